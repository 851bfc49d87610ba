"""Train on a single rank, step by step in turn with other trainings, for
``benchmarks/against_trl.py``.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from harness import be_the_only_rank
from step_watch import StepWatch

from megatron_dppo.launch.rank import filter_upstream_warnings
from megatron_dppo.observe.metrics import read_metrics
from megatron_dppo.parallel.world import initialize, shutdown
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rollout.step_rollouts import StepRollouts
from megatron_dppo.settings import load_config
from megatron_dppo.train import Trainer
from megatron_dppo.trainer.preflight import run_preflight


class InTurn(Trainer):
    """Trainer with a watch on steps."""

    def __init__(self, watch: StepWatch, *parts: Any) -> None:
        super().__init__(*parts)
        self._watch = watch

    def select(self, step: int) -> StepRollouts:
        self._watch.turn()
        return super().select(step)

    def save(self) -> None:
        # The last checkpoint comes after the last step.
        self._watch.finish(**figures(Path(self.config.run.dir)))


def figures(run: Path) -> dict[str, object]:
    """Return figures of the steps in the run's log."""
    rows = [row for row in read_metrics(run) if row["step"] > 0]
    return {
        "padding": 1.0 - sum(row["pack/fill"] for row in rows) / len(rows),
        "trained_tokens": sum(row.get("train/tokens", 0.0) for row in rows) / len(rows),
        "reward": [row["rollout/raw_reward"] for row in rows],
        "response_length": [row["rollout/response_len/mean"] for row in rows],
    }


def main(arguments: list[str]) -> None:
    watch = StepWatch()
    torch.set_num_threads(1)
    filter_upstream_warnings()
    be_the_only_rank()
    config = load_config(None, arguments)
    run_preflight(config, "train")
    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    with ExitStack() as to_close:
        workers = to_close.enter_context(closing(RewardWorkers.from_config(config.reward)))
        InTurn(watch, config, world, workers, to_close).run()
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
