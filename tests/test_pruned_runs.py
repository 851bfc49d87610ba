"""Whole runs under rules that reach into the trainer: more rounds of rollouts, a grown window, the head's scores."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_dppo.config import (
    CompletionPruningConfig,
    Config,
    LayoutConfig,
    LossConfig,
    PromptPruningConfig,
    PruningConfig,
    replace,
)
from megatron_dppo.rl.types import StepPlan
from megatron_dppo.rollout.step_rollouts import CompleteRollouts
from megatron_dppo.train import Trainer, train
from tests.ranks import RankPool
from tests.small_runs import REWARD, begin_run, configure, rows, write_run

ONE, TP2 = LayoutConfig(dp=1), LayoutConfig(tp=2, dp=1)
HALF_EQUAL = "len(solution_str) % 3 if int(ground_truth) % 2 else 1.0"
WINDOW = 8
SAMPLES = 3
"""Both of ``configure``."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("policy"))
    (folder / "half.py").write_text(REWARD.format(reward=HALF_EQUAL))
    return folder


def live(rank: int, size: int, config: Config) -> None:
    train(config)


class Mortal(Trainer):
    """Dies one step after its only checkpoint."""

    def train(self, plan: StepPlan, rollouts: CompleteRollouts) -> dict[str, float]:
        if self.step == 4:
            raise KeyboardInterrupt
        return super().train(plan, rollouts)


def die(rank: int, size: int, config: Config) -> None:
    with ExitStack() as to_close, pytest.raises(KeyboardInterrupt):
        begin_run(config, Mortal, to_close).run()


def settings(
    policy: Path,
    run: Path,
    layout: LayoutConfig,
    pruning: PruningConfig,
    *,
    ahead: int = 0,
    steps: int = 5,
    **loss: object,
) -> Config:
    config = configure(policy, run, layout, ahead=ahead, steps=steps, reward="half")
    return replace(config, pruning=pruning, loss=LossConfig(**loss), eval=replace(config.eval, problems=0))


REPLACING = {
    "dynamic_sampling": (WINDOW, PruningConfig(prompts=PromptPruningConfig(rule="dynamic_sampling"))),
    "greso": (2 * WINDOW, PruningConfig(prompts=PromptPruningConfig(rule="greso"), refill="prompts")),
}
"""Prompts of a step, and its rules."""


@pytest.mark.parametrize("rule", REPLACING)
def test_prompts_of_no_use_are_replaced_and_a_run_that_dies_goes_on_bit_by_bit(
    rule: str, policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Also with a batch in flight, which took several rounds, in the checkpoint."""
    prompts, pruning = REPLACING[rule]
    configs = [settings(policy, tmp_path / name, ONE, pruning, ahead=1) for name in ("whole", "died")]
    configs = [replace(each, rollout=replace(each.rollout, prompts_per_step=prompts)) for each in configs]
    ranks.run(1, live, configs[0])
    ranks.run(1, die, configs[1])
    ranks.run(1, live, configs[1])
    whole = rows(tmp_path / "whole")
    assert rows(tmp_path / "died") == whole
    assert all(row["prune/discarded_groups"] > 0 for row in whole), "half of the prompts can teach nothing"
    trained = [row["prune/kept_completion_fraction"] for row in whole]
    assert all(0.0 < share <= 1.0 for share in trained)
    assert all(row["rollout/zero_std/ratio"] < 1.0 for row in whole)


NOISE = PruningConfig(
    prompts=PromptPruningConfig(rule="none"),
    completions=CompletionPruningConfig(keep=0.1),
    max_weight=50.0,
    noise=1.0,
)


def test_a_run_of_equal_noise_considers_more_prompts_and_goes_on_bit_by_bit(
    policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    configs = [settings(policy, tmp_path / name, ONE, NOISE, name="reinforce_pp") for name in ("whole", "died")]
    ranks.run(1, live, configs[0])
    ranks.run(1, die, configs[1])
    ranks.run(1, live, configs[1])
    whole = rows(tmp_path / "whole")
    assert rows(tmp_path / "died") == whole
    census = [json.loads(line) for line in (tmp_path / "whole" / "pruning.jsonl").read_text().splitlines()]
    windows = [sum(row[fate][0] for fate in ("kept", "pruned", "idle")) / SAMPLES for row in census]
    inflation, expected = 1.0, []
    for row in whole:
        expected.append(round(WINDOW * inflation))
        inflation += 0.1 * (row["prune/variance_inflation"] - inflation)
    assert windows == expected
    assert windows[0] == WINDOW < windows[-1]


def test_scores_of_the_head_the_most_efficient_share_and_two_updates_go_together(
    policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    completions = CompletionPruningConfig(keep="auto", score="head")
    config = settings(
        policy, tmp_path, TP2, PruningConfig(completions=completions), steps=2, name="gspo", updates_per_rollout=2
    )
    ranks.run(2, live, config)
    for row in rows(tmp_path):
        assert row["train/grad_norm"] > 0 and row["train/no_op_updates"] == 0
        assert row["prune/kept_completion_fraction"] > 0.1
