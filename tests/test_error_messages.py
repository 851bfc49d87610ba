"""Errors word for word, as users read them. All other tests of errors look at the setting and its value."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.errors import MistakesError, UserError, error_text
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.preflight import preflight

MESSAGES = Path(__file__).with_name("error_messages.txt").read_text(encoding="utf-8")
CASES = [case.partition("\n")[::2] for case in MESSAGES.removeprefix("$ ").removesuffix("\n").split("\n\n$ ")]


@pytest.mark.parametrize(("overrides", "message"), CASES, ids=[overrides for overrides, _ in CASES])
def test_an_error_says_what_is_wrong_and_what_to_do(overrides: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        preflight(load_config(None, overrides.split()), "train")
    assert error_text(error.value) == message


def test_what_a_file_holds_sends_nothing_to_the_terminal() -> None:
    error = UserError("model.path", "\x1b]0;name\a", "has é and \ud83d", "take\nanother")
    for text in (error_text(error), error_text(MistakesError([error, error])), str(error)):
        assert "\\x1b]0;name\\x07" in text
        assert "é and \\ud83d" in text
