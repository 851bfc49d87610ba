"""Errors for users, shown without a traceback, and error formatting."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import traceback
from collections.abc import Iterable
from pathlib import Path

WIDTH = 100
"""Characters per line of an error."""
_USER_OF_URL = re.compile(r"(:/{1,2})[^/?#\s]+@")
"""Part of a URL before the host. In a path, the URL has a single slash."""


class UserError(Exception):
    """Mistake of the user; printed once, on a single rank, without a traceback.

    Args:
        setting: setting (``layout.tp``) or file at fault.
        value: value of the setting.
        problem: fault of the value, a predicate.
        remedy: instruction to the user.
    """

    def __init__(self, setting: str, value: object, problem: str, remedy: str) -> None:
        self.setting = setting
        self.value = value
        self.problem = problem
        self.remedy = remedy
        super().__init__(
            sanitize_text(f"{setting} = {value}: {problem}. {_format_remedy(remedy)}.")
        )

    def __reduce__(self) -> tuple[type[UserError], tuple[str, object, str, str]]:
        # By default, pickle would call the class with the message as the single argument.
        return type(self), (self.setting, self.value, self.problem, self.remedy)


class StandstillError(BaseException):
    """A user's code did not return in time."""

    # A BaseException, because a user's ``except Exception`` must not catch this error.

    def __init__(self, error: UserError) -> None:
        self.error = error
        super().__init__(error)


class MistakesError(Exception):
    """One or more mistakes found at once, without duplicates."""

    def __init__(self, errors: Iterable[UserError]) -> None:
        self.errors = tuple({str(error): error for error in errors}.values())
        super().__init__("\n".join(map(str, self.errors)))


def format_missing_extra(error: ModuleNotFoundError) -> str:
    """Return the error line for a missing package of the extras ``cpu`` and ``gpu``.

    Raises:
        ModuleNotFoundError: ``error`` itself, unless this project imports another project's module.
    """
    modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    importer = [name for name in modules if not name.startswith("importlib")][-1]
    names = [str(name).partition(".")[0] for name in (importer, error.name)]
    if names[0] != "megatron_dppo" or names[1] == "megatron_dppo":
        raise error
    return (
        f"error: {names[1]} is not installed: {install_command('cpu')} (for CUDA: [gpu], see "
        "docs/gpu.md)"
    )


def install_command(extra: str) -> str:
    """Return the command that installs an extra, from the checkout or origin of this install."""
    from importlib.metadata import PackageNotFoundError, distribution

    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    try:
        origin = json.loads(distribution("megatron-dppo").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    place = ""
    if "url" in origin:
        of_git = "vcs_info" in origin
        place = (
            f" @ git+{origin['url']}@{origin['vcs_info']['commit_id']}"
            if of_git
            else f" @ {origin['url']}"
        )
    return f"pip install {shlex.quote(remove_passwords(f'megatron-dppo[{extra}]{place}'))}"


def format_error(error: UserError | MistakesError) -> str:
    """Format setting, problem and remedy, wrapped, without a final newline. Keep line breaks."""
    if isinstance(error, MistakesError):
        return "\n".join(map(format_error, error.errors))
    value = f" = {error.value}" if str(error.value) else " is empty"
    parts = (
        _format_paragraph("problem", error.problem),
        _format_paragraph("remedy", _format_remedy(error.remedy)),
    )
    return sanitize_text("\n".join([f"error: {error.setting}{value}", *parts]))


def sanitize_text(text: str) -> str:
    """Return text safe for a terminal: escape control characters, remove passwords in URLs."""
    characters = []
    for c in remove_passwords(text):
        is_safe = c.isprintable() or c in "\n\t"
        characters.append(c if is_safe else c.encode("unicode_escape").decode())
    return "".join(characters)


def remove_passwords(text: str) -> str:
    """Remove users and passwords from URLs in a text."""
    return _USER_OF_URL.sub(r"\1***@", text)


def _format_remedy(text: str) -> str:
    # The name of a setting or command (``data.train``, ``init``) must keep its spelling.
    return text[0].upper() + text[1:] if text.partition(" ")[0].isalpha() else text


def _format_paragraph(title: str, text: str) -> str:
    margin = " " * 11
    # A list or traceback in the problem keeps its indentation.
    wrapper = textwrap.TextWrapper(
        WIDTH - len(margin),
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=False,
    )
    lines = [
        wrapped.rstrip() for line in text.splitlines() for wrapped in wrapper.wrap(line) or [""]
    ]
    return f"  {title:<9}" + f"\n{margin}".join(lines)
