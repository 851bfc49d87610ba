"""Requests of agents become contexts of recorded tokens, and sampled turns become answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from megatron_dppo.config import DataConfig
from megatron_dppo.data.turns import ChatRenderer
from megatron_dppo.rl.sequences import find_sequence_error, split_sequences
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.agents.endpoint import Endpoint
from megatron_dppo.rollout.agents.function import _make_stop_finder
from megatron_dppo.rollout.agents.requests import RefusedError
from megatron_dppo.rollout.agents.session import AgentLimits, Session
from megatron_dppo.rollout.conversation import ConversationFunction
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.turns import Client
from tests.rollout.agents.draws import list_draws, make_draw

openai = pytest.importorskip("openai")
THOUGHTS = (
    "{%- if tools %}{{- '<|im_start|>system\n<tool_call>' + tools|tojson + '<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{%- set text = message.content if message.role != 'assistant' or loop.last else "
    "message.content.split('</think>')[-1] %}"
    "{{- '<|im_start|>' + message.role + '\n' + text + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""As Qwen3's template: without the thoughts of earlier turns of the policy."""
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "1+1="}]
MORE = {"role": "user", "content": "more"}
MERGED = "12"
"""Text of one token, which the policy samples as two tokens."""
CALL = 'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
"""A token, because the tokenizer lacks some of the characters."""


@pytest.fixture
def merging(tokenizer: Any) -> Any:
    """Return a tokenizer that merges ``MERGED``."""
    from megatron_dppo.data.tokenizer import load_tokenizer

    loaded: Any = load_tokenizer(tokenizer.name_or_path)
    loaded.add_tokens([MERGED, CALL, "<think>", "</think>"])
    loaded.chat_template = THOUGHTS
    return loaded


class Rollout:
    """A rollout at an endpoint, with a policy that samples given texts, character by character.

    ``draws`` are the contexts and the turns outside the endpoint.
    """

    def __init__(
        self, tokenizer: Any, texts: Sequence[str], limits: AgentLimits, room: int
    ) -> None:
        self.tokenizer, self.texts, self.limits = tokenizer, list(texts), limits
        chat = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
        self.prompt = Prompt(0, np.array(tokenizer.encode(chat), np.int32), chat, "2")
        self.draws: list[tuple[list[int], Completion]] = []
        self.sampling = Sampling(1, room, 1.0, (tokenizer.eos_token_id,), seed=0)

    async def sample(self, client: Client, context: list[int], sampling: Sampling) -> Completion:
        text = self.texts.pop(0)
        pieces = [CALL] if text == CALL else [*map(self.to_piece, re.findall("</?think>|.", text))]
        ids = self.tokenizer.convert_tokens_to_ids(pieces)
        ids.append(self.tokenizer.eos_token_id)
        ends = [place for place, token in enumerate(ids) if token in sampling.stop_token_ids]
        said = np.array(ids[: min(ends[0] + 1, sampling.max_tokens)], np.int32)
        number = len(self.draws)
        logprobs = -np.arange(1, len(said) + 1, dtype=np.float32) - 100 * number
        versions = np.full(len(said), number, np.int32)
        reason: Any = "stop" if said[-1] in sampling.stop_token_ids else "length"
        drawn = Completion(said, logprobs, np.ones(len(said), bool), versions, reason)
        self.draws.append((context, drawn))
        return drawn

    def to_piece(self, character: str) -> str:
        (piece,) = self.tokenizer.tokenize(character)
        return str(piece)

    def run(self, agent: Callable[[Any], Awaitable[None]]) -> Completion:
        """Run an agent, with an OpenAI client, in the loop of the endpoint."""

        async def run() -> Completion:
            async with self.open() as (session, client):
                await agent(client)
            return session.build_completion(None)

        return asyncio.run(run())

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Session, Any]]:
        function = ConversationFunction(
            "rollout.agent", "f.py:f", None, "", tokenizer=self.tokenizer, vocabulary=512
        )
        record = Client(
            function=function,
            prompt=self.prompt,
            sampling=self.sampling,
            number=0,
            turn=self.sample,
        )
        renderer = ChatRenderer(self.tokenizer, DataConfig())
        find = _make_stop_finder(self.tokenizer)
        endpoint = Endpoint()
        session = Session(record, renderer, self.limits, {"temperature": (1.0,)}, find)
        url, key = await endpoint.open(session)
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            yield session, client
        endpoint.close_session(key)
        await endpoint.close()


@pytest.fixture
def begin(merging: Any) -> Callable[..., Rollout]:
    def make(*texts: str, turns: int = 9, tokens: int = 999, room: int = 200) -> Rollout:
        return Rollout(merging, texts, AgentLimits(turns, tokens, 60.0), room)

    return make


async def ask(client: Any, messages: list[Any], **more: Any) -> Any:
    """Request a turn, and append the turn to the messages."""
    answer = await client.chat.completions.create(model="policy", messages=messages, **more)
    messages.append(answer.choices[0].message.model_dump())
    return answer.choices[0]


def check_draws(rollout: Rollout, completion: Completion) -> None:
    """Check that the trained tokens are the draws, each after the context of its draw."""
    room = rollout.sampling.max_tokens
    assert find_sequence_error(len(rollout.prompt.token_ids), completion, room) is None
    drawn = [make_draw(*draw) for draw in rollout.draws]
    assert sorted(list_draws(rollout.prompt, completion)) == sorted(drawn)


def test_a_chat_keeps_the_sampled_tokens(begin: Any) -> None:
    """Though the template omits thoughts, and the tokenizer merges sampled tokens."""
    rollout = begin("<think>a</think>12", "12", "3")

    async def agent(client: Any) -> None:
        messages = [*ASKED]
        for _ in range(3):
            await ask(client, messages)
            messages.append(MORE)

    completion = rollout.run(agent)
    assert completion.starts == () and completion.finish_reason == "stop"
    merged = rollout.tokenizer.convert_tokens_to_ids(MERGED)
    assert merged not in completion.token_ids and len(rollout.draws) == 3
    text = rollout.tokenizer.decode(completion.token_ids)
    between = "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert text == between.join(["<think>a</think>12", "12", "3<|im_end|>"])
    check_draws(rollout, completion)


def test_other_histories_begin_sequences(begin: Any) -> None:
    """An edited turn, a sub-agent in between, and a second answer to the same messages."""
    rollout = begin("one", "two", "sub", "three", "four", "five")

    async def agent(client: Any) -> None:
        messages = [*ASKED]
        await ask(client, messages)
        helper = [{"role": "system", "content": "help"}, MORE]
        again = [*messages, MORE]
        await ask(client, again)
        await ask(client, helper)
        await ask(client, [*messages, MORE])
        await ask(client, [*ASKED, {"role": "assistant", "content": "1"}, MORE])
        await ask(client, [*helper, MORE])

    completion = rollout.run(agent)
    check_draws(rollout, completion)
    texts = [
        rollout.tokenizer.decode(completion.token_ids[each]) for each in split_sequences(completion)
    ]
    assert len(texts) == 4
    assert texts[0].startswith("one") and texts[0].endswith("two<|im_end|>")
    assert "sub" in texts[1] and texts[1].endswith("five<|im_end|>")
    # The second answer follows the sampled tokens of the first turn.
    assert "one" in texts[2] and texts[2].endswith("three<|im_end|>")
    assert texts[3].endswith("four<|im_end|>") and "one" not in texts[3]


def test_a_context_of_the_agents_own_leaves_the_first_sequence_empty(begin: Any) -> None:
    rollout = begin("yes")

    async def agent(client: Any) -> None:
        await ask(client, [{"role": "system", "content": "be brief"}, *ASKED])

    completion = rollout.run(agent)
    assert completion.starts == (0,)
    check_draws(rollout, completion)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called(begin: Any, stream: bool) -> None:
    rollout = begin(CALL, "2")

    async def agent(client: Any) -> None:
        messages: list[Any] = [*ASKED]
        if stream:
            chunks = await client.chat.completions.create(
                model="policy",
                messages=messages,
                tools=[ADD],
                stream=True,
                stream_options={"include_usage": True},
            )
            deltas = [chunk async for chunk in chunks]
            (call,) = deltas[0].choices[0].delta.tool_calls
            assert deltas[1].choices[0].finish_reason == "tool_calls"
            assert deltas[-1].usage.completion_tokens == len(rollout.draws[0][1].token_ids)
            kept = {"id": call.id, "type": "function", "function": call.function.model_dump()}
            messages.append({"role": "assistant", "content": "so", "tool_calls": [kept]})
        else:
            choice = await ask(client, messages, tools=[ADD])
            (call,) = choice.message.tool_calls
            assert (choice.message.content, choice.finish_reason) == ("so", "tool_calls")
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
        assert (await ask(client, messages, tools=[ADD])).message.content == "2"

    completion = rollout.run(agent)
    check_draws(rollout, completion)
    assert completion.starts == (0,), "the tools are in the context"


def test_texts_and_token_ids_are_continued(begin: Any) -> None:
    rollout = begin("12", "12", "3", "4")

    async def agent(client: Any) -> None:
        first = await client.completions.create(model="policy", prompt="7=")
        again = f"7={first.choices[0].text}+1="
        second = await client.completions.create(model="policy", prompt=again, stream=True)
        assert [chunk.choices[0].text async for chunk in second] == ["12"]
        ids = rollout.tokenizer.encode("5")
        third = await client.completions.create(model="policy", prompt=ids)
        made = third.choices[0].model_dump()["token_ids"]
        await client.completions.create(model="policy", prompt=[*ids, *made, *ids])

    completion = rollout.run(agent)
    check_draws(rollout, completion)
    assert len(split_sequences(completion)) == 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"temperature": 0.5}, "temperature = 0.5 is not served, only 1.0"),
        ({"n": 2}, "n = 2 is not served, only 1"),
        ({"seed": 1}, "The parameter seed is not served"),
        ({"tool_choice": "required"}, "tool_choice = 'required' is not served"),
        ({"stop": "ab"}, "The stop text 'ab' is not always a single token"),
        ({"max_tokens": 0}, "max_tokens is no whole number"),
        ({"model": "gpt"}, "There is no model 'gpt'"),
        ({"stream_options": "usage"}, "stream_options is no object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "other content than text",
        ),
        (
            {"messages": [*ASKED, {"role": "assistant", "content": "2"}]},
            "The last message is the policy's",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_request_that_is_not_served_fails_the_rollout(begin: Any, more: Any, words: str) -> None:
    """Also if the agent catches the error."""
    rollout = begin("yes", "no")

    async def agent(client: Any) -> None:
        await ask(client, [*ASKED])
        with pytest.raises(openai.APIStatusError, match=words) as raised:
            await client.chat.completions.create(**{"model": "policy", "messages": ASKED, **more})
        assert raised.value.status_code in (400, 404)

    completion = rollout.run(agent)
    assert completion.score is not None and completion.score.failure == "error"
    assert "requested what is not served" in completion.score.traceback
    assert len(completion.token_ids) == 0


def test_half_a_surrogate_pair_fails_the_rollout_and_not_the_run(begin: Any) -> None:
    """The tokenizer raises TypeError. The openai package cannot send such a text, other clients
    can."""
    rollout = begin()
    body = {"messages": [{"role": "user", "content": "\ud800"}]}

    async def run() -> Completion:
        async with rollout.open() as (session, _):
            with pytest.raises(RefusedError, match="The request cannot be read"):
                await session.answer(Session.complete_chat, body)
            assert not session.failed.done()
        return session.build_completion(None)

    score = asyncio.run(run()).score
    assert score is not None and "cannot be read" in score.traceback


def test_routes_and_keys_that_are_unknown(begin: Any) -> None:
    rollout = begin()

    async def agent(client: Any) -> None:
        (model,) = (await client.models.list()).data
        assert model.id == "policy"
        with pytest.raises(openai.AuthenticationError, match="no running rollout"):
            await client.with_options(api_key="another").models.list()
        with pytest.raises(openai.NotFoundError, match=r"POST /v1/embeddings is not served"):
            await client.embeddings.create(model="policy", input="a")

    score = rollout.run(agent).score
    assert score is not None and "embeddings" in score.traceback


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"turns": 2}, "rollout_limit"),
        ({"tokens": 120}, "rollout_limit"),
        ({"room": 60}, "context_length_exceeded"),
    ],
    ids=["turns", "tokens", "room"],
)
def test_limits_end_a_rollout(begin: Any, limits: Any, code: str) -> None:
    rollout = begin(*["yes"] * 9, **limits)

    async def agent(client: Any) -> None:
        messages: list[Any] = [*ASKED]
        with pytest.raises(openai.BadRequestError) as raised:
            for _ in range(9):
                await ask(client, messages)
                messages.append(MORE)
        assert raised.value.code == code

    completion = rollout.run(agent)
    assert (completion.finish_reason, completion.score) == ("length", None)
    read = len(rollout.prompt.token_ids) + len(completion.token_ids)
    assert 1 < len(rollout.draws) < 9 and read <= limits.get("tokens", 999)
    if "tokens" in limits:
        (first, turn), (second, _) = rollout.draws[:2]
        between = len(second) - len(first) - len(turn.token_ids)
        assert read + between >= limits["tokens"], "tokens of one sequence count once"
    check_draws(rollout, completion)


def test_a_turn_ends_at_a_stop_text(begin: Any) -> None:
    rollout = begin("7+8=15", "9", "2=3", "5", "6")

    async def agent(client: Any) -> None:
        messages: list[Any] = [*ASKED]
        choice = await ask(client, messages, stop=["="])
        assert (choice.message.content, choice.finish_reason) == ("7+8", "stop")
        messages.append(MORE)
        await ask(client, messages, max_tokens=1)
        first = await client.completions.create(model="policy", prompt="2+", stop="=")
        text, stop = first.choices[0].text, first.choices[0].stop_reason
        assert (text, stop) == ("2", "=")
        await client.completions.create(model="policy", prompt=f"2+{text}{stop}4")
        await client.completions.create(model="policy", prompt=f"2+{text}0")

    completion = rollout.run(agent)
    assert [draw[0] for draw in rollout.draws[3:]] == [
        rollout.tokenizer.encode(prompt) for prompt in ("2+2=4", "2+20")
    ]
    text = rollout.tokenizer.decode(completion.token_ids)
    assert text.startswith("7+8=<|im_end|>")
    check_draws(rollout, completion)


def test_an_agent_library_calls_a_tool(begin: Any) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    rollout = begin(CALL, "2", tokens=2000, room=900)

    @agents.function_tool  # type: ignore[untyped-decorator]
    def add(a: int) -> str:
        """Add one."""
        return str(a + 1)

    async def agent(client: Any) -> None:
        model = agents.OpenAIChatCompletionsModel("policy", client)
        adder = agents.Agent("adder", instructions="Add.", model=model, tools=[add])
        result = await agents.Runner.run(adder, "1+1=")
        assert result.final_output == "2"

    completion = rollout.run(agent)
    assert completion.score is None and completion.starts == (0,)
    assert rollout.tokenizer.decode(completion.token_ids).count("2") == 2
    check_draws(rollout, completion)
