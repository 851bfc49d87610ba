"""Errors word for word, as users read them. All other tests of errors look at the setting and its value."""

from __future__ import annotations

from megatron_dppo.errors import MistakesError, UserError, error_text


def test_what_a_file_holds_sends_nothing_to_the_terminal() -> None:
    error = UserError("model.path", "\x1b]0;name\a", "has é and \ud83d", "take\nanother")
    for text in (error_text(error), error_text(MistakesError([error, error])), str(error)):
        assert "\\x1b]0;name\\x07" in text
        assert "é and \\ud83d" in text
