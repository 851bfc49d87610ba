"""Buckets arrive byte by byte at every rank of a group, and when a member fails the others are free at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_dppo.rollout.servers.api import Manifest, Meeting
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.sender import Sender, SyncFailedError
from megatron_dppo.rollout.servers.sglang import SglangApi
from tests.servers.receiver import serve

LIMIT_S = 4.0


class Process(SglangApi):
    """A server of one rank that is no more than a process in the group."""

    def __init__(self, url: str, http: Http) -> None:
        super().__init__(url, http)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"
        self.received: list[bytes] = []

    async def join(self, meeting: Meeting) -> None:
        await self._do((meeting.name, meeting.host, meeting.port, meeting.offset, meeting.size))

    async def leave(self, group: str) -> None:
        pass

    async def receive(self, manifest: Manifest, group: str, version: str | None) -> None:
        sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize for shape, dtype in zip(
            manifest.shapes, manifest.dtypes, strict=True)]  # fmt: skip
        self.received.append(await self._do(sum(sizes)))

    async def _do(self, order: Any) -> Any:
        try:
            self._pipe.send(order)
            answer = await asyncio.to_thread(self._pipe.recv)
        except (EOFError, OSError):
            raise ServerError(self.url, "is gone", alive=False) from None
        if isinstance(answer, Exception):
            raise ServerError(self.url, f"refused: {answer}", alive=True)
        return answer


class Absent(SglangApi):
    """A server that nobody finds."""

    async def join(self, meeting: Meeting) -> None:
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


def _sender(http: Http, servers: list[Any], name: str) -> Sender:
    device = torch.device("cpu")
    return Sender(http, servers, name=name, host="127.0.0.1", device=device, timeout_s=LIMIT_S)


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
