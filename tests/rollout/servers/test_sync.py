"""After an update, a server with other weights than the actor, or than other servers, does not
pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.rollout.engine import Bucket, WeightSource
from megatron_dppo.rollout.servers.client import ServerClient
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.sender import SyncFailedError
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.rollout.servers.sync import Sync
from tests.rollout.scripted import world_of

WEIGHT = torch.tensor([0.5, 1.5])
NORM, OTHER = (
    hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in (WEIGHT, 2 * WEIGHT)
)
SAME = {"model.norm.weight@0": NORM[:16], "model.qkv.weight@0": "1"}


class Holds(SglangClient):
    """A server that holds these parameters after any update."""

    def __init__(self, checksums: dict[str, str], name: str = "a", version: str = "run-1") -> None:
        super().__init__(f"http://{name}:1", None)  # type: ignore[arg-type]
        self._checksums, self._version = checksums, version

    async def _nothing(self, *_: Any) -> None: ...

    pause = begin_update = end_update = flush = abort_update = _nothing

    async def get_version(self) -> str:
        return self._version

    async def get_checksums(self) -> dict[str, str]:
        return self._checksums


def actor_weights(*, to: Consumers, bucket_mib: int = 64) -> Iterator[Bucket]:
    yield {"model.qkv.weight": torch.ones(2, 2)}
    yield {"model.norm.weight": WEIGHT}


class Transport:
    """Takes all weights, and fails then if there is a problem."""

    def __init__(self, problem: str = "") -> None:
        self._problem = problem

    def send(self, apis: Sequence[ServerClient], source: WeightSource, version: str) -> int:
        sent = sum(
            tensor.nbytes
            for bucket in source(to=Consumers.STAGE_LEADERS)
            for tensor in bucket.values()
        )
        if self._problem:
            raise SyncFailedError({}, self._problem)
        return sent

    def close(self) -> None: ...


def problems_of(http: Http, *servers: Holds, device: str = "cpu", problem: str = "") -> Any:
    world = replace(world_of(1, 0), device=torch.device(device))
    return Sync(world, http, Transport(problem), "retract").update(
        servers, actor_weights, "run-1", verify=True
    )


A, B = "http://a:1", "http://b:1"
WHOLE, OWN = {"model.norm.weight@tp0": OTHER}, {"model.norm.weight@0": OTHER[:16]}


@pytest.mark.parametrize(
    ("servers", "device", "url", "problem"),
    [
        ([Holds(SAME), Holds(SAME, "b")], "cpu", None, ""),
        (
            [Holds(SAME | OWN)],
            "cpu",
            A,
            "holds another model.norm.weight@0 than the actor after an update",
        ),
        (
            [Holds(SAME), Holds(SAME | {"model.qkv.weight@0": "2"}, "b")],
            "cpu",
            B,
            "model.qkv.weight@0 than other",
        ),
        ([Holds(SAME, version="run-0")], "cpu", A, "'run-0'"),
        # vLLM's are SHA-256 everywhere; on a GPU, SGLang's are sixteen digits of a kernel of its
        # own.
        ([Holds(WHOLE)], "cuda", A, "model.norm.weight@tp0"),
        ([Holds(OWN)], "cuda", None, ""),
    ],
)
def test_servers_with_other_weights_are_named(
    http: Http, servers: list[Holds], device: str, url: str | None, problem: str
) -> None:
    found = problems_of(http, *servers, device=device)
    assert (list(found) if found else None) == ([url] if url else None)
    assert not found or problem in found[url]


def test_a_failure_of_no_server_is_reported(http: Http) -> None:
    problems = problems_of(http, Holds(SAME), problem="a bucket took more than 4 s")
    assert list(problems.values()) == ["a bucket took more than 4 s"]
