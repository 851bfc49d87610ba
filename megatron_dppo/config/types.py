"""What settings may be: numbers with limits; and what a configuration may be for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid")

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Seconds = Annotated[float, Field(gt=0.0)]

Command = Literal["train", "sft", "eval"]
"""What a configuration is checked for, and run as."""
