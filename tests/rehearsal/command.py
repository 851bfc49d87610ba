"""``python -m tests.rehearsal``: an update of a run on one rank of its layout, on a device that
computes nothing.

The findings stand beside the plan: bytes, counts, and seconds at the rates of
    ``estimate/kernels.py``."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron_dppo.config import Config
from megatron_dppo.errors import MistakesError, UserError
from megatron_dppo.estimate.assumptions import GIB, read_assumptions
from megatron_dppo.estimate.kernels import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    COLLECTIVES,
    EXCHANGE,
    INSIDE,
    PIPELINE,
    PRODUCTS,
    REPLICAS,
    estimate_kernel_time,
    estimate_message_time,
    estimate_optimizer_time,
    estimate_reduction_time,
    estimate_stage_times,
    estimate_transfer_time,
)
from megatron_dppo.estimate.memory import Memory, estimate_rank_memory, resolve_shape
from megatron_dppo.estimate.time import count_head_flops, count_layer_flops
from megatron_dppo.estimate.workload import Setup, assign_gpus
from megatron_dppo.parallel.layout import format_layout
from megatron_dppo.trainer.preflight import check_config
from tests.rehearsal.device import load_device, missing_parts, python_folder

if TYPE_CHECKING:  # these import torch
    from tests.rehearsal.booking import KernelLaunch
    from tests.rehearsal.step import Rehearsed

Stage = Literal["first", "last"]


def rehearse(
    config: Config,
    assumed: Sequence[str],
    *,
    rank: int | None,
    stage: Stage | None,
    json_wanted: bool,
) -> int:
    """Play and print. Returns 0, or 2 if the rank's memory does not fit on its GPU.

    Args:
        config: of the run.
        assumed: words ``assume.x=y``, as for ``plan``.
        rank: of the trainer.
        stage: pipeline stage whose first rank is played; None: the stage with the highest planned
            peak.
        json_wanted: print one JSON object.

    Raises:
        UserError: as for ``plan``; the rank does not exist.
        MistakesError: packages, g++ or Transformer Engine's Python are missing.
    """
    began = time.monotonic()
    if missing := missing_parts():
        raise MistakesError(missing)
    check_config(config)
    shape = resolve_shape(config.model.path)
    setup = Setup(config, shape, assign_gpus(config, shape), read_assumptions(assumed))
    chosen = _rank(setup, rank, stage)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real GPU must not answer in the device's place
    warnings.simplefilter("ignore")
    load_device()
    from tests.rehearsal.patches import prepare

    mode = prepare(python_folder())
    from tests.rehearsal.step import play

    found = {"rank": chosen, **findings(setup, play(mode, setup, chosen))}
    found["took_s"] = round(time.monotonic() - began, 1)
    print(json.dumps(found) if json_wanted else "\n".join(as_text(setup, found)))
    return 0 if found["fits"] else 2


def _rank(setup: Setup, rank: int | None, stage: Stage | None) -> int:
    ranks, stages = setup.placement.ranks, setup.placement.layout.pp
    if rank is not None:
        if not 0 <= rank < ranks:
            raise UserError(
                "--rank", rank, f"the trainer has {ranks} ranks", f"Give 0 to {ranks - 1}"
            )
        return rank
    fullest = max(range(stages), key=lambda each: estimate_rank_memory(setup, each).total)
    return {"first": 0, "last": stages - 1, None: fullest}[stage] * ranks // stages


def as_text(setup: Setup, found: dict[str, Any]) -> Iterator[str]:
    """The lines of the report."""
    config, total, seconds = (
        setup.config,
        found["total"],
        found["kernel_seconds"] + found["collective_seconds"],
    )
    where = (
        f"rank {found['rank']} of {setup.placement.ranks} ({format_layout(setup.placement.layout)})"
    )
    yield (
        f"{config.model.path}: {where}, pipeline stage {found['stage']}, on a {config.cluster.gpu}"
    )
    played = (
        f"{found['packs_played']} were played"
        if found["packs_played"] < found["packs"]
        else "all were played"
    )
    yield (
        f"an update of {found['packs']} packs of {found['capacity']:,} tokens; {played}, in "
        f"{found['took_s']:.0f} s"
    )
    yield f"\n{'memory at the peak, GiB':<40}{'rehearsed':>12}{'planned':>12}"
    for part, sizes in found["memory"].items():
        if any(sizes.values()):
            yield f"  {part:<38}{sizes['rehearsed'] / GIB:>12.2f}{sizes['planned'] / GIB:>12.2f}"
    yield f"  {'total':<38}{total['rehearsed'] / GIB:>12.2f}{total['planned'] / GIB:>12.2f}"
    fits = "it fits" if found["fits"] else "it does NOT fit"
    yield (
        f"{fits} into {total['room'] / GIB:.1f} GiB; activations hold the head's, too; of these, "
        "made in"
    )
    for made_in, size in found["alive_at_peak"].items():
        yield f"  {size / GIB:6.2f} GiB  {made_in}"
    yield f"\n{'seconds of an update, at usual rates':<40}{'seconds':>10}{'kernels':>10}{'TFLOP':>10}{'GiB':>10}"
    for kind, cost in found["update"].items():
        numbers = (
            f"{cost['kernels']:>10,.0f}{cost['flops'] / 1e12:>10.1f}{cost['bytes'] / GIB:>10.1f}"
        )
        yield f"  {kind:<38}{cost['seconds']:>10.3f}{numbers}"
    yield (
        f"  {'all':<38}{seconds:>10.3f}   and {found['pipeline_wait_seconds']:.3f} waiting in "
        "the pipeline"
    )
    planned = found["planned_kernel_seconds"] + found["planned_collective_seconds"]
    yield f"  {'planned: kernels and collectives':<38}{planned:>10.3f}"
    yield f"  {'a pass of log-probabilities':<38}{found['log_probability_seconds']:>10.3f}"
    shares = ", ".join(
        f"{share:.2f} {what}" for what, share in found["share_of_matrix_rate"].items()
    )
    yield f"model FLOPs over the data sheet's rate: {shares}"
    yield "\nhost waits of an update:"
    for wait, count in found["host_waits_per_update"].items():
        yield f"  {count:6.0f}  {wait}"
    yield "\nthe largest costs, and what lowers them:"
    for each in found["largest"]:
        yield f"  {each['cost']}: {each['lower']}"
    yield (
        "\nRehearsed without a GPU: no values, no measured time, no streams, no allocator, no "
        "NCCL; experts are even."
    )
    yield (
        "Not played: generation, scores, teachers, shared prefixes, replayed experts, servers' "
        "weights, checkpoints."
    )


LISTED = 8
"""Places of memory, and kernels by name."""


def findings(setup: Setup, played: Rehearsed) -> dict[str, Any]:
    """Bytes, FLOPs, seconds and counts of an update. What passes over a few packs show is carried
    on to all packs."""
    few, many, scored = (
        costs(each.kernels, setup) for each in (played.few, played.many, played.scored)
    )
    update = {
        kind: few.get(kind, KernelCost()).towards(cost, played.beyond)
        for kind, cost in many.items()
    }
    update = dict(sorted(update.items(), key=lambda each: -each[1].seconds))
    seconds = {kind: cost.seconds for kind, cost in update.items()}
    wires = sum(seconds[kind] for kind in seconds if kind in COLLECTIVES)
    kernels = sum(seconds.values()) - wires
    even = dataclasses.replace(
        setup, assume=dataclasses.replace(setup.assume, expert_imbalance=1.0)
    )
    planned_seconds = update_seconds(even, played.stage)
    layout, planned = setup.placement.layout, estimate_rank_memory(setup, played.stage)
    memory, busy = rehearsed_memory(setup, planned, played), useful_seconds(setup, played)
    once = seconds.get("optimizer", 0.0) + seconds.get(REPLICAS, 0.0)  # after the pipeline's passes
    stages = [each.update.total for each in estimate_stage_times(even)]
    slower = max(stages) / stages[played.stage]  # than this one, which waits for it with each pack
    waiting = (kernels + wires - once) * (
        slower * (1 + (layout.pp - 1) / (layout.vpp * played.packs)) - 1
    )
    return {
        "stage": played.stage,
        "packs": played.packs,
        "packs_played": played.many.packs,
        "capacity": played.capacity,
        "fits": memory.fits,
        "memory": {
            part: {"rehearsed": memory.parts[part], "planned": planned.parts[part]}
            for part in planned.parts
        },
        "total": {"rehearsed": memory.total, "planned": planned.total, "room": memory.room},
        "memory_over_plan": memory.total / planned.total,
        "alive_at_peak": dict(played.alive.most_common(LISTED)),
        "update": {kind: dataclasses.asdict(cost) for kind, cost in update.items()},
        "kernel_seconds": kernels,
        "collective_seconds": wires,
        "pipeline_wait_seconds": waiting,
        "planned_kernel_seconds": planned_seconds[0],
        "planned_collective_seconds": planned_seconds[1],
        "log_probability_seconds": sum(c.seconds for c in scored.values())
        * played.packs
        / played.scored.packs,
        "share_of_matrix_rate": {
            "kernels": busy / kernels,
            "and collectives": busy / (kernels + wires),
            "and the pipeline's waits": busy / (kernels + wires + waiting),
        },
        "kernels_per_pack": (len(played.many.kernels) - len(played.few.kernels))
        / played.more_packs,
        "kernel_names": dict(
            Counter(kernel.name for kernel in played.many.kernels).most_common(LISTED)
        ),
        "host_waits_per_update": {
            place: played.few.waits[place] + played.beyond * (count - played.few.waits[place])
            for place, count in played.many.waits.items()
        },
        "host_waits_of_log_probabilities": dict(played.scored.waits),
        "largest": [
            {"cost": kind, "lower": setting_for(kind, setup.config)} for kind in list(update)[:3]
        ],
    }


def update_seconds(setup: Setup, stage: int) -> tuple[float, float]:
    """Return planned seconds of an update's kernels and of its collectives on a rank of a stage,
    without waits."""
    packs, one = setup.packs, estimate_stage_times(setup)[stage].update
    kernels = packs * one.kernels + estimate_optimizer_time(setup, stage)
    return kernels, packs * (one.messages + one.exchange) + estimate_reduction_time(setup, stage)


def useful_seconds(setup: Setup, played: Rehearsed) -> float:
    """Seconds of an update's model FLOPs at the data sheet's rate, without padding and
    recomputation, on each rank."""
    each = (
        count_layer_flops(setup) * played.tokens + count_head_flops(setup.shape) * played.responses
    )
    ranks = setup.placement.ranks / (setup.placement.layout.dp or 1)
    return 3.0 * each * played.packs / ranks / setup.rate


def rehearsed_memory(setup: Setup, planned: Memory, played: Rehearsed) -> Memory:
    """The plan's memory with what was rehearsed in its place. Uneven experts, servers' buckets,
    CUDA's own memory and fragmentation cannot be rehearsed, and stay as planned."""
    parts = planned.parts | {name: float(size) for name, size in played.held.items()}
    parts |= {"activations": float(played.passes), "head": 0.0}
    held_there = {
        "optimizer": setup.config.optimizer.offload,
        "reference": setup.config.model.reference_on_host,
    }
    for part in (
        part for part, on_host in held_there.items() if on_host
    ):  # it is not on the device beside the passes
        parts[part] = max(parts[part] - played.passes, 0.0)
    return Memory(played.stage, parts, planned.room)


def setting_for(kind: str, config: Config) -> str:
    """The setting that lowers a cost."""
    layout = config.layout
    match kind:
        case "layers: products" if config.model.recompute != "none":
            return f"model.recompute, {config.model.recompute} now: none, if memory allows"
        case "layers: attention":
            return "rollout.max_response_tokens: attention grows with its square"
        case "layers: norms, activations, copies" if layout.tp > 1 and not layout.sequence_parallel:
            return "layout.sequence_parallel=true: each rank normalises its share of the tokens"
        case "optimizer":
            return "loss.updates_per_rollout: fewer updates"
        case _ if kind == INSIDE:
            return (
                f"layout.{'tp' if layout.tp > 1 else 'cp'}: a smaller one moves fewer "
                "activations, if memory allows"
            )
        case _ if kind == EXCHANGE:
            return "layout.ep and layout.etp: experts within a node, each on one rank"
        case _ if kind == REPLICAS:
            fewer = "loss.updates_per_rollout: fewer updates"
            return (
                fewer
                if config.optimizer.overlap
                else "optimizer.overlap=true: sums during the backward pass"
            )
        case _ if kind == PIPELINE:
            return "layout.pp: fewer stages, if memory allows"
    return "pruning.completions: fewer tokens, where the gradient's noise allows it"


ATTENTION = {"te::attention_fwd": ATTENTION_FORWARD, "te::attention_bwd": ATTENTION_BACKWARD}
MESSAGES = ("c10d::send", "c10d::recv")


@dataclass(slots=True)
class KernelCost:
    """Work of one kind."""

    kernels: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def towards(self, more: KernelCost, times: float) -> KernelCost:
        """This cost and so many times what ``more`` has beyond it."""
        pairs = ((getattr(self, name), getattr(more, name)) for name in self.__slots__)
        return KernelCost(*(mine + times * (theirs - mine) for mine, theirs in pairs))


def costs(kernels: Sequence[KernelLaunch], setup: Setup) -> dict[str, KernelCost]:
    """Work by kind."""
    found: dict[str, KernelCost] = defaultdict(KernelCost)
    for kernel in kernels:
        cost = found[kind_of(kernel)]
        cost.kernels += 1
        cost.flops += kernel.flops
        cost.bytes += kernel.bytes
        cost.seconds += seconds(kernel, setup)
    return dict(found)


def kind_of(kernel: KernelLaunch) -> str:
    """Kind of work of a kernel or collective."""
    name, place = kernel.name, kernel.place
    optimizer = "multi_tensor" in name or "/optimizer/" in place or "param_and_grad_buffer" in place
    if name.startswith("c10d::"):
        if "context_parallel" in place:
            return INSIDE
        if name.startswith(MESSAGES):
            return PIPELINE
        return (
            REPLICAS
            if optimizer
            else EXCHANGE
            if "token_dispatcher" in place or "alltoall" in name
            else INSIDE
        )
    if optimizer:
        return "optimizer"
    if "policy_head" in place or "policy_head" in name:
        return "head: products" if kernel.flops else "head: passes over logits"
    if name in ATTENTION:
        return "layers: attention"
    return "layers: products" if kernel.flops else "layers: norms, activations, copies"


def seconds(kernel: KernelLaunch, setup: Setup) -> float:
    """Least seconds of a kernel or a collective."""
    if kernel.name.startswith("c10d::"):
        kind = kind_of(kernel)
        if kernel.name.startswith(MESSAGES):
            return (
                0.0 if "recv" in kernel.name else estimate_message_time(setup, kind, kernel.bytes)
            )
        ranks, times = (
            int(kernel.name.rpartition(" ")[2]),
            2.0 if "allreduce" in kernel.name else 1.0,
        )
        return estimate_transfer_time(setup, kind, ranks, kernel.bytes, times=times)
    dtype = "bf16" if kernel.dtype.itemsize == 2 else "fp32"
    share = ATTENTION.get(kernel.name, PRODUCTS)
    return estimate_kernel_time(
        setup, kernel.flops, kernel.bytes, share=share, dtype=dtype, product=kernel.product
    )
