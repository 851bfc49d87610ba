"""Print a plan as text or JSON (``megatron-dppo plan``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from pydantic_core import to_jsonable_python

from megatron_dppo.config import Config
from megatron_dppo.config.exclusions import format_value
from megatron_dppo.estimate.assumptions import GIB, PREFIX, read_assumptions
from megatron_dppo.estimate.memory import Memory
from megatron_dppo.estimate.plan import Plan, as_json, make_plan
from megatron_dppo.estimate.search import SPARE, Proposal, SearchResult, search
from megatron_dppo.parallel.layout import format_layout
from megatron_dppo.trainer.preflight import format_size

COUNTED = {
    "completions rolled out": "completions",
    "completions trained on": "kept",
    "tokens generated": "generated",
    "tokens trained on": "trained",
}
"""Labels of a step's work, and the fields of :class:`Work`."""


def plan(config: Config, assumptions: Sequence[str], *, json_output: bool) -> int:
    """Print a plan (``megatron-dppo plan``). Return 0, or 1 if the run does not fit.

    Args:
        assumptions: words ``assume.x=y``.

    Raises:
        UserError: see :func:`read_assumptions` and :func:`make_plan`.
    """
    made = make_plan(config, read_assumptions(assumptions))
    print(json.dumps(as_json(made)) if json_output else "\n".join(as_text(made)))
    return 0 if made.fits else 1


def plan_search(
    config: Config,
    assumptions: Sequence[str],
    gpus: int | None,
    *,
    json_output: bool,
) -> int:
    """Print the fastest and the cheapest settings (``megatron-dppo plan --search``). Return 0, or 1
    if no settings fit.

    Args:
        gpus: maximum number of GPUs; None: the run's number.

    Raises:
        UserError: see :func:`read_assumptions` and :func:`search`.
    """
    gpus = _count_gpus(config) if gpus is None else gpus
    found = search(config, read_assumptions(assumptions), gpus)
    if json_output:
        print(json.dumps({"gpus": gpus, **to_jsonable_python(found)}))
    else:
        print("\n".join(_format_result(config, gpus, found)))
    return 1 if found.closest else 0


def _count_gpus(config: Config) -> int:
    cluster = config.cluster
    return (cluster.nodes + cluster.server_nodes) * cluster.gpus_per_node


def _format_result(config: Config, gpus: int, found: SearchResult) -> Iterator[str]:
    yield (
        f"{config.model.path} on at most {gpus} {config.cluster.gpu} GPUs, with {SPARE:.0%} of "
        "the memory to spare"
    )
    if found.on_policy and not found.fastest:
        yield f"\nnothing fits with rollout.ahead={config.rollout.ahead}"
    for goal, each in (
        ("fastest", found.fastest),
        ("cheapest", found.cheapest),
        ("on-policy", found.on_policy),
    ):
        if each:
            yield (
                f"\n{goal}: {each.seconds:.0f} s a step on {_format_gpus(each)}, "
                f"{each.gpu_hours:.3f} GPU-hours a step"
            )
            yield from _format_proposal(each)
    if found.closest:
        lack = f"lacks {found.closest.lack / GIB:.1f} GiB on a GPU"
        yield f"\ndoes not fit: the nearest miss, on {_format_gpus(found.closest)}, {lack}"
        yield from _format_proposal(found.closest)


def _format_gpus(proposal: Proposal) -> str:
    return f"{proposal.gpus} GPU{'s' * (proposal.gpus > 1)}"


def _format_proposal(proposal: Proposal) -> Iterator[str]:
    sides = (("trainer", proposal.actor), ("server", proposal.server.memory))
    yield "  " + ", ".join(
        f"{owner} {memory.total / GIB:.1f} of {memory.room / GIB:.1f} GiB"
        for owner, memory in sides
    )
    yield "  " + (
        " ".join(f"{key}={format_value(value)}" for key, value in proposal.change.items())
        or "as it is"
    )


def as_text(made: Plan) -> Iterator[str]:
    config = made.config
    placement = made.placement
    parameters = made.parameters
    unit, word = (1e9, "billion") if parameters.total >= 1e8 else (1e6, "million")
    active = (
        f", {parameters.active / unit:.2f} in use for a token"
        if parameters.active < parameters.total
        else ""
    )
    yield f"{config.model.path}: {parameters.total / unit:.2f} {word} parameters{active}"
    train = f"{placement.ranks} train ({format_layout(placement.layout)})"
    yield f"{placement.gpus} {config.cluster.gpu} GPUs: {train}, {_format_servers(made)}"
    if made.needs_flash_attn:
        yield (
            "Transformer Engine has no fused attention here without flash-attn: install it, or "
            "set model.spec=torch."
        )
    yield ""
    yield from _format_memory(f"trainer, pipeline stage {made.actor.stage}", made.actor)
    yield from _format_memory("server", made.server.memory)
    room = (
        f"{made.server.tokens:,} tokens a server, {made.server.concurrency:,} completions at once"
    )
    yield f"  the cache takes what is left: {room}"
    yield from _format_disk(made)
    yield ""
    if made.fits:
        yield "It fits."
        for part in (_format_times, _format_efficiency, _format_costs):
            yield ""
            yield from part(made)
    else:
        yield from _format_alternatives(made)
    yield ""
    yield f"assumed (set with {PREFIX}NAME=VALUE; sources: estimate/assumptions.py):"
    for name, value in asdict(made.assumptions).items():
        yield f"  {name} = " + ("as measured" if value is None else f"{value:g}")


def _format_servers(made: Plan) -> str:
    if not made.config.rollout.served:
        return "and the same ones generate in turn"
    servers = made.placement.servers
    where = " on the same GPUs" if made.placement.shared else ""
    generate = "server generates" if len(servers) == 1 else "servers generate"
    return f"{len(servers)} {generate}{where} (tp {', '.join(map(str, sorted(set(servers))))})"


def _format_memory(owner: str, memory: Memory) -> Iterator[str]:
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.parts.items() if size)
    room = (
        f"of {memory.room / GIB:.1f} GiB on a GPU"
        if memory.room
        else "GiB, and the trainer leaves no memory on its GPU"
    )
    yield f"{owner}: {memory.total / GIB:.1f} {room}"
    yield f"  {parts}"


def _format_disk(made: Plan) -> Iterator[str]:
    disk = made.disk
    kind = "adapters" if made.config.model.lora.rank else "weights"
    one = f"{format_size(disk.checkpoint)} ({kind}, their fp32 master copy and two moments)"
    several = (
        f"{disk.checkpoints} checkpoints of {one}"
        if disk.checkpoints > 1
        else f"a checkpoint of {one}"
    )
    export = f", Hugging Face export {format_size(disk.export)}" if disk.export else ""
    sync = f", files for the servers {format_size(disk.sync)}" if disk.sync else ""
    yield f"disk: about {format_size(disk.total)}"
    yield f"  {several}{export}{sync}"


def _format_alternatives(made: Plan) -> Iterator[str]:
    """Yield settings of the same GPUs that fit, else the nearest miss."""
    yield "It does NOT fit. There are no times of a run that does not fit."
    gpus = _count_gpus(made.config)
    found = search(made.config, made.assumptions, gpus)
    yield from _format_result(made.config, gpus, found)
    if found.closest:
        yield "\nLook for settings of more GPUs with --search --gpus N."
        if not made.config.optimizer.offload:
            yield "Or set optimizer.offload=true."


def _format_times(made: Plan) -> Iterator[str]:
    steps = off, on = made.unpruned, made.pruned
    rows: list[tuple[str, ...]] = [("a step, mean over the run", "unpruned", "pruned")]
    for label, field in COUNTED.items():
        rows.append((f"  {label}", *(f"{getattr(step.work, field):,.0f}" for step in steps)))
    rows.append(("  packs per replica and update", str(off.packs), str(on.packs)))
    for phase in off.phases:
        # Phases of 0 seconds are left out, such as a teacher's in a run without a teacher.
        if any(step.phases[phase] for step in steps):
            rows.append((f"  {phase}", *(f"{step.phases[phase]:.1f} s" for step in steps)))
    ahead = " (generation ahead)" if made.config.rollout.ahead else ""
    rows += [
        ("  seconds", f"{off.seconds:.1f}", f"{on.seconds:>12.1f}   {made.speed_up:.2f}x{ahead}"),
        ("  waiting in the pipeline", f"{off.bubble:.0%}", f"{on.bubble:.0%}"),
        ("  stretched by long responses", f"{off.long_tail:.2f}x", f"{on.long_tail:.2f}x"),
    ]
    for label, left, right in rows:
        yield f"{label:<32}{left:>12}{right:>12}"
    now = made.config.cluster.stop_before_limit_s
    verdict = "is too short" if now < made.stop_seconds else "is enough"
    yield (
        f"Before the time limit, an unpruned step and a checkpoint of "
        f"{made.checkpoint_seconds:.0f} s need --signal=B:USR1@{made.stop_seconds}; "
        f"cluster.stop_before_limit_s = {now:.0f} {verdict}."
    )


def _format_efficiency(made: Plan) -> Iterator[str]:
    """Compare pruning with a smaller batch."""
    if made.variance is None or made.efficiency is None:
        yield "The variance of this pruning was not measured: a smaller batch may do as well."
        yield "Set assume.variance to a run's prune/variance_inflation."
        return

    factor = _format_range(made.variance, digits=2)
    worth = _format_range(made.efficiency, digits=2)
    whence = "measured on three tasks" if made.assumptions.variance is None else "assumed"
    yield f"Pruning multiplies the gradient's variance by {factor} ({whence})."
    yield (
        "So does an unpruned step of as many fewer prompts, and takes "
        f"{worth} times as long as the pruned one with this split of the GPUs."
    )


def _format_costs(made: Plan) -> Iterator[str]:
    """Compare costs at equal noise, with fewer prompts; and at equal numbers of steps, with all."""
    hours = made.cost.gpu_hours
    less = "" if made.config.pruning.target_noise else ": less noise"
    rows = [("pruned", [hours]), (f"unpruned, all prompts{less}", [made.cost_unpruned.gpu_hours])]
    if made.efficiency:
        rows.append(
            ("unpruned, fewer prompts: equal noise", [hours * each for each in made.efficiency])
        )
    price = made.config.cluster.price_per_gpu_hour
    header = f"{made.config.run.steps:,} steps"
    yield f"{header:<40}{'GPU-hours':>20}" + (f"{f'at {price:,.2f} each':>20}" if price else "")
    for label, amounts in rows:
        money = f"{_format_range(amounts, price, digits=0):>20}" if price else ""
        yield f"  {label:<38}{_format_range(amounts, digits=1):>20}{money}"
    if not price:
        yield "Set cluster.price_per_gpu_hour to see what they cost."
    if made.efficiency:
        unit = "" if price else " GPU-hours"
        saved = [hours * (each - 1.0) * (price or 1.0) for each in made.efficiency]
        verb = "saves"
        if max(saved) < 0.0:
            verb = "costs another"
            saved = [-each for each in saved]
        yield f"At equal noise, pruning {verb} {_format_range(saved, digits=0)}{unit}."


def _format_range(amounts: Iterable[float], times: float = 1.0, *, digits: int) -> str:
    """Format amounts that may be equal, lowest first."""
    texts = (f"{times * x:,.{digits}f}".replace("-", "−") for x in sorted(amounts))
    return " to ".join(dict.fromkeys(texts))
