"""Play the update of a run on one rank: packs of the run's lengths, in its layout, without weights
and data."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

import megatron_dppo.models.policy_head_triton  # noqa: F401
from megatron_dppo.config import LayoutConfig
from megatron_dppo.estimate.workload import Setup
from megatron_dppo.models import actor as actor_module
from megatron_dppo.models.actor import Actor, Loss, Sums
from megatron_dppo.models.frozen import Reference
from megatron_dppo.parallel.layout import count_interleaved_packs
from megatron_dppo.parallel.world import World, initialize
from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.rl.packing import pack_sequences, resolve_min_packs
from megatron_dppo.rl.types import Pack
from megatron_dppo.trainer.functions import load_objective
from megatron_dppo.trainer.learner import PolicyLoss, get_importance_cap
from tests.rehearsal.booking import Allocation, Book, KernelLaunch
from tests.rehearsal.dispatch import RehearsalMode
from tests.rehearsal.patches import one_rank
from tests.rehearsal.te_kernels import set_attention_pairs


@contextmanager
def known_reads(
    mode: RehearsalMode, layout: LayoutConfig, experts_per_token: int
) -> Iterator[None]:
    """Answer reads of packs on their way through a policy; ``experts_per_token`` is 0 without
    experts."""
    to_device, tokens = actor_module.to_device, 0

    def note(pack: Pack, *more: Any) -> Any:
        nonlocal tokens
        tokens = len(pack.token_ids) // layout.cp // (layout.tp if layout.sequence_parallel else 1)
        return to_device(pack, *more)

    def read(tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.is_floating_point():
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        return _even_counts(tensor, tokens * experts_per_token) if experts_per_token else None

    with mock.patch.object(actor_module, "to_device", note), mock.patch.object(mode, "read", read):
        yield


def _even_counts(tensor: torch.Tensor, routed: int) -> torch.Tensor | None:
    """Counts that a token dispatcher reads, if this rank sends ``routed`` copies and all experts
    get equally many."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__ == "MoEAlltoAllTokenDispatcher":
            return _count(owner, tensor, routed)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _count(dispatcher: Any, tensor: torch.Tensor, routed: int) -> torch.Tensor | None:
    local, ep, tp = dispatcher.num_local_experts, dispatcher.ep_size, dispatcher.tp_size
    counts = {
        "input_splits": routed // ep,
        "output_splits": routed // ep,
        "output_splits_tp": routed,
        "tokens_per_expert": routed * tp // local,
        "num_global_tokens_per_local_expert": routed // (ep * local),
    }
    named = next(
        (count for name, count in counts.items() if getattr(dispatcher, name, None) is tensor), None
    )
    if named is None and tensor.shape == (local,):
        named = counts["tokens_per_expert"]
    return None if named is None else torch.full(tuple(tensor.shape), named, dtype=tensor.dtype)


SUMS = ("tokens", "fresh_tokens", "train/loss")
WORKSPACES = (":get_cublas_workspace", ":get_dummy_wgrad")
"""Functions of Transformer Engine that allocate once for the whole run, which the plan has in what
it reserves."""


@dataclass(frozen=True, slots=True)
class Booked:
    """Work of passes over some packs."""

    packs: int
    kernels: list[KernelLaunch]
    waits: Counter[str]
    """By reason and place."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Work and memory of one rank."""

    stage: int
    capacity: int
    """Tokens of a pack."""
    packs: int
    """Packs of an update of the run; fewer are played, all like the pack that is nearest to the
    mean."""
    tokens: int
    """Tokens of the sequences in a played pack."""
    responses: int
    """Those of them that are scored."""
    held: dict[str, int]
    """Bytes of weights, gradients, optimizer and reference."""
    passes: int
    """Bytes at the peak of an update above those held, without :data:`WORKSPACES`."""
    alive: Counter[str]
    """These bytes by the place that allocated them."""
    few: Booked
    """An update over the fewer of :func:`packs_to_play`."""
    many: Booked
    """An update over the more of them."""
    scored: Booked
    """A pass of log-probabilities over the packs of ``many``."""

    @property
    def more_packs(self) -> int:
        """Packs of ``many`` beyond those of ``few``; 1 if they are the same."""
        return max(self.many.packs - self.few.packs, 1)

    @property
    def beyond(self) -> float:
        """Packs of an update beyond those of ``few``, in units of ``more_packs``."""
        return (self.packs - self.few.packs) / self.more_packs


def play(mode: RehearsalMode, setup: Setup, rank: int) -> Rehearsed:
    """Play updates of the run of ``setup`` on one rank. The process must be prepared
    (:func:`world.prepare`)."""
    config, layout, placement = setup.config, setup.placement.layout, setup.placement
    reads = known_reads(mode, layout, setup.shape.experts_per_token)
    with one_rank(placement.ranks, rank), mode, reads:
        world = initialize(layout, seed=1, timeout_s=60.0)
        book = mode.book
        packs, pack = mean_pack(setup, world)
        held, actor = actor_of(book, setup, world)
        if config.loss.kl_coef > 0 and not config.model.lora.rank:
            held["reference"] = _reference_bytes(book, setup, world)
        set_attention_pairs(
            float(np.square(np.diff(pack.cu_seqlens).astype(float)).sum()) / layout.cp**2
        )
        few, many = ([pack] * count for count in packs_to_play(packs, layout))
        built, before, peaks = _settled(book), set(book.allocations), _note_peaks(book, actor)
        _update(actor, setup, few)  # what is made once
        first = _booked(book, few, lambda: _update(actor, setup, few))
        second = _booked(book, many, lambda: _update(actor, setup, many))
        peak, at_peak = peaks[-1]
        alive = Counter[str]()
        for key, allocation in at_peak.items():
            if key not in before:
                alive[allocation.place] += allocation.bytes
        workspaces = sum(alive.pop(place) for place in list(alive) if place.endswith(WORKSPACES))
        scored = _booked(book, many, lambda: actor.log_probabilities(many))
    return Rehearsed(
        stage=world.pp_rank,
        capacity=len(pack.token_ids),
        packs=packs,
        tokens=int(pack.token_ids.astype(bool).sum()),  # padding is 0
        responses=len(pack.targets),
        held=held,
        passes=peak - built - workspaces,
        alive=alive,
        few=first,
        many=second,
        scored=scored,
    )


def packs_to_play(packs: int, layout: LayoutConfig) -> tuple[int, int]:
    """Counts of packs for two updates that show the memory and the work of an update of
    ``packs`` packs.

    The first count is that of pipeline stages. The second is at least twice that; with virtual
    stages, it is a count that the interleaved schedule takes in groups of the same size as all
    packs, so that as many packs are in flight.
    """

    def alike(count: int) -> bool:
        return layout.vpp == 1 or count_interleaved_packs(
            count, layout.pp
        ) == count_interleaved_packs(packs, layout.pp)

    return min(layout.pp, packs), next(filter(alike, range(2 * layout.pp, packs)), packs)


def mean_pack(setup: Setup, world: World) -> tuple[int, Pack]:
    """How many packs a replica has in an update, and the one whose tokens and attention are nearest
    to their mean.

    Response lengths are quantiles of the planned distribution; prompts have the mean length.
    """
    config, layout, lengths, work = setup.config, setup.placement.layout, setup.lengths, setup.work
    room, prompt = config.pack.max_tokens, max(round(setup.prompt), 1)
    sequences = max(round(work.kept / work.updates / (layout.dp or 1)), 1)
    longer = 1.0 - (np.arange(sequences) + 0.5) / sequences
    responses = lengths.limit * (1.0 - longer ** (1.0 / max(lengths.exponent, 1e-3)))
    responses = np.clip(responses.astype(int), 1, room - prompt - layout.pack_multiple)
    packing = pack_sequences(
        prompt + responses,
        ranks=1,
        max_tokens=room,
        align=layout.row_multiple,
        capacity_multiple=world.compute_capacity_multiple(layout, room),
        window=config.pack.window,
        min_per_rank=resolve_min_packs(config.pack.min_per_rank, layout.pp),
        least_per_rank=layout.min_packs,
    )
    (packs,) = packing.packs
    each = [prompt + responses[list(rows)] for rows in packs]
    sizes = np.array([[one.sum(), np.square(one.astype(float)).sum()] for one in each])
    nearest = packs[int(np.abs(sizes / sizes.mean(axis=0) - 1.0).sum(axis=1).argmin())]
    samples = [_sample(prompt, int(responses[i])) for i in nearest]
    return len(packs), build_pack(samples, packing.capacity, pad_id=0, align=layout.row_multiple)


def _sample(prompt: int, response: int) -> TrainingSample:
    ids, masked = np.ones(prompt, np.int32), np.ones(response, bool)
    logprobs = np.full(response, -1.0, np.float32)
    return TrainingSample(
        ids, np.ones(response, np.int32), logprobs, masked, 1.0, 1.0 / response, version=0
    )


def actor_of(book: Book, setup: Setup, world: World) -> tuple[dict[str, int], Actor]:
    """The run's actor, without its weights' values, and the bytes of its weights, gradients and
    optimizer."""
    config, marks = setup.config, [_settled(book)]

    def optimizer_of(*arguments: Any, **options: Any) -> Any:
        marks.append(book.bytes_now)
        return make(*arguments, **options)

    make = actor_module.get_megatron_optimizer
    with mock.patch.object(actor_module, "get_megatron_optimizer", optimizer_of):
        actor = Actor(
            setup.shape, config.model, setup.placement.layout, config.optimizer, world,
            temperature=config.rollout.temperature,
            load=lambda chunks: marks.append(book.bytes_now),
        )  # fmt: skip
    if (
        not world.is_last_stage or world.tp_rank or world.cp_rank
    ):  # ranks that the loss's sums reach over the network
        actor._sum_over_replicas = lambda mine: dict.fromkeys(SUMS, 1.0)  # type: ignore[method-assign]
    marks.append(_settled(book))
    held = dict(zip(("weights", "gradients", "optimizer"), np.diff(marks).tolist(), strict=True))
    if actor._offloaded is not None:
        held["optimizer"] = actor._offloaded._host.numel()
    return held, actor


def _reference_bytes(book: Book, setup: Setup, world: World) -> int:
    """Bytes of the frozen copy, which is not kept."""
    before = _settled(book)
    frozen = Reference(
        setup.shape, setup.config.model, setup.placement.layout, world, temperature=1.0
    )
    size = _settled(book) - before
    del frozen
    return size


def _settled(book: Book) -> int:
    """Bytes in use, without what only cycles keep."""
    gc.collect()
    return book.bytes_now


def _note_peaks(book: Book, actor: Actor) -> list[tuple[int, dict[int, Allocation]]]:
    """Bytes at the peak of each update's passes, before the optimizer's step, and what is alive
    there."""
    noted, accumulate = [], actor.accumulate

    def noting(packs: Sequence[Pack], loss: Loss) -> list[Sums]:
        outputs = accumulate(packs, loss)
        noted.append((book.bytes_peak, book.at_peak))
        return outputs

    actor.accumulate = noting  # type: ignore[method-assign]
    return noted


def _booked(book: Book, packs: Sequence[Pack], work: Callable[[], object]) -> Booked:
    gc.collect()
    book.clear()
    work()
    return Booked(len(packs), list(book.kernels), book.waits.copy())


def _update(actor: Actor, setup: Setup, packs: Sequence[Pack]) -> None:
    """One update, with log-probabilities of earlier passes if the run's loss reads them."""
    config = setup.config
    loss = PolicyLoss(
        load_objective(config.loss),
        kl_coef=config.loss.kl_coef,
        tis_cap=get_importance_cap(config),
        version=0,
        entropy_coef=config.loss.entropy.coef or None,
    )
    loss.take_scored()
    last = actor.world.is_last_stage
    if last and config.loss.updates_per_rollout > 1:
        packs = [replace(pack, old_logprobs=pack.engine_logprobs) for pack in packs]
    if last and config.loss.kl_coef > 0:
        packs = [replace(pack, reference_logprobs=pack.engine_logprobs) for pack in packs]
    actor.update(packs, loss, lr=1e-7)
