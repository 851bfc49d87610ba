"""Types of settings: sections, numbers with limits, commands, and the YAML of settings files.

The YAML is the core schema of YAML 1.2: ``1e-3`` and ``012`` are numbers; ``yes``, ``on`` and
``1:30`` are words.
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
"""Problems to generate one by one: a million take a minute."""

Command = Literal["train", "sft", "eval", "probe-batch", "serve"]
"""Command, which selects the checks of the settings."""
TRAINING: tuple[Command, ...] = ("train", "sft")
"""Commands that write to ``run.dir``; only one at a time may use a folder."""

AnySection = TypeVar("AnySection", bound="Section")


class Section(BaseModel):
    """Group of settings and of nested sections. The text under a setting is its description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    def iter_settings(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield every setting as dotted key and value."""
        for name, value in self:
            if isinstance(value, Section):
                yield from value.iter_settings(f"{prefix}{name}.")
            else:
                yield prefix + name, value


def check_unique(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return words after a check for duplicates and empty words.

    Raises:
        ValueError: the type that pydantic expects from validators.
    """
    if wrong := [word for word in words if not word or words.count(word) > 1]:
        raise ValueError(f"names {wrong[0]} more than once" if wrong[0] else "has an empty name")
    return words


def replace(section: AnySection, **changes: Any) -> AnySection:
    """Return a copy with other values of some settings, checked like the values of a file.

    Raises:
        pydantic.ValidationError: a name is unknown, or a value is wrong.
    """
    return type(section)(**dict(section) | changes)


MOST_VALUES = 10_000
MOST_LEVELS = 32
"""Limits of a file: keys and values, including repetitions by aliases; depth of nested
collections."""


class Loader(yaml.SafeLoader):
    """YAML 1.2 loader with limits on size and depth."""

    # The resolvers of the base class follow YAML 1.1.
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._levels = 0
        self._values: dict[yaml.Node, int] = {}
        """Number of values of a node, with all values below."""

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
        # The count of an anchored node is stored only when the node is complete.
        if is_alias and node not in self._values:
            raise yaml.composer.ComposerError(None, None, "an alias is inside its own anchor", mark)
        if not is_alias:
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            pairs = (
                parts
                if isinstance(node, yaml.SequenceNode)
                else (part for pair in parts for part in pair)
            )
            # Count an aliased part at each repetition, because nested aliases multiply the values.
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
        # The first value of a duplicate key would be lost.
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} appears twice", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """YAML dumper that quotes words that YAML 1.1 or 1.2 would not read as words."""

    def represent_word(self, text: str) -> yaml.ScalarNode:
        # Unicode's line breaks are escaped in double quotes only.
        style = '"' if any(line_break in text for line_break in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_NUMBER = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
for _tag, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", rf"{_NUMBER}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+.0123456789"),
    # Merge keys belong to YAML 1.1, but are in wide use.
    ("merge", "<<", "<"),
):
    for _kind in (Loader, Dumper):
        _kind.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first)
        )
Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_int)
Dumper.add_representer(str, Dumper.represent_word)
