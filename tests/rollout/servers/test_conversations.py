"""What goes wrong in a conversation is held against whoever did wrong; the servers here are a few lines each."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.config import Config, ModelConfig, RolloutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.plugins import Sample, load_function
from megatron_dppo.rl.types import Prompt, VersionSpan
from megatron_dppo.rollout.conversation_functions import conversation_of
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.servers.batch import RequestBatch
from megatron_dppo.rollout.servers.conversations import Conversations
from megatron_dppo.rollout.servers.dispatch import Dispatcher, PromptFailedError
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.sglang import SglangClient
from tests.policies import write_policy

SAMPLES, PROMPTS = 4, 12
ABORTS = 9
FUNCTIONS = (
    f"ABORTS = {ABORTS}"
    + """
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

async def begin_anew(client, prompt):
    question = prompt.token_ids.tolist()
    return [[await client.generate(question), [1]], [[7, 5], await client.generate([7, 5])]]

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

async def tell_unknown_tokens(client, prompt):
    return [await client.generate(prompt.token_ids), [5, 10**6]]

async def ask_of_unknown_tokens(client, prompt):
    return [await client.generate([*prompt.token_ids, 10**6])]

async def go_on_from_nothing(client, prompt):
    return [await client.generate([])]

async def end_the_program(client, prompt):
    raise SystemExit(0)

async def stumble(client, prompt):
    return [await client.generate(prompt.token_ids), prompt.no_such_thing]
"""
)


class Policy(BaseHTTPRequestHandler):
    """Always says 5 6, and after ``ABORTS`` 5 alone, as a server that is paused. As a judge it is of other weights."""

    version = "3"

    def do_GET(self) -> None:
        self._answer({"weight_version": self.version})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/judge" and self.server.refusals:
            self.send_error(self.server.refusals.pop())
            return
        self.server.sampling.append(asked.get("sampling_params"))
        aborts = asked.get("input_ids", [0])[-1] == ABORTS
        tokens = [5] if aborts else [5, 6]
        meta = {
            "weight_version": "default" if self.path == "/judge" else self.version,
            "finish_reason": {"type": "abort" if aborts else "stop"},
            "output_token_logprobs": [[-0.5, 5], [-0.25, 6]][: len(tokens)],
        }
        self._answer({"meta_info": meta, "output_ids": tokens})

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # of all conversations at once: whom a queue of 5 turns away tries again after a second

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Policy)
        self.refusals: list[int] = []
        """Statuses of the next answers of the judge."""
        self.sampling: list[dict[str, Any]] = []
        """Parameters of the requests so far."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture
def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def converse(
    name: str,
    url: str,
    folder: Path,
    *,
    other: str = "",
    attempts: int = 3,
    setting: str = "custom_generate",
    roles: tuple[str, ...] = (),
    **sampled: float,
) -> tuple[RequestBatch, dict, list]:
    """Have a function answer; the batch, the servers that were lost, and what is left in the prompts."""
    (folder / "tools.py").write_text(FUNCTIONS)
    rollout = RolloutConfig(**{setting: f"{folder / 'tools.py'}:{name}"}, roles=roles)
    write_policy(folder, layers=1)
    function = conversation_of(Config(model=ModelConfig(path=str(folder)), rollout=rollout))
    assert function is not None
    conversations = Conversations(function, timeout_s=20.0)
    http = Http()
    dispatcher = Dispatcher(
        http,
        lambda told: int(told) if told.isdigit() else None,
        first=0,
        max_in_flight=64,
        request_timeout_s=20.0,
        attempts=attempts,
        conversations=conversations,
    )
    dispatcher.serve_from([SglangClient(url, http)])
    extra = [{"other": other, "turns": []} for _ in range(PROMPTS)]
    prompts = [Prompt(i, np.array([7, 8], np.int32), "7 8", "", extra=extra[i]) for i in range(PROMPTS)]
    sampling = Sampling(SAMPLES, max_tokens=8, temperature=1.0, stop_token_ids=(0,), seed=1, **sampled)
    batch = dispatcher.begin(prompts, sampling, 3)
    batch.wait(60.0)
    lost = dispatcher.take_lost()
    conversations.close()
    http.close()
    return batch, lost, extra


def test_a_judge_s_weights_are_not_the_policy_s(url: str, tmp_path: Path) -> None:
    batch, lost, _ = converse("ask_a_judge", url, tmp_path, other=url.replace("127.0.0.1", "localhost"))
    assert batch.error is None and lost == {}
    for group in batch.groups():
        assert [completion.token_ids.tolist() for completion in group] == [[5, 6]] * SAMPLES
        assert {span.version for completion in group for span in completion.versions} == {3}
        assert {completion.finish_reason for completion in group} == {"stop"}


@pytest.mark.parametrize(("setting", "name"), [("custom_generate", "talk"), ("conversation", "rollout")])
@pytest.mark.parametrize(("sampled", "said"), [({}, (1.0, -1)), ({"top_p": 0.9, "top_k": 20}, (0.9, 20))])
def test_turns_are_sampled_from_the_tokens_that_the_run_asks_for(
    server: Server,
    url: str,
    tmp_path: Path,
    setting: str,
    name: str,
    sampled: dict[str, float],
    said: tuple[float, ...],
) -> None:
    batch, _, _ = converse(name, url, tmp_path, setting=setting, **sampled)
    assert batch.error is None
    assert {(each["top_p"], each["top_k"]) for each in server.sampling} == {said}


def test_a_tool_that_is_down_costs_no_server(url: str, tmp_path: Path) -> None:
    batch, lost, _ = converse("ask_a_judge", url, tmp_path, other="http://127.0.0.1:9", attempts=2)
    assert lost == {}
    assert isinstance(batch.error, PromptFailedError) and "127.0.0.1:9 broke off at /judge" in str(batch.error)


def test_a_busy_tool_is_asked_again(server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dppo.rollout.servers.http.AGAIN_S", 0.1)
    server.refusals = [429, 503]
    batch, lost, _ = converse("ask_a_judge", url, tmp_path, other=url.replace("127.0.0.1", "localhost"), attempts=1)
    assert batch.error is None and lost == {} and server.refusals == []


def test_samples_that_are_given_up_are_asked_for_again_and_cost_no_server(url: str, tmp_path: Path) -> None:
    batch, lost, _ = converse("fail_at_first", url, tmp_path, attempts=SAMPLES + 1)
    assert batch.error is None and lost == {}
    assert batch.unfinished == 0


def test_what_a_conversation_writes_on_its_metadata_is_its_own(url: str, tmp_path: Path) -> None:
    batch, _, extra = converse("write_on_metadata", url, tmp_path)
    assert batch.error is None and batch.unfinished == 0
    assert [each["turns"] for each in extra] == [[]] * PROMPTS


def test_turns_are_joined_as_they_were_generated_also_where_the_server_broke_one_off(url: str, tmp_path: Path) -> None:
    batch, lost, extra = converse("rollout", url, tmp_path, setting="conversation")
    assert batch.error is None and lost == {} and [each["turns"] for each in extra] == [[]] * PROMPTS
    for completion in (completion for group in batch.groups() for completion in group):
        assert completion.token_ids.tolist() == [5, 6, 1, ABORTS, 5, 5, 6]
        assert completion.loss_mask.tolist() == [True, True, False, False, True, True, True]
        assert completion.logprobs[completion.loss_mask].tolist() == [-0.5, -0.25, -0.5, -0.5, -0.25]
        assert (completion.versions, completion.finish_reason) == ((VersionSpan(3, 7),), "stop")


def test_sequences_stay_apart(url: str, tmp_path: Path) -> None:
    batch, *_ = converse("begin_anew", url, tmp_path, setting="conversation")
    assert batch.error is None
    for completion in (completion for group in batch.groups() for completion in group):
        assert (completion.token_ids.tolist(), completion.starts) == ([5, 6, 1, 7, 5, 5, 6], (3,))


def test_each_token_comes_with_its_role(url: str, tmp_path: Path) -> None:
    batch, *_ = converse("speak_in_roles", url, tmp_path, setting="conversation", roles=("answerer", "asker"))
    assert batch.error is None
    for completion in (completion for group in batch.groups() for completion in group):
        assert completion.segments is not None and completion.segments.tolist() == [1, 1, -1, -1, 0, 0, 0]
    batch, *_ = converse("speak_in_roles", url, tmp_path, setting="conversation")
    assert isinstance(batch.error, UserError) and "rollout.roles has none" in str(batch.error)


def test_a_conversation_that_gives_up_is_had_again_and_costs_no_server(url: str, tmp_path: Path) -> None:
    batch, lost, _ = converse("give_up_at_first", url, tmp_path, setting="conversation")
    assert batch.error is None and lost == {}
    assert batch.unfinished == 0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("forget_what_was_told", "turn 1 that was generated after other tokens than stand before it"),
        ("tell_unknown_tokens", "a turn 1 with the token id 1000000; the policy's vocabulary has 131 tokens"),
        ("ask_of_unknown_tokens", "from a context with the token id 1000000; the policy's vocabulary has 131 tokens"),
        ("go_on_from_nothing", "no token to go on from"),
        ("end_the_program", "SystemExit: 0"),
        ("stumble", "AttributeError: 'Prompt' object has no attribute 'no_such_thing'"),
    ],
)
def test_a_conversation_that_cannot_be_trained_on_ends_the_run(
    function: str, words: str, url: str, tmp_path: Path
) -> None:
    batch, _, _ = converse(function, url, tmp_path, setting="conversation")
    assert isinstance(batch.error, UserError) and batch.error.setting == "rollout.conversation"
    assert words in batch.error.problem


def test_asyncio_says_nothing_of_what_was_given_up_and_failed(caplog: pytest.LogCaptureFixture) -> None:
    begun, http = threading.Event(), Http()

    async def fail() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            raise ZeroDivisionError

    future = http.start(fail())
    begun.wait()
    future.cancel()
    http.run(asyncio.sleep(0.05))
    del future  # which knows the task
    gc.collect()
    http.close()
    assert not caplog.records


def test_where_slime_is_installed_its_own_modules_stay_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is a package of two modules."""
    (package := tmp_path / "site" / "slime" / "utils").mkdir(parents=True)
    (package / "types.py").write_text("class Sample: ...")
    (package / "misc.py").write_text("def bring_along(): return 7")
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "site")
    theirs = importlib.import_module("slime.utils.types")
    (tmp_path / "uses.py").write_text("""
from slime.utils.http_utils import post
from slime.utils.misc import bring_along
from slime.utils.types import Sample

def seven(): return bring_along(), Sample
""")
    number, sample = load_function("rollout.custom_generate", f"{tmp_path}/uses.py:seven")()
    assert (number, sample) == (7, Sample)
    assert sys.modules["slime.utils.types"] is theirs and sys.modules["slime.utils"].types is theirs
    assert importlib.import_module("slime.utils.types").Sample is not Sample
    assert "slime.utils.http_utils" not in sys.modules


def test_the_conversation_that_is_under_way_longest_is_named(url: str, tmp_path: Path) -> None:
    """Also where it holds up the thread of all conversations."""
    (tmp_path / "tools.py").write_text("import time\nasync def rollout(client, prompt):\n    time.sleep(3)\n")
    write_policy(tmp_path, layers=1)
    rollout = RolloutConfig(conversation=f"{tmp_path}/tools.py:rollout")
    function = conversation_of(Config(model=ModelConfig(path=str(tmp_path)), rollout=rollout))
    assert function is not None
    conversations = Conversations(function, timeout_s=1.0)
    assert conversations.late(0.0) == ""
    http, prompt = Http(), Prompt(7, np.array([7, 8], np.int32), "7 8", "")
    sampling = Sampling(1, max_tokens=8, temperature=1.0, stop_token_ids=(0,), seed=1)
    begun = http.start(conversations(SglangClient(url, http), prompt, sampling, lambda told: []))
    deadline = time.monotonic() + 10.0
    while not conversations.late(0.5) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert re.fullmatch(
        r".*/tools\.py:rollout has been about prompt 7 for \d s and has not returned", conversations.late(0.5)
    )
    with pytest.raises(ServerError, match="for 1 s, with no completion in the end"):
        begun.result(10.0)
    assert conversations.late(0.0) == ""
    http.close()
