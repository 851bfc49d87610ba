"""The coordinates of a rank, and the few exchanges of small objects that a step needs.

Objects travel over gloo, in a group of their own that waits as long as a rollout may take. A slow
generation is then not mistaken for a dead network, and NCCL never waits for one.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dppo.config import LayoutConfig
from megatron_dppo.errors import StandstillError, UserError
from megatron_dppo.parallel import without_cuda
from megatron_dppo.parallel.layout import compute_capacity_multiple, resolve_layout
from megatron_dppo.parallel.meeting import LOST_CONTACT, build_rendezvous_args
from megatron_dppo.process.streams import record_progress

T = TypeVar("T")

RANK0_ERROR_DELAY_S = 2.0
"""How long other ranks hold back their own error where the leader's says more."""
TIMEOUT_FRACTION = 0.9
"""Share of a time limit after which a failed wait is one that took too long; before, another rank
has ended."""


@dataclass(frozen=True, slots=True)
class World:
    """One rank's coordinates. Replica d holds the ranks that train on the same packs.

    Dense parameters are cut over ``tp`` consecutive ranks of a pipeline stage, experts over ``etp ·
    ep``. The larger of these numbers is :attr:`shard_group_size`: so many consecutive ranks of each
    stage together have one copy of the policy.
    """

    rank: int
    size: int
    layout: LayoutConfig
    """With ``dp`` filled in."""
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    ep_rank: int
    etp_rank: int
    replica_of: tuple[int, ...]
    """[size], the data-parallel replica of every rank."""
    device: torch.device
    control: Any
    """Gloo group of all ranks for objects and rollout tokens."""
    timeout_s: float
    """How long an exchange in it waits for the slowest rank."""

    @property
    def dp(self) -> int:
        """Data-parallel replicas."""
        return self.layout.dp or 1

    @property
    def shard_group_size(self) -> int:
        """Ranks of a pipeline stage that together have one copy of its parameters."""
        return max(self.layout.tp, self.layout.expert_tp * self.layout.ep)

    @property
    def shard_group_rank(self) -> int:
        """This rank's number among the :attr:`shard_group_size` of its stage."""
        return self.rank % (self.size // self.layout.pp) % self.shard_group_size

    @property
    def is_in_first_shard_group(self) -> bool:
        """Whether this rank and the leader belong to one copy of the policy."""
        return self.rank % (self.size // self.layout.pp) < self.shard_group_size

    @property
    def is_rank0(self) -> bool:
        """Whether this rank plans, logs and prints for all."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.layout.pp - 1

    def broadcast(self, make: Callable[[], T]) -> T:
        """Run ``make`` on rank 0, and return its result on every rank. An exception there is raised
        on every rank."""
        record_progress()
        outcome: list[Any] = [None]
        if self.is_rank0:
            try:
                outcome[0] = (make(), None)
            except Exception as error:
                outcome[0] = (None, error)
        if self.size > 1:
            dist.broadcast_object_list(outcome, src=0, group=self.control)
        value, failure = outcome[0]
        if failure is not None:
            raise failure
        return value

    def poll(self, probe: Callable[[], T | None]) -> T:
        """Call ``probe`` on rank 0 until it returns a value, and return the value on every rank.

        ``probe`` waits for at most a second: however long the value takes, ranks wait in short
        exchanges. Its exception is raised on every rank. Collective.
        """
        while (found := self.broadcast(probe)) is None:
            pass
        return found

    def barrier(self, description: str) -> None:
        """Wait until every rank is here, for as long as ``rollout.timeout_s``. Collective.

        Raises:
            UserError: on the leader, naming the ranks that did not come in time; the others fail
                with torch's own error.
            RuntimeError: at once, where another rank has ended.
        """
        if self.size == 1:
            return
        began = time.monotonic()
        try:
            dist.monitored_barrier(
                self.control, timedelta(seconds=self.timeout_s), wait_all_ranks=True
            )
        except RuntimeError as error:
            if time.monotonic() - began < TIMEOUT_FRACTION * self.timeout_s:
                raise RuntimeError(f"{LOST_CONTACT} before its {description}: {error}") from error
            if not self.is_rank0:
                time.sleep(RANK0_ERROR_DELAY_S)
                raise
            problem = f"not every rank finished its {description} in time: {error}"
            remedy = "Look for what slowed those ranks down, or raise rollout.timeout_s"
            raise UserError("rollout.timeout_s", f"{self.timeout_s:g}", problem, remedy) from error

    def compute_capacity_multiple(self, layout: LayoutConfig, max_tokens: int) -> int:
        """Divisor of packs' tokens, at most ``max_tokens`` each, on these ranks' kind of device."""
        return compute_capacity_multiple(layout, max_tokens, cuda=self.device.type == "cuda")

    @contextmanager
    def training(self, description: str) -> Iterator[None]:
        """Name the setting where a collective of training waits longer than ``layout.timeout_s``.

        NCCL ends the process instead, after a message of its own.
        """
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            in_time = time.monotonic() - began < TIMEOUT_FRACTION * self.layout.timeout_s
            if in_time or "timed out" not in str(error).lower():
                raise
            problem = f"another rank did not take part in {description} in time ({error})"
            remedy = (
                "Look for the rank that hangs or has died; if all are well and merely slow, "
                "raise layout.timeout_s"
            )
            raise UserError(
                "layout.timeout_s", f"{self.layout.timeout_s:g}", problem, remedy
            ) from error

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        record_progress()
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def exchange(self, values: Sequence[T]) -> list[T]:
        """Send ``values[rank]`` to each rank, and return the values sent to this rank, by rank.
        Collective."""
        record_progress()
        if self.size == 1:
            return [*values]
        parts = [pickle.dumps(value, pickle.HIGHEST_PROTOCOL) for value in values]
        sizes = self.gather([len(part) for part in parts])
        incoming = [of_rank[self.rank] for of_rank in sizes]
        sent = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, incoming, sizes[self.rank], group=self.control)
        return [pickle.loads(part.numpy()) for part in received.split(incoming)]

    def run_on_all_ranks(self, attempt: Callable[[], T], *, description: str = "part") -> T:
        """Run ``attempt`` on every rank; if it fails on any, raise the lowest failing rank's error
        on all of them.

        For work that is local to a rank (reading files, scoring): ``attempt`` must not be
        collective, unless every rank fails in it where one does. ``description`` names the work in
        the error about ranks that take longer than ``rollout.timeout_s``.
        """
        value: Any = None
        failure: Any = None
        try:
            value = attempt()
        except (Exception, StandstillError) as error:
            failure = error
        self.gather_results(failure, description=description)
        return value

    def gather_results(self, result: T | BaseException, *, description: str) -> list[T]:
        """Return the results of all ranks, by rank. If any is an error, raise the lowest failing
        rank's on all ranks.

        Collective. ``description`` as for :meth:`together`.
        """
        self.barrier(description)
        results: list[Any] = self.gather(
            result.error if isinstance(result, StandstillError) else result
        )
        for each in results:
            if isinstance(each, BaseException):
                raise each
        return results


def initialize(layout: LayoutConfig, *, seed: int, timeout_s: float) -> World:
    """Join the process group (from torchrun's or srun's environment), lay the model-parallel groups
    over it.

    A process group that exists already is used, so that tests can lay several layouts over the same
    processes.
    """
    without_cuda.install()
    cuda = torch.cuda.is_available()
    if cuda:
        alone = (
            torch.cuda.device_count() == 1
        )  # as where Slurm shows each of its tasks no GPU but its own
        torch.cuda.set_device(0 if alone else int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        # Without device_id: torch would split the group for weights, to which servers belong, off a
        # default group that is bound to a device.
        limit = timedelta(seconds=layout.timeout_s)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            timeout=limit,
            **cast(Any, build_rendezvous_args(os.environ, limit)),
        )
    layout = resolve_layout(layout, dist.get_world_size())
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        distributed_timeout_minutes=layout.timeout_s / 60,
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    dp_rank = parallel_state.get_data_parallel_rank()
    replicas: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(replicas, dp_rank, group=control)
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        layout=layout,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=dp_rank,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        replica_of=tuple(replicas),
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        control=control,
        timeout_s=timeout_s,
    )


def shutdown() -> None:
    """Leave the process group, so that torchrun sees clean exits."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
