"""Whole runs of a small policy on sums, in the ranks of the pool, for tests of what the trainer makes of its parts."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_dppo.config import (
    ArithmeticConfig,
    Config,
    DataConfig,
    EvalConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    PackConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SyncConfig,
)
from megatron_dppo.init import character_tokenizer, write_tokenizer
from megatron_dppo.parallel.world import initialize
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.settings import load_config
from megatron_dppo.train import Trainer
from tests.policies import write_policy

SAVED = 3
"""The step after which there is a checkpoint."""
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Mixed on purpose: a random policy is never right, and a step of equal rewards would prove nothing."""
    return float({reward})
'''
MIXED, EQUAL = "len(solution_str) % 3", "1.0"
Rows = list[dict[str, Any]]


def write_run(folder: Path) -> Path:
    """A policy, and reward functions that tell samples of a prompt apart, or do not."""
    folder.mkdir(exist_ok=True)
    write_policy(folder / "hf", layers=2)
    write_tokenizer(character_tokenizer(), folder / "hf", max_tokens=128)
    for name, reward in (("mixed", MIXED), ("equal", EQUAL)):
        (folder / f"{name}.py").write_text(REWARD.format(reward=reward))
    return folder


def configure(
    folder: Path, run: Path, layout: LayoutConfig, *, ahead: int = 0, steps: int = 5, reward: str = "mixed"
) -> Config:
    return Config(
        run=RunConfig(dir=str(run), steps=steps, checkpoint_every=SAVED, export=False),
        model=ModelConfig(path=str(folder / "hf")),
        layout=layout,
        data=DataConfig(
            chat_template=False, max_prompt_tokens=24, arithmetic=ArithmeticConfig(problems=16, eval_problems=4)
        ),
        rollout=RolloutConfig(
            prompts_per_step=8, samples_per_prompt=3, max_response_tokens=9, ahead=ahead, sync=SyncConfig(check_every=3)
        ),
        reward=RewardConfig(function=f"{folder / reward}.py:compute_score"),
        pack=PackConfig(max_tokens=256),
        optimizer=OptimizerConfig(lr=1e-3),
        eval=EvalConfig(every=2, problems=4),
    )


def small_run(folder: Path, run: Path, *overrides: str) -> Config:
    """Return the settings of five steps of 8 prompts x 3 completions on sums, with a checkpoint after step 3.

    Args:
        folder: written by ``write_run``: the policy and the reward functions.
        run: the run's own folder.
        overrides: further settings, ``a.b=c`` as on the command line.
    """
    settings = f"""
    run.dir={run} run.steps=5 run.checkpoint_every={SAVED} run.export=false model.path={folder / "hf"}
    data.chat_template=false data.max_prompt_tokens=24 data.arithmetic.problems=16 data.arithmetic.eval_problems=4
    rollout.prompts_per_step=8 rollout.samples_per_prompt=3 rollout.max_response_tokens=9 rollout.sync.check_every=3
    reward.function={folder / "mixed"}.py:compute_score pack.max_tokens=256 optimizer.lr=1e-3
    eval.every=2 eval.problems=4
    """
    return load_config(None, [*settings.split(), *overrides])


def begin_run(config: Config, trainer: type[Trainer], to_close: ExitStack) -> Trainer:
    """What ``train`` does up to the first step, with another trainer."""
    world = initialize(config.layout, seed=config.run.seed, timeout_s=60.0)
    workers = RewardWorkers(config.reward.function, workers=1, timeout_s=10.0)
    to_close.callback(workers.close)
    return trainer(config, world, workers, to_close)


def rows(run: Path) -> Rows:
    """The run's metrics but for times."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("perf/")} for line in lines]
