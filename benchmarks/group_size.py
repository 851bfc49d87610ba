"""Completions per prompt, compared by gradient noise × seconds at equal completions per step.

At three stages of a training run with groups of 16, windows are rolled out and the gradient of each
completion is computed, as in ``efficiency.py``. Groups of 2, 4 and 8 are parts of the groups of 16,
with separate advantages. A step of M completions has M / G prompts.

- Relative noise of a step: variance of the gradient over the squared length of the mean gradient.
  The mean depends on G, since advantages do. The squared length is estimated from products between
  different prompts.
- ``efficiency`` of G: relative noise × seconds of groups of 8, over relative noise × seconds of
  groups of G. Both are unpruned, or both have the default pruning of completions.
- Seconds are fitted as in ``efficiency.py``. Intervals are 95%, by leaving out each window in turn
  (jackknife).

    python benchmarks/group_size.py [--task sums] [--windows 10] [--json]
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from arms import UNPRUNED, neyman
from efficiency import (
    BASELINE,
    Costs,
    Way,
    configured,
    costs_of,
    timed_steps,
    with_interval,
)
from estimator import Window
from harness import arguments, finish
from real_gradients import norm
from training_stages import TASKS, Stage, measure, training_stages

from megatron_dppo.api import step_metadata
from megatron_dppo.train import Trainer

LARGEST = 16
USUAL = 8
SIZES = (2, 4, USUAL, LARGEST)
ARMS = {BASELINE: UNPRUNED, "tokens auto alone, weights to 10": neyman(None, "auto")}


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a window's completions in groups of one size: means over draws."""

    variance: float
    signal: float
    """Unbiased estimate of the squared length of the mean gradient."""
    generated: float
    trained: float


def regrouped(stage: Stage, size: int) -> Stage:
    """Return the completions in smaller groups, as if each group had another prompt."""
    whole = stage.metadata
    rewards = whole.rewards.reshape(-1, size)
    lengths = whole.response_lengths.reshape(-1, size)
    norms = whole.score_norms.reshape(-1, size)
    prompt_lengths = np.repeat(whole.prompt_lengths, LARGEST // size)
    metadata = step_metadata(rewards, lengths, prompt_lengths, score_norms=norms)
    return dataclasses.replace(stage, metadata=metadata)


def step_of(stage: Stage, size: int, trainer: Trainer, settings: Sequence[str], draws: int) -> Step:
    window = Window(regrouped(stage, size), trainer.config.loss.name)
    prompts = len(stage.metadata.prompt_ids)
    parts = np.where(np.repeat(np.eye(prompts, dtype=bool), LARGEST, axis=1), window.full, 0.0)
    own = norm(window.gram, parts) ** 2
    signal = (window.length**2 - own.sum()) * prompts / (prompts - 1)
    groups = len(window.metadata.prompt_ids)
    single = np.where(np.repeat(np.eye(groups, dtype=bool), size, axis=1), window.full, 0.0)
    sampling = (norm(window.gram, single) ** 2).sum() - signal / groups
    way = Way(configured(trainer, *settings), trainer.sampler.history, window.metadata)
    drawn = way.step(window, draws)
    return Step(float(sampling) + drawn.noise, float(signal), drawn.generated, drawn.trained)


def visited(trainer: Trainer, name: str, options: Any) -> dict[str, Any]:
    count = trainer.config.rollout.prompts_per_step
    rng = np.random.default_rng(0)
    chosen = rng.permutation(len(trainer.pool))[: options.windows * count].reshape(-1, count)
    steps: dict[tuple[str, int], list[Step]] = {}
    for number, prompt_ids in enumerate(np.sort(chosen, axis=1)):
        stage = measure(trainer, name, prompt_ids, 1 + number, TASKS[options.task].stride)
        for arm, settings in ARMS.items():
            for size in SIZES:
                step = step_of(stage, size, trainer, settings, options.draws)
                steps.setdefault((arm, size), []).append(step)
    # Read the stage's step before the timed steps, which train on.
    at = trainer.step
    costs = costs_of(timed_steps(trainer, repeats=8))
    return {
        "stage": name,
        "step": at,
        "seconds": dataclasses.asdict(costs),
        "arms": judged(steps, costs),
    }


def judged(
    steps: Mapping[tuple[str, int], Sequence[Step]], costs: Costs
) -> dict[str, dict[str, Any]]:
    """Return E of each size, by arm."""

    def worth(own: Sequence[Step]) -> float:
        signal = sum(step.signal for step in own)
        return signal / (costs.of(own) * sum(step.variance for step in own))  # type: ignore[arg-type]

    found: dict[str, dict[str, Any]] = {arm: {} for arm, _ in steps}
    for (arm, size), own in steps.items():

        def efficiency(chosen: Sequence[int], own: Sequence[Step] = own, arm: str = arm) -> float:
            return worth([own[i] for i in chosen]) / worth([steps[arm, USUAL][i] for i in chosen])

        usual = steps[arm, USUAL]
        trained = statistics.fmean(s.trained for s in own)
        found[arm][str(size)] = {
            **with_interval(efficiency, len(own)),
            "noise": sum(s.variance for s in own) / sum(s.signal for s in own),
            "trained": trained / statistics.fmean(s.trained for s in usual),
        }
    return found


def main() -> None:
    parser = arguments(
        __doc__,
        prompts=(32, "of a window"),
        steps=(150, "most steps of training until the late stage is measured"),
        windows=(10, "of each stage"),
        draws=(30, "of each arm on each window"),
    )
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="of the run")
    options = parser.parse_args()
    stages = []
    with tempfile.TemporaryDirectory() as folder:
        found = training_stages(
            TASKS[options.task],
            options.prompts,
            LARGEST,
            options.steps,
            Path(folder),
            options.settings,
            partial(visited, options=options),
        )
        for stage in found:
            print(stage, file=sys.stderr, flush=True)
            stages.append(stage)
    finish({"task": options.task, "prompts": options.prompts, "stages": stages}, options)


if __name__ == "__main__":
    main()
