"""Efficiency of pruning beside a smaller batch: variance × seconds of the unpruned step, over
variance × seconds of another step.

A random 1/k of the prompts divides a step's cost by k, except for fixed cost, and multiplies the
variance by k. The ratio, E, is therefore the gain of a rule at the training's gradient noise.

At three stages of a real training run (two on ``smollm2_steps``), whole windows are rolled out, and
the gradient of each completion is computed.

- V₀, the variance of a window's gradient g, is estimated from the window's prompts, as in
  ``estimator.py``.
- D is the mean of ‖ĝ − g‖² over draws of a rule on the window, with the run's own reward history.
- The mean of the draws is g, so that the variance of the step is V₀ + D. Under a biased rule, V₀ +
  D is the mean square error if the bias is uncorrelated with g.
- Seconds are s₀ + s₁·(tokens generated) + s₂·(tokens trained on), fitted to processor seconds of
  further steps of the run at all stages: pruned and unpruned, with a quarter, half or all of the
  prompts. Tokens trained on include the prompt of each completion.
- All arms share windows, for comparisons more exact than V₀. Intervals are 95%, by leaving out each
  window in turn (jackknife).
- ``smaller_batch`` is an unpruned step of half of the prompts.
- ``bound`` is the best of two grids of kept fractions: one drawn like the rule, the second with
  more knowledge than a rule can have, namely right answers among 32 further answers to each prompt,
  and each completion's true norm.

    python benchmarks/efficiency.py [--windows 10] [--draws 60] [--json] [SETTING=VALUE ...]
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from arms import UNPRUNED, neyman, pruning, threshold
from estimator import Window
from harness import finish, mean_and_reach
from real_gradients import norm
from training_stages import TASKS, Stage, draw_windows, measure, stage_arguments, visit_stages

from megatron_dppo.config import Config, replace
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.plan import select_groups
from megatron_dppo.rl.pruning.draw import compute_variance_inflation, prune_minibatch
from megatron_dppo.rl.pruning.forecast import PromptForecast
from megatron_dppo.rl.pruning.prompt_rules import select
from megatron_dppo.rl.types import Floats, Ints, Selection, StepMetadata
from megatron_dppo.rollout.step_rollouts import StepRollouts
from megatron_dppo.settings import load_config
from megatron_dppo.train import Trainer

SIZES = (0.25, 0.5, 1.0)
"""Sizes of the steps for the fit of costs, in windows."""
KEEPS = (1, 0.85, 0.7, 0.5, 0.3), (1, 0.7, 0.5, 0.3, 0.2, "auto")
"""Grid of kept fractions: prompts, and tokens of completions."""
BASELINE = "unpruned"
HALF = "unpruned, half of the prompts"
QUARTER = "unpruned, a quarter"
DEFAULT = "prompts 0.85, tokens auto, weights to 10"
ARMS: Mapping[str, tuple[str, ...]] = {
    BASELINE: UNPRUNED,
    HALF: UNPRUNED,
    QUARTER: UNPRUNED,
    DEFAULT: neyman(0.85, "auto"),
    "prompts 0.85, tokens auto, weights to 5": neyman(0.85, "auto", max_weight=5.0),
    "prompts 0.85, tokens auto, weights to 20": neyman(0.85, "auto", max_weight=20.0),
    "prompts 0.85, tokens 0.5, weights to 10": neyman(0.85, 0.5),
    "prompts 0.7, tokens auto, weights to 10": neyman(0.7, "auto"),
    "prompts 0.7, tokens 0.5, weights to 5": neyman(0.7, 0.5, max_weight=5.0),
    "prompts 0.7, tokens 0.3, weights to 10": neyman(0.7, 0.3),
    "prompts 0.5, tokens 0.3, weights to 10": neyman(0.5, 0.3),
    "prompts 0.4, tokens 0.3, weights to 10": neyman(0.4, 0.3),
    "prompts 0.3, tokens 0.3, weights to 10, floor 0.15": neyman(0.3, 0.3, floor=0.15),
    "prompts 0.85 alone": neyman(0.85, None),
    "prompts 0.7 alone": neyman(0.7, None),
    "tokens auto alone, weights to 10": neyman(None, "auto"),
    "tokens 0.5 alone, weights to 10": neyman(None, 0.5),
    "DPPO: threshold, r 0.15 / 0.5, weights to 10": pruning(
        "threshold", "threshold", keep=(0.85, 0.5)
    ),
    "CPPO: top_k 0.5, divided by all": pruning(completions="top_k", keep=(1.0, 0.5)),
    "GRESO: greso, not refilled": pruning("greso", keep=(0.5, 1.0)),
}
PAPER: Mapping[str, tuple[str, ...]] = {
    BASELINE: UNPRUNED,
    HALF: UNPRUNED,
    DEFAULT: neyman(0.85, "auto"),
    "GRESO: greso, not refilled": pruning("greso", keep=(0.5, 1.0)),
    "DPPO: threshold, r 0.3 / 0.3, weights to 2.1": threshold(0.3, 0.3),
    "DPPO: threshold, r 0.5 / 0.5, weights to 4": threshold(0.5, 0.5),
    "DPPO: threshold, r 0.7 / 0.7, weights to 11.2": threshold(0.7, 0.7),
    "DPPO: threshold, r 0.9 / 0.9, weights to 100": threshold(0.9, 0.9),
    "DPPO: threshold_deterministic, r 0.5 / 0.5": threshold(0.5, 0.5, "threshold_deterministic"),
}
"""Arms of ``--paper``: the methods of ``paper_table.py``, without CPPO. Its divisor lengthens the
step, which the mean square error counts like noise."""
FRACTIONS = {HALF: 2, QUARTER: 4}


@dataclass(frozen=True, slots=True)
class Known:
    """Knowledge of the bound about a window's prompts, instead of a reward history; [N] each."""

    squares: Floats
    tokens: Floats

    def expected_square(self, prompt_ids: Ints, **_: object) -> Floats:
        return self.squares

    def expected_tokens(self, prompt_ids: Ints) -> Floats:
        return self.tokens

    def _return_zeros(self, prompt_ids: Ints) -> Ints:
        return np.zeros(len(prompt_ids), np.int64)

    get_last_magnitude = _return_zeros
    count_equal_visits = _return_zeros
    get_exploration = _return_zeros


@dataclass(frozen=True, slots=True)
class Step:
    """An arm's step on one window: means over draws."""

    noise: float
    """D"""
    sampling: float
    """V₀ of the window."""
    generated: float
    trained: float
    estimated: float
    """Metric ``prune/variance_inflation``: the run's own estimate of (V₀ + D)/V₀."""


@dataclass(frozen=True, slots=True)
class Way:
    """An arm's pruning of a window."""

    config: Config
    history: PromptForecast | Known
    metadata: StepMetadata
    fraction: int = 1
    """Before any rule, a random 1/``fraction`` of the prompts is taken."""

    def draw(self, rng: np.random.Generator) -> tuple[Floats, float, float, float]:
        """Return scales of all completions [n], tokens generated, tokens trained on, and the
        estimated inflation."""
        metadata = self.metadata
        pruning = self.config.pruning
        objective = resolve_objective(self.config.loss)
        if self.fraction > 1:
            count = len(metadata.prompt_ids) // self.fraction
            chosen = rng.choice(metadata.prompt_ids, count, replace=False)
            selection = Selection(chosen, np.ones(count), window=count)
        else:
            selection = select(
                metadata.prompt_ids,
                self.history,  # type: ignore[arg-type]
                pruning.prompts,
                group_size=metadata.rewards.shape[1],
                keep=pruning.prompts.keep,
                rng=rng,
            )
        order = np.argsort(selection.prompt_ids)
        groups = np.searchsorted(metadata.prompt_ids, selection.prompt_ids[order])
        part = dataclasses.replace(
            select_groups(metadata, groups),
            prompt_inclusion=selection.inclusion[order],
            window=float(selection.window),
        )
        scales = np.zeros(metadata.rewards.shape)
        if not len(groups):
            return scales.ravel(), 0.0, 0.0, 1.0
        keep = pruning.completions.share
        drawn = prune_minibatch(part, self.config, objective, keep=keep, rng=rng)
        weighted = drawn.weight * drawn.coefficient / drawn.normaliser
        scales[groups] = np.where(drawn.kept, weighted, 0.0)
        generated = float(part.response_lengths.sum())
        trained = float(part.tokens[drawn.kept].sum())
        inflation = compute_variance_inflation([(part, drawn)])
        return scales.ravel(), generated, trained, inflation

    def step(self, window: Window, draws: int) -> Step:
        rng = np.random.default_rng(0)
        drawn = [self.draw(rng) for _ in range(draws)]
        scales, generated, trained, estimated = zip(*drawn, strict=True)
        noise = float(np.mean(norm(window.gram, np.array(scales) - window.full) ** 2))
        sampling = window.sampling_noise * window.length**2
        means = map(statistics.fmean, (generated, trained, estimated))
        return Step(noise, sampling, *means)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds per step, per token generated and per token trained on."""

    step: float
    generated: float
    trained: float

    def of(self, steps: Sequence[Step]) -> float:
        generated = statistics.fmean(step.generated for step in steps)
        trained = statistics.fmean(step.trained for step in steps)
        return self.step + self.generated * generated + self.trained * trained


def timed_steps(trainer: Trainer, repeats: int) -> list[tuple[float, float, float, float]]:
    """Train on, with steps of several sizes, each pruned and unpruned.

    Returns:
        A row per step: tokens generated, tokens trained on, processor seconds of the rollouts and
        of the rest.
    """
    own = trainer.config
    rng = np.random.default_rng(trainer.step)
    rows = []
    unpruned = configured(trainer, *UNPRUNED)
    for size, config in itertools.product(SIZES * (1 + repeats), (own, unpruned)):
        trainer.config = config
        count = round(size * own.rollout.prompts_per_step)
        chosen = np.sort(rng.choice(len(trainer.pool), count, replace=False))
        start = time.process_time()
        selection = Selection(chosen, np.ones(count), window=count)
        rollouts = trainer.roll_out(StepRollouts(selection, trainer.step))
        rolled_out = time.process_time()
        learned = trainer.train(trainer.plan(rollouts), rollouts)
        rest = time.process_time() - rolled_out
        trainer.step += 1
        generated = float(rollouts.metadata.response_lengths.sum())
        rows.append((generated, learned.get("train/tokens", 0.0), rolled_out - start, rest))
    trainer.config = own
    # The first step of each size, pruned and unpruned, is a warm-up.
    return rows[2 * len(SIZES) :]


def costs_of(rows: Sequence[tuple[float, float, float, float]]) -> Costs:
    """Fit costs to rows of :func:`timed_steps`, by least squares."""
    generated, trained, rolling_out, rest = np.array(rows).T
    tokens = np.stack([np.ones(len(rows)), generated, trained], axis=1)
    # Seconds of pruning and packing are proportional to the tokens generated.
    (once, planning, training), *_ = np.linalg.lstsq(tokens, rest)
    (more, rolling), *_ = np.linalg.lstsq(tokens[:, :2], rolling_out)
    return Costs(float(once + more), float(rolling + planning), float(training))


def with_interval(value: Callable[[Sequence[int]], float], windows: int) -> dict[str, Any]:
    """Return a figure of all windows, and the 95% interval by leaving out each window in turn
    (jackknife, with Tukey's pseudo-values)."""
    everything = range(windows)
    found = value(everything)
    pseudo_values = []
    for left in everything:
        without = value([i for i in everything if i != left])
        pseudo_values.append(windows * found - (windows - 1) * without)
    _, reach = mean_and_reach(pseudo_values)
    return {"efficiency": found, "interval": [found - reach, found + reach]}


def judged(steps: Mapping[str, Sequence[Step]], costs: Costs) -> dict[str, dict[str, Any]]:
    """Return E of each arm with the parts of E, relative to the unpruned step."""
    found: dict[str, dict[str, Any]] = {}
    unpruned = steps[BASELINE]
    unpruned_generated = sum(step.generated for step in unpruned)
    unpruned_trained = sum(step.trained for step in unpruned)
    for name, own in steps.items():

        def efficiency(chosen: Sequence[int], own: Sequence[Step] = own) -> float:
            base = [unpruned[i] for i in chosen]
            these = [own[i] for i in chosen]
            sampling = sum(step.sampling for step in base)
            return costs.of(base) * sampling / (costs.of(these) * variance(these))

        sampling = sum(step.sampling for step in own)
        found[name] = {
            **with_interval(efficiency, len(own)),
            "variance": variance(own) / sampling,
            "variance_estimated": statistics.fmean(step.estimated for step in own),
            "generated": sum(step.generated for step in own) / unpruned_generated,
            "trained": sum(step.trained for step in own) / unpruned_trained,
            "seconds": costs.of(own) / costs.of(unpruned),
        }
    return found


def variance(steps: Sequence[Step]) -> float:
    return sum(step.sampling + step.noise for step in steps)


@dataclass(frozen=True, slots=True)
class Visit:
    """Measurements at a stage."""

    name: str
    step: int
    accuracy: float
    mixed_groups: float
    steps: dict[str, list[Step]]
    """Steps of each arm, one per window."""
    timed: list[tuple[float, float, float, float]]
    """Rows of :func:`timed_steps`."""

    def figures(self, costs: Costs) -> dict[str, Any]:
        """Return all figures of the stage."""
        arms = judged(self.steps, costs)
        base = self.steps[BASELINE]
        grid = _select_arms(arms, "grid ")
        known = _select_arms(arms, "known ")
        bests: dict[str, Any] = {}
        if grid:
            bests["best_of_grid"] = _best(grid)
        if known:
            bests["best_known"] = _best(known)
        if bests:
            bests["bound"] = max(bests.values(), key=lambda found: found["efficiency"])
            best = bests["bound"]["efficiency"]
            bests["default_over_bound"] = arms[DEFAULT]["efficiency"] / best
        own = {each: arms[each] for each in arms if not each.startswith(("grid ", "known "))}
        return {
            "stage": self.name,
            "step": self.step,
            "accuracy": self.accuracy,
            "mixed_groups": self.mixed_groups,
            "seconds": dataclasses.asdict(costs),
            "unpruned_step_s": costs.of(base),
            "tokens": {
                "generated": statistics.fmean(step.generated for step in base),
                "trained": statistics.fmean(step.trained for step in base),
            },
            "arms": own,
            "grid": {keep: found["efficiency"] for keep, found in grid.items()},
            **bests,
            "smaller_batch": own[HALF],
            "default_efficiency": own[DEFAULT]["efficiency"],
        }


def visited(trainer: Trainer, name: str, options: Any) -> Visit:
    """Measure all arms at a stage."""
    arms = PAPER if options.paper else ARMS
    configs = {each: configured(trainer, *settings) for each, settings in arms.items()}
    for prompts, completions in () if options.paper else itertools.product(*KEEPS):
        own = neyman(prompts, completions, floor=0.02, max_weight=50.0)
        configs[f"grid {prompts} / {completions}"] = configured(trainer, *own)
    steps: dict[str, list[Step]] = {}
    right = []
    live = []
    for number, prompt_ids in enumerate(draw_windows(trainer, options.windows)):
        seeds = 1 + number * (options.further + 1)
        stage = measure(trainer, name, prompt_ids, seeds, TASKS[options.task].stride)
        window = Window(stage, trainer.config.loss.name)
        rewards = stage.metadata.rewards
        right.append(float((rewards == 1.0).mean()))
        live.append(float((np.ptp(rewards, axis=1) > 0.0).mean()))
        for each, way in ways(trainer, stage, configs, seeds + 1, options.further):
            steps.setdefault(each, []).append(way.step(window, options.draws))
        print(f"{name}: window {number + 1} of {options.windows}", file=sys.stderr, flush=True)
    return Visit(
        name=name,
        # Read before the timed steps, which train on.
        step=trainer.step,
        accuracy=statistics.fmean(right),
        mixed_groups=statistics.fmean(live),
        steps=steps,
        timed=timed_steps(trainer, options.repeats),
    )


def _select_arms(arms: Mapping[str, dict[str, Any]], prefix: str) -> dict[str, dict[str, Any]]:
    selected = (name for name in arms if name.startswith(prefix))
    return {name.removeprefix(prefix): arms[name] for name in selected}


def _best(found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    keep = max(found, key=lambda keep: found[keep]["efficiency"])
    return {"keep": keep, **found[keep]}


def configured(trainer: Trainer, *settings: str) -> Config:
    """Return the run's configuration with an arm's pruning."""
    pruning = load_config("configs/quickstart.yaml", settings).pruning
    return replace(trainer.config, pruning=pruning)


def ways(
    trainer: Trainer, stage: Stage, configs: Mapping[str, Config], seeds: int, further: int
) -> Iterator[tuple[str, Way]]:
    """Yield all arms, the grid, and the bound after ``further`` rollouts of the window, with random
    seeds from ``seeds``."""
    history = trainer.sampler.history
    metadata = stage.metadata
    for name, config in configs.items():
        yield name, Way(config, history, metadata, FRACTIONS.get(name, 1))
    if not further:
        return
    ids = metadata.prompt_ids
    samples = metadata.rewards.shape[1]
    selection = Selection(ids, np.ones(len(ids)), window=len(ids))
    right, tokens = np.zeros((2, len(ids)))
    for number in range(further):
        step = trainer.config.run.steps + seeds + number
        rollouts = trainer.roll_out(StepRollouts(selection, step))
        right += (rollouts.metadata.rewards == 1.0).sum(axis=1)
        tokens += rollouts.metadata.response_lengths.mean(axis=1) / further
    chance = (right + 0.5) / (further * samples + 1.0)
    known = Known(1.0 - chance**samples - (1.0 - chance) ** samples, np.maximum(tokens, 1.0))
    true = dataclasses.replace(metadata, score_norms=stage.unit_norms)
    for name, config in configs.items():
        if name.startswith("grid"):
            yield name.replace("grid", "known"), Way(config, known, true)


def main() -> None:
    parser = stage_arguments(
        __doc__,
        draws=(60, "of each arm on each window"),
        repeats=(8, "of the timed steps of each size"),
        further=(
            4,
            "rollouts of a window, by which the bound knows how likely a prompt's group is to be "
            "mixed; 0: none",
        ),
    )
    parser.add_argument(
        "--paper", action="store_true", help="the methods of paper_table.py, without a bound"
    )
    options = parser.parse_args()
    visits = visit_stages(options, partial(visited, options=options))
    costs = costs_of([row for each in visits for row in each.timed])
    finish({"task": options.task, "stages": [each.figures(costs) for each in visits]}, options)


if __name__ == "__main__":
    main()
