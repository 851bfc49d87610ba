"""Whole runs of a small policy on sums, in the ranks of the pool."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from megatron_dppo.config import Config
from megatron_dppo.init import build_character_tokenizer, write_tokenizer
from megatron_dppo.parallel.world import initialize
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.types import StepPlan
from megatron_dppo.rollout.step_rollouts import CompleteRollouts
from megatron_dppo.settings import load_config
from megatron_dppo.train import Trainer
from tests.policies import write_policy

SAVED = 3
"""The step of the only checkpoint."""
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Differ within a prompt: a random policy is never right, and equal rewards train nothing."""
    return float({reward})
'''
MIXED = "len(solution_str) % 3"
REWARDS = {
    "mixed": MIXED,
    "equal": "1.0",
    "half": f"{MIXED} if int(ground_truth) % 2 else 1.0",
    "fails": "1 / 0",
}
"""Rewards by file. With ``half``, the rewards of every second prompt are equal."""
Rows = list[dict[str, Any]]


def write_run(folder: Path) -> Path:
    """Write a policy, and a file for each of ``REWARDS``."""
    folder.mkdir(exist_ok=True)
    write_policy(folder / "hf", layers=2)
    write_tokenizer(build_character_tokenizer(), folder / "hf", max_tokens=128)
    for name, reward in REWARDS.items():
        (folder / f"{name}.py").write_text(REWARD.format(reward=reward))
    return folder


def small_words(folder: Path, run: Path, *overrides: str) -> list[str]:
    """Return the settings of ``small_run`` as they are typed."""
    settings = f"""
    run.dir={run} run.steps=5 run.checkpoint_every={SAVED} run.export=false model.path={folder / "hf"}
    data.chat_template=false data.max_prompt_tokens=24 data.arithmetic.problems=16 data.arithmetic.eval_problems=4
    rollout.prompts_per_step=8 rollout.samples_per_prompt=3 rollout.max_response_tokens=9 rollout.sync.check_every=3
    reward.function={folder / "mixed"}.py:compute_score pack.max_tokens=256 optimizer.lr=1e-3
    eval.every=2 eval.problems=4
    """
    return [*settings.split(), *overrides]


def small_run(folder: Path, run: Path, *overrides: str) -> Config:
    """Return the settings of five steps of 8 prompts x 3 completions on sums, with a checkpoint
    after step 3.

    Args:
        folder: written by ``write_run``: the policy and the reward functions.
        run: the run's own folder.
        overrides: further settings, ``a.b=c`` as on the command line.
    """
    return load_config(None, small_words(folder, run, *overrides))


def begin_run(config: Config, trainer: type[Trainer], to_close: ExitStack) -> Trainer:
    """Return a trainer before its first step."""
    world = initialize(config.layout, seed=config.run.seed, timeout_s=60.0)
    workers = RewardWorkers(config.reward.spec, workers=1, timeout_s=10.0)
    to_close.callback(workers.close)
    return trainer(config, world, workers, to_close)


class Mortal(Trainer):
    """A trainer that dies before a step is trained, one step after the only checkpoint."""

    dies_at = SAVED + 1

    def train(self, plan: StepPlan, rollouts: CompleteRollouts) -> dict[str, float]:
        if self.step == self.dies_at:
            raise KeyboardInterrupt
        return super().train(plan, rollouts)


def live(rank: int, size: int, config: Config) -> None:
    """Run to the last step. Runs may follow each other in the same ranks."""
    with ExitStack() as to_close:
        begin_run(config, Trainer, to_close).run()


def die(rank: int, size: int, config: Config) -> None:
    """Run until the death of ``Mortal``."""
    with ExitStack() as to_close, suppress(KeyboardInterrupt):
        begin_run(config, Mortal, to_close).run()
        raise AssertionError("the run ended before its death")


def recorded(calls: list[str], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that adds its name and its whole numbers to ``calls``."""

    def call(*arguments: Any) -> Any:
        calls.append(
            " ".join([method.__name__, *(str(each) for each in arguments if isinstance(each, int))])
        )
        return method(*arguments)

    return call


def rows(run: Path) -> Rows:
    """Return the metrics of a run without times."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith("perf/")} for line in lines
    ]
