"""Stock SGLang and vLLM servers do what the trainer asks, refuse the rest in words, and end with
the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
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

from megatron_dppo.config.rollout import BranchConfig
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.rl.sampling_mask import find_mask_error
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.servers.client import (
    INCOMPLETE,
    TOP_LOGPROBS,
    GenerateResult,
    Manifest,
    ServerClient,
    WeightGroup,
    compute_entropy_bounds,
)
from megatron_dppo.rollout.servers.http import ServerError
from megatron_dppo.rollout.servers.launch import SECRET, load_engine_spec
from megatron_dppo.rollout.servers.sender import Sender
from megatron_dppo.rollout.servers.vllm import VllmClient
from megatron_dppo.rollout.teachers import TeacherQuery, TeacherServers
from megatron_dppo.settings import load_config
from tests.rollout.scripted import completion_of, world_of
from tests.servers.real import AGREES, WAIT_S, Kind, RealServer, RealServers

pytestmark = pytest.mark.servers

PROMPT = [5 + i % 40 for i in range(200)]
"""Longer than a block of a server's cache, so that a cache that was not flushed shows."""
SAMPLING = Sampling(samples=1, max_tokens=24, temperature=1.0, stop_token_ids=(), seed=0)
Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def old(served_policy: Path) -> Weights:
    return load_file(served_policy / "model.safetensors")


@pytest.fixture(scope="module")
def new(old: Weights) -> Weights:
    generator = torch.Generator().manual_seed(7)
    return {
        name: tensor * (1 + 0.5 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in old.items()
    }


class Served:
    """A shared server with the weights that it was started with, at version 1."""

    def __init__(self, server: RealServer, model: torch.nn.Module) -> None:
        self.server, self.api, self.http, self._model = server, server.api, server.api.http, model
        server.restore()

    def run(self, name: str, *arguments: Any) -> Any:
        """Run a coroutine method of the client."""
        return self.http.run(getattr(self.api, name)(*arguments))

    def start(self, **changes: Any) -> Future[list[GenerateResult]]:
        return self.http.start(
            self.api.generate(PROMPT, replace(SAMPLING, **changes), timeout_s=120.0)
        )

    def generate(self, **changes: Any) -> list[GenerateResult]:
        return self.start(**changes).result()

    def start_long(self) -> Future[list[GenerateResult]]:
        """Return a request of 800 tokens that has some: another one, of fewer tokens, was sent
        later and has ended."""
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
            sender.wait_loaded()
        finally:
            sender.close()

    def update(self, weights: Weights, *, version: str = "2", folder: Path | None = None) -> None:
        """Bring weights in two buckets, or from a folder of two files."""
        names = sorted(weights)
        buckets = [{name: weights[name] for name in part} for part in (names[:5], names[5:])]
        self.run("pause", "abort")
        self.run("begin_update")
        if folder is None:
            self.send(*buckets)
        else:
            for number, bucket in enumerate(buckets):
                save_file(bucket, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
            self.run("update_from_disk", folder, version)
        self.run("end_update", version)
        self.run("flush")
        self.run("resume")

    @torch.no_grad()
    def distributions(
        self, weights: Weights, context: Any, tokens: Any, temperature: float = 1.0
    ) -> torch.Tensor:
        """Return transformers' log-probabilities [L, vocabulary] before each token."""
        self._model.load_state_dict(weights, strict=False)
        self._model.tie_weights()
        logits = (
            self._model(torch.tensor([[*context, *tokens]]))
            .logits[0, len(context) - 1 : -1]
            .float()
        )
        return torch.log_softmax(logits / temperature, -1)

    def differences(
        self, weights: Weights, result: Any, context: Any = PROMPT, temperature: float = 1.0
    ) -> np.ndarray:
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
    served.run("abort_update")
    served.run("resume")


@pytest.fixture
def vllm(serve: Callable[..., Served]) -> Iterator[Served]:
    served = serve("vllm")
    yield served
    served.run("abort_update")
    served.run("resume")


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_logprobs_are_those_of_the_scaled_distribution(
    served: Served, old: Weights, temperature: float
) -> None:
    """At temperature 0, those of temperature 1."""
    results = served.generate(samples=3, temperature=temperature)
    assert len(results) == 3 and len({tuple(each.token_ids) for each in results}) == (
        3 if temperature else 1
    )
    for result in results:
        assert served.differences(old, result, temperature=temperature or 1.0).max() < AGREES
        assert result.versions == (("1", len(result.token_ids)),)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_of_the_kept_ids(
    serve: Callable[..., Served], old: Weights, temperature: float
) -> None:
    served = serve("sglang")
    asked = {"samples": 3, "top_k": 9, "top_p": 0.8, "sampling_mask": True}
    for result in served.generate(**asked, temperature=temperature):
        tokens, mask = result.token_ids, result.sampling_mask
        assert find_mask_error(mask, tokens, np.ones(len(tokens), bool)) is None
        assert 1 < mask.counts.max() <= 9
        every = served.distributions(old, PROMPT, tokens, temperature)
        kept = np.split(mask.token_ids, np.cumsum(mask.counts)[:-1])
        for row, ids, token, logprob in zip(every, kept, tokens, result.logprobs, strict=True):
            assert logprob == pytest.approx(float(row[token] - row[ids].logsumexp(0)), abs=AGREES)


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


@pytest.mark.parametrize("transport", [pytest.param("group", marks=pytest.mark.smoke), "disk"])
def test_weights_arrive_with_their_version(
    served: Served, old: Weights, new: Weights, transport: str, tmp_path: Path
) -> None:
    served.generate()  # leaves the prompt in the server's cache
    checksums = served.run("get_checksums")
    served.update(new, folder=None if transport == "group" else tmp_path)
    assert served.run("get_version") == "2"
    for result in served.generate(samples=2):
        assert served.differences(new, result).max() < AGREES
        assert result.versions == (("2", len(result.token_ids)),)
    changed = served.run("get_checksums")
    assert changed.keys() == checksums.keys()
    assert not changed.items() & checksums.items()
    served.update(old, version="3")
    assert served.run("get_checksums") == checksums


def test_a_teacher_scores_as_transformers_does(
    vllm: Served, old: Weights, served_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's form of the requests: ``test_a_run_is_distilled_from_a_server``."""
    monkeypatch.setenv(SECRET, vllm.server.secret)
    teacher = f"loss.distillation.teacher={vllm.api.url}"
    config = load_config(
        None, [teacher, "rollout.max_response_tokens=300", f"rollout.timeout_s={WAIT_S}"]
    )
    prompt, world = Prompt(0, np.array(PROMPT, np.int32), "", ""), world_of(1, 0)
    with closing(TeacherServers(config, world, load_tokenizer(served_policy))) as servers:
        query, completions = TeacherQuery(servers, [prompt]), [(completion_of(PROMPT),)]
        query.wait(completions, world)
        [[scored]] = query.add_logprobs(completions)
    taught = replace(scored, logprobs=scored.teacher_logprobs)
    assert vllm.differences(old, taught).max() < AGREES


def test_a_paused_server_is_well(vllm: Served) -> None:
    vllm.run("pause", "keep")
    queued = vllm.start()
    vllm.run("health", 10.0)
    assert not queued.done()
    vllm.run("resume")
    assert len(queued.result(60.0)) == 1


def test_a_stranger_can_neither_ask_nor_change_anything(served: Served) -> None:
    for secret in (None, "another"):
        stranger = load_engine_spec(served.server.kind).client(
            served.api.url, served.http, secret=secret, timeout_s=10.0
        )
        generate = partial(stranger.generate, PROMPT, SAMPLING, timeout_s=10.0)
        for request in (
            generate,
            stranger.get_version,
            stranger.resume,
            stranger.flush,
            stranger.begin_update,
        ):
            with pytest.raises(ServerError, match="401"):
                served.http.run(request())


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_two_ranks_each_take_their_part(
    serve: Callable[..., Served], new: Weights, kind: Kind
) -> None:
    served = serve(kind, 2)
    assert served.run("get_info") and served.api.ranks == 2
    if kind == "vllm":  # a wrong shape kills SGLang
        served.run("begin_update")
        with pytest.raises(Exception, match=r"norm\.weight"):
            served.send({"model.norm.weight": torch.zeros(3)})
        served.run("abort_update")
        served.run("health", 20.0)
    served.update(new)
    served.check(new)


@pytest.mark.parametrize(
    ("kind", "likeliest"), [("sglang", TOP_LOGPROBS), ("vllm", TOP_LOGPROBS - 1)]
)
def test_entropies_are_those_of_the_scaled_distribution(
    serve: Callable[..., Served], old: Weights, kind: Kind, likeliest: int
) -> None:
    served, temperature = serve(kind), 0.9
    (result,) = served.generate(temperature=temperature, branches=(BranchConfig(entropy=1.0),))
    expected = (
        served.distributions(old, PROMPT, result.token_ids, temperature).topk(likeliest).values
    )
    np.testing.assert_allclose(
        result.entropies, compute_entropy_bounds(expected.tolist()), atol=10 * AGREES
    )


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
        sender.wait_loaded()
        sender.close()
    vllm.run("end_update", "2")
    vllm.run("resume")
    vllm.check(new)
    with pytest.raises(ServerError, match=f"no group named {senders[0].name}"):
        vllm.run("update_from_distributed", Manifest.from_tensors(new), senders[0].name, None)
    vllm.run("leave", senders[0].name)  # also if the server is no member


def test_an_incomplete_update_is_refused_and_a_good_one_follows(
    vllm: Served, new: Weights, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"  # of a layer that has another tensor already
    with pytest.raises(Exception, match=name):
        vllm.update(dict(new) | {name: new[name][:, :-1].contiguous()})
    assert vllm.run("get_version") == INCOMPLETE
    vllm.run("abort_update")
    with pytest.raises(ServerError, match=r"not whole.*layers\.0\.mlp"):
        vllm.update({name: tensor for name, tensor in new.items() if "layers.0.mlp" not in name})
    assert vllm.run("get_version") == INCOMPLETE
    vllm.run("abort_update")
    vllm.run("begin_update")
    with pytest.raises(ServerError, match="no safetensors"):
        vllm.run("update_from_disk", tmp_path, "2")
    vllm.run("abort_update")
    vllm.update(new)
    vllm.check(new)


def test_a_silent_sender_holds_no_server_for_ever(vllm: Served, old: Weights, new: Weights) -> None:
    hasty = VllmClient(vllm.api.url, vllm.http, secret=vllm.server.secret, timeout_s=5.0)
    vllm.run("begin_update")
    sender = vllm.sender(hasty)
    began = time.monotonic()
    with pytest.raises(ServerError, match="rank 0") as raised:
        vllm.http.run(hasty.update_from_distributed(Manifest.from_tensors(new), sender.name, None))
    assert raised.value.alive
    assert time.monotonic() - began < 30.0
    vllm.run("abort_update")
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
    everyone = [psutil.Process(pid) for pid in vllm.server.process.list_pids()]
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
