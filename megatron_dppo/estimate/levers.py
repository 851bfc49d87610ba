"""Speed-ups of each lever, by the share of the step that rollouts take: Amdahl's law, and its price in steps.

A step without pruning takes the time 1: ``r`` of it for rollouts, ``f`` for what no lever shortens (the weights' way to
the servers, scoring, the sum of gradients over replicas), and the rest for training. With a share ``q`` of the prompts
kept, a share ``c`` of the tokens that are trained on kept, and rollouts ``x`` times as fast, it takes

    f + r·q/x + (1 − r − f)·q·c              one after the other,
    f + max(r·q/x, (1 − r − f)·q·c)          rolled out ahead (``rollout.ahead`` of 1 or more).

Groups of equal reward have no gradient, and a step without pruning leaves them out, too. If the share ``m`` of the
groups is mixed, keeping ``k`` of the tokens that were rolled out is thus c = min(k, m)/m of those that are trained on.

The formula knows no long tail of the rollouts and no bubble of a pipeline: :func:`step_time` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_dppo.config import Config
from megatron_dppo.config.loss import ScheduleConfig

SHARES = (0.35, 0.65, 0.75)
"""Shares of a step that rollouts take: short answers on a few machines, long ones, and long ones with tools."""


@dataclass(frozen=True, slots=True)
class Levers:
    """Settings that make a run faster.

        Levers(prompts=0.7, completions=0.5, faster=2.0)

    rolls out 0.7 of the prompts on an engine twice as fast, and trains on half of their completions' tokens. Where
    rollouts take 65% of a step and 60% of the groups are mixed, it takes 0.65·0.7/2 + 0.35·0.7·(0.5/0.6) = 0.43 of
    the time.
    """

    prompts: float = 1.0
    """``pruning.prompts.keep``."""
    completions: float = 1.0
    """``pruning.completions.keep``, a share of the tokens that were rolled out."""
    faster: float = 1.0
    """Times as many tokens per second from the rollout engine."""
    ahead: bool = False
    """Rollouts run ahead (``rollout.ahead`` of 1 or more), on machines of their own."""

    @property
    def words(self) -> str:
        """For a table."""
        pruned = {"prompts": self.prompts, "completions": self.completions}
        parts = [f"{name} {keep:g}" for name, keep in pruned.items() if keep < 1.0]
        parts += [f"rollouts {self.faster:g}x"] if self.faster > 1.0 else []
        parts += ["ahead"] if self.ahead else []
        return ", ".join(parts) or "none"


TABLE = (
    Levers(completions=0.5),
    Levers(completions=0.3),
    Levers(prompts=0.7),
    Levers(prompts=0.5),
    Levers(prompts=0.7, completions=0.5),
    Levers(prompts=0.5, completions=0.3),
    Levers(prompts=0.4, completions=0.3),
    Levers(faster=1.5),
    Levers(faster=2.0),
    Levers(ahead=True),
    Levers(prompts=0.7, completions=0.5, faster=2.0),
    Levers(prompts=0.4, completions=0.3, faster=2.0),
    Levers(prompts=0.7, completions=0.5, ahead=True),
    Levers(prompts=0.7, completions=0.5, faster=2.0, ahead=True),
)
"""The rows that ``megatron-dppo plan`` prints and docs/scaling.md shows."""


class Price(NamedTuple):
    """Measured price of pruning in steps."""

    prompts: float
    completions: float
    steps_ratio: float
    """Steps without pruning over steps with it, to the same accuracy; below 1 where pruning costs steps."""
    interval: tuple[float, float] | None
    """95% interval; None if there are too few seeds for one."""
    seeds: int
    share: float
    """Share of a step without pruning that rollouts took."""
    source: str


_SUMS = 'docs/pruning_measured.md, "Time to an accuracy"'
PRICES = (
    Price(1.0, 0.3, 0.98, (0.93, 1.04), 3, 0.34, _SUMS),
    Price(0.7, 0.5, 0.92, (0.89, 0.94), 5, 0.45, _SUMS),
    Price(0.7, 0.3, 0.88, None, 2, 0.34, _SUMS),
    Price(0.5, 0.3, 0.76, (0.65, 0.90), 5, 0.45, _SUMS),
    Price(0.4, 0.3, 0.84, (0.76, 0.93), 5, 0.45, _SUMS),
)
"""All that was measured of ``neyman``. Newer figures go in here; the tables follow."""


def measured_price(levers: Levers) -> Price | None:
    """Measured price of the same pruning, or else of the least that prunes as much or more; None if there is none.

    Faster rollouts have no price. That of rolling out ahead has not been measured, and counts as none.
    """
    if levers.prompts == levers.completions == 1.0:
        return Price(1.0, 1.0, 1.0, (1.0, 1.0), 0, 0.0, "nothing is pruned")
    found = [p for p in PRICES if p.prompts <= levers.prompts and p.completions <= levers.completions]
    return max(found, default=None, key=lambda price: (price.prompts, price.completions))


def step_speed_up(levers: Levers, share: float, *, fixed: float = 0.0, mixed: float = 1.0) -> float:
    """Seconds of a step without the levers over those with them: the formula at the top of this file.

    Args:
        levers: that are pulled.
        share: r, of a step without them that rollouts take.
        fixed: f, of it that no lever shortens.
        mixed: m, of the groups that have a gradient; 1 where all have one, as with a KL term.
    """
    rollouts = share * levers.prompts / levers.faster
    training = (1.0 - share - fixed) * levers.prompts * min(levers.completions, mixed) / mixed
    return 1.0 / (fixed + (max(rollouts, training) if levers.ahead else rollouts + training))


class Gain(NamedTuple):
    """Speed-up by levers."""

    step: float
    """Times as many steps in the same time."""
    accuracy: float | None
    """Times as fast to the same accuracy: ``step`` times what they cost in steps; None if that is not known."""


@dataclass(frozen=True, slots=True)
class LeverRow:
    """One row of the table."""

    levers: Levers
    steps_ratio: float | None
    """See :class:`Price`; None if nothing was measured that prunes as much."""
    exact: bool
    """Whether that was measured of this very pruning, and not of one that prunes more."""
    gains: tuple[Gain, ...]
    """For each share of rollouts."""


def lever_table(
    shares: Sequence[tuple[float, float]], *, mixed: float, table: Sequence[Levers] = TABLE
) -> Iterator[LeverRow]:
    """Speed-ups of each row of levers.

    Args:
        shares: r and f of :func:`step_speed_up`, for each column.
        mixed: its m.
        table: the rows.
    """
    for levers in table:
        price = measured_price(levers)
        ratio = price and price.steps_ratio
        steps = [step_speed_up(levers, share, fixed=fixed, mixed=mixed) for share, fixed in shares]
        yield LeverRow(
            levers,
            ratio,
            exact=price is not None and (price.prompts, price.completions) == (levers.prompts, levers.completions),
            gains=tuple(Gain(step, step * ratio if ratio else None) for step in steps),
        )


def pruning_of(config: Config) -> Levers | None:
    """The pruning of a run; None if its rules are not those whose price in steps was measured."""
    pruning = config.pruning
    kept = []
    for level in (pruning.prompts, pruning.completions):
        if level.named not in ("none", "neyman") or level.schedule != ScheduleConfig():
            return None
        kept.append(level.keep if level.named == "neyman" else 1.0)
    return Levers(prompts=kept[0], completions=kept[1]) if pruning.refill == "none" else None
