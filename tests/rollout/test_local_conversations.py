"""Conversations with the local engine: what is trained on is what a plain forward gives, token by token, and the same
call gives the same bits however long a tool takes."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from megatron_dppo.errors import UserError
from megatron_dppo.rl.types import Completion, Prompt, VersionSpan
from megatron_dppo.rollout.conversation import Client, ConversationFunction, TryAgainError, Turn
from megatron_dppo.rollout.engine import generate
from megatron_dppo.rollout.local import LocalEngine
from megatron_dppo.rollout.local_conversations import LocalConversations
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.rollout.test_local import (
    STOP,
    make_policy,
    make_prompts,
    one_thread,  # noqa: F401
    plain_logprobs,
    sampling_of,
    shapes_read,
    source_of,
    tokens_of,
    weights_of,
)

TOLD = [9, 10]
CALL = 20
"""The token that calls the tool."""
MOST = 24


async def once(client: Client, prompt: Prompt) -> list[Turn]:
    return [await client.generate(prompt.token_ids)]


async def with_a_tool(client: Client, prompt: Prompt, wait_s: float = 0.0) -> list[Turn]:
    """Three turns at most, each of five tokens or up to a call; the tool answers with twice as many tokens."""
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
    """Two requests for the same, at once, of which the second counts."""
    return [(await asyncio.gather(*[client.generate(prompt.token_ids) for _ in range(2)]))[1]]


async def forget_what_was_told(client: Client, prompt: Prompt) -> list[Turn]:
    return [await client.generate(prompt.token_ids, max_tokens=2) for _ in range(2)]


async def stumble(client: Client, prompt: Prompt) -> list[Turn]:
    return [await client.generate(prompt.token_ids), prompt.no_such_thing]


async def end_the_program(client: Client, prompt: Prompt) -> list[Turn]:
    sys.exit(0)


async def cancel_itself(client: Client, prompt: Prompt) -> list[Turn]:
    raise asyncio.CancelledError("no more of this")


async def go_on_from_nothing(client: Client, prompt: Prompt) -> list[Turn]:
    return [await client.generate([])]


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


@pytest.fixture(scope="module")
def policy() -> Qwen3ForCausalLM:
    return make_policy()


@pytest.fixture
def engines(policy: Qwen3ForCausalLM, tmp_path: Path) -> Iterator[Any]:
    """Makes engines of one policy, by the function that has their conversations; None: none."""
    made: list[LocalEngine] = []
    policy.config.save_pretrained(tmp_path)

    def make(function: Any, max_batch: int = 64, path: Path = tmp_path, **limits: float) -> LocalEngine:
        named = function and ConversationFunction("rollout.conversation", f"f.py:{function.__name__}", function, "Mend")
        talks = named and LocalConversations(named, attempts=2, **{"timeout_s": 0.5, **limits})
        made.append(
            LocalEngine(path, device=torch.device("cpu"), dtype=torch.float32, max_batch=max_batch, conversations=talks)
        )
        made[-1].update_weights(weights_of(policy) if path == tmp_path else source_of(stored(path)), version=3)
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("function", [never_end, ask_for_ever])
def test_a_conversation_that_does_not_return_is_named_and_ended(
    engines: Any, function: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engines(function, timeout_s=60.0, late_s=0.3, end_s=1.0)
    with pytest.raises(UserError) as raised:
        generate(engine, make_prompts(3, 6), sampling_of(samples=2))
    who = f"2 conversations of f.py:{function.__name__}, the first of them about prompt 1"
    assert (
        raised.value.setting == "rollout.timeout_s" and raised.value.problem == f"passed in which none ended of {who}"
    )
    assert capsys.readouterr().err == f"late: none has ended for 0 s of {who}\n"


def stored(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def bits_of(groups: Sequence[Sequence[Completion]]) -> list:
    return [[(c.token_ids.tolist(), c.logprobs.tobytes(), c.loss_mask.tolist()) for c in group] for group in groups]


def test_one_turn_is_what_the_engine_says_without_a_conversation(engines: Any) -> None:
    """Bit by bit: what samples of a prompt go on from is read once, and the luck is the same."""
    prompts, sampling = make_prompts(3, 11, 1, 6), sampling_of()
    assert bits_of(generate(engines(once), prompts, sampling)) == bits_of(generate(engines(None), prompts, sampling))
    greedy = sampling_of(samples=2, temperature=0.0)
    assert bits_of(generate(engines(once), prompts, greedy)) == bits_of(generate(engines(None), prompts, greedy))


def test_every_sampled_token_has_the_log_probability_that_a_plain_forward_gives_it(
    engines: Any, policy: Qwen3ForCausalLM
) -> None:
    prompts = make_prompts(3, 11, 1, 6)
    groups = generate(engines(with_a_tool), prompts, sampling_of(samples=6, max_tokens=MOST))
    turns = []
    for prompt, group in zip(prompts, groups, strict=True):
        assert len({completion.token_ids.tobytes() for completion in group}) > 3
        for completion in group:
            expected = plain_logprobs(policy, prompt, completion, 1.0)
            mask, length = completion.loss_mask, len(completion.token_ids)
            np.testing.assert_allclose(completion.logprobs[mask], expected[mask], atol=1e-5, rtol=0)
            assert length <= MOST and completion.versions == (VersionSpan(3, length),)
            said = completion.token_ids[mask].tolist()
            assert not set(said[:-1]) & set(STOP), "a token that ends a response ends the conversation"
            assert set(completion.token_ids[~mask]) <= set(TOLD)
            turns.append(int(np.diff(np.append(mask, False).astype(int)).clip(max=0).sum()))
    assert set(turns) >= {-2, -3}, "conversations end after two and three turns"


def test_how_long_a_tool_takes_changes_no_bit(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, sampling = make_prompts(3, 11, 1, 6), sampling_of(samples=6, max_tokens=MOST)
    quick = engines(with_a_tool)
    shapes = shapes_read(monkeypatch)
    groups = bits_of(generate(quick, prompts, sampling))
    before, shapes[:] = list(shapes), []
    assert bits_of(generate(engines(with_a_slow_tool), prompts, sampling)) == groups
    assert shapes == before, "the same turns are decoded together"
    # The second time, and in small batches, where rounding may differ.
    assert bits_of(generate(quick, prompts, sampling)) == groups
    small = tokens_of(generate(engines(with_a_tool, max_batch=7), prompts, sampling))
    assert small == [[tokens for tokens, *_ in group] for group in groups]


def test_what_is_asked_again_has_luck_of_its_own(engines: Any) -> None:
    prompts, sampling = make_prompts(3, 6), sampling_of(samples=6, max_tokens=MOST)
    first, second = generate(engines(once), prompts, sampling), generate(engines(second_thoughts), prompts, sampling)
    for before, after in zip(bits_of(first), bits_of(second), strict=True):
        assert all(a != b for a, b in zip(before, after, strict=True))
    assert bits_of(second) == bits_of(generate(engines(second_thoughts), prompts, sampling))


def test_a_conversation_that_gives_up_is_had_again(engines: Any) -> None:
    prompts = [replace(prompt, extra={"notes": []}) for prompt in make_prompts(3, 6)]
    sampling = sampling_of(samples=2, max_tokens=MOST)
    again = generate(engines(give_up_at_first), prompts, sampling)
    assert tokens_of(again) == tokens_of(generate(engines(with_a_tool), prompts, sampling))
    assert [prompt.extra for prompt in prompts] == [{"notes": []}] * 2


@pytest.mark.parametrize(
    ("function", "setting", "words"),
    [
        (forget_what_was_told, "rollout.conversation", "turn 1 that was generated after other tokens"),
        (stumble, "rollout.conversation", "AttributeError: 'Prompt' object has no attribute 'no_such_thing'"),
        (end_the_program, "rollout.conversation", "SystemExit: 0"),
        (cancel_itself, "rollout.conversation", "CancelledError: no more of this"),
        (go_on_from_nothing, "rollout.conversation", "no token to go on from"),
        (
            give_up,
            "rollout.conversation",
            "gave up prompt 0 2 times (rollout.attempts), the last time: the tool is down",
        ),
        (
            never_end,
            "rollout.request_timeout_s",
            "2 conversations of f.py:never_end neither asked for a turn nor ended",
        ),
    ],
)
def test_what_goes_wrong_stops_the_run_in_words(engines: Any, function: Any, setting: str, words: str) -> None:
    engine = engines(function)
    pending = engine.begin(make_prompts(3, 6), sampling_of(samples=2))  # which does not raise
    with pytest.raises(UserError) as raised:
        engine.finish(pending)
    assert raised.value.setting == setting and words in str(raised.value)
    plain = engine.sample_each(make_prompts(3), sampling_of(samples=2))
    assert len(plain["local"][0]) == 2, "servers are compared without conversations"


def test_experts_are_known_of_every_token_that_was_read(engines: Any, tmp_path: Path) -> None:
    shape = write_qwen3_moe(folder := tmp_path / "moe", Sizes()).routing
    prompts, sampling = make_prompts(3, 6), replace(sampling_of(samples=3, max_tokens=MOST), routing=shape)
    for prompt, group in zip(prompts, generate(engines(with_a_tool, path=folder), prompts, sampling), strict=True):
        for completion in group:
            assert completion.routing is not None
            read = len(prompt.token_ids) + int(np.flatnonzero(completion.loss_mask)[-1])
            assert len(completion.routing) == read
