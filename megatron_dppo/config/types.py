"""Types of settings: sections, and numbers with limits; and the commands that settings are for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict

Fraction = Annotated[float, Gt(0.0), Le(1.0)]
Share = Annotated[float, Ge(0.0), Le(1.0)]
AboveZero = Annotated[float, Gt(0.0)]
AtLeastOne = Annotated[float, Ge(1.0)]
NonNegative = Annotated[float, Ge(0.0)]
Seconds = AboveZero
Positive = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]

Command = Literal["train", "sft", "eval", "probe-tree", "compress", "serve"]
"""Command that settings are checked for."""
TRAINING: tuple[Command, ...] = ("train", "sft")
"""Commands that write to ``run.dir``, each alone."""

AnySection = TypeVar("AnySection", bound="Section")


class Section(BaseModel):
    """Settings that belong together, and sections of more of them. The text under a setting is its meaning."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Every setting by its dotted key, with its value."""
        for name, value in self:
            if isinstance(value, Section):
                yield from value.leaves(f"{prefix}{name}.")
            else:
                yield prefix + name, value


def each_once(words: tuple[str, ...]) -> tuple[str, ...]:
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
        pydantic.ValidationError: for an unknown name, a value of the wrong type or beyond its limits.
    """
    return type(section)(**dict(section) | changes)
