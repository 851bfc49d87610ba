"""How a mistake that the user can mend is put to them: once, on stderr, in four short parts."""

from __future__ import annotations

import textwrap

from megatron_dppo.errors import UserError

WIDTH = 100


def describe(error: UserError) -> str:
    """The message of an error as a block of text, without a final newline."""
    value = f" = {error.value}" if str(error.value) else " is empty"
    return "\n".join(
        [f"error: {error.setting}{value}", _part("problem", error.problem), _part("remedy", _sentence(error.remedy))]
    )


def _sentence(text: str) -> str:
    """With a capital, unless it begins with the name of a setting or a command."""
    return text[0].upper() + text[1:] if text.partition(" ")[0].isalpha() else text


def _part(title: str, text: str) -> str:
    """Text under a title, wrapped; lines of its own (a traceback, a list) are kept."""
    margin = " " * 11
    wrapper = textwrap.TextWrapper(
        WIDTH - len(margin), break_long_words=False, break_on_hyphens=False, drop_whitespace=False
    )
    lines = [wrapped.rstrip() for line in text.splitlines() for wrapped in wrapper.wrap(line) or [""]]
    return f"  {title:<9}" + f"\n{margin}".join(lines)
