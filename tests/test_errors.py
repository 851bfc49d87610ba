"""The text of an error fits a terminal and sends no control characters there."""

import pytest

from megatron_dppo.errors import WIDTH, MistakesError, UserError, format_error, format_missing_extra


def test_control_characters_of_files_are_escaped() -> None:
    error = UserError("model.path", "\x1b]0;name\a", "has é and \ud83d", "take\nanother")
    for text in (format_error(error), format_error(MistakesError([error, error])), str(error)):
        assert "\\x1b]0;name\\x07" in text
        assert "é and \\ud83d" in text


def test_passwords_of_urls_are_left_out() -> None:
    error = UserError(
        "rollout.servers",
        "https://me:hunter2@host/a",
        "s3://me:hunter@2@b: no answer",
        "Mail me@home",
    )
    assert (
        str(error) == "rollout.servers = https://***@host/a: s3://***@b: no answer. Mail me@home."
    )
    assert "hunter" not in format_error(error)


def test_an_error_text_is_wrapped_and_keeps_a_traceback_s_lines() -> None:
    problem = "word " * 60 + "\nTraceback:\n  File x\n    raise"
    lines = format_error(UserError("a.b", "3", problem, "do this")).splitlines()
    assert lines[0] == "error: a.b = 3"
    assert max(map(len, lines)) <= WIDTH
    assert [line.removeprefix(" " * 11) for line in lines[-4:-1]] == [
        "Traceback:",
        "  File x",
        "    raise",
    ]
    assert lines[-1] == "  remedy   Do this"


def test_a_package_missed_by_others_is_not_an_extra_of_ours() -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        format_missing_extra(raised.value)
