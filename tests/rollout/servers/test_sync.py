"""After an update, a server that holds something else than the actor, or than other servers, does not pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.rollout.engine import Bucket, WeightSource
from megatron_dppo.rollout.servers.client import InFlight, ServerClient
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.sender import SyncFailedError
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.rollout.servers.sync import Sync, _Digests
from tests.rollout.scripted import world_of

WEIGHT = torch.tensor([0.5, 1.5])
NORM, OTHER = (hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in (WEIGHT, 2 * WEIGHT))
SAME = {"model.norm.weight@0": NORM[:16], "model.qkv.weight@0": "1"}


class Holds(SglangClient):
    """A server that takes an update and holds these parameters afterwards."""

    def __init__(self, url: str, http: Http, checksums: dict[str, str], told: str = "run-1") -> None:
        super().__init__(url, http)
        self._checksums, self._told = checksums, told

    async def pause(self, in_flight: InFlight) -> None: ...
    async def begin_update(self) -> None: ...
    async def end_update(self, version: str) -> None: ...
    async def flush(self) -> None: ...
    async def abandon_update(self) -> None: ...

    async def version(self) -> str:
        return self._told

    async def checksums(self) -> dict[str, str]:
        return self._checksums


def _weights(*, to: Consumers, bucket_mib: int = 64) -> Iterator[Bucket]:
    """The actor's."""
    yield {"model.qkv.weight": torch.ones(2, 2)}
    yield {"model.norm.weight": WEIGHT}


class SentAll:
    """A transport that takes all there is."""

    def __init__(self, problem: str | None = None) -> None:
        self.source: WeightSource | None = None
        self._problem = problem

    def send(self, apis: Sequence[ServerClient], source: WeightSource, version: str) -> int:
        self.source = source
        sent = sum(tensor.nbytes for bucket in source(to=Consumers.STAGE_LEADERS) for tensor in bucket.values())
        if self._problem:
            raise SyncFailedError({}, self._problem)
        return sent

    def close(self) -> None: ...


@pytest.fixture
def http() -> Iterator[Http]:
    http = Http()
    yield http
    http.close()


def _update(http: Http, *servers: Any, device: str = "cpu") -> Any:
    world = replace(world_of(1, 0), device=torch.device(device))
    return Sync(world, http, SentAll(), "retract").update(servers, _weights, "run-1", verify=True)


def test_servers_that_hold_the_same_as_the_actor_pass(http: Http) -> None:
    assert _update(http, Holds("http://a:1", http, SAME), Holds("http://b:1", http, SAME)) is None


def test_a_norm_that_is_not_the_actors_is_named(http: Http) -> None:
    problems = _update(http, Holds("http://a:1", http, SAME | {"model.norm.weight@0": OTHER[:16]}))
    assert problems == {"http://a:1": "holds another model.norm.weight@0 than the actor after an update"}


def test_a_parameter_that_other_servers_have_otherwise_is_named(http: Http) -> None:
    other = Holds("http://b:1", http, SAME | {"model.qkv.weight@0": "2"})
    problems = _update(http, Holds("http://a:1", http, SAME), other)
    assert problems == {"http://b:1": "holds another model.qkv.weight@0 than other servers after an update"}


def test_a_server_that_says_another_version_does_not_pass(http: Http) -> None:
    problems = _update(http, Holds("http://a:1", http, SAME, told="run-0"))
    assert list(problems) == ["http://a:1"] and "'run-0'" in problems["http://a:1"]


def test_on_a_gpu_whole_hashes_are_compared_with_the_actors_and_sglangs_own_are_not(http: Http) -> None:
    # vLLM's are SHA-256 everywhere; SGLang's are sixteen digits of a kernel of its own where the weights are on a GPU.
    whole, own = {"model.norm.weight@tp0": OTHER}, {"model.norm.weight@0": OTHER[:16]}
    assert list(_update(http, Holds("http://a:1", http, whole), device="cuda")) == ["http://a:1"]
    assert _update(http, Holds("http://a:1", http, own), device="cuda") is None


def test_weights_are_hashed_only_by_an_update_that_compares(http: Http) -> None:
    for verify, source in ((True, _Digests), (False, type(_weights))):
        transport = SentAll()
        server = Holds("http://a:1", http, SAME)
        assert (
            Sync(world_of(1, 0), http, transport, "retract").update([server], _weights, "run-1", verify=verify) is None
        )
        assert type(transport.source) is source


def test_a_failure_that_is_nobodys_fault_is_told_all_the_same(http: Http) -> None:
    sync = Sync(world_of(1, 0), http, SentAll("a bucket took more than 4 s"), "retract")
    problems = sync.update([Holds("http://a:1", http, SAME)], _weights, "run-1", verify=True)
    assert problems is not None and list(problems.values()) == ["a bucket took more than 4 s"]
