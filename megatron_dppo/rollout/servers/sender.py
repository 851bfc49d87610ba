"""The weight group: a process group of one sender and all ranks of all servers, through which
buckets travel.

Servers and sender make their ends with torch's own constructor, which finds the others by a store
of rank 0. A group belongs to the servers that it was made with. When one of them is lost, the group
is ended and a new one is made.
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
"""Seconds between looks at a bucket on its way."""
GRACE_S = 5.0
"""How long servers may take to say what went wrong, once it has."""
JOIN_S = 30.0
"""How long servers may take to join a gloo group."""
FIRST = Manifest(["model.rotary_emb.inv_freq"], ["uint8"], [[1]])
"""One byte under a name that loaders pass over: old checkpoints hold such a buffer, which models
compute themselves."""


class SyncFailedError(Exception):
    """An update broke off.

    Args:
        problems: what went wrong, by URL of the server at fault. Empty where no single one is known
            to be.
        problem: what the sender itself saw.
    """

    def __init__(self, problems: Mapping[str, str], problem: str) -> None:
        self.problems = dict(problems)
        self.problem = problem
        super().__init__(self.problems, problem)  # both, so that it can be sent to other ranks


@dataclass(frozen=True, slots=True)
class StagedBucket:
    """A bucket, ready to be sent."""

    manifest: Manifest
    flat: torch.Tensor
    """[bytes], uint8: its tensors one after the other."""


@dataclass(frozen=True, slots=True)
class _SentBucket:
    """A bucket on its way, and what servers will say of it, by URL."""

    what: str
    work: Future[dist.Work]
    """Done when the broadcast has begun, or could not."""
    replies: Mapping[str, Future[None]]

    @property
    def is_refused(self) -> bool:
        return any(reply.done() and reply.exception() for reply in self.replies.values())

    @property
    def is_done(self) -> bool:
        """Whether it has left, or it is known that it will not."""
        return self.work.done() and (
            self.work.exception() is not None or self.work.result().is_completed()
        )


class Sender:
    """Rank 0 of a group whose other ranks are the servers'.

    Args:
        http: through which servers are told what comes.
        clients: the servers, which know how many ranks they have.
        name: of the group, never used before.
        host: address of this machine for the servers.
        device: where buckets are sent from; its kind decides between NCCL and gloo.
        timeout_s: how long joining, and one bucket, may take.

    Raises:
        SyncFailedError: not all of them joined, or the first byte did not reach all of them.
        UserError: NCCL said that they have another version.
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
        """The bucket on its way."""
        backend: Literal["gloo", "nccl"] = "nccl" if device.type == "cuda" else "gloo"
        # For gloo this limits joining; each bucket has a limit of its own. For NCCL it limits
        # breaking off, and our own limit must be reached before it.
        limit = timedelta(
            seconds=2 * timeout_s + 60 if backend == "nccl" else min(timeout_s, JOIN_S)
        )
        size = 1 + sum(client.ranks for client in clients)
        # Not by rendezvous: under torchrun it would look for torchrun's own store, at any address.
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
            error.__traceback__ = (
                None  # it holds the store, and with it the servers that wait there
            )
        self._group: dist.ProcessGroup | None = group
        self._store: dist.TCPStore | None = store
        joined = group is not None
        del group, store  # or the error that is raised below would keep them
        if not joined or any(reply.done() and reply.exception() for reply in joins.values()):
            raise self._handle_failure(joins, problem)
        if problems := collect_problems(joins, timeout_s):
            self.close()
            raise SyncFailedError(problems, problem)
        self._send_first_byte()

    def _send_first_byte(self) -> None:
        """Send one byte to all ranks, so that the group is known to work before weights are sent.

        NCCL makes its communicator within the first broadcast. That call waits for the last rank,
        and nothing breaks it off. It therefore runs in a thread of its own, which is left behind
        where a server never comes. The servers that did come cannot be told apart from it, and are
        named, too.
        """
        try:
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            self._start("the first byte", StagedBucket(FIRST, byte), None, begin=_run_in_thread)
            self.wait_loaded()
        except SyncFailedError as failed:
            self.close()
            nccl.check_mismatch(" ".join([failed.problem, *failed.problems.values()]))
            if (ours := nccl.get_loaded_version()) is None:
                raise
            hint = f"(the trainer has NCCL {ours}, and a server with another could not join it)"
            problems = {url: f"{problem} {hint}" for url, problem in failed.problems.items()}
            raise SyncFailedError(problems, f"{failed.problem} {hint}") from None

    def stage(self, bucket: Bucket) -> StagedBucket:
        """Copy a bucket into that of two buffers which is not being sent. The caller may then reuse
        its memory."""
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
        """Set a bucket on its way, once the one before has arrived.

        It waits until all servers have loaded the one before. Two requests on two connections could
        be read in the wrong order, and only a server's answer says that it has read one.

        Args:
            staged: the bucket that was staged last.
            version: with the last bucket of an update.

        Raises:
            SyncFailedError: the one before did not arrive. Nothing can be sent through this group
                any more.
        """
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
            if self._group is not group:  # it was given up while this waited for a server
                group.abort()
            return work

        self._sent = _SentBucket(label, begin(broadcast), replies)

    def wait_loaded(self) -> None:
        """Wait until every server has loaded what was sent last.

        Raises:
            SyncFailedError: as said of :meth:`send`.
        """
        if self._sent is None:
            return
        what = self._sent.what
        replies = self._sent.replies
        problem = self._wait_for(self._sent)
        # The work that it holds keeps the group's connections open, and servers waiting at them.
        self._sent = None
        if problem:
            raise self._handle_failure(replies, problem)
        if problems := collect_problems(replies, self._timeout_s):
            raise SyncFailedError(problems, f"{what} was not loaded")

    def _wait_for(self, bucket: _SentBucket) -> str | None:
        """Wait until what was sent has left; or until it is known that it will not, and why."""
        deadline = time.monotonic() + self._timeout_s
        while not bucket.is_done:
            # A server that refused, or is gone, will not take part; the group would wait for it
            # until it times out.
            if bucket.is_refused:
                return f"a server left while {bucket.what} was on its way"
            if time.monotonic() > deadline:
                return f"{bucket.what} took more than {self._timeout_s:g} s"
            time.sleep(POLL_INTERVAL_S)
        try:
            bucket.work.result().wait()
        except RuntimeError as error:  # dist.DistBackendError is one, too
            return f"{bucket.what} could not be sent ({_format_error(error)})"
        return None

    def close(self) -> None:
        """Leave the group at the same time as the servers.

        NCCL ends a group together: on one machine a server that leaves waits until this side closes
        its connections, and finds an error if this side broke the group off before. Only a bucket
        that is on its way is broken off first, which frees the servers that wait in it. A
        destruction that hangs is left behind in its thread.
        """
        if self._sent is not None:
            self._end()
        group = self._group
        self._group = None
        self._store = None
        leaving = {
            client.url: self._http.start(client.leave(self.name)) for client in self._clients
        }
        ours = _run_in_thread(partial(_destroy, group), "leaving")
        collect_problems(leaving, GRACE_S)
        try:
            ours.result(GRACE_S)
        except (
            TimeoutError
        ):  # a server that is gone leaves no group: servers that wait in it are freed
            if group is not None:
                _run_in_thread(group.abort, "breaking off")

    def _end(self) -> None:
        group = self._group
        self._group = None
        self._store = None
        self._sent = None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # what is broken already need not be broken off
                group.abort()
            _destroy(group)

    def _handle_failure(self, replies: Mapping[str, Future[None]], problem: str) -> SyncFailedError:
        """End the group, so that servers that wait in it answer, and find out which servers are at
        fault.

        Those are the servers that are gone: others may say that the group broke before a lost one
        is missed. Where none is gone, they are those that refused while the group was whole, and
        those that say nothing afterwards. A server that has half a message is among the silent
        ones, since gloo waits for the rest of it.
        """
        before = {url: reply for url, reply in replies.items() if reply.done()}
        self._end()
        silent_or_gone = collect_problems(replies, GRACE_S, include_refusals=False)
        refused = {} if any(map(_is_gone, replies.values())) else collect_problems(before, GRACE_S)
        return SyncFailedError({**refused, **silent_or_gone}, problem)


def find_local_address(urls: Iterable[str]) -> str:
    """The address of this machine that servers see: the one from which packets to them would leave.

    Where some are on this machine and some are not, that for those which are not; it serves all.
    """
    found = []
    for url in urls:
        parts = urlsplit(url)
        family, *_, place = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            found.append(probe.getsockname()[0])
    return next((address for address in found if not is_loopback(address)), found[0])


def collect_problems(
    replies: Mapping[str, Future[None]], timeout_s: float, *, include_refusals: bool = True
) -> dict[str, str]:
    """Problems by server; none for servers that did as they were told.

    Args:
        replies: by URL.
        timeout_s: how long to wait for all of them.
        include_refusals: whether a server that answers, but with a refusal, is at fault itself.
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
            problems[url] = f"said nothing within {timeout_s:g} s"
    return problems


@contextlib.contextmanager
def disable_watchdog() -> Iterator[None]:
    """NCCL groups made within the block have no watchdog of torch's.

    The watchdog would end this process once a server has died, whatever
    TORCH_NCCL_ASYNC_ERROR_HANDLING says, since it sets a flag upon which the monitor of the default
    group does so. Our own limits stand in for it. Torch reads the variable when a group is made.
    """
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
    """Result or error of a call. Nothing that its frames refer to is kept."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        error.__traceback__ = None  # it holds the group, and with it the servers that wait in it
        future.set_exception(error)
    return future


def _destroy(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group(group)


def _run_in_thread(call: Callable[[], T], name: str = "first byte") -> Future[T]:
    """Future result or error of a call, from a thread that may be left behind."""
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
    """An error of torch's in one line, without the stack; NCCL's own words are the last of several
    lines."""
    return " ".join(str(error).partition("\nException raised from")[0].split())[:MAX_ERROR_CHARS]
