"""A stock vLLM server with our extension does what the trainer asks of a server, and says so when it does not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_dppo.rollout.servers.client import INCOMPLETE, GenerateRequest, GenerateResult, Manifest, WeightGroup
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.vllm import VllmClient
from tests.servers.real import RealServer, RealServers

pytestmark = pytest.mark.servers

PROMPT = [5 + i % 40 for i in range(200)]
"""Longer than a block of the server's cache, so that a cache that was not flushed shows."""
TOLERANCE = 1e-4
Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def old(served_policy: Path) -> Weights:
    return load_file(served_policy / "model.safetensors")


@pytest.fixture(scope="module")
def new(old: Weights) -> Weights:
    generator = torch.Generator().manual_seed(7)
    return {name: tensor * (1 + 0.5 * torch.randn(tensor.shape, generator=generator)) for name, tensor in old.items()}


@pytest.fixture(scope="module")
def reference(served_policy: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(served_policy, dtype=torch.float32).eval()


@pytest.fixture
def api(vllm_tp1: RealServer, http: Http, old: Weights) -> Iterator[VllmClient]:
    """The shared server with the weights that it was started with, at version 1."""
    assert isinstance(vllm_tp1.api, VllmClient)
    _update(http, vllm_tp1.api, old, "1")
    yield vllm_tp1.api
    http.run(vllm_tp1.api.abandon_update())
    http.run(vllm_tp1.api.resume())


@pytest.fixture
def seeded(http: Http, api: VllmClient) -> VllmClient:
    """The shared server, asked with seeds though it runs on CPU: safe for a request that has a step to itself."""
    return VllmClient(api.url, http, secret=api.secret)


def _ask(**changed: object) -> GenerateRequest:
    asked = {"samples": 1, "max_tokens": 24, "temperature": 1.0, "stop_token_ids": (), "seed": 3} | changed
    return GenerateRequest(PROMPT, **asked)  # type: ignore[arg-type]


def _generate(http: Http, api: VllmClient, **changed: object) -> list[GenerateResult]:
    return http.run(api.generate(_ask(**changed), timeout_s=120.0))


def _update(http: Http, api: VllmClient, weights: Weights, version: str) -> None:
    http.run(api.pause("abort"))
    http.run(api.begin_update())
    _send_bucket(http, api, weights)
    http.run(api.end_update(version))
    http.run(api.flush())
    http.run(api.resume())


@torch.no_grad()
def _logprobs(
    model: torch.nn.Module, weights: Weights, piece: GenerateResult, temperature: float = 1.0
) -> NDArray[np.float32]:
    """What transformers says of a piece."""
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    tokens = torch.tensor([[*PROMPT, *piece.token_ids]])
    logits = model(tokens).logits[0, len(PROMPT) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, tokens[0, len(PROMPT) :, None])[:, 0].numpy()


def _in_flight(http: Http, api: VllmClient, tokens: int) -> Future[list[GenerateResult]]:
    """A request that has begun to generate."""
    before = time.monotonic()
    _generate(http, api, max_tokens=50)
    took = time.monotonic() - before
    asked = http.start(api.generate(_ask(max_tokens=tokens), timeout_s=120.0))
    time.sleep(took)
    return asked


class Trainer:
    """Rank 0 of a group of one server."""

    def __init__(self, http: Http, api: VllmClient, label: str, *, timeout_s: float = 60.0) -> None:
        self._http, self._api, self.group = http, api, f"{label}-{os.getpid()}-{time.monotonic_ns()}"
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        size = 1 + api.ranks
        joined = http.start(api.join(WeightGroup(self.group, "127.0.0.1", self._store.port, "gloo", 1, size)))
        # What torch's own constructor makes of a store behind the group's name, which is how servers come to it.
        store = dist.PrefixStore("cpu/", dist.PrefixStore(f"{self.group}/", dist.PrefixStore(self.group, self._store)))
        self._ranks = dist.ProcessGroupGloo(store, 0, size, timeout)
        joined.result(timeout_s)

    def send(self, bucket: Weights) -> None:
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in bucket.values()])
        received = self._http.start(self._api.update_from_distributed(Manifest.of(bucket), self.group, None))
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._ranks.broadcast([flat], options).wait()
        received.result(60.0)

    def leave(self) -> None:
        self._http.run(self._api.leave(self.group))


def _send_bucket(http: Http, api: VllmClient, *buckets: Weights) -> None:
    """Through a group of their own."""
    trainer = Trainer(http, api, "bucket")
    try:
        for bucket in buckets:
            trainer.send(bucket)
    finally:
        trainer.leave()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0, 0.0])
def test_logprobs_are_those_of_the_temperature_scaled_distribution(
    http: Http, api: VllmClient, old: Weights, reference: torch.nn.Module, temperature: float
) -> None:
    """And at temperature 0 those of temperature 1."""
    pieces = _generate(http, api, samples=3, temperature=temperature)
    assert len(pieces) == 3
    for piece in pieces:
        expected = _logprobs(reference, old, piece, temperature or 1.0)
        np.testing.assert_allclose(piece.logprobs, expected, atol=TOLERANCE)
        assert piece.versions == (("1", 24),)
        assert piece.reason == "length"


def test_samples_differ_and_a_seed_repeats_them(http: Http, seeded: VllmClient) -> None:
    def draw(seed: int) -> set[tuple[int, ...]]:
        return {tuple(piece.token_ids.tolist()) for piece in _generate(http, seeded, samples=5, seed=seed)}

    first = draw(2**64 - 1)
    assert len(first) == 5
    assert draw(2**64 - 1) == first
    assert draw(11) != first


def test_prompts_that_do_not_fit_into_one_step_are_all_answered(http: Http, api: VllmClient) -> None:
    """With a seed, a part of one kills a server on CPU."""
    assert not api.seeded
    asks = [GenerateRequest([5 + (i + 7 * j) % 40 for i in range(500)], 4, 4, 1.0, (), seed=j) for j in range(8)]
    answers = [http.start(api.generate(ask, timeout_s=60.0)) for ask in asks]
    assert [len(answer.result(60.0)) for answer in answers] == [4] * 8


def test_temperature_zero_is_greedy(http: Http, api: VllmClient) -> None:
    pieces = _generate(http, api, samples=2, temperature=0.0) + _generate(http, api, temperature=0.0, seed=11)
    assert len({tuple(piece.token_ids.tolist()) for piece in pieces}) == 1


def test_a_stop_token_ends_a_completion_and_is_its_last(http: Http, seeded: VllmClient) -> None:
    whole = _generate(http, seeded)[0]
    stop = int(whole.token_ids[5])
    first = int(np.argmax(whole.token_ids == stop))
    piece = _generate(http, seeded, stop_token_ids=(stop,))[0]
    assert piece.reason == "stop"
    np.testing.assert_array_equal(piece.token_ids, whole.token_ids[: first + 1])
    assert len(piece.logprobs) == first + 1


def test_the_models_own_end_of_sequence_stops_nothing_that_was_not_asked_for(http: Http, api: VllmClient) -> None:
    pieces = _generate(http, api, samples=16, max_tokens=100)
    assert any(2 in piece.token_ids[:-1] for piece in pieces)
    assert {piece.reason for piece in pieces} == {"length"}


def test_an_aborted_request_gives_what_it_made(
    http: Http, api: VllmClient, old: Weights, reference: torch.nn.Module
) -> None:
    asked = _in_flight(http, api, 800)
    http.run(api.pause("abort"))
    (piece,) = asked.result(30.0)
    assert piece.reason == "abort"
    assert 0 < len(piece.token_ids) < 800
    np.testing.assert_allclose(piece.logprobs, _logprobs(reference, old, piece), atol=TOLERANCE)


@pytest.mark.parametrize("in_flight", ["retract", "keep"])
def test_a_request_goes_on_through_an_update_and_says_which_weights_made_what(
    http: Http, api: VllmClient, old: Weights, new: Weights, reference: torch.nn.Module, in_flight: str
) -> None:
    """Retracted, what it has is computed again with the new weights; kept, the old cache goes on to be used."""
    asked = _in_flight(http, api, 800)
    http.run(api.pause(in_flight))  # type: ignore[arg-type]
    http.run(api.begin_update())
    _send_bucket(http, api, new)
    http.run(api.end_update("2"))
    http.run(api.resume())
    (piece,) = asked.result(120.0)
    assert piece.reason == "length"
    (first, before), (second, after) = piece.versions
    assert (first, second, before + after) == ("1", "2", 800)
    assert min(before, after) > 0
    made_before = np.abs(piece.logprobs - _logprobs(reference, old, piece))[:before]
    made_after = np.abs(piece.logprobs - _logprobs(reference, new, piece))[before:]
    assert made_before.max() < TOLERANCE
    assert (made_after.max() < TOLERANCE) == (in_flight == "retract")


@pytest.mark.parametrize("transport", ["group", "disk"])
def test_weights_arrive(
    http: Http,
    api: VllmClient,
    old: Weights,
    new: Weights,
    reference: torch.nn.Module,
    transport: str,
    tmp_path: Path,
) -> None:
    _generate(http, api)  # leaves the prompt in the server's cache
    checksums = http.run(api.checksums())
    _send(http, api, new, transport, tmp_path)
    assert http.run(api.version()) == "2"
    for piece in _generate(http, api, samples=2):
        np.testing.assert_allclose(piece.logprobs, _logprobs(reference, new, piece), atol=TOLERANCE)
        assert piece.versions == (("2", 24),)
    changed = http.run(api.checksums())
    assert changed.keys() == checksums.keys()
    assert not changed.items() & checksums.items()
    _update(http, api, old, "3")
    assert http.run(api.checksums()) == checksums


def _send(http: Http, api: VllmClient, weights: Weights, transport: str, folder: Path) -> None:
    """In two buckets, where there are buckets."""
    names = sorted(weights)
    buckets = [{name: weights[name] for name in part} for part in (names[:5], names[5:])]
    http.run(api.pause("abort"))
    http.run(api.begin_update())
    if transport == "group":
        _send_bucket(http, api, *buckets)
    else:
        for number, bucket in enumerate(buckets):
            save_file(bucket, folder / f"model-{number}.safetensors")
        http.run(api.update_from_disk(folder, "2"))
    http.run(api.end_update("2"))
    http.run(api.flush())
    http.run(api.resume())


def test_a_server_is_in_several_groups_at_once_and_leaves_each_by_its_name(
    http: Http, api: VllmClient, new: Weights, reference: torch.nn.Module
) -> None:
    names = sorted(new)
    first, second = Trainer(http, api, "first"), Trainer(http, api, "second")
    http.run(api.pause("abort"))
    http.run(api.begin_update())
    first.send({name: new[name] for name in names[:9]})
    first.leave()
    second.send({name: new[name] for name in names[9:]})
    http.run(api.end_update("2"))
    http.run(api.resume())
    (piece,) = _generate(http, api)
    np.testing.assert_allclose(piece.logprobs, _logprobs(reference, new, piece), atol=TOLERANCE)
    with pytest.raises(ServerError, match=f"no group named {first.group}"):
        http.run(api.update_from_distributed(Manifest.of(new), first.group, None))
    for trainer in (first, second):
        trainer.leave()  # also where it is in it no more


def test_weights_of_another_shape_are_refused_by_name_and_a_good_update_follows(
    http: Http, api: VllmClient, new: Weights, reference: torch.nn.Module, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"  # of a layer that has another tensor already
    wrong = dict(new) | {name: new[name][:, :-1].contiguous()}
    with pytest.raises(ServerError, match=name):
        _send(http, api, wrong, "group", tmp_path)
    assert http.run(api.version()) == INCOMPLETE
    http.run(api.abandon_update())
    _send(http, api, new, "group", tmp_path)
    (piece,) = _generate(http, api)
    np.testing.assert_allclose(piece.logprobs, _logprobs(reference, new, piece), atol=TOLERANCE)


def test_an_update_that_leaves_out_a_layer_is_refused(http: Http, api: VllmClient, new: Weights) -> None:
    http.run(api.pause("abort"))
    http.run(api.begin_update())
    _send_bucket(http, api, {name: tensor for name, tensor in new.items() if "layers.0.mlp" not in name})
    with pytest.raises(ServerError, match=r"not whole.*layers\.0\.mlp"):
        http.run(api.end_update("2"))
    assert http.run(api.version()) == INCOMPLETE


def test_a_folder_without_weights_is_refused(http: Http, api: VllmClient, tmp_path: Path) -> None:
    http.run(api.begin_update())
    with pytest.raises(ServerError, match="no safetensors"):
        http.run(api.update_from_disk(tmp_path, "2"))


def test_a_silent_sender_holds_no_server_for_ever(
    http: Http, api: VllmClient, old: Weights, new: Weights, reference: torch.nn.Module, tmp_path: Path
) -> None:
    """It has joined, it lives, and it never sends what it announced."""
    hasty = VllmClient(api.url, http, secret=api.secret, timeout_s=5.0, ranks=api.ranks)
    trainer = Trainer(http, hasty, "silent")
    http.run(api.begin_update())
    began = time.monotonic()
    with pytest.raises(ServerError, match="rank 0") as raised:
        http.run(hasty.update_from_distributed(Manifest.of(new), trainer.group, None))
    assert raised.value.alive
    assert time.monotonic() - began < 15.0
    http.run(api.abandon_update())
    trainer.leave()
    (piece,) = _generate(http, api)
    np.testing.assert_allclose(piece.logprobs, _logprobs(reference, old, piece), atol=TOLERANCE)
    _send(http, api, new, "group", tmp_path)
    (piece,) = _generate(http, api)
    np.testing.assert_allclose(piece.logprobs, _logprobs(reference, new, piece), atol=TOLERANCE)


def test_a_meeting_that_nobody_comes_to_ends(http: Http, api: VllmClient) -> None:
    hasty = VllmClient(api.url, http, secret=api.secret, timeout_s=3.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ServerError, match="failed to join") as raised:
        http.run(hasty.join(WeightGroup("nobody", "127.0.0.1", store.port, "gloo", 1, 2)))
    assert raised.value.alive
    http.run(api.health(10.0))


@pytest.mark.parametrize("process", ["EngineCore", "Worker"])
def test_health_sees_what_hangs_behind_a_front_that_answers(
    http: Http, vllm_tp1: RealServer, api: VllmClient, process: str
) -> None:
    everyone = [psutil.Process(pid) for pid in vllm_tp1.process.pids()]
    (hung,) = [one for one in everyone if f"VLLM::{process}" in " ".join(one.cmdline())]
    hung.send_signal(signal.SIGSTOP)
    try:
        http.run(api.get("/health"))
        with pytest.raises(ServerError) as raised:
            http.run(api.health(2.0))
    finally:
        hung.send_signal(signal.SIGCONT)
    assert not raised.value.alive
    http.run(api.health(20.0))


def test_a_paused_server_is_well(http: Http, api: VllmClient) -> None:
    http.run(api.pause("keep"))
    queued = http.start(api.generate(_ask(), timeout_s=60.0))
    http.run(api.health(10.0))
    assert not queued.done()
    http.run(api.resume())
    assert len(queued.result(60.0)) == 1


def test_a_server_generates_after_it_has_regained_its_memory(http: Http, api: VllmClient, old: Weights) -> None:
    """On CPU, where nothing is released, that is all there is to see."""
    http.run(api.pause("abort"))
    http.run(api.release_memory())
    http.run(api.regain_weights())
    http.run(api.regain_cache())
    http.run(api.resume())
    assert len(_generate(http, api)[0].token_ids) == 24


def test_every_route_wants_the_secret(http: Http, api: VllmClient) -> None:
    for secret in (None, "another"):
        stranger = VllmClient(api.url, http, secret=secret)
        for asking in (stranger.routes, stranger.version, stranger.resume, stranger.flush, stranger.begin_update):
            with pytest.raises(ServerError, match="401"):
                http.run(asking())


def test_of_two_ranks_each_takes_its_share_and_a_refusal_is_told_once(
    http: Http,
    served_policy: Path,
    tmp_path_factory: pytest.TempPathFactory,
    new: Weights,
    reference: torch.nn.Module,
) -> None:
    """vLLM's own transfer routes, after a failure, give every later answer of the second rank one call late."""
    servers = RealServers(served_policy, tmp_path_factory.mktemp("two-ranks"), http)
    try:
        api = servers.get("vllm", 2).api
        assert isinstance(api, VllmClient)
        assert http.run(api.info()).ranks == 2
        folder = tmp_path_factory.mktemp("weights")
        http.run(api.begin_update())
        with pytest.raises(ServerError, match=r"norm\.weight"):
            _send_bucket(http, api, {"model.norm.weight": torch.zeros(3)})
        http.run(api.abandon_update())
        http.run(api.health(20.0))
        _send(http, api, new, "group", folder)
        (piece,) = _generate(http, api)
        np.testing.assert_allclose(piece.logprobs, _logprobs(reference, new, piece), atol=TOLERANCE)
    finally:
        servers.stop()
