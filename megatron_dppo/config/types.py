"""Types of settings: sections, numbers with limits, the commands that settings are for, and the
YAML of their files.

That is the core schema of YAML 1.2: ``1e-3`` and ``012`` are numbers; ``yes``, ``on`` and ``1:30``
    are words.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from typing import Annotated, Any, Literal, TypeVar

import yaml
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict

Fraction = Annotated[float, Gt(0.0), Le(1.0)]
Share = Annotated[float, Ge(0.0), Le(1.0)]
AboveZero = Annotated[float, Gt(0.0)]
AtLeastOne = Annotated[float, Ge(1.0)]
NonNegative = Annotated[float, Ge(0.0)]
Seconds = AboveZero
Keep = Fraction | Literal["auto"]
Positive = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]
Pool = Annotated[int, Ge(1), Le(1_000_000)]
"""Number of problems that are made one by one: a million takes a minute."""

Command = Literal["train", "sft", "eval", "probe-batch", "serve"]
"""Command that settings are checked for."""
TRAINING: tuple[Command, ...] = ("train", "sft")
"""Commands that write to ``run.dir``, each alone."""

AnySection = TypeVar("AnySection", bound="Section")


class Section(BaseModel):
    """Settings that belong together, and sections of more of them. The text under a setting is its
    meaning."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    def iter_settings(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Every setting by its dotted key, with its value."""
        for name, value in self:
            if isinstance(value, Section):
                yield from value.iter_settings(f"{prefix}{name}.")
            else:
                yield prefix + name, value


def check_unique(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a list in which none stands twice, nor is empty.

    Raises:
        ValueError: for another list, as pydantic's validators do.
    """
    if wrong := [word for word in words if not word or words.count(word) > 1]:
        raise ValueError(f"names {wrong[0]} more than once" if wrong[0] else "has an empty name")
    return words


def replace(section: AnySection, **changes: Any) -> AnySection:
    """A copy with other values of some settings, which are checked as those of a file are.

    Raises:
        pydantic.ValidationError: for an unknown name, a value of the wrong type or beyond its
            limits.
    """
    return type(section)(**dict(section) | changes)


MOST_VALUES = 10_000
MOST_LEVELS = 32
"""Limits of a file: its keys and values, those that aliases repeat included, and its nested
collections."""


class Loader(yaml.SafeLoader):
    """YAML 1.2 with limits. A key that stands twice in a section is an error: its first value would
    be lost."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  # replaces the base class's

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._levels = 0
        self._values: dict[yaml.Node, int] = {}
        """The number of values that a node stands for, its own included."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        is_alias = self.check_event(yaml.AliasEvent)
        self._levels += 1
        if self._levels > MOST_LEVELS:
            raise yaml.composer.ComposerError(
                None, None, f"nests deeper than {MOST_LEVELS} levels", mark
            )
        node = super().compose_node(parent, index)
        assert node is not None
        self._levels -= 1
        if is_alias and node not in self._values:
            raise yaml.composer.ComposerError(
                None, None, "an alias stands within its own anchor", mark
            )
        if not is_alias:
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            pairs = (
                parts
                if isinstance(node, yaml.SequenceNode)
                else (part for pair in parts for part in pair)
            )
            self._values[node] = 1 + sum(self._values[part] for part in pairs)
        if self._values[node] > MOST_VALUES:
            raise yaml.composer.ComposerError(
                None, None, f"holds more than {MOST_VALUES:,} values", mark
            )
        return node

    def construct_int(self, node: yaml.ScalarNode) -> int:
        text = str(node.value)
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} stands twice", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes words that YAML 1.1 or 1.2 would read as anything else, and escapes Unicode's line
    breaks."""

    def represent_word(self, text: str) -> yaml.ScalarNode:
        style = '"' if any(line_break in text for line_break in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_NUMBER = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
for _tag, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", rf"{_NUMBER}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+.0123456789"),
    ("merge", "<<", "<"),  # of YAML 1.1, and in wide use
):
    for _kind in (Loader, Dumper):
        _kind.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first)
        )
Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_int)
Dumper.add_representer(str, Dumper.represent_word)
