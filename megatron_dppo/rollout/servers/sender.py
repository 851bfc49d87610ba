"""Weight group: a process group that carries buckets from the sender to all ranks of all servers.

- Servers and sender create their ends with torch's own constructor, and meet at rank 0's store.
- The members never change: after the loss of a server a new group is created.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from megatron_dppo.parallel.meeting import is_loopback, open_store
from megatron_dppo.rollout.engine import Bucket
from megatron_dppo.rollout.servers import nccl
from megatron_dppo.rollout.servers.client import Manifest, ServerClient, WeightGroup
from megatron_dppo.rollout.servers.http import MAX_ERROR_CHARS, Http, ServerError

T = TypeVar("T")

POLL_INTERVAL_S = 0.0005
"""Seconds between two checks of a pending bucket."""
GRACE_S = 5.0
"""Seconds for servers to report the cause of a failure."""
JOIN_S = 30.0
"""Seconds for servers to join a gloo group."""
FIRST = Manifest(["model.rotary_emb.inv_freq"], ["uint8"], [[1]])
"""A single byte under a name that loaders skip: a buffer of old checkpoints, which models compute
themselves."""


class SyncFailedError(Exception):
    """Failure of an update.

    Args:
        problems: problem of each server at fault, by URL; empty if unknown.
        problem: problem seen by the sender.
    """

    def __init__(self, problems: Mapping[str, str], problem: str) -> None:
        self.problems = dict(problems)
        self.problem = problem
        # Both arguments, because the error is pickled for other ranks.
        super().__init__(self.problems, problem)


@dataclass(frozen=True, slots=True)
class StagedBucket:
    """Bucket ready for sending."""

    manifest: Manifest
    flat: torch.Tensor
    """[bytes], uint8."""


@dataclass(frozen=True, slots=True)
class _SentBucket:
    """Pending bucket, with the replies of the servers by URL."""

    name: str
    work: Future[dist.Work]
    """Done when the broadcast has started, or has failed to start."""
    replies: Mapping[str, Future[None]]

    @property
    def is_refused(self) -> bool:
        return any(reply.done() and reply.exception() for reply in self.replies.values())

    @property
    def is_done(self) -> bool:
        """Whether the bucket has been sent, or has failed."""
        return self.work.done() and (
            self.work.exception() is not None or self.work.result().is_completed()
        )


class Sender:
    """Rank 0 of a weight group; the other ranks belong to the servers.

    Args:
        http: client for announcements to servers.
        clients: servers of the group.
        name: name of the group, never used before.
        host: address of this machine as seen by the servers.
        device: source device of buckets; NCCL for CUDA, gloo otherwise.
        timeout_s: seconds for joining, and for each bucket.

    Raises:
        SyncFailedError: a server did not join, or did not receive the first byte.
        UserError: a server has another version of NCCL.
    """

    def __init__(
        self,
        http: Http,
        clients: Sequence[ServerClient],
        *,
        name: str,
        host: str,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._http = http
        self._clients = list(clients)
        self.name = name
        self._device = device
        self._timeout_s = timeout_s
        self._flats = [torch.empty(0, dtype=torch.uint8, device=device)] * 2
        self._turn = 0
        self._sent: _SentBucket | None = None
        backend: Literal["gloo", "nccl"] = "nccl" if device.type == "cuda" else "gloo"
        # gloo: limit for joining; each bucket has its own. NCCL: limit before aborting, longer than
        # timeout_s, which must be reached first.
        limit = timedelta(
            seconds=2 * timeout_s + 60 if backend == "nccl" else min(timeout_s, JOIN_S)
        )
        size = 1 + sum(client.ranks for client in clients)
        # No rendezvous, because under torchrun it would look for torchrun's own store.
        store = open_store(host, limit, size)
        joins = {}
        offset = 1
        for client in clients:
            joins[client.url] = http.start(
                client.join(WeightGroup(name, host, store.port, backend, offset, size))
            )
            offset += client.ranks
        group: dist.ProcessGroup | None = None
        problem = "not all servers joined the group for weights"
        try:
            with disable_watchdog():
                group, _ = _new_process_group_helper(
                    size,
                    0,
                    [],
                    dist.Backend(backend),
                    dist.PrefixStore(name, store),
                    group_name=cast(Any, name),
                    timeout=limit,
                )
            _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        except Exception as error:
            problem = f"{problem} ({_format_error(error)})"
            # The traceback's reference to the store would keep the servers waiting.
            error.__traceback__ = None
        self._group: dist.ProcessGroup | None = group
        self._store: dist.TCPStore | None = store
        joined = group is not None
        # The traceback of the error below would keep group and store.
        del group, store
        if not joined or any(reply.done() and reply.exception() for reply in joins.values()):
            raise self._handle_failure(joins, problem)
        if problems := collect_problems(joins, timeout_s):
            self.close()
            raise SyncFailedError(problems, problem)
        self._send_first_byte()

    def _send_first_byte(self) -> None:
        """Send a byte to all ranks, to test the group before weights are sent."""
        # In a thread, which is abandoned if a server never joins: NCCL creates the communicator
        # within the first broadcast, which waits for the last rank and cannot be interrupted. All
        # servers are reported, because the missing server is unknown.
        try:
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            self._start("the first byte", StagedBucket(FIRST, byte), None, begin=_run_in_thread)
            self.wait_loaded()
        except SyncFailedError as failed:
            self.close()
            nccl.check_mismatch(" ".join([failed.problem, *failed.problems.values()]))
            if (loaded := nccl.get_loaded_version()) is None:
                raise
            hint = f"(the trainer has NCCL {loaded}, and a server with another could not join it)"
            problems = {url: f"{problem} {hint}" for url, problem in failed.problems.items()}
            raise SyncFailedError(problems, f"{failed.problem} {hint}") from None

    def stage(self, bucket: Bucket) -> StagedBucket:
        """Copy a bucket into the idle one of two buffers. The caller may then reuse the bucket's
        memory."""
        size = sum(tensor.nbytes for tensor in bucket.values())
        self._turn ^= 1
        if self._flats[self._turn].numel() < size:
            self._flats[self._turn] = torch.empty(size, dtype=torch.uint8, device=self._device)
        flat = self._flats[self._turn][:size]
        start = 0
        for tensor in bucket.values():
            end = start + tensor.nbytes
            flat[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            start = end
        return StagedBucket(Manifest.from_tensors(bucket), flat)

    def send(self, staged: StagedBucket, version: str | None) -> None:
        """Start sending the bucket staged last, after all servers have loaded the previous bucket.

        Args:
            version: version of the weights, with an update's last bucket; otherwise None.

        Raises:
            SyncFailedError: the previous bucket did not arrive. The group is unusable afterwards.
        """
        # Wait for the replies, because a server could read two requests on two connections in the
        # wrong order.
        self.wait_loaded()
        self._start("a bucket", staged, version, begin=_run_now)

    def _start(
        self,
        label: str,
        staged: StagedBucket,
        version: str | None,
        *,
        begin: Callable[[Callable[[], dist.Work]], Future[dist.Work]],
    ) -> None:
        group = self._group
        assert group is not None
        replies = {
            client.url: self._http.start(
                client.update_from_distributed(staged.manifest, self.name, version)
            )
            for client in self._clients
        }
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self._timeout_s)

        def broadcast() -> dist.Work:
            work = group.broadcast([staged.flat], options)
            # Another thread closed the group while this thread waited for a server.
            if self._group is not group:
                group.abort()
            return work

        self._sent = _SentBucket(label, begin(broadcast), replies)

    def wait_loaded(self) -> None:
        """Wait until every server has loaded the last bucket sent.

        Raises:
            SyncFailedError: see :meth:`send`.
        """
        if self._sent is None:
            return
        name = self._sent.name
        replies = self._sent.replies
        problem = self._wait_for(self._sent)
        # The bucket's work keeps the group's connections open, and servers waiting.
        self._sent = None
        if problem:
            raise self._handle_failure(replies, problem)
        if problems := collect_problems(replies, self._timeout_s):
            raise SyncFailedError(problems, f"{name} was not loaded")

    def _wait_for(self, bucket: _SentBucket) -> str | None:
        """Wait until a bucket is done; return the problem, or None."""
        deadline = time.monotonic() + self._timeout_s
        while not bucket.is_done:
            # Without a server that refused or died, the group would wait until the timeout.
            if bucket.is_refused:
                return f"a server left while {bucket.name} was on its way"
            if time.monotonic() > deadline:
                return f"{bucket.name} took more than {self._timeout_s:g} s"
            time.sleep(POLL_INTERVAL_S)
        try:
            bucket.work.result().wait()
        # Includes dist.DistBackendError, a subclass.
        except RuntimeError as error:
            return f"{bucket.name} could not be sent ({_format_error(error)})"
        return None

    def close(self) -> None:
        """Leave the group at the same time as the servers."""
        # NCCL ends a group collectively: on a single machine, a leaving server waits until the
        # sender closes its connections, and reports an error if the sender aborted first. Abort
        # only a pending bucket, to free the waiting servers.
        if self._sent is not None:
            self._end()
        group = self._group
        self._group = None
        self._store = None
        leaving = {
            client.url: self._http.start(client.leave(self.name)) for client in self._clients
        }
        # In a thread, because the destruction may hang.
        leaving_call = _run_in_thread(partial(_destroy, group), "leaving")
        collect_problems(leaving, GRACE_S)
        try:
            leaving_call.result(GRACE_S)
        # Abort, to free servers that wait for a dead server.
        except TimeoutError:
            if group is not None:
                _run_in_thread(group.abort, "breaking off")

    def _end(self) -> None:
        group = self._group
        self._group = None
        self._store = None
        self._sent = None
        if group is not None:
            # A broken group need not be aborted.
            with contextlib.suppress(RuntimeError):
                group.abort()
            _destroy(group)

    def _handle_failure(self, replies: Mapping[str, Future[None]], problem: str) -> SyncFailedError:
        """End the group, and identify the servers at fault."""
        before = {url: reply for url, reply in replies.items() if reply.done()}
        # Servers that wait in the group reply only after its end.
        self._end()
        # A server with half a message stays silent, since gloo waits for the rest.
        silent_or_gone = collect_problems(replies, GRACE_S, include_refusals=False)
        # If a server is dead, refusals do not count, because a live server may report the broken
        # group first. Otherwise a refusal counts if sent while the group was whole.
        refused = {} if any(map(_is_gone, replies.values())) else collect_problems(before, GRACE_S)
        return SyncFailedError({**refused, **silent_or_gone}, problem)


def find_local_address(urls: Iterable[str]) -> str:
    """Return the address of this machine as seen by servers; the address for remote servers, if
    any, serves all."""
    found = []
    for url in urls:
        parts = urlsplit(url)
        family, *_, place = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket chooses the source address without sending a packet.
            probe.connect(place)
            found.append(probe.getsockname()[0])
    return next((address for address in found if not is_loopback(address)), found[0])


def collect_problems(
    replies: Mapping[str, Future[None]],
    timeout_s: float,
    *,
    include_refusals: bool = True,
) -> dict[str, str]:
    """Collect problems by server URL, without servers that succeeded.

    Args:
        replies: pending replies by URL.
        timeout_s: seconds for all replies together.
        include_refusals: whether a refusal is the server's fault.
    """
    deadline = time.monotonic() + timeout_s
    problems = {}
    for url, reply in replies.items():
        try:
            reply.result(max(deadline - time.monotonic(), 0.0))
        except ServerError as error:
            if include_refusals or not error.alive:
                problems[url] = error.problem
        except TimeoutError:
            reply.cancel()
            problems[url] = f"did not answer within {timeout_s:g} s"
    return problems


@contextlib.contextmanager
def disable_watchdog() -> Iterator[None]:
    """Create NCCL groups within the block without torch's watchdog.

    After the death of a server the watchdog would set a flag, and the default group's monitor would
    end this process, whatever TORCH_NCCL_ASYNC_ERROR_HANDLING is. This module has its own limits.
    """
    # Torch reads the variable only when a group is created.
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _run_now(call: Callable[[], T]) -> Future[T]:
    """Run a call and return a finished future."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        # The traceback's reference to the group would keep the servers waiting.
        error.__traceback__ = None
        future.set_exception(error)
    return future


def _destroy(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group(group)


def _run_in_thread(call: Callable[[], T], name: str = "first byte") -> Future[T]:
    """Run a call in a daemon thread, which may be abandoned."""
    future: Future[T] = Future()

    def run() -> None:
        outcome = _run_now(call)
        if (error := outcome.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(outcome.result())

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _is_gone(reply: Future[None]) -> bool:
    error = reply.exception() if reply.done() and not reply.cancelled() else None
    return isinstance(error, ServerError) and not error.alive


def _format_error(error: Exception) -> str:
    # Everything before the C++ stack, because NCCL's message is the last of several lines.
    return " ".join(str(error).partition("\nException raised from")[0].split())[:MAX_ERROR_CHARS]
