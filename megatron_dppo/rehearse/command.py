"""``megatron-dppo rehearse``: an update of a run on one rank of its layout, on a device that computes nothing."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.assumptions import GIB, read_assumptions
from megatron_dppo.estimate.memory import rank_memory, shape_of
from megatron_dppo.estimate.workload import Setup, place
from megatron_dppo.parallel.layout import layout_text
from megatron_dppo.rehearse.device import load_device
from megatron_dppo.trainer.preflight import check_config

Stage = Literal["first", "last"]


def rehearse(
    config: Config, assumed: Sequence[str], *, rank: int | None, stage: Stage | None, json_wanted: bool
) -> int:
    """Play and print. Returns 0, or 2 if the rank's memory does not fit on its GPU.

    Args:
        config: of the run.
        assumed: words ``assume.x=y``, as for ``plan``.
        rank: of the trainer.
        stage: pipeline stage whose first rank is played; None: the stage with the highest planned peak.
        json_wanted: print one JSON object.

    Raises:
        UserError: as for ``plan``; the rank does not exist; g++ or Transformer Engine's Python is missing.
    """
    began = time.monotonic()
    check_config(config)
    shape = shape_of(config.model.path)
    setup = Setup(config, shape, place(config, shape), read_assumptions(assumed))
    chosen = _rank(setup, rank, stage)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real GPU must not answer in the device's place
    warnings.simplefilter("ignore")
    load_device()
    from megatron_dppo.rehearse.requirements import python_folder
    from megatron_dppo.rehearse.world import prepare

    mode = prepare(python_folder())
    from megatron_dppo.rehearse.findings import findings
    from megatron_dppo.rehearse.step import play

    found = {"rank": chosen, **findings(setup, play(mode, setup, chosen))}
    found["took_s"] = round(time.monotonic() - began, 1)
    print(json.dumps(found) if json_wanted else "\n".join(as_text(setup, found)))
    return 0 if found["fits"] else 2


def _rank(setup: Setup, rank: int | None, stage: Stage | None) -> int:
    ranks, stages = setup.placement.ranks, setup.placement.layout.pp
    if rank is not None:
        if not 0 <= rank < ranks:
            raise UserError("--rank", rank, f"the trainer has {ranks} ranks", f"Give 0 to {ranks - 1}")
        return rank
    fullest = max(range(stages), key=lambda each: rank_memory(setup, each).total)
    return {"first": 0, "last": stages - 1, None: fullest}[stage] * ranks // stages


def as_text(setup: Setup, found: dict[str, Any]) -> Iterator[str]:
    """The lines of the report."""
    config, total, seconds = setup.config, found["total"], found["kernel_seconds"] + found["collective_seconds"]
    where = f"rank {found['rank']} of {setup.placement.ranks} ({layout_text(setup.placement.layout)})"
    yield f"{config.model.path}: {where}, pipeline stage {found['stage']}, on a {config.cluster.gpu}"
    played = f"{found['packs_played']} were played" if found["packs_played"] < found["packs"] else "all were played"
    yield f"an update of {found['packs']} packs of {found['capacity']:,} tokens; {played}, in {found['took_s']:.0f} s"
    yield f"\n{'memory at the peak, GiB':<40}{'rehearsed':>12}{'planned':>12}"
    for part, sizes in found["memory"].items():
        if any(sizes.values()):
            yield f"  {part:<38}{sizes['rehearsed'] / GIB:>12.2f}{sizes['planned'] / GIB:>12.2f}"
    yield f"  {'total':<38}{total['rehearsed'] / GIB:>12.2f}{total['planned'] / GIB:>12.2f}"
    fits = "it fits" if found["fits"] else "it does NOT fit"
    yield f"{fits} into {total['room'] / GIB:.1f} GiB; activations hold the head's, too; of these, made in"
    for made_in, size in found["alive_at_peak"].items():
        yield f"  {size / GIB:6.2f} GiB  {made_in}"
    yield f"\n{'seconds of an update, at usual rates':<40}{'seconds':>10}{'kernels':>10}{'TFLOP':>10}{'GiB':>10}"
    for kind, cost in found["update"].items():
        numbers = f"{cost['kernels']:>10,.0f}{cost['flops'] / 1e12:>10.1f}{cost['bytes'] / GIB:>10.1f}"
        yield f"  {kind:<38}{cost['seconds']:>10.3f}{numbers}"
    yield f"  {'all':<38}{seconds:>10.3f}   and {found['pipeline_wait_seconds']:.3f} waiting in the pipeline"
    planned = found["planned_kernel_seconds"] + found["planned_collective_seconds"]
    yield f"  {'planned: kernels and collectives':<38}{planned:>10.3f}"
    yield f"  {'a pass of log-probabilities':<38}{found['log_probability_seconds']:>10.3f}"
    shares = ", ".join(f"{share:.2f} {what}" for what, share in found["share_of_matrix_rate"].items())
    yield f"model FLOPs over the data sheet's rate: {shares}"
    yield "\nhost waits of an update:"
    for wait, count in found["host_waits_per_update"].items():
        yield f"  {count:6.0f}  {wait}"
    yield "\nthe largest costs, and what lowers them:"
    for each in found["largest"]:
        yield f"  {each['cost']}: {each['lower']}"
    yield "\nRehearsed without a GPU: no values, no measured time, no streams, no allocator, no NCCL; experts are even."
    yield "Not played: generation, scores, teachers, shared prefixes, replayed experts, servers' weights, checkpoints."
