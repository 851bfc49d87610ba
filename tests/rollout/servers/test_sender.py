"""Buckets arrive byte by byte at every rank of a group, and when a member fails the others are free at once."""

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
from megatron_dppo.rollout.servers import sender as sender_module
from megatron_dppo.rollout.servers.client import Manifest, WeightGroup
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.sender import FIRST, GRACE_S, Sender, SyncFailedError
from megatron_dppo.rollout.servers.sglang import SglangClient
from tests.ranks import forks
from tests.rollout.servers.receiver import serve

LIMIT_S = 2.0


class Process(SglangClient):
    """A server of one rank that is no more than a process in the group."""

    def __init__(self, url: str, http: Http) -> None:
        super().__init__(url, http)
        self._pipe, theirs = forks().Pipe()
        self.process = forks().Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"
        self.received: list[bytes] = []

    async def join(self, meeting: WeightGroup) -> None:
        await self._do((meeting.name, meeting.host, meeting.port, meeting.offset, meeting.size, meeting.backend))

    async def leave(self, group: str) -> None:
        pass

    async def update_from_distributed(self, manifest: Manifest, group: str, version: str | None) -> None:
        sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize for shape, dtype in zip(
            manifest.shapes, manifest.dtypes, strict=True)]  # fmt: skip
        came = await self._do(sum(sizes))
        if manifest is not FIRST:  # which loaders pass over
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
    """A server that joins, and then never comes to receive."""

    async def update_from_distributed(self, manifest: Manifest, group: str, version: str | None) -> None:
        await asyncio.sleep(60)


class Refuses(Process):
    """A server that joins, and cannot make a communicator."""

    def __init__(self, url: str, http: Http, why: str) -> None:
        super().__init__(url, http)
        self._why = why

    async def update_from_distributed(self, manifest: Manifest, group: str, version: str | None) -> None:
        raise ServerError(self.url, f"refused /update_weights_from_distributed: {self._why}", alive=True)


class Absent(SglangClient):
    """A server that nobody finds."""

    async def join(self, meeting: WeightGroup) -> None:
        raise ServerError(self.url, "is not there", alive=False)

    async def leave(self, group: str) -> None:
        raise ServerError(self.url, "is not there", alive=False)


@pytest.fixture
def http() -> Iterator[Http]:
    http = Http()
    yield http
    http.close()


@pytest.fixture
def servers(http: Http) -> Iterator[list[Process]]:
    servers = [Process(f"http://{name}:1", http) for name in "ab"]
    yield servers
    for server in servers:
        server.process.kill()


def _sender(http: Http, servers: list[Any], name: str, **more: Any) -> Sender:
    device = torch.device("cpu")
    return Sender(http, servers, name=name, host="127.0.0.1", device=device, timeout_s=LIMIT_S, **more)


def _can_still_receive(http: Http, servers: list[Process], name: str) -> bool:
    sender = _sender(http, servers, name)
    sender.send(sender.stage({"a": torch.ones(4)}), None)
    sender.arrive()
    sender.close()
    return [len(server.received) for server in servers] == [1] * len(servers)


def test_every_bucket_arrives_byte_by_byte_though_its_memory_is_used_again(http: Http, servers: list[Process]) -> None:
    sender = _sender(http, servers, "bytes")
    memory = torch.empty(3, 5)
    sent = []
    for number in range(4):
        bucket = {"a": memory.fill_(number), "b": torch.full((7,), number, dtype=torch.bfloat16)}
        sent.append(b"".join(t.flatten().view(torch.uint8).numpy().tobytes() for t in bucket.values()))
        sender.send(sender.stage(bucket), None)
    sender.arrive()
    assert [server.received for server in servers] == [sent, sent]
    sender.close()


def test_a_server_that_cannot_join_is_named_and_the_others_are_free(http: Http, servers: list[Process]) -> None:
    began = time.monotonic()
    with pytest.raises(SyncFailedError) as failed:
        _sender(http, [*servers, Absent("http://c:1", http)], "join")
    assert failed.value.problems == {"http://c:1": "is not there"}
    assert time.monotonic() - began < 2 * LIMIT_S
    again = _sender(http, servers, "join again")
    again.send(again.stage({"a": torch.ones(4)}), None)
    again.arrive()
    assert [len(server.received) for server in servers] == [1, 1]
    again.close()


def test_a_server_that_dies_within_a_bucket_is_named_and_the_others_are_free(
    http: Http, servers: list[Process]
) -> None:
    sender = _sender(http, servers, "death")
    os.kill(servers[0].process.pid, signal.SIGSTOP)  # so that it is in the middle of the bucket when it dies
    with pytest.raises(SyncFailedError) as failed:
        sender.send(sender.stage({"a": torch.ones(4_000_000)}), None)
        time.sleep(0.5)
        servers[0].process.kill()
        sender.arrive()
    assert list(failed.value.problems) == ["http://a:1"]
    sender.close()
    again = _sender(http, servers[1:], "without it")
    again.send(again.stage({"a": torch.ones(4)}), None)
    again.arrive()
    again.close()


@pytest.fixture
def another(http: Http) -> Iterator[Callable[..., Any]]:
    made: list[Process] = []

    def make(kind: type[Process], *arguments: Any) -> Process:
        made.append(kind("http://c:1", http, *arguments))
        return made[-1]

    yield make
    for server in made:
        server.process.kill()


def test_a_server_that_joins_and_never_comes_ends_the_joining_in_time(
    http: Http, servers: list[Process], another: Callable[..., Any]
) -> None:
    began = time.monotonic()
    with pytest.raises(SyncFailedError, match="the first byte") as failed:
        _sender(http, [servers[0], another(Late)], "late")
    assert time.monotonic() - began < LIMIT_S + 3 * GRACE_S
    assert list(failed.value.problems) == ["http://c:1"]
    assert _can_still_receive(http, servers[:1], "without it")


def test_a_broadcast_that_never_returns_ends_the_joining_in_time(
    http: Http, servers: list[Process], another: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
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
    began = time.monotonic()
    with pytest.raises(SyncFailedError, match="the first byte took more than 2 s"):
        _sender(http, [*servers, another(Late)], "stuck")
    assert time.monotonic() - began < LIMIT_S + 3 * GRACE_S
    over.set()
    assert aborted.wait(10), "the thread that was left behind keeps a group that it was late for"


def test_a_refusal_at_the_first_byte_names_the_server_and_the_likely_cause(
    http: Http, servers: list[Process], another: Callable[..., Any]
) -> None:
    refuses = another(Refuses, "NCCL error: unhandled system error")
    with pytest.raises(SyncFailedError) as failed:
        _sender(http, [*servers, refuses], "refused", our_nccl="2.29.7")
    # Whoever gloo has pass the byte on to it waits for it, and is named, too.
    assert "unhandled system error" in failed.value.problems["http://c:1"]
    assert "the trainer has NCCL 2.29.7" in failed.value.problems["http://c:1"]


def test_two_versions_of_nccl_stop_the_run_with_the_way_out(
    http: Http, servers: list[Process], another: Callable[..., Any]
) -> None:
    said = "Last error:\nMismatched NCCL version detected : rank 1 version 23007 rank 0 version 22907"
    with pytest.raises(UserError) as refused:
        _sender(http, [servers[0], another(Refuses, said)], "two versions", our_nccl="2.29.7")
    assert "2.29.7 and 2.30.7" in refused.value.problem
    assert "nvidia-nccl-cu13==2.30.7" in refused.value.remedy
    assert _can_still_receive(http, servers[:1], "of one version")


@pytest.mark.parametrize("at", [0, 1], ids=["first byte", "bucket"])
def test_a_broadcast_that_raises_is_a_failure_of_the_update(
    at: int, http: Http, servers: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcast, calls = dist.ProcessGroup.broadcast, count()

    def fails(group: Any, *arguments: Any) -> Any:
        if next(calls) == at:
            raise dist.DistBackendError("NCCL error in: NCCLUtils.cpp:94, internal error\nLast error:\nno such device")
        return broadcast(group, *arguments)

    monkeypatch.setattr(dist.ProcessGroup, "broadcast", fails)
    with pytest.raises(SyncFailedError) as failed:
        sender = _sender(http, servers, "raises")
        sender.send(sender.stage({"a": torch.ones(4)}), None)
        sender.arrive()
    assert (
        "could not be sent (NCCL error in: NCCLUtils.cpp:94, internal error Last error: no such" in failed.value.problem
    )
    for server in servers:
        server.received.clear()
    assert _can_still_receive(http, servers, f"after {at}")


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How groups end, in order: on this side, and by requests to the servers."""
    seen: list[str] = []
    abort, destroy = dist.ProcessGroup.abort, dist.destroy_process_group

    def noting_abort(group: Any) -> None:
        seen.append("abort")
        abort(group)

    def noting_destroy(group: Any) -> None:
        seen.append("destroy")
        destroy(group)

    async def leave(server: Process, group: str) -> None:
        seen.append("leave")

    monkeypatch.setattr(dist.ProcessGroup, "abort", noting_abort)
    monkeypatch.setattr(dist, "destroy_process_group", noting_destroy)
    monkeypatch.setattr(Process, "leave", leave)
    return seen


def test_a_group_that_is_whole_is_left_by_all_and_not_broken_off(
    http: Http, servers: list[Process], ends: list[str]
) -> None:
    sender = _sender(http, servers, "whole")
    sender.send(sender.stage({"a": torch.ones(4)}), None)
    sender.arrive()
    sender.close()
    assert sorted(ends) == ["destroy", "leave", "leave"]


def test_a_bucket_on_its_way_is_broken_off_before_servers_leave(
    http: Http, servers: list[Process], ends: list[str]
) -> None:
    sender = _sender(http, servers, "on its way")
    os.kill(servers[0].process.pid, signal.SIGSTOP)
    sender.send(sender.stage({"a": torch.ones(4_000_000)}), None)
    sender.close()
    assert ends == ["abort", "destroy", "leave", "leave"]


def test_servers_that_wait_for_this_side_to_leave_are_not_waited_for_first(
    http: Http, servers: list[Process], ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NCCL on one machine, where a rank's end waits for the others' connections."""

    async def leave(server: Process, group: str) -> None:
        while "destroy" not in ends:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(Process, "leave", leave)
    sender = _sender(http, servers, "together")
    began = time.monotonic()
    sender.close()
    assert time.monotonic() - began < GRACE_S


def test_an_end_that_hangs_is_left_behind(http: Http, servers: list[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    sender = _sender(http, servers, "hangs")
    monkeypatch.setattr(sender_module, "GRACE_S", 0.5)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: over.wait(60))
    began = time.monotonic()
    sender.close()
    over.set()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("before", [None, "0"])
def test_the_group_is_made_without_a_watchdog_and_others_with_theirs(
    before: str | None, http: Http, servers: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, seen = "TORCH_NCCL_BLOCKING_WAIT", []
    monkeypatch.setenv(name, before) if before else monkeypatch.delenv(name, raising=False)
    make = sender_module._new_process_group_helper

    def watched(*arguments: Any, **named: Any) -> Any:
        seen.append(os.environ.get(name))
        return make(*arguments, **named)

    monkeypatch.setattr(sender_module, "_new_process_group_helper", watched)
    _sender(http, servers, f"watched {before}").close()
    assert seen == ["1"]
    assert os.environ.get(name) == before
