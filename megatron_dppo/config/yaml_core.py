"""YAML by the core schema of YAML 1.2: ``1e-3`` and ``012`` are numbers; ``yes``, ``on`` and ``1:30`` are words."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """YAML 1.2 in which a key that stands twice in a section is an error: the first one would be lost in silence."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  # replaces the base class's

    def construct_int(self, node: yaml.ScalarNode) -> int:
        text = str(node.value)
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes words that YAML 1.1 or 1.2 would read as anything else, and escapes Unicode's line breaks."""

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
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))
Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_int)
Dumper.add_representer(str, Dumper.represent_word)
