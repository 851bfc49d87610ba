"""Stock SGLang and vLLM servers do what the trainer asks, refuse the rest in words, and end with the run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_dppo.config import BranchConfig
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.servers.client import (
    INCOMPLETE,
    TOP_LOGPROBS,
    GenerateRequest,
    GenerateResult,
    Manifest,
    ServerClient,
    WeightGroup,
    least_entropies,
)
from megatron_dppo.rollout.servers.http import ServerError
from megatron_dppo.rollout.servers.launch import spec_of
from megatron_dppo.rollout.servers.sender import Sender
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.rollout.servers.vllm import VllmClient
from tests.rollout.local import forks_of
from tests.rollout.servers.script import dispatcher_of, prompts_of
from tests.servers.real import (
    AGREES,
    Kind,
    RealServer,
    RealServers,
    launch_settings,
)

pytestmark = pytest.mark.servers

PROMPT = [5 + i % 40 for i in range(200)]
"""Longer than a block of a server's cache, so that a cache that was not flushed shows."""
REQUEST = GenerateRequest(PROMPT, samples=1, max_tokens=24, temperature=1.0, stop_token_ids=(), seed=None)
Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def old(served_policy: Path) -> Weights:
    return load_file(served_policy / "model.safetensors")


@pytest.fixture(scope="module")
def new(old: Weights) -> Weights:
    generator = torch.Generator().manual_seed(7)
    return {name: tensor * (1 + 0.5 * torch.randn(tensor.shape, generator=generator)) for name, tensor in old.items()}


class Served:
    """A shared server with the weights that it was started with, at version 1."""

    def __init__(self, server: RealServer, model: torch.nn.Module) -> None:
        self.server, self.api, self.http, self._model = server, server.api, server.api.http, model
        server.restore()

    def run(self, name: str, *arguments: Any) -> Any:
        """Run a coroutine method of the client."""
        return self.http.run(getattr(self.api, name)(*arguments))

    def start(self, **changes: Any) -> Future[list[GenerateResult]]:
        return self.http.start(self.api.generate(replace(REQUEST, **changes), timeout_s=120.0))

    def generate(self, **changes: Any) -> list[GenerateResult]:
        return self.start(**changes).result()

    def start_long(self) -> Future[list[GenerateResult]]:
        """Return a request of 800 tokens that has some: another one, of fewer tokens, was sent later and has ended."""
        request = self.start(max_tokens=800)
        self.generate(max_tokens=8)
        return request

    def sender(self, api: ServerClient | None = None) -> Sender:
        places = {"host": "127.0.0.1", "device": torch.device("cpu"), "timeout_s": 60.0}
        return Sender(self.http, [api or self.api], name=f"group-{time.monotonic_ns()}", **places)

    def send(self, *buckets: Weights) -> None:
        sender = self.sender()
        try:
            for bucket in buckets:
                sender.send(sender.stage(bucket), None)
            sender.arrive()
        finally:
            sender.close()

    def update(self, weights: Weights, *, version: str = "2", mode: str = "abort", folder: Path | None = None) -> None:
        """Bring weights in two buckets, or from a folder of two files."""
        names = sorted(weights)
        buckets = [{name: weights[name] for name in part} for part in (names[:5], names[5:])]
        self.run("pause", mode)
        self.run("begin_update")
        if folder is None:
            self.send(*buckets)
        else:
            for number, bucket in enumerate(buckets):
                save_file(bucket, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
            self.run("update_from_disk", folder, version)
        self.run("end_update", version)
        if mode == "abort":
            self.run("flush")
        self.run("resume")

    @torch.no_grad()
    def distributions(self, weights: Weights, context: Any, tokens: Any, temperature: float = 1.0) -> torch.Tensor:
        """Return transformers' log-probabilities [L, vocabulary] before each token."""
        self._model.load_state_dict(weights, strict=False)
        self._model.tie_weights()
        logits = self._model(torch.tensor([[*context, *tokens]])).logits[0, len(context) - 1 : -1].float()
        return torch.log_softmax(logits / temperature, -1)

    def differences(self, weights: Weights, result: Any, context: Any = PROMPT, temperature: float = 1.0) -> np.ndarray:
        """Return |log p| differences [L] of a result and transformers."""
        expected = self.distributions(weights, context, result.token_ids, temperature)
        tokens = torch.from_numpy(result.token_ids.astype(np.int64))[:, None]
        return np.abs(result.logprobs - expected.gather(1, tokens)[:, 0].numpy())

    def check(self, weights: Weights) -> None:
        (result,) = self.generate()
        assert self.differences(weights, result).max() < AGREES


@pytest.fixture(scope="module")
def serve(real_servers: RealServers, served_policy: Path) -> Callable[..., Served]:
    model = AutoModelForCausalLM.from_pretrained(served_policy, dtype=torch.float32).eval()
    return lambda kind, tp=1: Served(real_servers.get(kind, tp), model)


@pytest.fixture(params=["sglang", "vllm"])
def served(request: pytest.FixtureRequest, serve: Callable[..., Served]) -> Iterator[Served]:
    served = serve(request.param)
    yield served
    served.run("abandon_update")
    served.run("resume")


@pytest.fixture
def vllm(serve: Callable[..., Served]) -> Iterator[Served]:
    served = serve("vllm")
    yield served
    served.run("abandon_update")
    served.run("resume")


def test_a_server_describes_itself(served: Served, served_policy: Path) -> None:
    info = served.run("info")
    assert (Path(info.model), info.dtype, info.ranks) == (served_policy, "float32", 1)
    assert info.nccl is None


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_logprobs_are_those_of_the_scaled_distribution(served: Served, old: Weights, temperature: float) -> None:
    """At temperature 0, those of temperature 1."""
    results = served.generate(samples=3, temperature=temperature)
    assert len(results) == 3 and len({tuple(each.token_ids) for each in results}) == (3 if temperature else 1)
    for result in results:
        assert served.differences(old, result, temperature=temperature or 1.0).max() < AGREES
        assert result.versions == (("1", len(result.token_ids)),)


@pytest.mark.parametrize("least", [{"top_k": 1}, {"top_p": 1e-6}])
def test_the_likeliest_token_alone_is_greedy(served: Served, least: dict[str, float]) -> None:
    greedy, sampled = served.generate(temperature=0.0), served.generate(temperature=1.5, **least)
    np.testing.assert_array_equal(greedy[0].token_ids, sampled[0].token_ids)


def test_a_stop_token_ends_a_completion_and_is_its_last(served: Served) -> None:
    whole = served.generate(temperature=0.0)[0]
    stop = int(whole.token_ids[5])
    result = served.generate(temperature=0.0, stop_token_ids=(stop,))[0]
    assert result.reason == "stop"
    length = whole.token_ids.tolist().index(stop) + 1
    np.testing.assert_array_equal(result.token_ids, whole.token_ids[:length])
    assert len(result.logprobs) == length


TRIES = 5
"""A server may finish a request before a busy machine interrupts it."""


def test_an_aborted_request_returns_its_tokens(served: Served, old: Weights) -> None:
    for _ in range(TRIES):
        request = served.start_long()
        served.run("pause", "abort")
        (result,) = request.result(30.0)
        served.run("resume")
        if result.reason == "abort":
            break
    assert result.reason == "abort"
    assert 0 < len(result.token_ids) < 800
    assert served.differences(old, result).max() < AGREES


@pytest.mark.parametrize("mode", ["retract", "keep"])
def test_a_request_survives_an_update(vllm: Served, old: Weights, new: Weights, mode: str) -> None:
    """Retracted, its tokens are computed again with the new weights; kept, the old cache remains in use."""
    for _ in range(TRIES):
        vllm.server.restore()
        request = vllm.start_long()
        vllm.update(new, mode=mode)
        (result,) = request.result(120.0)
        if len(result.versions) == 2:
            break
    (first, before), (second, after) = result.versions
    assert (result.reason, first, second, before + after) == ("length", "1", "2", 800)
    assert min(before, after) > 0
    assert vllm.differences(old, result)[:before].max() < AGREES
    assert (vllm.differences(new, result)[before:].max() < AGREES) == (mode == "retract")


@pytest.mark.parametrize("transport", [pytest.param("group", marks=pytest.mark.smoke), "disk"])
def test_weights_arrive_with_their_version(
    served: Served, old: Weights, new: Weights, transport: str, tmp_path: Path
) -> None:
    served.generate()  # leaves the prompt in the server's cache
    checksums = served.run("checksums")
    served.update(new, folder=None if transport == "group" else tmp_path)
    assert served.run("version") == "2"
    for result in served.generate(samples=2):
        assert served.differences(new, result).max() < AGREES
        assert result.versions == (("2", len(result.token_ids)),)
    changed = served.run("checksums")
    assert changed.keys() == checksums.keys()
    assert not changed.items() & checksums.items()
    served.update(old, version="3")
    assert served.run("checksums") == checksums


def test_a_paused_server_is_well(vllm: Served) -> None:
    vllm.run("pause", "keep")
    queued = vllm.start()
    vllm.run("health", 10.0)
    assert not queued.done()
    vllm.run("resume")
    assert len(queued.result(60.0)) == 1


def test_a_stranger_can_neither_ask_nor_change_anything(served: Served) -> None:
    for secret in (None, "another"):
        stranger = spec_of(served.server.kind).client(served.api.url, served.http, secret=secret, timeout_s=10.0)
        generate = partial(stranger.generate, REQUEST, timeout_s=10.0)
        for request in (generate, stranger.version, stranger.resume, stranger.flush, stranger.begin_update):
            with pytest.raises(ServerError, match="401"):
                served.http.run(request())


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_two_ranks_each_take_their_part(serve: Callable[..., Served], new: Weights, kind: Kind) -> None:
    served = serve(kind, 2)
    assert served.run("info").ranks == 2
    if kind == "vllm":  # a wrong shape kills SGLang
        served.run("begin_update")
        with pytest.raises(Exception, match=r"norm\.weight"):
            served.send({"model.norm.weight": torch.zeros(3)})
        served.run("abandon_update")
        served.run("health", 20.0)
    served.update(new)
    served.check(new)


@pytest.mark.parametrize(("kind", "likeliest"), [("sglang", TOP_LOGPROBS), ("vllm", TOP_LOGPROBS - 1)])
def test_trees_are_the_policys_and_fork_by_entropy(
    serve: Callable[..., Served], old: Weights, kind: Kind, likeliest: int
) -> None:
    served, temperature = serve(kind), 0.9

    def entropies(context: Any, tokens: Any) -> np.ndarray:
        return least_entropies(served.distributions(old, context, tokens, temperature).topk(likeliest).values.tolist())

    some = np.random.default_rng(4).integers(5, 45, 200)
    limit = float(np.quantile(entropies(some[:4], some), 0.8))
    branches = BranchConfig(entropy=limit), BranchConfig(at=14)
    dispatcher = dispatcher_of(served.http, served.api, max_in_flight=16)
    batch = dispatcher.begin(prompts_of(24), Sampling(8, 32, temperature, (), seed=3, branches=branches), 1)
    batch.wait(180.0)
    assert batch.error is None and batch.unfinished == 0
    forked = set()
    for prompt, group in zip(batch.prompts, batch.groups(), strict=True):
        context = prompt.token_ids.tolist()
        assert len(group) == 8
        for leaf in group:
            assert served.differences(old, leaf, context, temperature).max() < AGREES
            assert {span.version for span in leaf.versions} == {1}
            found, position = entropies(context, leaf.token_ids), forks_of(leaf)[0]
            assert np.all(found[1:position] <= limit + AGREES)
            if position < len(leaf.token_ids):
                assert found[position] > limit - AGREES
                forked.add(position)
        for one, other in zip(group[::2], group[1::2], strict=True):
            assert forks_of(one) == forks_of(other)
            shared = forks_of(one)[1]
            np.testing.assert_array_equal(one.token_ids[:shared], other.token_ids[:shared])
    assert len(forked) > 2  # servers cannot seed their sampling on a CPU


TRAINER = """
import sys, time
from megatron_dppo.rollout.servers.processes import ServerProcess
from megatron_dppo.settings import load_config
server = ServerProcess(load_config(None, sys.argv[1:]), 0, host="127.0.0.1", secret="s")
server.start()
while not server.listens():
    time.sleep(0.2)
print(*server.pids(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("kind", "tp"), [("sglang", 2), ("vllm", 1)])
def test_no_rank_of_a_server_outlives_the_trainer(served_policy: Path, tmp_path: Path, kind: Kind, tp: int) -> None:
    settings = [f"run.dir={tmp_path}/run", f"model.path={served_policy}", *launch_settings(kind, (tp,))]
    with subprocess.Popen([sys.executable, "-c", TRAINER, *settings], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        try:
            family = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
            assert len(family) > tp
            trainer.kill()
            assert psutil.wait_procs(family, timeout=20)[1] == []
        finally:
            trainer.kill()


def test_deterministic_sglang_takes_a_request_a_sample(serve: Callable[..., Served]) -> None:
    """Deterministic kernels, with which seeds count, exist for GPUs only."""
    served = serve("sglang")
    assert served.run("get", "/server_info")["enable_deterministic_inference"] is False
    api = SglangClient(served.api.url, served.http, secret=served.server.secret)
    api._known_deterministic = True
    results = served.http.run(api.generate(replace(REQUEST, samples=3, seed=5), timeout_s=60.0))
    assert len(results) == 3 and all(len(each.logprobs) == len(each.token_ids) for each in results)


def test_a_seed_repeats_samples(vllm: Served) -> None:
    """On a CPU, a seed is safe for a request that has a step to itself."""
    assert not vllm.api.seeded
    seeded = VllmClient(vllm.api.url, vllm.http, secret=vllm.server.secret)

    def draw(seed: int) -> set[tuple[int, ...]]:
        results = vllm.http.run(seeded.generate(replace(REQUEST, samples=5, seed=seed), timeout_s=60.0))
        return {tuple(result.token_ids.tolist()) for result in results}

    first = draw(2**64 - 1)
    assert len(first) == 5
    assert draw(2**64 - 1) == first
    assert draw(11) != first


def test_prompts_beyond_one_step_are_all_answered(vllm: Served) -> None:
    """With a seed, a part of one kills a server on CPU."""
    contexts = [[5 + (i + 7 * j) % 40 for i in range(500)] for j in range(8)]
    requests = [vllm.start(token_ids=each, samples=4, max_tokens=4, seed=1) for each in contexts]
    assert [len(request.result(60.0)) for request in requests] == [4] * 8


def test_the_models_end_of_sequence_stops_nothing(vllm: Served) -> None:
    results = vllm.generate(samples=16, max_tokens=100)
    assert any(2 in result.token_ids[:-1] for result in results)
    assert {result.reason for result in results} == {"length"}


def test_a_server_is_in_several_groups_at_once(vllm: Served, new: Weights) -> None:
    names = sorted(new)
    parts = [{name: new[name] for name in part} for part in (names[:9], names[9:])]
    vllm.run("pause", "abort")
    vllm.run("begin_update")
    senders = vllm.sender(), vllm.sender()
    for sender, part in zip(senders, parts, strict=True):
        sender.send(sender.stage(part), None)
        sender.arrive()
        sender.close()
    vllm.run("end_update", "2")
    vllm.run("resume")
    vllm.check(new)
    with pytest.raises(ServerError, match=f"no group named {senders[0].name}"):
        vllm.run("update_from_distributed", Manifest.of(new), senders[0].name, None)
    vllm.run("leave", senders[0].name)  # also if the server is no member


def test_an_incomplete_update_is_refused_and_a_good_one_follows(vllm: Served, new: Weights, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"  # of a layer that has another tensor already
    with pytest.raises(Exception, match=name):
        vllm.update(dict(new) | {name: new[name][:, :-1].contiguous()})
    assert vllm.run("version") == INCOMPLETE
    vllm.run("abandon_update")
    with pytest.raises(ServerError, match=r"not whole.*layers\.0\.mlp"):
        vllm.update({name: tensor for name, tensor in new.items() if "layers.0.mlp" not in name})
    assert vllm.run("version") == INCOMPLETE
    vllm.run("abandon_update")
    vllm.run("begin_update")
    with pytest.raises(ServerError, match="no safetensors"):
        vllm.run("update_from_disk", tmp_path, "2")
    vllm.run("abandon_update")
    vllm.update(new)
    vllm.check(new)


def test_a_silent_sender_holds_no_server_for_ever(vllm: Served, old: Weights, new: Weights) -> None:
    hasty = VllmClient(vllm.api.url, vllm.http, secret=vllm.server.secret, timeout_s=5.0)
    vllm.run("begin_update")
    sender = vllm.sender(hasty)
    began = time.monotonic()
    with pytest.raises(ServerError, match="rank 0") as raised:
        vllm.http.run(hasty.update_from_distributed(Manifest.of(new), sender.name, None))
    assert raised.value.alive
    assert time.monotonic() - began < 30.0
    vllm.run("abandon_update")
    sender.close()
    vllm.check(old)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ServerError, match="failed to join") as raised:
        vllm.http.run(hasty.join(WeightGroup("nobody", "127.0.0.1", store.port, "gloo", 1, 2)))
    assert raised.value.alive
    vllm.update(new)
    vllm.check(new)


@pytest.mark.parametrize("process", ["EngineCore", "Worker"])
def test_health_sees_a_hang_behind_the_front(vllm: Served, process: str) -> None:
    everyone = [psutil.Process(pid) for pid in vllm.server.process.pids()]
    (hung,) = [each for each in everyone if f"VLLM::{process}" in " ".join(each.cmdline())]
    hung.suspend()
    try:
        vllm.run("get", "/health")
        with pytest.raises(ServerError) as raised:
            vllm.run("health", 2.0)
    finally:
        hung.resume()
    assert not raised.value.alive
    vllm.run("health", 20.0)
