"""Faults of a conversation are charged to whoever is at fault; the policy's server is a few
lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.conversation_functions import load_rollout_function
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.servers.conversations import Conversations
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.settings import load_config
from tests.policies import write_policy
from tests.rollout.servers.script import answering, dispatcher_of

POLICY = partial(write_policy, layers=1)
SAMPLES, PROMPTS = 4, 12
ABORTS = 9
FUNCTIONS = """
ABORTS = 9
import time
from megatron_dppo.rollout.conversation import TryAgainError

SEEN = {}

async def rollout(client, prompt):
    prompt.extra["turns"].append("hello")
    assert len(prompt.extra["turns"]) == 1
    tokens = prompt.token_ids.tolist()
    first = await client.generate(tokens)
    second = await client.generate([*tokens, *first.token_ids, 1, ABORTS])
    return [first, [1, ABORTS], second]

async def speak_in_roles(client, prompt):
    first, told, second = await rollout(client, prompt)
    return [("asker", first), told, ("answerer", second)]

async def give_up_at_first(client, prompt):
    SEEN[prompt.id] = SEEN.get(prompt.id, 0) + 1
    if SEEN[prompt.id] == 1:
        raise TryAgainError("a tool is down")
    return [await client.generate(prompt.token_ids)]

async def forget_what_was_told(client, prompt):
    tokens = prompt.token_ids.tolist()
    return [await client.generate(tokens), await client.generate(tokens)]

async def ask_of_unknown_tokens(client, prompt):
    return [await client.generate([*prompt.token_ids, 10**6])]

async def go_on_from_nothing(client, prompt):
    return [await client.generate([])]

async def end_the_program(client, prompt):
    raise SystemExit(0)

async def block(client, prompt):
    time.sleep(3)

def generate_at_once(client, prompt):
    return []

async def stumble(client, prompt):
    return [await client.generate(prompt.token_ids), prompt.no_such_thing]
"""


class Conversing:
    """Conversations with a server of the policy.

    ``sampling`` are the parameters of requests so far.
    """

    url: str

    def __init__(self, http: Http, policy: Path, folder: Path) -> None:
        self.http, self._policy, self._file = http, policy, folder / "tools.py"
        self._file.write_text(FUNCTIONS)
        self.sampling: list[dict[str, Any]] = []

    def answer(self, path: str, content: dict[str, Any]) -> tuple[int, Any]:
        """Answer 5 6, and an aborted 5 to a context that ends with ``ABORTS``. Inference is
        deterministic."""
        self.sampling += content.get("sampling_params", [])
        (context,) = content.get("input_ids", [[0]])
        aborts = context[-1:] == [ABORTS]
        tokens = [5] if aborts else [5, 6]
        meta = {
            "weight_version": "3",
            "finish_reason": {"type": "abort" if aborts else "stop"},
            "output_token_logprobs": [[-0.5, 5], [-0.25, 6]][: len(tokens)],
        }
        info = {"weight_version": "3", "enable_deterministic_inference": True}
        return 200, info | {"meta_info": meta, "output_ids": tokens}

    def function(self, name: str, *settings: str) -> Any:
        spec = f"rollout.conversation={self._file}:{name}"
        return load_rollout_function(
            load_config(None, [f"model.path={self._policy}", spec, *settings])
        )

    def converse(self, name: str, *settings: str, attempts: int = 3, **more: Any) -> Any:
        """Have a function answer all prompts. Lost servers and prompts' extras become attributes of
        the batch."""
        conversations = Conversations(self.function(name, *settings), timeout_s=20.0)
        client = SglangClient(self.url, self.http)
        dispatcher = dispatcher_of(
            self.http, client, attempts=attempts, conversations=conversations
        )
        extra: list[dict[str, Any]] = [{"turns": []} for _ in range(PROMPTS)]
        prompts = [
            Prompt(i, np.array([7, 8], np.int32), "7 8", "", extra=extra[i]) for i in range(PROMPTS)
        ]
        sampling = Sampling(
            SAMPLES, max_tokens=8, temperature=1.0, stop_token_ids=(0,), seed=1, **more
        )
        batch = dispatcher.begin(prompts, sampling, 3)
        batch.wait(60.0)
        conversations.close()
        assert dispatcher.take_unhealthy() == {}, "a server is blamed"
        assert [each["turns"] for each in extra] == [[]] * PROMPTS, (
            "a conversation wrote into the prompt"
        )
        return batch

    def completions(self, name: str, *settings: str, **more: Any) -> list[Completion]:
        batch = self.converse(name, *settings, **more)
        assert batch.error is None and batch.unfinished_count == 0
        assert [len(group) for group in batch.build_groups()] == [SAMPLES] * PROMPTS
        return [completion for group in batch.build_groups() for completion in group]


@pytest.fixture
def conversing(http: Http, policy: Path, tmp_path: Path) -> Iterator[Conversing]:
    conversing = Conversing(http, policy, tmp_path)
    with answering(conversing.answer) as conversing.url:
        yield conversing


def test_turns_are_sampled_as_the_run_asks(conversing: Conversing) -> None:
    """With one seed, SGLang's deterministic inference would repeat one conversation."""
    conversing.completions("rollout", top_p=0.9, top_k=20)
    assert {(each["top_p"], each["top_k"]) for each in conversing.sampling} == {(0.9, 20)}
    assert len({each["sampling_seed"] for each in conversing.sampling}) == len(conversing.sampling)


def test_a_conversation_given_up_is_requested_again(conversing: Conversing) -> None:
    conversing.completions("give_up_at_first", attempts=SAMPLES + 1)


def test_turns_are_joined_across_an_abort(conversing: Conversing) -> None:
    for completion in conversing.completions("rollout"):
        assert completion.token_ids.tolist() == [5, 6, 1, ABORTS, 5, 5, 6]
        assert completion.loss_mask.tolist() == [True, True, False, False, True, True, True]
        assert completion.logprobs[completion.loss_mask].tolist() == [
            -0.5,
            -0.25,
            -0.5,
            -0.5,
            -0.25,
        ]
        assert (completion.versions.tolist(), completion.finish_reason) == ([3] * 7, "stop")


def test_each_token_has_its_role(conversing: Conversing) -> None:
    for completion in conversing.completions("speak_in_roles", "rollout.roles=[answerer,asker]"):
        assert completion.segments is not None and completion.segments.tolist() == [
            1,
            1,
            -1,
            -1,
            0,
            0,
            0,
        ]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "forget_what_was_told",
            "turn 1 whose context differs from the tokens before it",
        ),
        (
            "ask_of_unknown_tokens",
            "from a context with the token id 1000000; the policy's vocabulary",
        ),
        ("go_on_from_nothing", "The context of a turn has no token"),
        ("end_the_program", "SystemExit: 0"),
        ("stumble", "AttributeError: 'Prompt' object has no attribute 'no_such_thing'"),
    ],
)
def test_an_unusable_conversation_ends_the_run(
    conversing: Conversing, name: str, problem: str
) -> None:
    error = conversing.converse(name).error
    assert isinstance(error, UserError) and error.setting == "rollout.conversation"
    assert problem in str(error)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("generate_at_once", "is no coroutine"),
        ("stumbl", "Perhaps 'stumble' was meant"),
    ],
)
def test_a_function_of_another_form_is_refused(
    conversing: Conversing, name: str, problem: str
) -> None:
    with pytest.raises(UserError) as raised:
        conversing.function(name)
    assert raised.value.setting == "rollout.conversation" and problem in str(raised.value)


def test_a_conversation_that_blocks_is_named_and_fails(conversing: Conversing) -> None:
    """The function blocks the thread of all conversations."""
    conversations = Conversations(conversing.function("block"), timeout_s=1.0)
    http, prompt = conversing.http, Prompt(7, np.array([7, 8], np.int32), "7 8", "")
    sampling = Sampling(1, max_tokens=8, temperature=1.0, stop_token_ids=(0,), seed=1)
    begun = http.start(
        conversations(SglangClient(conversing.url, http), prompt, sampling, lambda told: [])
    )
    while not (named := conversations.describe_stalled(0.1)):
        time.sleep(0.05)
    assert "tools.py:block has not returned for prompt 7 after" in named
    with pytest.raises(ServerError, match="for 1 s without a completion"):
        begun.result(10.0)
    assert conversations.describe_stalled(0.0) == ""
