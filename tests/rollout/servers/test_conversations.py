"""Faults of a conversation are charged to whoever is at fault; the policy's server is a few lines."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.plugins import Sample, load_function
from megatron_dppo.rl.types import Completion, Prompt, VersionSpan
from megatron_dppo.rollout.conversation_checks import UnusableError
from megatron_dppo.rollout.conversation_functions import completion_of_samples, conversation_of
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.servers.conversations import Conversations
from megatron_dppo.rollout.servers.dispatch import PromptFailedError
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
from slime.utils.http_utils import post
from slime.utils.types import Sample

SEEN = {}

async def talk(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    if not sample.tokens:
        sample.tokens = [7, 8]
    answer = await post(url, {"input_ids": sample.tokens, "sampling_params": sampling_params})
    made = answer["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(args, tokens=[t for _, t in made], log_probs=[p for p, _ in made],
                                  meta_info=answer["meta_info"])
    return sample

async def ask_a_judge(args, sample, sampling_params):
    await post(sample.metadata["other"] + "/judge", {})
    return await talk(args, sample, sampling_params)

async def fail_at_first(args, sample, sampling_params):
    SEEN[sample.index] = SEEN.get(sample.index, 0) + 1
    if SEEN[sample.index] == 1:
        sample.status = Sample.Status.FAILED
        return sample
    return await talk(args, sample, sampling_params)

async def write_on_metadata(args, sample, sampling_params):
    sample.metadata["turns"].append("hello")
    assert len(sample.metadata["turns"]) == 1
    return await talk(args, sample, sampling_params)

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

async def forget_log_probs(args, sample, sampling_params):
    sample = await talk(args, sample, sampling_params)
    sample.rollout_log_probs = None
    return sample

async def use_an_option_of_slime(args, sample, sampling_params):
    return args.an_option_of_slime

async def block(client, prompt):
    time.sleep(3)

def generate_at_once(args, sample, sampling_params):
    return sample

async def stumble(client, prompt):
    return [await client.generate(prompt.token_ids), prompt.no_such_thing]
"""


class Conversing:
    """Conversations with a server of the policy.

    ``refusals`` are statuses of the judge's next answers, ``sampling`` the parameters of requests so far.
    """

    url: str

    def __init__(self, http: Http, policy: Path, folder: Path) -> None:
        self.http, self._policy, self._file = http, policy, folder / "tools.py"
        self._file.write_text(FUNCTIONS)
        self.refusals: list[int] = []
        self.sampling: list[dict[str, Any]] = []

    def answer(self, path: str, content: dict[str, Any]) -> tuple[int, Any]:
        """Answer 5 6, and an aborted 5 to a context that ends with ``ABORTS``. As a judge, have other weights."""
        if path == "/judge" and self.refusals:
            return self.refusals.pop(), None
        if "sampling_params" in content:
            self.sampling.append(content["sampling_params"])
        aborts = content.get("input_ids", [0])[-1] == ABORTS
        tokens = [5] if aborts else [5, 6]
        meta = {
            "weight_version": "default" if path == "/judge" else "3",
            "finish_reason": {"type": "abort" if aborts else "stop"},
            "output_token_logprobs": [[-0.5, 5], [-0.25, 6]][: len(tokens)],
        }
        return 200, {"weight_version": "3", "meta_info": meta, "output_ids": tokens}

    def function(self, name: str, setting: str, *settings: str) -> Any:
        spec = f"rollout.{setting}={self._file}:{name}"
        return conversation_of(load_config(None, [f"model.path={self._policy}", spec, *settings]))

    def converse(
        self, name: str, *settings: str, setting: str = "conversation", judge: str = "", attempts: int = 3, **more: Any
    ) -> Any:
        """Have a function answer all prompts. Lost servers and prompts' extras become attributes of the batch."""
        conversations = Conversations(self.function(name, setting, *settings), timeout_s=20.0)
        client = SglangClient(self.url, self.http)
        dispatcher = dispatcher_of(self.http, client, attempts=attempts, conversations=conversations)
        judge = judge or self.url.replace("127.0.0.1", "localhost")
        extra = [{"other": judge, "turns": []} for _ in range(PROMPTS)]
        prompts = [Prompt(i, np.array([7, 8], np.int32), "7 8", "", extra=extra[i]) for i in range(PROMPTS)]
        sampling = Sampling(SAMPLES, max_tokens=8, temperature=1.0, stop_token_ids=(0,), seed=1, **more)
        batch = dispatcher.begin(prompts, sampling, 3)
        batch.wait(60.0)
        conversations.close()
        assert dispatcher.take_lost() == {}, "a server is blamed"
        assert [each["turns"] for each in extra] == [[]] * PROMPTS, "a conversation wrote into the prompt"
        return batch

    def completions(self, name: str, *settings: str, **more: Any) -> list[Completion]:
        batch = self.converse(name, *settings, **more)
        assert batch.error is None and batch.unfinished == 0
        assert [len(group) for group in batch.groups()] == [SAMPLES] * PROMPTS
        return [completion for group in batch.groups() for completion in group]


@pytest.fixture
def conversing(http: Http, policy: Path, tmp_path: Path) -> Iterator[Conversing]:
    conversing = Conversing(http, policy, tmp_path)
    with answering(conversing.answer) as conversing.url:
        yield conversing


def test_a_judges_weights_are_not_the_policys(conversing: Conversing) -> None:
    for completion in conversing.completions("ask_a_judge", setting="custom_generate"):
        assert (completion.token_ids.tolist(), completion.finish_reason) == ([5, 6], "stop")
        assert {span.version for span in completion.versions} == {3}


@pytest.mark.parametrize(("setting", "name"), [("custom_generate", "talk"), ("conversation", "rollout")])
def test_turns_are_sampled_as_the_run_asks(conversing: Conversing, setting: str, name: str) -> None:
    """With one seed, SGLang's deterministic inference would repeat one conversation."""
    conversing.completions(name, setting=setting, top_p=0.9, top_k=20)
    assert {(each["top_p"], each["top_k"]) for each in conversing.sampling} == {(0.9, 20)}
    if name == "talk":
        assert len({each["sampling_seed"] for each in conversing.sampling}) == PROMPTS * SAMPLES


def test_an_absent_tool_costs_no_server(conversing: Conversing) -> None:
    batch = conversing.converse("ask_a_judge", setting="custom_generate", judge="http://127.0.0.1:9", attempts=2)
    assert isinstance(batch.error, PromptFailedError) and "127.0.0.1:9 broke off at /judge" in str(batch.error)


def test_a_busy_tool_is_asked_again(conversing: Conversing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dppo.rollout.servers.http.AGAIN_S", 0.1)
    conversing.refusals += [429, 503]
    conversing.completions("ask_a_judge", setting="custom_generate", attempts=1)
    assert conversing.refusals == []


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("custom_generate", "fail_at_first"),
        ("conversation", "give_up_at_first"),
        ("custom_generate", "write_on_metadata"),
    ],
)
def test_samples_given_up_are_requested_again(conversing: Conversing, setting: str, name: str) -> None:
    conversing.completions(name, setting=setting, attempts=SAMPLES + 1)


def test_turns_are_joined_across_an_abort(conversing: Conversing) -> None:
    for completion in conversing.completions("rollout"):
        assert completion.token_ids.tolist() == [5, 6, 1, ABORTS, 5, 5, 6]
        assert completion.loss_mask.tolist() == [True, True, False, False, True, True, True]
        assert completion.logprobs[completion.loss_mask].tolist() == [-0.5, -0.25, -0.5, -0.5, -0.25]
        assert (completion.versions, completion.finish_reason) == ((VersionSpan(3, 7),), "stop")


def test_each_token_has_its_role(conversing: Conversing) -> None:
    for completion in conversing.completions("speak_in_roles", "rollout.roles=[answerer,asker]"):
        assert completion.segments is not None and completion.segments.tolist() == [1, 1, -1, -1, 0, 0, 0]


@pytest.mark.parametrize(
    ("setting", "name", "problem"),
    [
        ("conversation", "forget_what_was_told", "turn 1 that was generated after other tokens than stand before it"),
        ("conversation", "ask_of_unknown_tokens", "from a context with the token id 1000000; the policy's vocabulary"),
        ("conversation", "go_on_from_nothing", "no token to go on from"),
        ("conversation", "end_the_program", "SystemExit: 0"),
        ("conversation", "stumble", "AttributeError: 'Prompt' object has no attribute 'no_such_thing'"),
        ("custom_generate", "forget_log_probs", "0 of sample.rollout_log_probs"),
        ("custom_generate", "use_an_option_of_slime", "args.an_option_of_slime, an option of slime's without"),
    ],
)
def test_an_unusable_conversation_ends_the_run(conversing: Conversing, setting: str, name: str, problem: str) -> None:
    error = conversing.converse(name, setting=setting).error
    assert isinstance(error, UserError) and error.setting == f"rollout.{setting}"
    assert problem in str(error)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("generate_at_once", "is no coroutine"),
        ("tal", "Perhaps 'talk' was meant"),
    ],
)
def test_a_function_of_another_form_is_refused(conversing: Conversing, name: str, problem: str) -> None:
    with pytest.raises(UserError) as raised:
        conversing.function(name, "custom_generate")
    assert raised.value.setting == "rollout.custom_generate" and problem in str(raised.value)


def test_an_installed_slime_keeps_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package := tmp_path / "slime" / "utils").mkdir(parents=True)
    (package / "types.py").write_text("class Sample: ...")
    (package / "misc.py").write_text("def bring_along(): return 7")
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    theirs = importlib.import_module("slime.utils.types")
    (tmp_path / "uses.py").write_text("""
from slime.utils.misc import bring_along
from slime.utils.types import Sample

def seven(): return bring_along(), Sample
""")
    assert load_function("rollout.custom_generate", f"{tmp_path}/uses.py:seven")() == (7, Sample)
    assert sys.modules["slime.utils.types"] is sys.modules["slime.utils"].types is theirs
    assert "slime.utils.misc" not in sys.modules


def test_a_conversation_that_blocks_is_named_and_fails(conversing: Conversing) -> None:
    """The function blocks the thread of all conversations."""
    conversations = Conversations(conversing.function("block", "conversation"), timeout_s=1.0)
    http, prompt = conversing.http, Prompt(7, np.array([7, 8], np.int32), "7 8", "")
    sampling = Sampling(1, max_tokens=8, temperature=1.0, stop_token_ids=(0,), seed=1)
    begun = http.start(conversations(SglangClient(conversing.url, http), prompt, sampling, lambda told: []))
    while not (named := conversations.late(0.1)):
        time.sleep(0.05)
    assert "tools.py:block has been about prompt 7 for" in named
    with pytest.raises(ServerError, match="for 1 s, with no completion in the end"):
        begun.result(10.0)
    assert conversations.late(0.0) == ""


def sample_of(tokens: list[int], length: int) -> Sample:
    logprobs = [-0.1 * token for token in tokens[-length:]]
    return Sample(tokens=tokens, response_length=length, rollout_log_probs=logprobs, status=Sample.Status.COMPLETED)


JOIN = partial(completion_of_samples, prompt=Prompt(0, np.array([7, 8], np.int32), "", ""), limit=2)
FIRST, SECOND = sample_of([7, 8, 1, 2], 2), sample_of([5, 5, 5, 3], 1)


def test_several_samples_are_sequences_of_one_completion() -> None:
    whole = JOIN([FIRST, SECOND])
    assert (whole.token_ids.tolist(), whole.starts, whole.finish_reason) == ([1, 2, 5, 5, 5, 3], (2,), "stop")
    assert whole.loss_mask.tolist() == [True, True, False, False, False, True]
    np.testing.assert_allclose(whole.logprobs[whole.loss_mask], [-0.1, -0.2, -0.3], rtol=1e-6)
    cut = JOIN([FIRST, SECOND, sample_of([5, 5, 5, 3, 3], 2)])
    assert (cut.starts, cut.finish_reason) == ((2, 6), "length"), "a sequence was cut off"
    cut = JOIN([FIRST, SECOND, sample_of([5] * 9, 1)])
    assert (cut.token_ids.tolist(), cut.finish_reason) == ([1, 2, 5, 5, 5, 3], "length"), "a context left no room"


@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        ([SECOND, FIRST], "begin with the prompt"),
        ([FIRST, 3], "a int"),
        ([], "an empty list"),
        ([FIRST, sample_of([3], 1)], "1 tokens for a prompt of 0 and a response of 1"),
        (replace(FIRST, loss_mask=[1, 0.5]), "a loss_mask of other values than true and false"),
    ],
)
def test_impossible_samples_are_refused(samples: Any, problem: str) -> None:
    with pytest.raises(UnusableError, match=problem):
        JOIN(samples)
