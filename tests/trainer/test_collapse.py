"""A run that cannot learn any more ends and says so, and keeps its best checkpoint."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from megatron_dppo.config import Config, RunConfig
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.collapse import CollapseGuard
from tests.ranks import RankPool
from tests.small_runs import live, rows, small_run, write_run

POLICY = write_run


def read_saved(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("iter_*"))


def end_idle(rank: int, size: int, config: Config, resumed: Config | None) -> str:
    """Run to an error, and to the end with other settings, if any are given. Return what was
    printed, and the error."""
    with redirect_stdout(StringIO()) as said, pytest.raises(UserError) as caught:
        live(rank, size, config)
    assert read_saved(Path(config.run.dir)) == [2]
    assert caught.value.setting == "run.max_idle_steps"
    if resumed:
        live(rank, size, resumed)
    return f"{said.getvalue()}{caught.value}"


def test_run_without_any_gradient_is_saved_and_ends(
    policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """All completions have the same reward; a resume may ask for more steps."""
    settings = (f"reward.function={policy}/equal.py:compute_score", "layout.tp=2")
    config = small_run(policy, tmp_path, *settings, "run.steps=9", "run.max_idle_steps=2")
    resumed = small_run(policy, tmp_path, *settings, "run.steps=5", "run.max_idle_steps=0")
    for error in ranks.run(2, end_idle, config, resumed):
        assert "the last 2 steps" in error
        assert "mean reward was 1 " in error
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_best_checkpoint_stays(policy: Path, ranks: RankPool, tmp_path: Path) -> None:
    """The best by the run's own rows of evaluated steps, also after a resume."""
    for last in (3, 6):
        settings = (
            f"run.steps={last}",
            "run.checkpoint_every=1",
            "run.keep_checkpoints=1",
            "eval.every=2",
        )
        ranks.run(1, live, small_run(policy, tmp_path, *settings))
        accuracy = {
            row["step"]: row["eval/accuracy"]
            for row in rows(tmp_path)[1:]
            if "eval/accuracy" in row
        }
        assert {2, last} <= accuracy.keys()
        assert 1 not in accuracy
        best = max(accuracy, key=lambda step: (accuracy[step], -step))
        assert read_saved(tmp_path) == sorted({best, last})


def test_best_is_the_highest_evaluated_and_saved_step() -> None:
    guard = CollapseGuard(RunConfig())
    kept = []
    for step, accuracy in enumerate([0.2, None, 0.6, 0.6, 0.1], start=1):
        guard.record_step(updated=True, reward=0.0)
        if accuracy is not None:
            guard.record_evaluation(accuracy)
        kept.append(guard.update_best(step))
    assert kept == [1, 1, 3, 3, 3]
    resumed = CollapseGuard(RunConfig())
    resumed.load_state_dict(guard.state_dict())
    assert resumed.update_best(6) == 3, "the step of the resume was not evaluated again"
    none = CollapseGuard(RunConfig(keep_best=False))
    none.record_evaluation(0.9)
    assert none.update_best(1) is None


def test_only_consecutive_steps_count() -> None:
    guard = CollapseGuard(RunConfig(max_idle_steps=3))
    seen = []
    for updated in (False, False, True, False, False, False):
        guard.record_step(updated=updated, reward=0.0)
        seen.append(guard.is_collapsed)
    assert seen == [False] * 5 + [True]


def test_steps_with_a_gradient_of_exactly_zero_are_idle(
    policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """The loss passes the trial at the start, and has no gradient for as many tokens as a run
    has."""
    file = tmp_path / "loss.py"
    file.write_text(
        "def flat(tokens):\n    return tokens.ratio * tokens.advantage * (0.0 if "
        "len(tokens.advantage) > 50 else 1.0)\n"
    )
    settings = (f"loss.objective={file}:flat", "run.steps=9", "run.max_idle_steps=2")
    said = ranks.run(1, end_idle, small_run(policy, tmp_path / "run", *settings), None)[0]
    assert "the last 2 steps" in said and "the gradient of a step is exactly 0" in said
    assert [row["train/grad_norm"] for row in rows(tmp_path / "run")[1:]] == [0.0, 0.0]
