"""The one exception whose message is all that a user sees, and its text."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import traceback
from collections.abc import Iterable
from pathlib import Path

WIDTH = 100
"""Characters of a line of an error's text."""
_USER_OF_URL = re.compile(r"(:/{1,2})[^/?#\s]+@")
"""The part of a URL before its host. A URL that was read as a path has one slash."""


class UserError(Exception):
    """A mistake that the user can mend. It is printed once, by one rank, without a traceback.

    Args:
        setting: the setting (``layout.tp``) or the file at fault.
        value: what it holds.
        problem: what is wrong with that.
        remedy: what to do about it, as an instruction.
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
        return type(self), (self.setting, self.value, self.problem, self.remedy)


class StandstillError(BaseException):
    """A user's code has not returned in time. An ``except Exception`` in the user's code must not
    catch this error.

    Args:
        error: error for the user.
    """

    def __init__(self, error: UserError) -> None:
        self.error = error
        super().__init__(error)


class MistakesError(Exception):
    """Several mistakes, or one, that were found at once. Each is named once, however many checks
    came upon it.

    Args:
        errors: at least one.
    """

    def __init__(self, errors: Iterable[UserError]) -> None:
        self.errors = tuple({str(error): error for error in errors}.values())
        super().__init__("\n".join(map(str, self.errors)))


def format_missing_extra(error: ModuleNotFoundError) -> str:
    """Return the line for a command that needs a package of the extras ``cpu`` and ``gpu``, which
    is not installed.

    Raises:
        ModuleNotFoundError: ``error`` itself, unless a module of this project imports another
            project's, or asks for its version.
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
    """Return the command that installs an extra of this project from the project's checkout or
    origin."""
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
    """An error's text for the user: the setting, the problem and the remedy, wrapped, without a
    final newline.

    Lines of the error's own, as of a traceback or a list, are kept.
    """
    if isinstance(error, MistakesError):
        return "\n".join(map(format_error, error.errors))
    value = f" = {error.value}" if str(error.value) else " is empty"
    parts = (
        _format_paragraph("problem", error.problem),
        _format_paragraph("remedy", _format_remedy(error.remedy)),
    )
    return sanitize_text("\n".join([f"error: {error.setting}{value}", *parts]))


def sanitize_text(text: str) -> str:
    """Return a text that is safe for a terminal: control characters are escaped, passwords in URLs
    are removed."""
    text = remove_passwords(text)
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def remove_passwords(text: str) -> str:
    """Return a text without the user and password of its URLs."""
    return _USER_OF_URL.sub(r"\1***@", text)


def _format_remedy(text: str) -> str:
    """With a capital, unless it begins with the name of a setting or a command."""
    return text[0].upper() + text[1:] if text.partition(" ")[0].isalpha() else text


def _format_paragraph(title: str, text: str) -> str:
    margin = " " * 11
    wrapper = textwrap.TextWrapper(
        WIDTH - len(margin), break_long_words=False, break_on_hyphens=False, drop_whitespace=False
    )
    lines = [
        wrapped.rstrip() for line in text.splitlines() for wrapped in wrapper.wrap(line) or [""]
    ]
    return f"  {title:<9}" + f"\n{margin}".join(lines)
