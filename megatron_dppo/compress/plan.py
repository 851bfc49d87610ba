"""``megatron-dppo plan --keep``: what a run saves if its policy is made smaller first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_dppo.compress.cut import MULTIPLES, check_cut, sizes
from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.assumptions import GIB, read_assumptions
from megatron_dppo.estimate.memory import shape_of
from megatron_dppo.estimate.plan import Plan, as_json, make_plan
from megatron_dppo.estimate.report import as_text
from megatron_dppo.trainer.preflight import size_text


def plan_with_smaller(
    config: Config, assumed: Sequence[str], *, json_wanted: bool, keep: float | None = None, **how: Any
) -> int:
    """Print the plan of a run, and beside it that of the smaller policy. Returns 0, or 1 if the latter does not fit.

    Args:
        config: of the run.
        assumed: words ``assume.x=y``.
        json_wanted: one JSON object instead of text.
        keep: as ``megatron-dppo compress`` has it.
        how: likewise, ``method`` and ``multiple``, if they are given.

    Raises:
        UserError: for what :func:`make_plan` or :func:`plan_smaller` refuses; for a method without ``keep``.
    """
    if keep is None:
        problem = "says how a policy is made smaller, and not to which share"
        name, value = next(iter(how.items()))
        raise UserError(f"--{name}", value, problem, "Give --keep, too, or leave it out")
    made = make_plan(config, read_assumptions(assumed))
    smaller = plan_smaller(made, keep, **how)
    if json_wanted:
        print(json.dumps(as_json(made) | {"smaller": as_json(smaller)}))
    else:
        words = " ".join(f"--{name} {value}" for name, value in ({"method": "width"} | how).items())
        print("\n".join([*as_text(made), "", *smaller_text(made, smaller, f"--keep {keep:g} {words}")]))
    return 0 if smaller.fits else 1


def plan_smaller(made: Plan, keep: float, method: str = "width", multiple: int | None = None) -> Plan:
    """The same run with what ``compress --keep --method --multiple`` leaves of its policy.

    Raises:
        UserError: naming one of these, for what cannot be left, and for a number that the layout does not divide; as
            ``make_plan``.
    """
    shape, layout = shape_of(made.config.model.path), made.placement.layout
    if multiple is not None and multiple < 1:
        raise UserError("--multiple", multiple, "is no number of parts", "Give 1 or more")
    check_cut(shape, method, keep)
    left = sizes(shape, method, keep, multiple).shape(shape)
    for what, count, before, setting, ranks in (
        ("feed-forward units", left.ffn, shape.ffn, "tp", layout.tp),
        ("experts", left.experts, shape.experts, "ep", layout.ep),
    ):
        if count != before and count % ranks:
            problem = f"leaves {count} {what}, which layout.{setting} = {ranks} does not divide"
            raise UserError("--multiple", multiple or MULTIPLES[method], problem, f"Give a multiple of {ranks}")
    return make_plan(made.config, made.assumptions, left)


def smaller_text(whole: Plan, smaller: Plan, how: str) -> Iterator[str]:
    """A column for the whole policy and one for the smaller."""
    both, (unit, word) = (whole, smaller), whole.parameters.unit
    yield f"{f'with a smaller policy ({how})':<44}{'whole':>14}{'smaller':>14}"
    rows = [
        (f"{word} parameters", [f"{made.parameters.total / unit:.2f}" for made in both]),
        ("memory of the trainer's fullest GPU", [f"{made.actor.total / GIB:.1f} GiB" for made in both]),
        ("disk, about", [size_text(made.disk.total) for made in both]),
        ("completions at once on a server", [f"{made.server.concurrency:,}" for made in both]),
    ]
    for phase in smaller.pruned.phases:
        if any(made.pruned.phases[phase] for made in both):
            rows.append((f"{phase}, a step", [_seconds(made, made.pruned.phases[phase]) for made in both]))
    rows += [
        ("a step", [_seconds(made, made.pruned.seconds) for made in both]),
        ("the run, GPU-hours", [f"{made.cost.gpu_hours:,.1f}" if made.fits else "does not fit" for made in both]),
    ]
    for what, cells in rows:
        yield f"  {what:<42}" + "".join(f"{cell:>14}" for cell in cells)
    if whole.fits and smaller.fits:
        times = whole.pruned.seconds / smaller.pruned.seconds
        yield f"  {times:.2f}x as many steps in the same time, recovery not counted"


def _seconds(made: Plan, seconds: float) -> str:
    return f"{seconds:.1f} s" if made.fits else "–"
