"""Findings of a rehearsal beside the plan, as plain objects."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from megatron_dppo.config import Config
from megatron_dppo.estimate.kernels import stage_passes, update_seconds
from megatron_dppo.estimate.memory import Memory, rank_memory
from megatron_dppo.estimate.roofline import COLLECTIVES, EXCHANGE, INSIDE, PIPELINE, REPLICAS
from megatron_dppo.estimate.time import head_flops, layer_flops
from megatron_dppo.estimate.workload import Setup
from megatron_dppo.rehearse.roofline import KernelCost, costs
from megatron_dppo.rehearse.step import Rehearsed

LISTED = 8
"""Places of memory, and kernels by name."""


def findings(setup: Setup, played: Rehearsed) -> dict[str, Any]:
    """Bytes, FLOPs, seconds and counts of an update. What passes over a few packs show is carried on to all packs."""
    few, many, scored = (costs(each.kernels, setup) for each in (played.few, played.many, played.scored))
    update = {kind: few.get(kind, KernelCost()).towards(cost, played.beyond) for kind, cost in many.items()}
    update = dict(sorted(update.items(), key=lambda each: -each[1].seconds))
    seconds = {kind: cost.seconds for kind, cost in update.items()}
    wires = sum(seconds[kind] for kind in seconds if kind in COLLECTIVES)
    kernels = sum(seconds.values()) - wires
    even = dataclasses.replace(setup, assume=dataclasses.replace(setup.assume, expert_imbalance=1.0))
    planned_seconds = update_seconds(even, played.stage)
    layout, planned = setup.placement.layout, rank_memory(setup, played.stage)
    memory, busy = rehearsed_memory(setup, planned, played), useful_seconds(setup, played)
    once = seconds.get("optimizer", 0.0) + seconds.get(REPLICAS, 0.0)  # after the pipeline's passes
    stages = [each.update.total for each in stage_passes(even)]
    slower = max(stages) / stages[played.stage]  # than this one, which waits for it with each pack
    waiting = (kernels + wires - once) * (slower * (1 + (layout.pp - 1) / (layout.vpp * played.packs)) - 1)
    return {
        "stage": played.stage,
        "packs": played.packs,
        "packs_played": played.many.packs,
        "capacity": played.capacity,
        "fits": memory.fits,
        "memory": {part: {"rehearsed": memory.parts[part], "planned": planned.parts[part]} for part in planned.parts},
        "total": {"rehearsed": memory.total, "planned": planned.total, "room": memory.room},
        "memory_over_plan": memory.total / planned.total,
        "alive_at_peak": dict(played.alive.most_common(LISTED)),
        "update": {kind: dataclasses.asdict(cost) for kind, cost in update.items()},
        "kernel_seconds": kernels,
        "collective_seconds": wires,
        "pipeline_wait_seconds": waiting,
        "planned_kernel_seconds": planned_seconds[0],
        "planned_collective_seconds": planned_seconds[1],
        "log_probability_seconds": sum(c.seconds for c in scored.values()) * played.packs / played.scored.packs,
        "share_of_matrix_rate": {
            "kernels": busy / kernels,
            "and collectives": busy / (kernels + wires),
            "and the pipeline's waits": busy / (kernels + wires + waiting),
        },
        "kernels_per_pack": (len(played.many.kernels) - len(played.few.kernels)) / played.more_packs,
        "kernel_names": dict(Counter(kernel.name for kernel in played.many.kernels).most_common(LISTED)),
        "host_waits_per_update": {
            place: played.few.waits[place] + played.beyond * (count - played.few.waits[place])
            for place, count in played.many.waits.items()
        },
        "host_waits_of_log_probabilities": dict(played.scored.waits),
        "largest": [{"cost": kind, "lower": setting_for(kind, setup.config)} for kind in list(update)[:3]],
    }


def useful_seconds(setup: Setup, played: Rehearsed) -> float:
    """Seconds of an update's model FLOPs at the data sheet's rate, without padding and recomputation, on each rank."""
    each = sum(layer_flops(setup)) * played.tokens + head_flops(setup.shape) * played.responses
    ranks = setup.placement.ranks / (setup.placement.layout.dp or 1)
    return 3.0 * each * played.packs / ranks / setup.rate


def rehearsed_memory(setup: Setup, planned: Memory, played: Rehearsed) -> Memory:
    """The plan's memory with what was rehearsed in its place. Uneven experts, servers' buckets, CUDA's own memory and
    fragmentation cannot be rehearsed, and stay as planned."""
    parts = planned.parts | {name: float(size) for name, size in played.held.items()}
    parts |= {"activations": float(played.passes), "head": 0.0}
    held_there = {"optimizer": setup.config.optimizer.offload, "reference": setup.config.model.reference_on_host}
    for part in (part for part, on_host in held_there.items() if on_host):  # it is not on the device beside the passes
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
            return f"layout.{'tp' if layout.tp > 1 else 'cp'}: a smaller one moves fewer activations, if memory allows"
        case _ if kind == EXCHANGE:
            return "layout.ep and layout.etp: experts within a node, each on one rank"
        case _ if kind == REPLICAS:
            fewer = "loss.updates_per_rollout: fewer updates"
            return fewer if config.optimizer.overlap else "optimizer.overlap=true: sums during the backward pass"
        case _ if kind == PIPELINE:
            return "layout.pp: fewer stages, if memory allows"
    return "pruning.completions: fewer tokens, where the gradient's noise allows it"
