"""Completions per prompt, compared by gradient noise × seconds at equal completions per step.

At three stages of a training run with groups of 16, windows are rolled out and the gradient of each
completion is computed, as in ``efficiency.py``. Groups of 2, 4 and 8 are parts of the groups of 16,
with separate advantages. A step of M completions has M / G prompts.

- Relative noise of a step: variance of the gradient over the squared length of the mean gradient.
  The mean depends on G, since advantages do. The squared length is estimated from products between
  the gradients of different windows.
- ``efficiency`` of G: relative noise × seconds of groups of 8, over relative noise × seconds of
  groups of G. Both are unpruned, or both have the default pruning of completions.
- Seconds are fitted as in ``efficiency.py``. Intervals are 95%, by leaving out each window in turn
  (jackknife).

    python benchmarks/group_size.py [--task sums] [--windows 100] [--json]
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
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
from harness import finish
from real_gradients import gram, norm
from training_stages import (
    TASKS,
    Stage,
    compute_unit_gradients,
    roll_out_window,
    stage_arguments,
    visit_stages,
)

from megatron_dppo.api import step_metadata
from megatron_dppo.rl.types import Floats
from megatron_dppo.train import Trainer

LARGEST = 16
USUAL = 8
SIZES = (2, 4, USUAL, LARGEST)
ARMS = {BASELINE: UNPRUNED, "tokens auto alone, weights to 10": neyman(None, "auto")}


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a window's completions in groups of one size: means over draws."""

    squares: float
    """Sum of the squared lengths of the prompts' parts of the gradient."""
    noise: float
    """Variance by pruning."""
    groups: int
    generated: float
    trained: float

    def variance(self, signal: float) -> float:
        """Return the step's variance, from the squared length of the mean gradient."""
        return self.squares - signal / self.groups + self.noise


@dataclass(frozen=True, slots=True)
class Measurement:
    """Windows of a stage. Lists are by window."""

    steps: dict[tuple[str, int], list[Step]]
    """By arm and size."""
    products: dict[int, Floats]
    """[windows, windows] by size: inner products of the unpruned gradients."""

    def estimate_signal(self, size: int, chosen: Sequence[int]) -> float:
        """Estimate the squared length of the mean gradient, without bias."""
        products = self.products[size][np.ix_(chosen, chosen)]
        pairs = len(chosen) * (len(chosen) - 1)
        return float(products.sum() - np.trace(products)) / pairs


def regrouped(stage: Stage, size: int) -> Stage:
    """Return the completions in smaller groups, as if each group had another prompt."""
    whole = stage.metadata
    rewards = whole.rewards.reshape(-1, size)
    lengths = whole.response_lengths.reshape(-1, size)
    norms = whole.score_norms.reshape(-1, size)
    prompt_lengths = np.repeat(whole.prompt_lengths, LARGEST // size)
    metadata = step_metadata(rewards, lengths, prompt_lengths, score_norms=norms)
    return dataclasses.replace(stage, metadata=metadata)


def measure_step(window: Window, trainer: Trainer, settings: Sequence[str], draws: int) -> Step:
    groups, size = window.metadata.rewards.shape
    single = np.where(np.repeat(np.eye(groups, dtype=bool), size, axis=1), window.full, 0.0)
    squares = float((norm(window.gram, single) ** 2).sum())
    way = Way(configured(trainer, *settings), trainer.sampler.history, window.metadata)
    drawn = way.step(window, draws)
    return Step(squares, drawn.noise, groups, drawn.generated, drawn.trained)


def measured(trainer: Trainer, name: str, options: Any) -> Measurement:
    count = trainer.config.rollout.prompts_per_step
    stride = TASKS[options.task].stride
    rng = np.random.default_rng(0)
    steps: dict[tuple[str, int], list[Step]] = {}
    totals: dict[int, list[torch.Tensor]] = {}
    for number in range(options.windows):
        prompt_ids = np.sort(rng.choice(len(trainer.pool), count, replace=False))
        rollouts = roll_out_window(trainer, prompt_ids, 1 + number)
        live, rows = compute_unit_gradients(trainer, rollouts, stride)
        products = np.zeros((rollouts.metadata.rewards.size,) * 2)
        products[np.ix_(live, live)] = gram(rows)
        stage = Stage(name, trainer.step, rollouts.metadata, products)
        for size in SIZES:
            window = Window(regrouped(stage, size), trainer.config.loss.name)
            scales = torch.from_numpy((window.full * window.advantage.ravel())[live])
            totals.setdefault(size, []).append(scales.to(rows.dtype) @ rows)
            for arm, settings in ARMS.items():
                step = measure_step(window, trainer, settings, options.draws)
                steps.setdefault((arm, size), []).append(step)
        print(f"{name}: window {number + 1} of {options.windows}", file=sys.stderr, flush=True)
    return Measurement(steps, {size: gram(torch.stack(own)) for size, own in totals.items()})


def visited(trainer: Trainer, name: str, options: Any) -> dict[str, Any]:
    at = trainer.step
    found = measured(trainer, name, options)
    # The timed steps train on.
    costs = costs_of(timed_steps(trainer, repeats=8))
    return {
        "stage": name,
        "step": at,
        "seconds": dataclasses.asdict(costs),
        "arms": judged(found, costs),
    }


def judged(found: Measurement, costs: Costs) -> dict[str, dict[str, Any]]:
    """Return E of each size, by arm."""

    def worth(arm: str, size: int, chosen: Sequence[int]) -> float:
        own = [found.steps[arm, size][i] for i in chosen]
        signal = found.estimate_signal(size, chosen)
        variance = statistics.fmean(step.variance(signal) for step in own)
        return signal / (costs.of(own) * variance)  # type: ignore[arg-type]

    table: dict[str, dict[str, Any]] = {arm: {} for arm, _ in found.steps}
    for (arm, size), own in found.steps.items():

        def efficiency(chosen: Sequence[int], arm: str = arm, size: int = size) -> float:
            return worth(arm, size, chosen) / worth(arm, USUAL, chosen)

        everything = range(len(own))
        signal = found.estimate_signal(size, everything)
        usual = found.steps[arm, USUAL]
        trained = statistics.fmean(s.trained for s in own)
        table[arm][str(size)] = {
            **with_interval(efficiency, len(own)),
            "noise": statistics.fmean(s.variance(signal) for s in own) / signal,
            "trained": trained / statistics.fmean(s.trained for s in usual),
        }
    return table


def main() -> None:
    parser = stage_arguments(
        __doc__,
        prompts=(32, "of a window"),
        samples=None,
        windows=(100, "of each stage"),
        draws=(30, "of each arm on each window"),
    )
    parser.set_defaults(samples=LARGEST)
    options = parser.parse_args()
    stages = visit_stages(options, partial(visited, options=options))
    finish({"task": options.task, "prompts": options.prompts, "stages": stages}, options)


if __name__ == "__main__":
    main()
