"""Tools in the form of Qwen3 and Qwen2.5: what the policy is told of them, and its calls, read out of what it said.

The chat template says what tools there are. The policy calls one in a block of its answer:

    Let me add.
    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tools = Sequence[Mapping[str, Any]]
"""As a chat template takes them: ``{"type": "function", "function": {"name": ..., "description": ..., "parameters":
...}}``, ``parameters`` a JSON schema."""
CALL = "<tool_call>"
OTHER_CALL = "<function="
"""In templates of another form of calls, that of Qwen3-Coder."""
_BLOCK = re.compile(rf"{CALL}(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_THINKS, _HAS_THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: str
    """A JSON object."""


def read_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The calls of a turn of the policy, and what it said before the first of them, its thoughts among that.

    Thoughts call nothing. As in vLLM's parser of this form, the last block need not be closed, and one that holds no
    object with a name and an object of arguments makes all of the turn words: an environment then learns that no tool
    was called.
    """
    thoughts, end, words = text.rpartition(_HAS_THOUGHT)
    calls = [_call(block) for block in _BLOCK.findall(words)]
    if not calls or None in calls or _THINKS in words:
        return text, []
    said = thoughts + end + words.partition(CALL)[0]
    return said.strip(), [call for call in calls if call is not None]


def _call(block: str) -> ToolCall | None:
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
