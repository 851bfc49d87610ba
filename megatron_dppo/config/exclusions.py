"""Exclusions between settings, settings without effect, and numbers that are too large.

- Each command checks the configuration against ``exclusions.yaml`` before ranks start.
- ``idle.yaml`` lists settings that a run does not read.
- ``tools/site/settings_page.py`` prints the exclusions in docs/settings.md.
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
    """Condition on settings, in the syntax of ``exclusions.yaml``."""

    key: str
    order: str | None
    """``=``, ``!=``, ``<``, ``>`` or ``>=``; None: the value is not null, false, 0 or empty."""
    words: tuple[str, ...]
    """Right-hand side: values, keys of settings and properties."""

    @classmethod
    def parse(cls, text: str) -> Condition:
        # Every term matches, because a test reads the whole table.
        key, order, words = TERM.fullmatch(text).groups()  # type: ignore[union-attr]
        return cls(key, order, tuple(words.split("|")) if order else ())

    def matches(self, config: Config, policy: object) -> bool:
        value = get_value(self.key, config, policy)
        if self.order is None:
            return bool(value)
        others = [_resolve_word(word, config, policy) for word in self.words]
        if self.order in ORDERS:
            return None not in (value, *others) and ORDERS[self.order](value, float(others[0]))
        elements = value if isinstance(value, tuple) else ()
        texts = {format_value(each) for each in (value, *elements)}
        patterns = []
        for word, other in zip(self.words, others, strict=True):
            pattern = re.escape(format_value(other))
            # A star is a wildcard in the table alone: values of settings may have a star.
            patterns.append(pattern if is_key(word) else pattern.replace(r"\*", ".*"))
        wanted = "|".join(patterns)
        return any(re.fullmatch(wanted, text) for text in texts) == (self.order == "=")


def _resolve_word(word: str, config: Config, policy: object) -> Any:
    return get_value(word, config, policy) if is_key(word) else word


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Row of the table: values of settings that are refused together."""

    terms: tuple[Condition, ...]
    """The row applies if all conditions hold. The first names the setting for the error."""
    because: str
    """Problem, which continues "setting = value: "; ``{key}`` is replaced by a value."""
    remedy: str
    commands: tuple[str, ...]

    @property
    def needs_policy_shape(self) -> bool:
        return any(
            name.startswith("policy.") for term in self.terms for name in (term.key, *term.words)
        )

    def check(self, config: Config, policy: object = None) -> None:
        """Check a configuration against the row.

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

        def fill_places(text: str) -> str:
            return PLACE.sub(lambda found: format_key(found[1]), text)

        problem = fill_places(self.because)
        remedy = fill_places(self.remedy)
        raise UserError(self.terms[0].key, format_key(self.terms[0].key), problem, remedy)


@cache
def load_exclusions() -> tuple[Exclusion, ...]:
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
    """Yield a row once for each of its texts ``each``, which replaces EACH."""
    for each in row.get("each", [""]):
        yield {name: text.replace("EACH", each) for name, text in row.items() if name != "each"}


@cache
def load_idle_rows() -> tuple[dict[str, str], ...]:
    table = yaml.load(IDLE.read_text(encoding="utf-8"), Loader)
    return tuple(texts for row in table for texts in _expand_row(row))


def find_idle_keys(config: Config) -> tuple[str, ...]:
    """Return the keys, or beginnings of keys, of settings that ``train`` ignores in a
    configuration."""
    keys: list[str] = []
    for row in load_idle_rows():
        terms = map(Condition.parse, row["when"].split())
        if all(term.matches(config, None) for term in terms):
            keys += row["keys"].split()
    return tuple(keys)


def _build_default_remedy(terms: tuple[Condition, ...]) -> str:
    """Return the remedy: a default that ends one of the terms.

    Raises:
        ValueError: no default ends any term, and the row has no explicit remedy.
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
    config: Config,
    command: Command,
    policy: object = None,
) -> Iterator[Callable[[], None]]:
    """Yield the checks of a command, which raise UserError if a row of the table excludes the
    settings.

    Args:
        policy: ``PolicyShape``, to check only the rows that need a shape; None: the remaining
            rows.
    """
    for row in load_exclusions():
        if command in row.commands and row.needs_policy_shape == (policy is not None):
            yield partial(row.check, config, policy)


def is_key(word: str) -> bool:
    """Return whether a word is a dotted key, and not a value."""
    section, dot, _ = word.partition(".")
    if dot:
        return section in ("policy", *Config.model_fields)
    return isinstance(getattr(Config, word, None), property)


def get_value(key: str, config: Config, policy: object = None) -> Any:
    name = key.removeprefix("policy.")
    return operator.attrgetter(name)(config if name == key else policy)


def format_value(value: object) -> str:
    """Return a value in the form of an override on the command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Section):
        return "{" + ", ".join(f"{name}: {format_value(each)}" for name, each in value) + "}"
    if isinstance(value, Mapping):
        # Hide the values, because environment variables may hold keys or passwords.
        return "{" + ", ".join(f"{name}: …" for name in value) + "}"
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


MOST_SECONDS = 1e9
MOST_FLOAT = 1e30
MOST_WHOLE = 2**63 - 1


def check_numbers(config: Config) -> None:
    """Check that clocks, generators and 32-bit arithmetic can hold every number.

    Raises:
        UserError: names the first setting whose number is too large.
    """
    for key, value in config.iter_settings():
        # Infinity is a limit that is left out, except for a time.
        if not isinstance(value, int | float) or (value == math.inf and not key.endswith("_s")):
            continue
        most: float = MOST_FLOAT if isinstance(value, float) else MOST_WHOLE
        if key.endswith("_s"):
            most = MOST_SECONDS
        if value > most:
            problem = "is more than can be computed with"
            raise UserError(key, f"{value!s:.40}", problem, f"Set it to {most:g} or less")
