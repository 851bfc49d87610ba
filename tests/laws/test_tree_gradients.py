"""Law 2 of trees on real gradients: a real engine grows trees, a real plan prunes and packs them.

The gradient of trees is compared with that of flat groups. Both are sampled, and may differ by four
standard errors of their difference, along a direction from a part of the flat groups.
``tests/rl/test_trees.py`` knows all outcomes of a smaller policy.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.real_gradients import gradient, planned
from megatron_dppo.config import BranchConfig, Config, TreeConfig, replace
from megatron_dppo.init import write_model
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.types import Floats, Selection
from megatron_dppo.rollout.step_rollouts import StepRollouts
from megatron_dppo.settings import load_config
from megatron_dppo.train import Trainer
from megatron_dppo.trainer.learner import PolicyLoss
from tests.ranks import RankPool
from tests.small_runs import begin_run

PROMPTS, SAMPLES, STEPS = 32, 8, 40
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    good = [character in "abcdefghijklm" for character in solution_str]
    return float(good[:1] == [True]) + float(sum(good[2:]) >= 2)
"""
"""The first token decides, and so do the last ones: trunks and leaves both have a gradient."""
OF_OWN = 1.0 - 1.0 / SAMPLES
"""Factor of a flat group's gradient whose baseline is the mean of all its rewards, its own
included."""
TWICE = TreeConfig(branches=(BranchConfig(at=1), BranchConfig(at=3)))
"""One path in three does not reach the second fork."""
BY_ENTROPY = TreeConfig(branches=(BranchConfig(entropy=3.0, children=4),))


def configure(folder: Path, tree: TreeConfig, *, pruned: bool) -> Config:
    """Return settings of responses with six tokens at most; each token ends its response once in
    eight times or so."""
    settings = f"""
    run.dir={folder / "run"} run.checkpoint_every=0 run.export=false run.seed={1 + len(tree.branches)}
    model.path={folder / "hf"} data.chat_template=false data.max_prompt_tokens=24
    data.arithmetic.problems=40 data.arithmetic.eval_problems=4 eval.every=0 eval.problems=0
    rollout.prompts_per_step={PROMPTS} rollout.samples_per_prompt={SAMPLES} rollout.max_response_tokens=6
    rollout.stop_token_ids=[2,10,11,12,13,14] reward.function={folder / "reward.py"}:compute_score
    loss.name=dr_grpo pruning.prompts.rule=none pruning.completions.rule={"neyman" if pruned else "none"}
    pruning.completions.keep=0.5 pack.max_tokens=4096
    """
    config = load_config(None, settings.split())
    return replace(config, rollout=replace(config.rollout, tree=tree))


def measure(rank: int, size: int, folder: Path, tree: TreeConfig, pruned: bool) -> Floats:
    """[STEPS, parameters], the gradients of as many rollouts; ``pruned``: of half of the
    prompts and completions."""
    rows = []
    with ExitStack() as to_close:
        trainer = begin_run(configure(folder, tree, pruned=pruned), Trainer, to_close)
        trainer.sync(0)
        loss = PolicyLoss(
            resolve_objective(trainer.config.loss), kl_coef=0.0, tis_cap=None, version=0
        )
        for trainer.step in range(STEPS):
            chosen, chance = np.arange(PROMPTS), np.ones(PROMPTS)
            if pruned:
                chosen = np.sort(
                    np.random.default_rng(trainer.step).choice(PROMPTS, PROMPTS // 2, replace=False)
                )
                chance = np.full(PROMPTS // 2, 0.5)
            rollouts = trainer.roll_out(
                StepRollouts(Selection(chosen, chance, window=PROMPTS), trainer.step)
            )
            (minibatch,) = trainer.plan(rollouts).minibatches
            packs = planned(minibatch, rollouts.held, trainer.world, trainer.policy.pad_id)
            rows.append(gradient(trainer.policy.actor, packs, loss).double().numpy())
    return np.stack(rows)


def test_trees_have_the_gradient_of_flat_groups(ranks: RankPool, tmp_path: Path) -> None:
    write_model(
        tmp_path / "hf", hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=64, std=0.2
    )
    (tmp_path / "reward.py").write_text(REWARD)
    cases = (TreeConfig(), False), (TWICE, False), (BY_ENTROPY, True)
    [flat], *trees = ranks.in_turn(
        1, *((measure, tmp_path, tree, pruned) for tree, pruned in cases)
    )
    some, others = np.split(flat / OF_OWN, [STEPS // 4])
    direction = some.mean(axis=0) / np.linalg.norm(some.mean(axis=0))
    truth = others @ direction
    for [found] in trees:
        along = found @ direction
        variance = sum(values.var(ddof=1) / len(values) for values in (along, truth))
        assert abs(along.mean() - truth.mean()) < 4.0 * np.sqrt(variance)
