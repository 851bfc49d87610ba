"""A plan in words and columns, and the command that prints it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from megatron_dppo.config import Config
from megatron_dppo.estimate.assumptions import GIB, PREFIX, read_assumptions
from megatron_dppo.estimate.levers import Gain, LeverRow
from megatron_dppo.estimate.memory import Memory
from megatron_dppo.estimate.plan import Plan, as_json, make_plan
from megatron_dppo.parallel.layout import layout_text
from megatron_dppo.settings import short

COUNTED = {
    "completions rolled out": "completions",
    "completions trained on": "kept",
    "tokens generated": "generated",
    "tokens trained on": "trained",
}
"""What the report says of a step's work, by the fields of :class:`Work`."""


def plan(config: Config, assumed: Sequence[str], *, json_wanted: bool) -> int:
    """``megatron-dppo plan``: print it. Returns 0, or 1 where the run does not fit.

    Args:
        config: of the run.
        assumed: words ``assume.x=y``.
        json_wanted: one JSON object instead of text.
    """
    made = make_plan(config, read_assumptions(assumed))
    print(json.dumps(as_json(made)) if json_wanted else "\n".join(as_text(made)))
    return 0 if made.fits else 1


def as_text(made: Plan) -> Iterator[str]:
    """The lines of the report."""
    config, placement, parameters = made.config, made.placement, made.parameters
    active = f", {parameters.active / 1e9:.2f} in use for a token" if parameters.active < parameters.total else ""
    yield f"{config.model.path}: {parameters.total / 1e9:.2f} billion parameters{active}"
    train = f"{placement.ranks} train ({layout_text(placement.layout)})"
    yield f"{placement.gpus} {config.cluster.gpu} GPUs: {train}, {_servers(made)}"
    yield ""
    yield from _memory(f"trainer, pipeline stage {made.actor.stage}", made.actor)
    yield from _memory("server", made.server.memory)
    yield f"  cache of {made.server.tokens:,} tokens a server: {made.server.concurrency:,} completions at once"
    yield ""
    yield "It fits." if made.fits else "It does NOT fit." + ("" if made.remedies else " Nothing that was tried helps.")
    for change in made.remedies:
        yield "  it would with  " + " ".join(f"{key}={short(value)}" for key, value in change.items())
    yield ""
    yield from _times(made)
    yield ""
    yield from _levers(made)
    yield ""
    yield from _costs(made)
    yield ""
    yield f"assumed (set with {PREFIX}NAME=VALUE; estimate/assumptions.py says where each is from):"
    for name, value in asdict(made.assumptions).items():
        yield f"  {name} = " + ("as measured" if value is None else f"{value:g}")


def _servers(made: Plan) -> str:
    if made.config.rollout.engine == "local":
        return "and the same ones generate in turn"
    servers = made.placement.servers
    where = " on the same GPUs" if made.placement.shared else ""
    return f"{len(servers)} servers of tp {', '.join(map(str, sorted(set(servers))))} generate{where}"


def _memory(whose: str, memory: Memory) -> Iterator[str]:
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.parts.items() if size)
    yield f"{whose}: {memory.total / GIB:.1f} of {memory.room / GIB:.1f} GiB on a GPU"
    yield f"  {parts}"


def _times(made: Plan) -> Iterator[str]:
    steps = off, on = made.unpruned, made.pruned
    rows: list[tuple[str, ...]] = [("a step, mean over the run", "unpruned", "pruned")]
    for what, field in COUNTED.items():
        rows.append((f"  {what}", *(f"{getattr(step.work, field):,.0f}" for step in steps)))
    rows.append(("  packs per replica and update", str(off.packs), str(on.packs)))
    for phase in off.phases:
        if any(step.phases[phase] for step in steps):
            rows.append((f"  {phase}", *(f"{step.phases[phase]:.1f} s" for step in steps)))
    ahead = " (generation ahead)" if made.config.rollout.ahead else ""
    rows += [
        ("  seconds", f"{off.seconds:.1f}", f"{on.seconds:>12.1f}   {made.speed_up:.2f}x{ahead}"),
        ("  waiting in the pipeline", f"{off.bubble:.0%}", f"{on.bubble:.0%}"),
        ("  stretched by long responses", f"{off.long_tail:.2f}x", f"{on.long_tail:.2f}x"),
    ]
    for what, left, right in rows:
        yield f"{what:<32}{left:>12}{right:>12}"


def _levers(made: Plan) -> Iterator[str]:
    if made.speed_up_to_accuracy is not None:
        ratio = f"pruning costs steps (ratio {made.steps_ratio:.2f})"
        yield f"to the same accuracy {made.speed_up_to_accuracy:.2f}x: {ratio}"
    yield "what a lever brings where rollouts take such a share of an unpruned step: steps, and to the same accuracy"
    (own, _), *others = made.lever_shares
    heads = [f"this run {own:.0%}", *(f"{share:.0%}" for share, _ in others)]
    yield f"{'':<50}{'steps ratio':>11}" + "".join(f"{head:>15}" for head in heads)
    for row in made.levers:
        yield f"  {row.levers.words:<48}{ratio_text(row):>11}" + "".join(f"{gain_text(g):>15}" for g in row.gains)
    if any(row.steps_ratio and not row.exact for row in made.levers):
        yield "  * measured of the least pruning that leaves out as much or more"


def ratio_text(row: LeverRow) -> str:
    """What a lever costs in steps, with a star where something else was measured that prunes more."""
    return "unknown" if row.steps_ratio is None else f"{row.steps_ratio:.2f}" + "*" * (not row.exact)


def gain_text(gain: Gain) -> str:
    """Times as many steps in the same time, and times as fast to the same accuracy."""
    return f"{gain.step:.2f}x " + ("?" if gain.accuracy is None else f"{gain.accuracy:.2f}x")


def _costs(made: Plan) -> Iterator[str]:
    off, on = made.cost_unpruned, made.cost
    yield f"{made.config.run.steps} steps: {on.gpu_hours:,.1f} GPU-hours, {off.gpu_hours:,.1f} unpruned"
    if on.money is not None and off.money is not None:
        yield f"  money: {on.money:,.0f}, {off.money:,.0f} unpruned; pruning saves {off.money - on.money:,.0f}"
