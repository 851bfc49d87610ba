"""Rollouts ahead of training: the order of a step's parts, and the age of rollouts over a death."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.config import Config
from megatron_dppo.rl.types import StepPlan
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts
from megatron_dppo.train import Trainer
from tests.ranks import RankPool
from tests.small_runs import (
    SAVED,
    Mortal,
    begin_run,
    die,
    live,
    recorded,
    rows,
    small_run,
    write_run,
)

POLICY = write_run


@dataclass(frozen=True)
class Life:
    """Work of a run from a start to its end or death."""

    selected: list[int]
    """Steps whose prompts were drawn."""
    trained: dict[int, list[int]]
    """Prompts of each step."""


def record_life(rank: int, size: int, config: Config, dies_at: int) -> Life:
    life = Life([], {})

    class Recorded(Mortal):
        def select(self, step: int) -> StepRollouts:
            life.selected.append(step)
            return super().select(step)

        def train(self, plan: StepPlan, rollouts: CompleteRollouts) -> dict[str, float]:
            metrics = super().train(plan, rollouts)
            life.trained[self.step] = rollouts.metadata.prompt_ids.tolist()
            return metrics

    Recorded.dies_at = dies_at
    with ExitStack() as to_close, suppress(KeyboardInterrupt):
        begin_run(config, Recorded, to_close).run()
    return life


def test_no_prompt_is_lost_however_far_ahead_a_run_resumes(
    policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Three steps are in flight in the checkpoint. With fewer ahead, rollouts that are too old are
    repeated, and prompts without a request are part of the next checkpoint."""

    def call(run: str, ahead: int, dies_at: int = 9, saves: int = SAVED) -> tuple[Any, ...]:
        settings = (
            f"rollout.ahead={ahead}",
            "run.steps=6",
            f"run.checkpoint_every={saves}",
            "layout.dp=1",
        )
        return record_life, small_run(policy, tmp_path / run, *settings), dies_at

    def lags(run: str) -> list[tuple[float, float]]:
        return [(row["staleness/max"], row["staleness/mean"]) for row in rows(tmp_path / run)[1:]]

    [whole], [died] = ranks.in_turn(1, call("whole", 3), call("died", 3, dies_at=4))
    assert lags("whole") == [(float(lag), float(lag)) for lag in (0, 1, 2, 3, 3, 3)]
    assert {row["staleness/bound"] for row in rows(tmp_path / "whole")[1:]} == {3.0}
    assert sorted(whole.selected) == sorted(whole.trained) == list(range(6))
    assert sorted(died.selected) == list(range(6))
    assert list(died.trained) == [0, 1, 2, 3]
    for run in ("same", "fewer", "none"):
        shutil.copytree(tmp_path / "died", tmp_path / run)

    on_policy = call("none", 0, dies_at=4, saves=1)
    resumed = ranks.in_turn(1, call("same", 3), call("fewer", 1), on_policy, call("none", 1))
    steps_of_lives = ((3, 4, 5), (3, 4, 5), (3,), (4, 5))
    for [life], steps in zip(resumed, steps_of_lives, strict=True):
        assert life == Life([], {step: whole.trained[step] for step in steps})
    assert rows(tmp_path / "same") == rows(tmp_path / "whole")
    assert lags("fewer")[3:] == [(0.0, 0.0), (1.0, 1.0), (1.0, 1.0)]
    assert lags("none")[3:] == [(0.0, 0.0), (0.0, 0.0), (1.0, 1.0)]
    assert len(list((tmp_path / "none/checkpoints/iter_0000004").glob("rollouts*"))) == 2


def record_order(rank: int, size: int, config: Config) -> str:
    """Return the parts of a run's steps, and the calls of its collector, in their order."""
    order: list[str] = []
    with ExitStack() as to_close:
        trainer = begin_run(config, Trainer, to_close)
        for name in ("select", "plan", "train", "sync"):
            setattr(trainer, name, recorded(order, getattr(trainer, name)))
        for name in ("request", "finish"):
            setattr(trainer.collector, name, recorded(order, getattr(trainer.collector, name)))
        trainer.run()
    return " ".join(order)


def test_next_steps_are_requested_before_a_step_trains(
    policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    on_policy = small_run(policy, tmp_path / "on-policy", "run.steps=2", "eval.problems=0")
    two_ahead = small_run(
        policy, tmp_path / "two", "run.steps=4", "rollout.ahead=2", "eval.problems=0"
    )
    assert ranks.in_turn(1, (record_order, on_policy), (record_order, two_ahead)) == [
        [
            "sync 0 select 0 request finish plan train sync 1 select 1 request finish plan train "
            "sync 2"
        ],
        [
            "sync 0 select 0 request finish plan select 1 request select 2 request train sync 1 "
            "finish plan select 3 request train sync 2 finish plan train sync 3 finish plan train "
            "sync 4"
        ],
    ]


def test_rollouts_stay_fresh_while_no_weight_moves(
    policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Groups of equal rewards keep nothing: the engine stays at version 0, over a death as well.
    The first update makes the rollouts in flight one version old, whatever the number of steps."""
    settings = ("rollout.ahead=1", "run.steps=6")
    equal = f"reward.function={policy}/equal.py:compute_score"
    first, second = (
        small_run(policy, tmp_path, *settings, equal),
        small_run(policy, tmp_path, *settings),
    )
    ranks.in_turn(1, (die, first), (live, second))
    steps = rows(tmp_path)[1:]
    assert [row["train/no_op_updates"] for row in steps] == [1.0] * (SAVED + 1) + [0.0] * 2
    assert [row["rollout/stale_tokens"] for row in steps] == [0.0] * 5 + [1.0]
    assert [row["staleness/max"] for row in steps] == [0.0] * 5 + [1.0]
    assert steps[-2]["train/rollout_logprob_abs_diff"] < 1e-5
