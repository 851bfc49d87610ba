"""Weights over NCCL, from one GPU to the next: they arrive, and a server that dies or never comes
costs only itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_dppo.rollout.servers import nccl
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.sender import GRACE_S, Sender, SyncFailedError
from tests.rollout.servers.test_sender import Late, Process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL takes no two ranks on one"
    ),
]
LIMIT_S = 30.0


@pytest.fixture
def server(http: Http) -> Iterator[Callable[..., Any]]:
    made: list[Process] = []

    def make(kind: type[Process] = Process) -> Process:
        made.append(kind(f"http://{len(made)}:1", http))
        return made[-1]

    yield make
    for process in made:
        process.process.kill()


def _sender(http: Http, server: Process, name: str) -> Sender:
    device, ours = torch.device("cuda", 0), nccl.get_loaded_version()
    return Sender(
        http, [server], name=name, host="127.0.0.1", device=device, timeout_s=LIMIT_S, our_nccl=ours
    )


def _arrives(http: Http, server: Process, name: str) -> bool:
    sender = _sender(http, server, name)
    bucket = torch.arange(1_000_000, device="cuda:0")
    sender.send(sender.stage({"a": bucket}), None)
    sender.wait_loaded()
    sender.close()
    return server.received == [bucket.cpu().numpy().tobytes()]


def test_a_bucket_arrives(http: Http, server: Callable[..., Any]) -> None:
    assert _arrives(http, server(), "arrives")


def test_a_server_that_dies_within_a_bucket_does_not_take_the_trainer_along(
    http: Http, server: Callable[..., Any]
) -> None:
    dies = server()
    sender = _sender(http, dies, "dies")
    os.kill(dies.process.pid, signal.SIGSTOP)
    with pytest.raises(SyncFailedError) as failed:
        sender.send(sender.stage({"a": torch.ones(200_000_000, device="cuda:0")}), None)
        time.sleep(0.5)
        dies.process.kill()
        sender.wait_loaded()
    assert list(failed.value.problems) == [dies.url]
    time.sleep(5.0)  # longer than torch's monitor takes to see what a watchdog has found
    assert _arrives(http, server(), "after a death")


def test_a_server_that_never_comes_ends_the_joining_in_time(
    http: Http, server: Callable[..., Any]
) -> None:
    began = time.monotonic()
    with pytest.raises(SyncFailedError):
        _sender(http, server(Late), "late")
    assert time.monotonic() - began < LIMIT_S + 3 * GRACE_S
    assert _arrives(http, server(), "after the late one")
