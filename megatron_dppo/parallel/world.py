"""Coordinates of a rank, and the few exchanges of small objects in a step, over gloo."""

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
"""Delay of errors on ranks other than 0 if rank 0's error is more informative."""
TIMEOUT_FRACTION = 0.9
"""A wait that fails after this fraction of its time limit is a timeout; earlier, a rank has
ended."""


@dataclass(frozen=True, slots=True)
class World:
    """Coordinates of one rank. Replica d has the ranks that train on the same packs.

    Dense parameters are cut over ``tp`` consecutive ranks of a pipeline stage, experts over ``etp ·
    ep``. The larger number of ranks, :attr:`shard_group_size`, has one copy of the stage's
    parameters.
    """

    rank: int
    size: int
    layout: LayoutConfig
    """Layout with ``dp`` filled in."""
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
    """Seconds that an exchange in ``control`` waits for the slowest rank."""

    @property
    def dp(self) -> int:
        return self.layout.dp or 1

    @property
    def shard_group_size(self) -> int:
        """Ranks of a pipeline stage that together have one copy of the parameters."""
        return max(self.layout.tp, self.layout.expert_tp * self.layout.ep)

    @property
    def shard_group_rank(self) -> int:
        """This rank's number in its group of :attr:`shard_group_size` ranks."""
        return self.rank % (self.size // self.layout.pp) % self.shard_group_size

    @property
    def is_in_first_shard_group(self) -> bool:
        """Whether this rank and rank 0 have parts of the same copy of the policy."""
        return self.rank % (self.size // self.layout.pp) < self.shard_group_size

    @property
    def is_rank0(self) -> bool:
        """Whether this rank plans, logs and prints for all ranks."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.layout.pp - 1

    def broadcast(self, make: Callable[[], T]) -> T:
        """Return the result of ``make`` on rank 0, or raise its exception, on every rank."""
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
        Collective.

        ``probe`` must return within a second. An exception of ``probe`` is raised on every rank.
        """
        # Ranks wait in short exchanges, even if the value takes long.
        while (found := self.broadcast(probe)) is None:
            pass
        return found

    def barrier(self, description: str) -> None:
        """Wait for every rank, for at most ``rollout.timeout_s``. Collective.

        Raises:
            UserError: on rank 0 after the time limit, naming the missing ranks; other ranks raise
                torch's own error.
            RuntimeError: at once, if another rank has ended.
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
                # Rank 0's error names the missing ranks, and should be printed first.
                time.sleep(RANK0_ERROR_DELAY_S)
                raise
            problem = f"not every rank finished its {description} in time: {error}"
            remedy = "Look for what slowed those ranks down, or raise rollout.timeout_s"
            raise UserError("rollout.timeout_s", f"{self.timeout_s:g}", problem, remedy) from error

    def compute_capacity_multiple(self, layout: LayoutConfig, max_tokens: int) -> int:
        """Return the divisor of the tokens of packs on this kind of device, for packs of at most
        ``max_tokens`` tokens."""
        return compute_capacity_multiple(layout, max_tokens, cuda=self.device.type == "cuda")

    @contextmanager
    def training(self, description: str) -> Iterator[None]:
        """Name the setting if a collective of training waits longer than ``layout.timeout_s``."""
        # NCCL instead ends the process, after its own message.
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
        """Return every rank's value, by rank, on every rank."""
        record_progress()
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def exchange(self, values: Sequence[T]) -> list[T]:
        """Send ``values[rank]`` to each rank; return the values sent to this rank, by rank.
        Collective."""
        record_progress()
        if self.size == 1:
            return [*values]
        parts = [pickle.dumps(value, pickle.HIGHEST_PROTOCOL) for value in values]
        # Sizes first, because all_to_all_single needs the sizes of both sides.
        sizes = self.gather([len(part) for part in parts])
        incoming = [of_rank[self.rank] for of_rank in sizes]
        sent = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, incoming, sizes[self.rank], group=self.control)
        return [pickle.loads(part.numpy()) for part in received.split(incoming)]

    def run_on_all_ranks(self, attempt: Callable[[], T], *, description: str = "part") -> T:
        """Run ``attempt`` on every rank; on failure, raise the lowest failing rank's error on all
        ranks.

        ``attempt`` must not be collective, unless a failure on one rank implies a failure on every
        rank. ``description`` names the work in the error about late ranks.
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
        """Return all ranks' results, or raise the lowest failing rank's error on all ranks.
        Collective."""
        self.barrier(description)
        results: list[Any] = self.gather(
            result.error if isinstance(result, StandstillError) else result
        )
        for outcome in results:
            if isinstance(outcome, BaseException):
                raise outcome
        return results


def initialize(layout: LayoutConfig, *, seed: int, timeout_s: float) -> World:
    """Join the process group of torchrun's or srun's environment, and create the model-parallel
    groups."""
    without_cuda.install()
    cuda = torch.cuda.is_available()
    if cuda:
        # Slurm may expose only its own GPU to each task.
        alone = torch.cuda.device_count() == 1
        torch.cuda.set_device(0 if alone else int(os.environ.get("LOCAL_RANK", "0")))
    # An existing group is reused, so that tests can try several layouts in the same processes.
    if not dist.is_initialized():
        # Without device_id, because torch would split the group for weights, which includes
        # servers, off a default group that is bound to a device.
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
    # A separate group with a time limit for a rollout: a slow generation is no dead network, and
    # NCCL never waits for a generation.
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
