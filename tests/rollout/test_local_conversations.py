"""Conversations with the local engine: log-probabilities of a plain forward, and the same bits
however slow a tool."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen3ForCausalLM

from megatron_dppo.errors import UserError
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.conversation import Client, ConversationFunction, TryAgainError, Turn
from megatron_dppo.rollout.local import LocalEngine
from megatron_dppo.rollout.local_conversations import LocalConversations
from tests.rollout.local import (
    STOP,
    assert_logprobs_of_a_plain_forward,
    bits_of,
    generate,
    make_engine,
    make_policy,
    make_prompts,
    record_reads,
    sampling_of,
    tokens_of,
)

TOLD = [9, 10]
CALL = 20
"""The token that calls the tool."""
MOST = 24


async def once(client: Client, prompt: Prompt) -> list[Turn]:
    return [await client.generate(prompt.token_ids)]


async def with_a_tool(client: Client, prompt: Prompt, wait_s: float = 0.0) -> list[Turn]:
    """Three turns at most, each of five tokens or up to a call; the tool answers with twice as many
    tokens."""
    tokens, turns = prompt.token_ids.tolist(), []
    for _ in range(3):
        turns.append(turn := await client.generate(tokens, max_tokens=5, stop_token_ids=[CALL]))
        if not len(turn.token_ids) or turn.token_ids[-1] in STOP:
            break
        await asyncio.sleep(wait_s * random.random())
        turns.append(told := TOLD * len(turn.token_ids))
        tokens += [*turn.token_ids.tolist(), *told]
    return turns


async def with_a_slow_tool(client: Client, prompt: Prompt) -> list[Turn]:
    return await with_a_tool(client, prompt, wait_s=0.02)


async def second_thoughts(client: Client, prompt: Prompt) -> list[Turn]:
    """Make the same request twice, at once, and use the second turn."""
    return [(await asyncio.gather(*[client.generate(prompt.token_ids) for _ in range(2)]))[1]]


async def stumble(client: Client, prompt: Prompt) -> list[Turn]:
    return [await client.generate(prompt.token_ids), prompt.no_such_thing]


async def cancel_itself(client: Client, prompt: Prompt) -> list[Turn]:
    raise asyncio.CancelledError("no more of this")


async def cancel_all(client: Client, prompt: Prompt) -> list[Turn]:
    for task in asyncio.all_tasks():
        task.cancel()
    return await once(client, prompt)


async def stop_the_loop(client: Client, prompt: Prompt) -> list[Turn]:
    asyncio.get_running_loop().stop()
    return await once(client, prompt)


async def exit_in_callback(client: Client, prompt: Prompt) -> list[Turn]:
    asyncio.get_running_loop().call_soon(sys.exit)
    return await once(client, prompt)


async def fork(client: Client, prompt: Prompt) -> list[Turn]:
    """Fork as a library might that forgets to end its copy."""
    child = os.fork()
    if child == 0:
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGABRT)
    assert os.waitpid(child, 0)[1] == 0, "the copy goes on in the run's loop"
    return await once(client, prompt)


async def never_end(client: Client, prompt: Prompt) -> list[Turn]:
    if prompt.id == 1:
        await asyncio.Event().wait()
    return await once(client, prompt)


async def ask_for_ever(client: Client, prompt: Prompt) -> list[Turn]:
    while prompt.id == 1:
        await client.generate(prompt.token_ids, max_tokens=1)
    return await once(client, prompt)


async def give_up(client: Client, prompt: Prompt) -> list[Turn]:
    raise TryAgainError("the tool is down")


async def give_up_at_first(client: Client, prompt: Prompt, seen: set[int] = set()) -> list[Turn]:  # noqa: B006
    prompt.extra["notes"].append("hello")
    assert len(prompt.extra["notes"]) == 1, "what a conversation writes on its columns is its own"
    turns = await with_a_tool(client, prompt)
    if prompt.id not in seen:
        seen.add(prompt.id)
        raise TryAgainError("the tool is down")
    return turns


def talks_of(function: Any, **limits: float) -> LocalConversations:
    named = ConversationFunction(
        "rollout.conversation", f"f.py:{function.__name__}", function, "Mend"
    )
    return LocalConversations(named, attempts=2, **{"timeout_s": 0.5, **limits})


def test_loop_is_closed_after_an_exit_in_a_callback() -> None:
    """Else tasks would be left for the garbage collector, which runs their ends anywhere."""
    conversations = talks_of(once)
    conversations._runner.get_loop().call_soon(sys.exit)
    conversations.close()
    with pytest.raises(RuntimeError, match="closed"):
        conversations._runner.get_loop()


@pytest.fixture(scope="module")
def policy() -> Qwen3ForCausalLM:
    return make_policy()


@pytest.fixture
def engines(policy: Qwen3ForCausalLM, tmp_path: Path) -> Iterator[Any]:
    """A maker of engines of one policy, by the function that has their conversations; None:
    none."""
    made: list[LocalEngine] = []

    def make(function: Any, max_batch: int = 64, **limits: float) -> LocalEngine:
        talks = function and talks_of(function, **limits)
        made.append(make_engine(policy, tmp_path, max_batch=max_batch, conversations=talks))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("function", [never_end, ask_for_ever])
def test_late_conversations_are_named_and_ended(
    engines: Any, function: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engines(function, timeout_s=60.0, late_s=0.5, end_s=3.0)
    with pytest.raises(UserError) as raised:
        generate(engine, make_prompts(3, 6), sampling_of(samples=2))
    who = f"none of 2 conversations of f.py:{function.__name__}"
    where = ", the first of them about prompt 1"
    assert raised.value.setting == "rollout.timeout_s"
    assert raised.value.problem == f"is over: {who} ended{where}"
    late = rf"late: {re.escape(who)} has ended for \d+ s{where}\n"
    # On a busy machine, other conversations may be late as well before they end.
    assert re.search(late, capsys.readouterr().err)


def test_one_turn_is_a_completion_without_a_conversation(engines: Any) -> None:
    """Bit by bit: the beginning that samples share is read once, and the random numbers are the
    same."""
    prompts, sampling = make_prompts(3, 11, 1, 6), sampling_of()
    assert bits_of(generate(engines(once), prompts, sampling)) == bits_of(
        generate(engines(None), prompts, sampling)
    )


def test_forked_copy_ends_where_its_step_ends(engines: Any) -> None:
    prompts, sampling = make_prompts(3), sampling_of()
    assert bits_of(generate(engines(fork), prompts, sampling)) == bits_of(
        generate(engines(once), prompts, sampling)
    )


@pytest.mark.parametrize("callback", ["task", "call_soon"])
def test_process_that_a_callback_forks_has_no_conversations(
    engines: Any, tmp_path: Path, callback: str
) -> None:
    """It would begin other conversations, and each of them would fork, too."""
    count, children = tmp_path / "forks", []

    def fork_aside() -> None:
        with count.open("a") as file:
            file.write(".")
        if count.stat().st_size > conversations:
            return
        if child := os.fork():
            children.append(child)
        else:
            signal.alarm(10)  # the end of a process that goes on

    async def run_aside() -> None:
        fork_aside()

    async def talk(client: Client, prompt: Prompt) -> list[Turn]:
        loop = asyncio.get_running_loop()
        if callback == "task":
            await loop.create_task(run_aside())
        else:
            loop.call_soon(fork_aside)
        return await once(client, prompt)

    prompts, sampling = make_prompts(3, 11), sampling_of()
    conversations = len(prompts) * sampling.samples
    generate(engines(talk), prompts, sampling)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * conversations
    assert count.stat().st_size == conversations


def test_sampled_tokens_have_logprobs_of_a_plain_forward(
    engines: Any, policy: Qwen3ForCausalLM
) -> None:
    prompts = make_prompts(3, 11, 1, 6)
    groups = generate(engines(with_a_tool), prompts, sampling_of(samples=6, max_tokens=MOST))
    assert_logprobs_of_a_plain_forward(policy, prompts, groups, 1.0)
    turns = set()
    for group in groups:
        for completion in group:
            mask, length = completion.loss_mask, len(completion.token_ids)
            assert length <= MOST and completion.versions.tolist() == [1] * length
            said = completion.token_ids[mask].tolist()
            assert not set(said[:-1]) & set(STOP), (
                "a token that ends a response ends the conversation"
            )
            assert set(completion.token_ids[~mask]) <= set(TOLD)
            turns.add(int((np.diff(np.append(mask, False).astype(int)) < 0).sum()))
    assert turns >= {2, 3}, "conversations end after two and three turns"


def test_waiting_for_a_tool_changes_no_bit(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, sampling = make_prompts(3, 11, 1, 6), sampling_of(samples=6, max_tokens=MOST)
    quick = engines(with_a_tool)
    shapes = record_reads(monkeypatch)
    groups = generate(quick, prompts, sampling)
    before, shapes[:] = list(shapes), []
    assert bits_of(generate(engines(with_a_slow_tool), prompts, sampling)) == bits_of(groups)
    assert shapes == before, "the same turns are decoded together"
    # The second time, and in small batches, where rounding may differ.
    assert bits_of(generate(quick, prompts, sampling)) == bits_of(groups)
    assert tokens_of(generate(engines(with_a_tool, max_batch=7), prompts, sampling)) == tokens_of(
        groups
    )


def test_repeated_requests_draw_other_tokens(engines: Any) -> None:
    prompts, sampling = make_prompts(3, 6), sampling_of(samples=6, max_tokens=MOST)
    first, second = (
        generate(engines(function), prompts, sampling) for function in (once, second_thoughts)
    )
    for before, after in zip(bits_of(first), bits_of(second), strict=True):
        assert all(a != b for a, b in zip(before, after, strict=True))
    assert bits_of(second) == bits_of(generate(engines(second_thoughts), prompts, sampling))


def test_conversation_that_gives_up_is_repeated(engines: Any) -> None:
    prompts = [replace(prompt, extra={"notes": []}) for prompt in make_prompts(3, 6)]
    sampling = sampling_of(samples=2, max_tokens=MOST)
    again = generate(engines(give_up_at_first), prompts, sampling)
    assert tokens_of(again) == tokens_of(generate(engines(with_a_tool), prompts, sampling))
    assert [prompt.extra for prompt in prompts] == [{"notes": []}] * 2


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (stumble, "AttributeError: 'Prompt' object has no attribute 'no_such_thing'"),
        (cancel_itself, "CancelledError: no more of this"),
        (cancel_all, "f.py:cancel_all: cancelled tasks of the run"),
        (
            stop_the_loop,
            "f.py:stop_the_loop: cancelled tasks of the run, or stopped the event loop",
        ),
        (exit_in_callback, "f.py:exit_in_callback: raised in a callback or a task:\nTraceback"),
        (give_up, "gave up prompt 0 2 times (rollout.attempts), the last time: the tool is down"),
        (never_end, "2 conversations of f.py:never_end neither requested a turn nor ended"),
    ],
)
def test_failing_conversations_stop_the_run(engines: Any, function: Any, words: str) -> None:
    engine = engines(function)
    with pytest.raises(UserError) as raised:
        engine.begin(make_prompts(3, 6), sampling_of(samples=2))
    setting = "rollout.request_timeout_s" if function is never_end else "rollout.conversation"
    assert raised.value.setting == setting and words in str(raised.value)
    plain = engine.sample_each(make_prompts(3), sampling_of(samples=2))
    assert len(plain["local"][0]) == 2, "servers are compared without conversations"
