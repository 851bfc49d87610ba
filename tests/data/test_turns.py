"""An environment's messages become the token ids of the chat template, and tool calls are read out
of turns.

No token of the policy changes.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_dppo.config import DataConfig
from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.data.turns import (
    ChatRenderer,
    ConversationFormatError,
    ToolCall,
    normalize_message,
    parse_tool_calls,
)
from megatron_dppo.init import CHAT_TEMPLATE
from tests.data.conftest import Load, Refuse

ASKED = [{"role": "system", "content": "a game"}, {"role": "user", "content": "guess"}]
MORE = {"role": "user", "content": "more"}
WITHOUT_THOUGHTS = CHAT_TEMPLATE.replace(
    "message['content']",
    "(message['content'] if message['role'] != 'assistant' or loop.last else "
    "message['content'].split('=')[-1])",
)
"""As Qwen3's: without the text before the answer in earlier turns of the policy."""
OF_LAST = CHAT_TEMPLATE.replace(
    "message['content']", "(messages[0]['content'] if loop.last else '') + message['content']"
)
"""The last message begins with the system's."""


@pytest.fixture
def changed(tokenizer: Tokenizer) -> Any:
    """The tokenizer. A test may change its template."""
    before = tokenizer.chat_template
    yield tokenizer
    tokenizer.chat_template = before


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def render_between(
    tokenizer: Any, said: list[int], *new: dict[str, Any], tools: Sequence[Any] = ()
) -> list[int]:
    """Return the tokens between a turn of the policy and the next turn."""
    return ChatRenderer(tokenizer, DataConfig()).render_after_turn(ASKED, said[-1], new, tools)


@pytest.mark.parametrize(
    "template",
    [CHAT_TEMPLATE, WITHOUT_THOUGHTS, OF_LAST],
    ids=["ChatML", "without thoughts", "moved"],
)
def test_the_policy_reads_the_templates_text_after_a_turn(changed: Any, template: str) -> None:
    """Whatever the template makes of earlier messages."""
    changed.chat_template = template
    said = [*changed.encode("1+1=2"), changed.eos_token_id]
    then = changed.decode(render_between(changed, said, MORE))
    own = "a game" if template is OF_LAST else ""
    assert then == f"\n<|im_start|>user\n{own}more<|im_end|>\n<|im_start|>assistant\n"
    assert changed.decode(render_between(changed, said, MORE, MORE)).count("more") == 2
    whole = changed.apply_chat_template(
        [*ASKED, assistant("1+1=2"), MORE], add_generation_prompt=True, tokenize=False
    )
    asked = ChatRenderer(changed, DataConfig()).render(ASKED, ())
    if template is CHAT_TEMPLATE:
        assert changed.decode([*asked, *said]) + then == whole


def test_an_open_turn_of_the_policy_is_closed(tokenizer: Tokenizer) -> None:
    assert render_between(tokenizer, tokenizer.encode("7"), MORE)[0] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("template", "message", "words"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", MORE, "repeats or omits a turn"),
        ("{{ messages.first }}{{ raise_exception('odd') }}", MORE, "fail in the chat template"),
        (
            CHAT_TEMPLATE,
            {"role": "user", "content": [{"type": "image"}]},
            "other content than text",
        ),
        (CHAT_TEMPLATE, {"role": "user", "content": 7}, "other content than text"),
        (CHAT_TEMPLATE, {"role": "assistant", "tool_calls": [{}]}, "A tool call cannot be read"),
    ],
    ids=["omits", "fails", "image", "number", "call"],
)
def test_messages_without_place_behind_the_turn_are_refused(
    changed: Any, template: str, message: dict[str, Any], words: str
) -> None:
    changed.chat_template = template
    with pytest.raises(ConversationFormatError, match=words):
        render_between(changed, changed.encode("7"), message)


def test_the_same_message_of_two_clients_is_equal() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    spaced = {"function": {"name": "add", "arguments": '{"a":1}'}, "id": "1", "index": 0}
    one = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    other = {"role": "assistant", "content": [{"type": "text", "text": ""}], "tool_calls": [spaced]}
    assert normalize_message(one) == normalize_message(other)
    for changes in ({"content": "so"}, {"tool_calls": None}, {"role": "user"}):
        assert normalize_message(one) != normalize_message({**one, **changes})


NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": NUMBER},
}
FIND = {
    "type": "function",
    "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}},
}


def test_each_prompt_is_rendered_with_the_rows_tools(load: Load, calling: Tokenizer) -> None:
    given: list[Any] = [[FIND, ADD], json.dumps([FIND]), None, []]
    tools = [[FIND, ADD], [FIND], None, None]
    pool = load([{"prompt": "Hi", "label": "1", "tools": each} for each in given], calling)
    hi, options = (
        [{"role": "user", "content": "Hi"}],
        {"add_generation_prompt": True, "tokenize": False},
    )
    assert [prompt.text for prompt in pool] == [
        calling.apply_chat_template(hi, tools=t, **options) for t in tools
    ]


def test_turns_with_tools_are_rendered_by_their_template(changed: Any, calling: Tokenizer) -> None:
    changed.chat_template = {"default": CHAT_TEMPLATE, "tool_use": calling.chat_template}
    said, result = changed.encode("7"), {"role": "tool", "content": "3"}
    then = changed.decode(render_between(changed, said, result, tools=[ADD]))
    assert "\n<tool_response>\n3\n</tool_response>" in then
    assert "<|im_start|>tool\n3" in changed.decode(render_between(changed, said, result))
    changed.chat_template = CHAT_TEMPLATE
    with pytest.raises(ConversationFormatError, match="has no tools that are called by JSON"):
        render_between(changed, said, result, tools=[ADD])


@pytest.mark.parametrize("given", ["hammer", [{"a": 1}]])
def test_a_column_of_other_tools_is_refused(refuse: Refuse, calling: Tokenizer, given: Any) -> None:
    words = "rows.jsonl, line 1", "no list of functions in column 'tools'"
    refuse([{"prompt": "Hi", "label": "1", "tools": given}], *words, by=calling)


def test_a_template_without_tools_is_refused(refuse: Refuse) -> None:
    words = "line 1", "has tools, and the chat template has no place for tools"
    refuse([{"prompt": "Hi", "label": "1", "tools": [ADD]}], *words)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADDED = ToolCall("add", '{"a": 1}')
THOUGHT = f"<think>\nI say <tool_call> or\n{call('find')}</think>\n\nNow:"


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("It is 3.", "It is 3.", []),
        (f"Let me see.\n{call('add', a=1)}", "Let me see.", [ADDED]),
        (
            call("add", a=1) + "\n" + call("find", q="ä"),
            "",
            [ADDED, ToolCall("find", '{"q": "ä"}')],
        ),
        (call("now").removesuffix("</tool_call>"), "", [ToolCall("now", "{}")]),
        (f"{THOUGHT} {call('add', a=1)}", THOUGHT, [ADDED]),
        (f"<think>{call('add', a=1)}</think> 3", f"<think>{call('add', a=1)}</think> 3", []),
        (f"<think>{call('add', a=1)}", f"<think>{call('add', a=1)}", []),
    ],
)
def test_calls_are_read_out_of_a_turn(text: str, said: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text) == (said, calls)


@pytest.mark.parametrize(
    "block",
    ["add(1)", "[]", '{"name": "add"}', '{"name": 1, "arguments": {}}', "[" * 100_000],
)
def test_a_turn_with_an_unreadable_call_is_words(block: str) -> None:
    for text in (f"{call('add', a=1)}<tool_call>{block}</tool_call>", f"<tool_call>{block}"):
        assert parse_tool_calls(text) == (text, [])
