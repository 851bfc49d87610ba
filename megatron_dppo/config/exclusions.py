"""Exclusions between settings, settings without effect, and numbers that are too large.

Each command checks its configuration against ``exclusions.yaml`` before ranks start. ``idle.yaml``
lists settings that a run does not read.

``tools/site/settings_page.py`` prints the table in docs/settings.md.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import yaml

from megatron_dppo.config import Config
from megatron_dppo.config.types import Command, Loader, Section
from megatron_dppo.errors import UserError

TABLE = Path(__file__).with_suffix(".yaml")
IDLE = Path(__file__).with_name("idle.yaml")
TERM = re.compile(r"([\w.]+)(?:(!=|>=|[=<>])(.*))?")
PLACE = re.compile(r"\{([\w.]+)\}")
ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    ">=": operator.ge,
}
EVERY = "every command"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on settings, as ``exclusions.yaml`` describes them."""

    key: str
    order: str | None
    """``=``, ``!=``, ``<``, ``>`` or ``>=``; None: the value is neither null, false, 0 nor
    empty."""
    words: tuple[str, ...]
    """Values, keys of settings and properties to compare with."""

    @classmethod
    def parse(cls, text: str) -> Condition:
        key, order, words = TERM.fullmatch(text).groups()  # type: ignore[union-attr]  # a test reads the table
        return cls(key, order, tuple(words.split("|")) if order else ())

    def matches(self, config: Config, policy: object) -> bool:
        value = get_value(self.key, config, policy)
        if self.order is None:
            return bool(value)
        others = [get_value(word, config, policy) if is_key(word) else word for word in self.words]
        if self.order in ORDERS:
            return None not in (value, *others) and ORDERS[self.order](value, float(others[0]))
        texts = {
            format_value(each) for each in (value, *(value if isinstance(value, tuple) else ()))
        }
        wanted = (
            re.escape(format_value(other)) for other in others
        )  # a value of a setting may have a star of its own
        patterns = "|".join(
            p if is_key(w) else p.replace(r"\*", ".*")
            for p, w in zip(wanted, self.words, strict=True)
        )
        return any(re.fullmatch(patterns, text) for text in texts) == (self.order == "=")


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A row of the table: values of settings that are refused together."""

    terms: tuple[Condition, ...]
    """The first one names the setting that the error is about. The row applies if all terms
    hold."""
    because: str
    """Continues "setting = value: "; ``{key}`` is replaced by the value of a setting or
    property."""
    remedy: str
    commands: tuple[str, ...]

    @property
    def needs_policy_shape(self) -> bool:
        """Whether the row requires the shape of the policy."""
        return any(
            name.startswith("policy.") for term in self.terms for name in (term.key, *term.words)
        )

    def check(self, config: Config, policy: object = None) -> None:
        """
        Args:
            config: of the run.
            policy: its ``PolicyShape``, if the row requires one.

        Raises:
            UserError: all terms of the row hold.
        """
        if not all(term.matches(config, policy) for term in self.terms):
            return

        def format_key(key: str) -> str:
            if key == "with":
                return " and ".join(
                    f"{term.key} = {format_key(term.key)}" for term in self.terms[1:]
                )
            return format_value(get_value(key, config, policy))

        problem, remedy = (
            PLACE.sub(lambda found: format_key(found[1]), said)
            for said in (self.because, self.remedy)
        )
        raise UserError(self.terms[0].key, format_key(self.terms[0].key), problem, remedy)


@cache
def load_exclusions() -> tuple[Exclusion, ...]:
    """The rows of the table, in its order."""
    table = yaml.load(TABLE.read_text(encoding="utf-8"), Loader)
    return tuple(
        row
        for commands, rows in table.items()
        for each in rows
        for row in _build_rows(commands, **each)
    )


def _build_rows(commands: str, **row: Any) -> Iterator[Exclusion]:
    commanded = get_args(Command) if commands == EVERY else tuple(commands.split())
    for texts in _expand_row(row):
        terms = tuple(map(Condition.parse, texts["when"].split()))
        yield Exclusion(
            terms, texts["because"], texts.get("remedy") or _build_default_remedy(terms), commanded
        )


def _expand_row(row: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield a row of a table once for each of its texts ``each``, which replaces EACH."""
    for each in row.get("each", [""]):
        yield {name: text.replace("EACH", each) for name, text in row.items() if name != "each"}


@cache
def load_idle_rows() -> tuple[dict[str, str], ...]:
    """Return the rows of ``idle.yaml``."""
    table = yaml.load(IDLE.read_text(encoding="utf-8"), Loader)
    return tuple(texts for row in table for texts in _expand_row(row))


def find_idle_keys(config: Config) -> tuple[str, ...]:
    """Return the keys, or beginnings of keys, of settings that ``train`` does not read, given the
    other settings."""
    idle = [
        row
        for row in load_idle_rows()
        if all(Condition.parse(term).matches(config, None) for term in row["when"].split())
    ]
    return tuple(key for row in idle for key in row["keys"].split())


def _build_default_remedy(terms: tuple[Condition, ...]) -> str:
    """The remedy of setting one of the terms' settings to its default, if the term does not hold
    then.

    Raises:
        ValueError: there is no such setting, and the row has no remedy of its own.
    """
    defaults = dict(Config().iter_settings())
    others = [
        term.key for term in terms if term.key in defaults and not term.matches(Config(), None)
    ]
    if not others:
        raise ValueError(
            f"row of {terms[0].key} in {TABLE.name}: no default ends it, so it requires a remedy"
        )
    return f"Set {', or '.join(f'{key}={format_value(defaults[key])}' for key in others)}"


def build_checks(
    config: Config, command: Command, policy: object = None
) -> Iterator[Callable[[], None]]:
    """Each raises UserError if the settings have what a row of the table excludes.

    Args:
        config: of the run.
        command: that is to run.
        policy: the policy's ``PolicyShape``, for the rows that require one; None: for all others.
    """
    for row in load_exclusions():
        if command in row.commands and row.needs_policy_shape == (policy is not None):
            yield partial(row.check, config, policy)


def is_key(word: str) -> bool:
    """Whether a word is a dotted key of a setting or property, not a value."""
    section, dot, _ = word.partition(".")
    return (
        section in ("policy", *Config.model_fields)
        if dot
        else isinstance(getattr(Config, word, None), property)
    )


def get_value(key: str, config: Config, policy: object = None) -> Any:
    """The value of a setting or property by its dotted key."""
    name = key.removeprefix("policy.")
    return operator.attrgetter(name)(config if name == key else policy)


def format_value(value: object) -> str:
    """Format a value as an override on the command line has it."""
    if isinstance(value, tuple):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Section):
        return "{" + ", ".join(f"{name}: {format_value(each)}" for name, each in value) + "}"
    if isinstance(value, Mapping):  # values may be keys or passwords
        return "{" + ", ".join(f"{name}: …" for name in value) + "}"
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


MOST_SECONDS = 1e9
MOST_FLOAT = 1e30
MOST_WHOLE = 2**63 - 1


def check_numbers(config: Config) -> None:
    """Check that clocks, generators and 32-bit arithmetic can hold every number.

    Raises:
        UserError: naming the first setting whose number is too large. An infinity that is no time
            is a limit left out.
    """
    for key, value in config.iter_settings():
        if not isinstance(value, int | float) or (value == math.inf and not key.endswith("_s")):
            continue
        most = (
            MOST_SECONDS
            if key.endswith("_s")
            else MOST_FLOAT
            if isinstance(value, float)
            else MOST_WHOLE
        )
        if value > most:
            problem = "is more than can be computed with"
            raise UserError(key, f"{value!s:.40}", problem, f"Set it to {most:g} or less")
