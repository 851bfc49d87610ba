"""Buckets arrive byte by byte at every rank of a group; when a member fails, the others are free at
once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.servers import nccl
from megatron_dppo.rollout.servers import sender as sender_module
from megatron_dppo.rollout.servers.client import Manifest, WeightGroup
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.sender import FIRST, GRACE_S, Sender, SyncFailedError
from megatron_dppo.rollout.servers.sglang import SglangClient
from tests.ranks import forks
from tests.rollout.servers.receiver import serve

LIMIT_S = 2.0


class Process(SglangClient):
    """A server of one rank: a process in the group."""

    def __init__(self, url: str, http: Http, problem: str = "") -> None:
        super().__init__(url, http)
        self._problem = problem
        self._pipe, theirs = forks().Pipe()
        self.process = forks().Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"
        self.received: list[bytes] = []

    async def join(self, group: WeightGroup) -> None:
        await self._do(
            (group.name, group.host, group.port, group.offset, group.size, group.backend)
        )

    async def leave(self, group: str) -> None:
        pass

    async def update_from_distributed(
        self, manifest: Manifest, group: str, version: str | None
    ) -> None:
        tensors = zip(manifest.shapes, manifest.dtypes, strict=True)
        came = await self._do(
            sum(torch.Size(s).numel() * getattr(torch, dtype).itemsize for s, dtype in tensors)
        )
        if manifest is not FIRST:  # loaders ignore that one
            self.received.append(came)

    async def _do(self, order: Any) -> Any:
        try:
            self._pipe.send(order)
            answer = await asyncio.to_thread(self._pipe.recv)
        except (EOFError, OSError):
            raise ServerError(self.url, "is gone", alive=False) from None
        if isinstance(answer, Exception):
            raise ServerError(self.url, f"refused: {answer}", alive=True)
        return answer


class Late(Process):
    """Joins, and never receives."""

    async def update_from_distributed(
        self, manifest: Manifest, group: str, version: str | None
    ) -> None:
        await asyncio.sleep(60)


class Refuses(Process):
    """Joins, and refuses to receive."""

    async def update_from_distributed(
        self, manifest: Manifest, group: str, version: str | None
    ) -> None:
        raise ServerError(
            self.url, f"refused /update_weights_from_distributed: {self._problem}", alive=True
        )


class Absent(Process):
    async def join(self, group: WeightGroup) -> None:
        raise ServerError(self.url, "is not there", alive=False)


@pytest.fixture
def process(http: Http) -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def make(kind: type[Process] = Process, problem: str = "") -> Process:
        made.append(kind(f"http://{'abcd'[len(made)]}:1", http, problem))
        return made[-1]

    yield make
    for each in made:
        each.process.kill()


@pytest.fixture
def servers(process: Callable[..., Process]) -> list[Process]:
    return [process(), process()]


def sender_of(servers: list[Any], name: str) -> Sender:
    places = {"host": "127.0.0.1", "device": torch.device("cpu"), "timeout_s": LIMIT_S}
    return Sender(servers[0].http, servers, name=name, **places)


def send(sender: Sender, size: int = 4) -> None:
    sender.send(sender.stage({"a": torch.ones(size)}), None)


def check_receives(servers: list[Process]) -> None:
    for server in servers:
        server.received.clear()
    sender = sender_of(servers, "again")
    send(sender)
    sender.wait_loaded()
    sender.close()
    assert [len(server.received) for server in servers] == [1] * len(servers)


def test_buckets_arrive_though_their_memory_is_reused(servers: list[Process]) -> None:
    sender = sender_of(servers, "bytes")
    memory = torch.empty(3, 5)
    sent = []
    for number in range(4):
        bucket = {"a": memory.fill_(number), "b": torch.full((7,), number, dtype=torch.bfloat16)}
        sent.append(
            b"".join(t.flatten().view(torch.uint8).numpy().tobytes() for t in bucket.values())
        )
        sender.send(sender.stage(bucket), None)
    sender.wait_loaded()
    assert [server.received for server in servers] == [sent, sent]
    sender.close()


def test_a_death_within_a_bucket_frees_the_others(servers: list[Process]) -> None:
    sender = sender_of(servers, "death")
    os.kill(servers[0].process.pid, signal.SIGSTOP)  # in the middle of the bucket
    with pytest.raises(SyncFailedError) as failed:
        send(sender, 4_000_000)
        time.sleep(0.5)
        servers[0].process.kill()
        sender.wait_loaded()
    assert list(failed.value.problems) == ["http://a:1"]
    sender.close()
    check_receives(servers[1:])


@pytest.mark.parametrize(
    ("kind", "said", "problem"),
    [
        (Absent, "", "is not there"),
        (Late, "", "the first byte"),
        (
            Refuses,
            "NCCL error: unhandled system error",
            "unhandled system error.*the trainer has NCCL 2.29.7",
        ),
    ],
)
def test_a_failed_join_names_the_server_and_frees_the_others(
    servers: list[Process],
    process: Callable[..., Process],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Process],
    said: str,
    problem: str,
) -> None:
    monkeypatch.setattr(nccl, "get_loaded_version", lambda: "2.29.7" if said else None)
    began = time.monotonic()
    with pytest.raises(SyncFailedError, match=f"(?s){problem}") as failed:
        sender_of([servers[0], process(kind, said)], "join")
    assert time.monotonic() - began < LIMIT_S + 3 * GRACE_S
    assert "http://c:1" in failed.value.problems
    check_receives(servers[:1])


def test_two_versions_of_nccl_stop_the_run(
    servers: list[Process], process: Callable[..., Process]
) -> None:
    said = (
        "Last error:\nMismatched NCCL version detected : rank 1 version 23007 rank 0 version 22907"
    )
    with pytest.raises(UserError) as refused:
        sender_of([servers[0], process(Refuses, said)], "versions")
    assert "2.29.7 and 2.30.7" in refused.value.problem
    assert "nvidia-nccl-cu13==2.30.7" in refused.value.remedy
    check_receives(servers[:1])


def test_a_broadcast_that_never_returns_ends_in_time(
    servers: list[Process], process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    over, aborted = threading.Event(), threading.Event()
    broadcast, abort = dist.ProcessGroup.broadcast, dist.ProcessGroup.abort

    def as_nccl_does(group: Any, *arguments: Any) -> Any:
        """Return when all have come, which gloo does not wait for."""
        over.wait(60)
        return broadcast(group, *arguments)

    def noting(group: Any) -> None:
        abort(group)
        if over.is_set():
            aborted.set()

    monkeypatch.setattr(dist.ProcessGroup, "broadcast", as_nccl_does)
    monkeypatch.setattr(dist.ProcessGroup, "abort", noting)
    with pytest.raises(SyncFailedError, match="the first byte took more than 2 s"):
        sender_of([*servers, process(Late)], "stuck")
    over.set()
    assert aborted.wait(10), "the abandoned thread keeps a group"


@pytest.mark.parametrize("at", [0, 1], ids=["first byte", "bucket"])
def test_a_broadcast_that_raises_fails_the_update(
    servers: list[Process], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    broadcast, calls = dist.ProcessGroup.broadcast, count()

    def fails(group: Any, *arguments: Any) -> Any:
        if next(calls) == at:
            raise dist.DistBackendError(
                "NCCL error in: NCCLUtils.cpp:94, internal error\nLast error:\nno such device"
            )
        return broadcast(group, *arguments)

    monkeypatch.setattr(dist.ProcessGroup, "broadcast", fails)
    with pytest.raises(SyncFailedError) as failed:
        sender = sender_of(servers, "raises")
        send(sender)
        sender.wait_loaded()
    problem = (
        "could not be sent (NCCL error in: NCCLUtils.cpp:94, internal error Last error: no such"
    )
    assert problem in failed.value.problem
    check_receives(servers)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How groups end, in order: on this side, and by requests to the servers."""
    seen: list[str] = []
    abort, destroy = dist.ProcessGroup.abort, dist.destroy_process_group

    async def leave(server: Process, group: str) -> None:
        seen.append("leave")

    monkeypatch.setattr(
        dist.ProcessGroup, "abort", lambda group: (seen.append("abort"), abort(group))
    )
    monkeypatch.setattr(
        dist, "destroy_process_group", lambda group: (seen.append("destroy"), destroy(group))
    )
    monkeypatch.setattr(Process, "leave", leave)
    return seen


def test_a_bucket_on_its_way_is_aborted_before_servers_leave(
    servers: list[Process], ends: list[str]
) -> None:
    sender = sender_of(servers, "on its way")
    os.kill(servers[0].process.pid, signal.SIGSTOP)
    send(sender, 4_000_000)
    sender.close()
    assert ends == ["abort", "destroy", "leave", "leave"]


def test_servers_may_wait_for_the_sender_to_leave(
    servers: list[Process], ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NCCL on one machine, a rank's end waits for the others' connections."""

    async def leave(server: Process, group: str) -> None:
        while "destroy" not in ends:
            await asyncio.sleep(0.01)
        ends.append("leave")

    monkeypatch.setattr(Process, "leave", leave)
    check_receives(servers)
    assert ends == ["destroy", "leave", "leave"]


def test_an_end_that_hangs_is_abandoned(
    servers: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    sender = sender_of(servers, "hangs")
    monkeypatch.setattr(sender_module, "GRACE_S", 0.5)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: over.wait(60))
    began = time.monotonic()
    sender.close()
    over.set()
    assert time.monotonic() - began < 10


def test_the_group_alone_has_no_watchdog(
    servers: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, seen = "TORCH_NCCL_BLOCKING_WAIT", []
    monkeypatch.delenv(name, raising=False)
    make = sender_module._new_process_group_helper

    def watched(*arguments: Any, **named: Any) -> Any:
        seen.append(os.environ.get(name))
        return make(*arguments, **named)

    monkeypatch.setattr(sender_module, "_new_process_group_helper", watched)
    sender_of(servers, "watched").close()
    assert seen == ["1"] and name not in os.environ
