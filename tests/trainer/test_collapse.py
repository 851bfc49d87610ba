"""A run that cannot learn any more ends and says so, and does not lose the best that it had."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_dppo.config import Config, LayoutConfig, RunConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.train import Trainer
from megatron_dppo.trainer.collapse import CollapseGuard
from tests.ranks import RankPool
from tests.small_runs import begin_run, configure, rows, write_run

TP2 = LayoutConfig(tp=2, dp=1)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("policy"))


def ending(rank: int, size: int, config: Config) -> tuple[str, str] | None:
    """What a run ended with, if not with its last step."""
    with ExitStack() as to_close:
        try:
            begin_run(config, Trainer, to_close).run()
        except UserError as error:
            return error.setting, str(error)
    return None


def saved(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("iter_*"))


def test_a_run_without_any_gradient_is_saved_and_ends(policy: Path, ranks: RankPool, tmp_path: Path) -> None:
    """All answers are worth the same: no step changes a weight."""
    config = configure(policy, tmp_path, TP2, steps=9, reward="equal")
    config = replace(config, run=replace(config.run, max_idle_steps=2))
    for setting, said in ranks.run(2, ending, config):
        assert setting == "run.max_idle_steps"
        assert "the last 2 steps" in said and "mean reward was 1 " in said
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]
    assert saved(tmp_path) == [2]
    again = replace(config, run=replace(config.run, max_idle_steps=0, steps=5))
    assert ranks.run(2, ending, again) == [None, None]
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("keep_best", "layout"), [(True, TP2), (False, LayoutConfig(dp=1))])
def test_the_best_checkpoint_stays(
    keep_best: bool, layout: LayoutConfig, policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """By what the run's own rows say of the steps that were evaluated; also after a resume."""
    config = configure(policy, tmp_path, layout, steps=3)
    config = replace(
        config,
        run=replace(config.run, checkpoint_every=1, keep_checkpoints=1, keep_best=keep_best),
        eval=replace(config.eval, every=2),
    )
    for last in (3, 6):
        assert {*ranks.run(layout.tp, ending, replace(config, run=replace(config.run, steps=last)))} == {None}
        accuracy = {row["step"]: row["eval/accuracy"] for row in rows(tmp_path)[1:] if "eval/accuracy" in row}
        assert {2, last} <= accuracy.keys() and 1 not in accuracy
        best = max(accuracy, key=lambda step: (accuracy[step], -step))
        assert saved(tmp_path) == sorted({best, last} if keep_best else {last})


def test_the_best_is_the_highest_of_what_was_evaluated_and_saved() -> None:
    guard = CollapseGuard(RunConfig())
    kept = []
    for step, accuracy in enumerate([0.2, None, 0.6, 0.6, 0.1], start=1):
        guard.trained(updated=True, reward=0.0)
        if accuracy is not None:
            guard.evaluated(accuracy)
        kept.append(guard.saving(step))
    assert kept == [1, 1, 3, 3, 3]
    resumed = CollapseGuard(RunConfig())
    resumed.load_state_dict(guard.state_dict())
    assert resumed.saving(6) == 3, "what it resumes from was not evaluated again"
    CollapseGuard(RunConfig()).load_state_dict({})  # of an earlier version


def test_only_steps_in_a_row_count() -> None:
    guard = CollapseGuard(RunConfig(max_idle_steps=3))
    seen = []
    for updated in (False, False, True, False, False, False):
        guard.trained(updated=updated, reward=0.0)
        seen.append(guard.hopeless)
    assert seen == [False] * 5 + [True]
