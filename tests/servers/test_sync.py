"""After an update, a server that holds something else than the actor, or than other servers, does not pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from megatron_dppo.rollout.engine import WeightSource
from megatron_dppo.rollout.servers.api import InFlight, ServerApi
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.sglang import SglangApi
from megatron_dppo.rollout.servers.sync import Sync
from megatron_dppo.rollout.servers.transports import Moved, Sent
from tests.rollout.scripted import world_of

NORM, OTHER = (hashlib.sha256(text).hexdigest() for text in (b"norm", b"other"))
SAME = {"model.norm.weight@0": NORM[:16], "model.qkv.weight@0": "1"}


class Holds(SglangApi):
    """A server that takes an update and holds these parameters afterwards."""

    def __init__(self, url: str, http: Http, checksums: dict[str, str], told: str = "run-1") -> None:
        super().__init__(url, http)
        self._checksums, self._told = checksums, told

    async def pause(self, in_flight: InFlight) -> None: ...
    async def begin_update(self) -> None: ...
    async def end_update(self, version: str) -> None: ...
    async def flush(self) -> None: ...

    async def version(self) -> str:
        return self._told

    async def checksums(self) -> dict[str, str]:
        return self._checksums


class SentAll:
    """A transport that has moved one norm."""

    def send(self, apis: Sequence[ServerApi], source: WeightSource, version: str) -> Sent:
        return Sent({}, None, Moved(4, {"model.norm.weight": NORM}))

    def close(self) -> None: ...


@pytest.fixture
def http() -> Iterator[Http]:
    http = Http()
    yield http
    http.close()


def _update(http: Http, *servers: Any) -> Any:
    return Sync(world_of(1, 0), http, SentAll(), "retract").update(servers, Any, "run-1", verify=True)


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
