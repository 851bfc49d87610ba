"""An environment's messages become the token ids of the chat template, and tool calls are read out
of turns.

No token of the policy changes.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.data.turns import (
    ChatSession,
    ConversationFormatError,
    ReplayMismatchError,
    ResponseFullError,
    ToolCall,
    TurnReplay,
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


def converse(
    tokenizer: Any, said: list[int], *rounds: list[dict[str, Any]], tools: Sequence[Any] = ()
) -> list[list[int]]:
    """Have the policy answer ``said`` in every round. Returns the tokens before each answer."""
    heard: list[list[int]] = []

    async def say(told: list[int]) -> list[int]:
        heard.append(told)
        return said

    async def run() -> None:
        turns = ChatSession(tokenizer, ASKED, say, tools)
        for messages in rounds:
            await turns(messages)

    asyncio.run(run())
    return heard


@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, WITHOUT_THOUGHTS], ids=["ChatML", "without thoughts"]
)
def test_the_policy_reads_the_templates_text_after_a_turn(changed: Any, template: str) -> None:
    changed.chat_template = template
    said = [*changed.encode("1+1=2"), changed.eos_token_id]
    second = [*ASKED, assistant("1+1=2"), MORE]
    first, then, last = converse(
        changed, said, ASKED, second, [*second, assistant("1+1=2"), MORE, MORE]
    )
    assert first == []
    assert changed.decode(then) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert changed.decode(last).count("more") == 2, "and nothing of the turns before"
    whole = changed.apply_chat_template(second, add_generation_prompt=True, tokenize=False)
    asked = changed.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    if template is CHAT_TEMPLATE:
        assert asked + changed.decode([*said, *then]) == whole


def test_an_open_turn_of_the_policy_is_closed(tokenizer: Tokenizer) -> None:
    (_, then) = converse(tokenizer, tokenizer.encode("7"), ASKED, [*ASKED, assistant("7"), MORE])
    assert then[0] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (
            OF_LAST,
            [*ASKED, assistant("7"), MORE],
            r"\(user\) for which the chat template changes earlier messages",
        ),
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            [*ASKED, assistant("7"), MORE],
            "the chat template",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            [*ASKED, assistant("7")],
            "without a message between",
        ),
        (
            CHAT_TEMPLATE,
            [*ASKED, assistant("8"), MORE],
            "changes earlier messages of the conversation",
        ),
        (
            CHAT_TEMPLATE,
            [*ASKED, assistant("7"), {"role": "user", "content": [MORE]}],
            "with more than text",
        ),
    ],
)
def test_messages_without_place_behind_the_turn_are_refused(
    changed: Any, template: str, messages: list[Any], words: str
) -> None:
    changed.chat_template = template
    with pytest.raises(ConversationFormatError, match=words):
        converse(changed, changed.encode("7"), ASKED, messages)
    with pytest.raises(
        ConversationFormatError, match="begins with other messages than its problem"
    ):
        converse(changed, changed.encode("7"), [MORE])


def replay(told: list[list[int]], *, cut_off: bool = False) -> None:
    """Replay the policy's part of 1 2 | 5 5 | 3 | 6 to an environment that answers ``told``."""
    again = TurnReplay([1, 2, 5, 5, 3, 6], [True, True, False, False, True, False], cut_off=cut_off)

    async def hear() -> None:
        for each in told:
            await again(each)
        again.check_end()

    asyncio.run(hear())


def test_a_replay_finds_an_environment_of_other_answers() -> None:
    with pytest.raises(ResponseFullError):
        replay([[], [5, 5], [6, 7]], cut_off=True)  # without room for the 7
    for other, cut_off, did in (
        ([[], [5, 4]], False, "answered differently"),
        ([[], [5, 5, 6]], True, "answered differently"),
        ([[], [5, 5], [6]], False, "requested another turn"),
        ([[], [5, 5]], False, "ended early"),
    ):
        with pytest.raises(ReplayMismatchError, match=f"The environment {did} in the replay of"):
            replay(other, cut_off=cut_off)


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
    rounds = ASKED, [*ASKED, assistant("7"), result]
    (_, then) = converse(changed, said, *rounds, tools=[ADD])
    assert "\n<tool_response>\n3\n</tool_response>" in changed.decode(then)
    assert "<|im_start|>tool\n3" in changed.decode(converse(changed, said, *rounds)[1])


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
