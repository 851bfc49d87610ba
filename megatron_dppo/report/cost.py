"""Cost of runs, and savings by pruning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import get_args

from megatron_dppo.config.rollout import ServerKind
from megatron_dppo.observe.timers import saving
from megatron_dppo.report.axes import say
from megatron_dppo.report.parts import Chapter, Note, Part, Table
from megatron_dppo.report.run import Record, RunRecord
from megatron_dppo.report.timing import race


@dataclass(frozen=True, slots=True)
class Spent:
    """GPU-hours of one run, or hours of its processes if it has no GPUs."""

    hours: float
    """Hours of steps and evaluations, without the start and checkpoints."""
    by_prompts: float
    """Estimated hours saved by pruning prompts, with the pruning of completions left as it is."""
    by_completions: float
    both: float
    """Hours saved by both levels, which is more than the sum: what is not rolled out is not trained on either."""
    devices: str
    """``8 GPUs``, ``2 processes``; and whether servers are among them."""

    @property
    def unit(self) -> str:
        return "GPU-h" if "GPU" in self.devices else "process-h"

    @property
    def share(self) -> float:
        """The share that both levels saved of the hours of a run without pruning."""
        return self.both / (self.hours + self.both) if self.hours else 0.0


def spent(run: RunRecord) -> Spent:
    """The seconds of every row, times the GPUs or processes that the run held then."""
    servers = _server_gpus(run)
    # In pruning.jsonl ``idle`` counts completions with zero advantage.
    dropped = {row["step"]: (row["pruned"][1], row["idle"][1]) for row in run.census}
    hours, saved = 0.0, [0.0, 0.0, 0.0]
    for row in run.rows:
        held = (_ranks(run, row) + (servers or 0)) / 3600.0
        hours += held * (row.get("perf/step_time", 0.0) + row.get("perf/eval_time", 0.0))
        pruned, zero_advantage = dropped.get(row["step"], (0, 0))
        for i, seconds in enumerate(saving(row, pruned=pruned, zero_advantage=zero_advantage)):
            saved[i] += held * seconds
    return Spent(hours, saved[0], saved[1], saved[2], _devices(run, servers))


def _ranks(run: RunRecord, row: Record) -> int:
    """The trainer's ranks: those of the row, else those of the layout."""
    sizes = (int(run.setting(f"layout.{size}") or 1) for size in ("tp", "pp", "cp", "dp"))
    return int(row.get("perf/ranks", 0)) or prod(sizes)


def _server_gpus(run: RunRecord) -> int | None:
    """GPUs of servers besides the trainer's. None if the run did not start the servers itself: then neither their size
    nor their number is known."""
    if run.setting("rollout.engine") not in get_args(ServerKind) or run.setting("rollout.colocated"):
        return 0
    tp, count = run.setting("rollout.launch.tp"), int(run.setting("rollout.launch.count"))
    if not count:
        return None
    return sum(tp[:count]) if isinstance(tp, list) else count * int(tp)


def _devices(run: RunRecord, servers: int | None) -> str:
    held = max((_ranks(run, row) for row in run.rows), default=0) + (servers or 0)
    # A run that does not say whether it had GPUs is taken for one that had.
    on_gpus = any(row.get("perf/gpus", 1) for row in run.rows)
    word = ("GPU" if on_gpus else "process") + ("" if held == 1 else "s" if on_gpus else "es")
    of_servers = "servers not counted" if servers is None else f"{servers} of them for servers"
    return f"{held} {word}" + (f", {of_servers}" if servers != 0 else "")


def cost(runs: Sequence[RunRecord], price: float | None) -> Chapter:
    """Hours and money: what was spent, what each run estimates that pruning saved, and how long the runs took.

    Args:
        runs: at least one.
        price: of one GPU for one hour; None: each run's own.
    """
    prices = [run.setting("cluster.price_per_gpu_hour") if price is None else price for run in runs]
    priced = any(rate is not None for rate in prices)
    found = [(spent(run), rate) for run, rate in zip(runs, prices, strict=True)]

    def hours(what: str, field: str) -> list[str]:
        return [what, *(f"{say(getattr(of, field), 'number')} {of.unit}" for of, _ in found)]

    def money(what: str, field: str) -> list[str]:
        return [what, *("–" if rate is None else _money(getattr(of, field) * rate) for of, rate in found)]

    rows = [
        ["held", *(of.devices for of, _ in found)],
        hours("spent", "hours"),
        hours("saved by pruning prompts, estimated", "by_prompts"),
        hours("saved by pruning completions, estimated", "by_completions"),
        hours("saved by both, estimated", "both"),
        ["… of what the run would have taken", *(say(of.share, "share") for of, _ in found)],
    ]
    if priced:
        rows.append(["price of an hour", *("–" if rate is None else f"{rate:g}" for rate in prices)])
        rows += [money("money spent", "hours"), money("money saved, estimated", "both")]
    if outcome := race(runs):
        rows.append(["measured, a step", *(outcome.cells(outcome.pace, run.name) for run in runs)])
        if outcome.target is not None:
            what = f"measured, until {say(outcome.target, 'share')} were right"
            rows.append([what, *(outcome.cells(outcome.reached, run.name) for run in runs)])
    lead = (
        "Spent: seconds of all steps and evaluations, times the GPUs or processes held; not starts and checkpoints. "
        "Saved: estimated from each run's own timers, as if every token of a step cost the same; either level with the "
        "pruning of the other as it is, so that both together save more than their sum. Costs that do not "
        "depend on the tokens are not saved: where a run without pruning is on this page, trust the measured times."
    )
    if any(_server_gpus(run) is None for run in runs):
        lead += (
            " Servers that a run was given are not counted, because the number of their GPUs is not known: its hours "
            "and money are those of the trainer alone."
        )
    parts: list[Part] = [Table(["", *(run.name for run in runs)], rows)]
    if outcome and outcome.differs:
        parts.append(Note(outcome.unlike))
    if not priced:
        parts.append(Note("--price, or cluster.price_per_gpu_hour, turns hours into money."))
    return Chapter("cost", "Cost", lead, parts)


def _money(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.2f}" if amount >= 0.1 or not amount else f"{amount:.1g}"
