"""Tools: the policy is told of those of its prompt, and its calls are read out of what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_dppo.config import DataConfig
from megatron_dppo.data.prompts import load_prompts
from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.data.turns import ToolCall, read_calls
from megatron_dppo.errors import UserError
from tests.data.conftest import Write

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": NUMBER}}
FIND = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}}


def test_each_prompt_is_told_of_its_own_tools(calling: Tokenizer, write: Write, tmp_path: Path) -> None:
    """As a list, as JSON text, and as parquet keeps it: with null where another row has a field."""
    tools: list[Any] = [[ADD], [ADD], [FIND, ADD], json.dumps([FIND]), None, []]
    rows = [{"prompt": "Hi", "label": "1", "tools": each} for each in tools]
    pool = load_prompts(DataConfig(train=write(rows)), calling, split="train")
    plain = [json.loads(each) if isinstance(each, str) else each for each in tools]
    told = [
        calling.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tools=each or None, add_generation_prompt=True, tokenize=False
        )
        for each in plain
    ]
    assert [prompt.text for prompt in pool] == told and len(set(told)) == 4
    assert '{"type": "function", "function": {"name": "add"' in pool[0].text
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([rows[0], rows[2]]), file)
    names = [
        [json.loads(line)["function"] for line in prompt.text.splitlines() if line.startswith('{"')]
        for prompt in load_prompts(DataConfig(train=str(file)), calling, split="train")
    ]
    assert names == [[ADD["function"]], [FIND["function"], ADD["function"]]]


@pytest.mark.parametrize("given", ["hammer", ["hammer"], '[{"a": 1}]', {"name": "add"}])
def test_a_column_of_other_tools_is_refused(calling: Tokenizer, write: Write, given: Any) -> None:
    rows = [{"prompt": "Hi", "label": "1", "tools": given}]
    with pytest.raises(UserError, match=r"rows\.jsonl, line 1.*no list of functions in column 'tools'.*otherwise"):
        load_prompts(DataConfig(train=write(rows)), calling, split="train")


def test_a_template_that_says_nothing_of_tools_is_refused(tokenizer: Tokenizer, write: Write) -> None:
    data = DataConfig(train=write([{"prompt": "Hi", "label": "1", "tools": [ADD]}]))
    with pytest.raises(UserError, match=r"line 1.*has tools, of which the chat template says nothing"):
        load_prompts(data, tokenizer, split="train")


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("It is 3.", "It is 3.", []),
        (f"Let me see.\n{call('add', a=1)}", "Let me see.", [ToolCall("add", '{"a": 1}')]),
        (
            call("add", a=1) + "\n" + call("find", q="ä"),
            "",
            [ToolCall("add", '{"a": 1}'), ToolCall("find", '{"q": "ä"}')],
        ),
        (call("now").removesuffix("</tool_call>"), "", [ToolCall("now", "{}")]),
        (
            f"<think>\nI say <tool_call> or\n{call('find')}</think>\n\nNow: {call('add', a=1)}",
            f"<think>\nI say <tool_call> or\n{call('find')}</think>\n\nNow:",
            [ToolCall("add", '{"a": 1}')],
        ),
        (f"<think>{call('add', a=1)}</think> 3", f"<think>{call('add', a=1)}</think> 3", []),
        (f"<think>{call('add', a=1)}", f"<think>{call('add', a=1)}", []),
    ],
)
def test_calls_are_read_out_of_what_the_policy_says(text: str, said: str, calls: list[ToolCall]) -> None:
    assert read_calls(text) == (said, calls)


@pytest.mark.parametrize(
    "block",
    ["", "add(1)", "[]", '{"name": "add"}', '{"arguments": {}}', '{"name": 1, "arguments": {}}', 
     '{"name": "a", "arguments": "{}"}', "[" * 100_000],
)  # fmt: skip
def test_a_turn_with_a_call_that_cannot_be_read_is_words(block: str) -> None:
    text = f"{call('add', a=1)}<tool_call>{block}</tool_call>"
    assert read_calls(text) == (text, [])
    assert read_calls(f"<tool_call>{block}") == (f"<tool_call>{block}", [])
