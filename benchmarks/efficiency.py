"""What pruning is worth beside a smaller batch: variance × seconds of the unpruned step over those
of another step.

A step of fewer prompts, taken at random, has as much less cost as it has more variance, but for
what a step costs whatever its size. This ratio, E, is therefore what a rule is worth at the
gradient noise at which one trains.

At three stages of a real training run, whole windows are rolled out, and the gradient of each
completion is taken. V₀, the variance of a window's gradient g, is estimated from the window's
prompts, as ``estimator.py`` says. D is the mean of ‖ĝ − g‖² over draws of a rule on the window,
with the run's own record of prompts. Since the draws' mean is g, the variance of the step is V₀ +
D. Under a biased rule this is its mean square error, if the bias is uncorrelated with g.

Seconds are s₀ + s₁·(tokens generated) + s₂·(tokens trained on), fitted to the processor's seconds
of further steps of the run at all stages, pruned and unpruned, with a quarter of the prompts to
all. Each completion that is trained on counts its prompt, too.

All arms share windows, so that they are compared more exactly than V₀ is known. Intervals are 95%,
by leaving each window out in turn (the jackknife). ``smaller_batch`` is an unpruned step of half of
the prompts. ``bound`` is the best of two grids of shares: drawn as the rule does, and with more
knowledge than it can have. This is of each prompt how many of 32 further answers are right, and of
each completion its true norm.

    python benchmarks/efficiency.py [--windows 10] [--draws 60] [--json] [SETTING=VALUE ...]
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from estimator import Window
from harness import arguments, finish, mean_and_reach
from real_gradients import norm
from time_to_accuracy import FEW, FEWER, LESS, MILD, OFF, SEVEN_TENTHS, pruned
from training_stages import TASKS, Stage, measure, training_stages

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
"""Of the steps by whose seconds costs are fitted, in windows."""
KEEPS = (1, 0.85, 0.7, 0.5, 0.3), (1, 0.7, 0.5, 0.3, 0.2, "auto")
"""Shares of prompts and of completions' tokens: the grid."""
BASELINE, HALF, DEFAULT = "unpruned", "unpruned, half of the prompts", "0.85 / auto, the default"
HALF_OF_TOKENS = ("pruning.completions.keep=0.5",)
ARMS: Mapping[str, tuple[str, ...]] = {
    BASELINE: OFF,
    HALF: OFF,
    "unpruned, a quarter": OFF,
    DEFAULT: (),
    "0.85 / auto, weights to 5": ("pruning.max_weight=5",),
    "0.85 / auto, weights to 20": ("pruning.max_weight=20",),
    "0.85 / 0.5, weights to 10": HALF_OF_TOKENS,
    "0.7 / auto, weights to 10": SEVEN_TENTHS,
    "0.7 / 0.5, weights to 5": MILD,
    "0.7 / 0.3, weights to 10": (*SEVEN_TENTHS, *LESS),
    "0.5 / 0.3, weights to 10": ("pruning.prompts.keep=0.5", *LESS),
    "0.4 / 0.3, weights to 10": FEW,
    "0.3 / 0.3, weights to 10": FEWER,
    "prompts 0.85 alone": pruned("neyman", "none"),
    "prompts 0.7 alone": pruned("neyman", "none", *SEVEN_TENTHS),
    "completions auto alone": pruned("none", "neyman"),
    "completions 0.5 alone": pruned("none", "neyman", *HALF_OF_TOKENS),
    "threshold (DPPO's paper)": pruned("threshold", "threshold"),
    "top_k (CPPO)": pruned("none", "top_k"),
    "greso": pruned("greso", "none"),
}
FRACTIONS = {HALF: 2, "unpruned, a quarter": 4}
GENEROUS = ("pruning.prompts.floor=0.02", "pruning.max_weight=50")
"""For the grid and the bound, so that no floor is what limits them."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the bound knows of a window's prompts, in place of their record. [N] each."""

    squares: Floats
    tokens: Floats

    def expected_square(self, prompt_ids: Ints, **_: object) -> Floats:
        return self.squares

    def expected_tokens(self, prompt_ids: Ints) -> Floats:
        return self.tokens

    def _nothing(self, prompt_ids: Ints) -> Ints:
        return np.zeros(len(prompt_ids), np.int64)

    last_magnitude = equal_visits = explore = _nothing


@dataclass(frozen=True, slots=True)
class Step:
    """An arm's step on one window: means over its draws."""

    noise: float
    """D"""
    sampling: float
    """V₀ of the window."""
    generated: float
    trained: float
    estimated: float
    """``prune/variance_inflation``, by which a run estimates (V₀ + D)/V₀ itself."""


@dataclass(frozen=True, slots=True)
class Way:
    """How an arm prunes."""

    config: Config
    history: PromptForecast | Known
    metadata: StepMetadata
    fraction: int = 1
    """Of how many prompts one is taken at random, before any rule."""

    def draw(self, rng: np.random.Generator) -> tuple[Floats, float, float, float]:
        """Scales of all completions [n], tokens generated and trained on, and the estimated
        inflation."""
        metadata, pruning = self.metadata, self.config.pruning
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
        drawn = prune_minibatch(
            part, self.config, objective, keep=pruning.completions.share, rng=rng
        )
        scales[groups] = np.where(
            drawn.kept, drawn.weight * drawn.coefficient / drawn.normaliser, 0.0
        )
        inflation = compute_variance_inflation([(part, drawn)])
        return (
            scales.ravel(),
            float(part.response_lengths.sum()),
            float(part.tokens[drawn.kept].sum()),
            inflation,
        )

    def step(self, window: Window, draws: int) -> Step:
        rng = np.random.default_rng(0)
        scales, generated, trained, estimated = zip(
            *(self.draw(rng) for _ in range(draws)), strict=True
        )
        noise = float(np.mean(norm(window.gram, np.array(scales) - window.full) ** 2))
        sampling = window.sampling_noise * window.length**2
        return Step(noise, sampling, *map(statistics.fmean, (generated, trained, estimated)))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step, of a token generated and of a token trained on."""

    step: float
    generated: float
    trained: float

    def of(self, steps: Sequence[Step]) -> float:
        generated, trained = (
            statistics.fmean(getattr(s, name) for s in steps) for name in ("generated", "trained")
        )
        return self.step + self.generated * generated + self.trained * trained


def timed_steps(trainer: Trainer, repeats: int) -> list[tuple[float, float, float, float]]:
    """Steps of several sizes, each pruned and unpruned, which train on.

    Returns:
        Tokens generated and trained on, and seconds of rolling out and of the rest, of each.
    """
    own, rng, rows = trainer.config, np.random.default_rng(trainer.step), []
    unpruned = configured(trainer, *OFF)
    for size, trainer.config in itertools.product(SIZES * (1 + repeats), (own, unpruned)):
        count = round(size * own.rollout.prompts_per_step)
        chosen = np.sort(rng.choice(len(trainer.pool), count, replace=False))
        start = time.process_time()
        rollouts = trainer.roll_out(
            StepRollouts(Selection(chosen, np.ones(count), window=count), trainer.step)
        )
        rolled_out = time.process_time()
        learned = trainer.train(trainer.plan(rollouts), rollouts)
        rest = time.process_time() - rolled_out
        trainer.step += 1
        generated = float(rollouts.metadata.response_lengths.sum())
        rows.append((generated, learned.get("train/tokens", 0.0), rolled_out - start, rest))
    trainer.config = own
    return rows[2 * len(SIZES) :]  # the first of each warms up


def costs_of(rows: Sequence[tuple[float, float, float, float]]) -> Costs:
    """Least squares of :func:`timed_steps`' rows. What pruning and packing take goes by the tokens
    generated."""
    generated, trained, rolling_out, rest = np.array(rows).T
    tokens = np.stack([np.ones(len(rows)), generated, trained], axis=1)
    (once, planning, training), *_ = np.linalg.lstsq(tokens, rest)
    (more, rolling), *_ = np.linalg.lstsq(tokens[:, :2], rolling_out)
    return Costs(float(once + more), float(rolling + planning), float(training))


def with_interval(value: Callable[[Sequence[int]], float], windows: int) -> dict[str, Any]:
    """A figure of all windows, and the 95% interval by leaving each out in turn (the jackknife)."""
    everything = range(windows)
    found = value(everything)
    without = (value([i for i in everything if i != left]) for left in everything)
    _, reach = mean_and_reach(
        [windows * found - (windows - 1) * each for each in without]
    )  # Tukey's pseudo-values
    return {"efficiency": found, "interval": [found - reach, found + reach]}


def judged(steps: Mapping[str, Sequence[Step]], costs: Costs) -> dict[str, dict[str, Any]]:
    """E of each arm with what it comes from, relative to the unpruned step."""
    found: dict[str, dict[str, Any]] = {}
    for name, own in steps.items():

        def efficiency(chosen: Sequence[int], own: Sequence[Step] = own) -> float:
            base = [steps[BASELINE][i] for i in chosen]
            these = [own[i] for i in chosen]
            return (
                costs.of(base) * sum(s.sampling for s in base) / (costs.of(these) * variance(these))
            )

        sampling = sum(step.sampling for step in own)
        found[name] = {
            **with_interval(efficiency, len(own)),
            "variance": variance(own) / sampling,
            "variance_estimated": statistics.fmean(step.estimated for step in own),
            "generated": sum(step.generated for step in own)
            / sum(step.generated for step in steps[BASELINE]),
            "trained": sum(step.trained for step in own)
            / sum(step.trained for step in steps[BASELINE]),
            "seconds": costs.of(own) / costs.of(steps[BASELINE]),
        }
    return found


def variance(steps: Sequence[Step]) -> float:
    return sum(step.sampling + step.noise for step in steps)


@dataclass(frozen=True, slots=True)
class Visit:
    """What was measured at a stage."""

    name: str
    step: int
    accuracy: float
    mixed_groups: float
    steps: dict[str, list[Step]]
    """Of each arm, on each window."""
    timed: list[tuple[float, float, float, float]]
    """Of :func:`timed_steps`."""

    def figures(self, costs: Costs) -> dict[str, Any]:
        """Everything of the stage."""
        arms, base = judged(self.steps, costs), self.steps[BASELINE]
        grid, known = (
            {
                each.removeprefix(word): found
                for each, found in arms.items()
                if each.startswith(word)
            }
            for word in ("grid ", "known ")
        )
        bests = {
            name: _best(found)
            for name, found in (("best_of_grid", grid), ("best_known", known))
            if found
        }
        bound = max(bests.values(), key=lambda found: found["efficiency"])
        own = {each: arms[each] for each in ARMS}
        return {
            "stage": self.name,
            "step": self.step,
            "accuracy": self.accuracy,
            "mixed_groups": self.mixed_groups,
            "seconds": dataclasses.asdict(costs),
            "unpruned_step_s": costs.of(base),
            "tokens": {
                key: statistics.fmean(getattr(step, key) for step in base)
                for key in ("generated", "trained")
            },
            "arms": own,
            "grid": {keep: found["efficiency"] for keep, found in grid.items()},
            **bests,
            "bound": bound,
            "smaller_batch": own[HALF],
            "default_efficiency": own[DEFAULT]["efficiency"],
            "default_over_bound": own[DEFAULT]["efficiency"] / bound["efficiency"],
        }


def visited(trainer: Trainer, name: str, options: Any) -> Visit:
    """Measure at a stage."""
    size, rng = trainer.config.rollout.prompts_per_step, np.random.default_rng(0)
    chosen = rng.permutation(len(trainer.pool))[: options.windows * size].reshape(-1, size)
    if len(chosen) < options.windows:
        raise SystemExit(
            f"--windows {options.windows} of {size} prompts are more than the pool's "
            f"{len(trainer.pool)}"
        )
    configs = {each: configured(trainer, *settings) for each, settings in ARMS.items()}
    configs |= {
        f"grid {p} / {c}": configured(trainer, *GENEROUS, *_keeps(p, c))
        for p in KEEPS[0]
        for c in KEEPS[1]
    }
    steps: dict[str, list[Step]] = {}
    right, live = [], []
    for number, prompt_ids in enumerate(np.sort(chosen, axis=1)):
        seeds = 1 + number * (options.further + 1)
        stage = measure(trainer, name, prompt_ids, seeds, TASKS[options.task].stride)
        window = Window(stage, trainer.config.loss.name)
        right.append(float((stage.metadata.rewards == 1.0).mean()))
        live.append(float((np.ptp(stage.metadata.rewards, axis=1) > 0.0).mean()))
        for each, way in ways(trainer, stage, configs, seeds + 1, options.further):
            steps.setdefault(each, []).append(way.step(window, options.draws))
        print(f"{name}: window {number + 1} of {len(chosen)}", file=sys.stderr, flush=True)
    facts = trainer.step, statistics.fmean(right), statistics.fmean(live), steps
    return Visit(name, *facts, timed_steps(trainer, options.repeats))


def _best(found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    keep = max(found, key=lambda keep: found[keep]["efficiency"])
    return {"keep": keep, **found[keep]}


def _keeps(prompts: float, completions: float | str) -> tuple[str, str]:
    return f"pruning.prompts.keep={prompts}", f"pruning.completions.keep={completions}"


def configured(trainer: Trainer, *settings: str) -> Config:
    """The run's configuration with these settings of pruning."""
    pruning = load_config("configs/quickstart.yaml", settings).pruning
    return replace(trainer.config, pruning=pruning)


def ways(
    trainer: Trainer, stage: Stage, configs: Mapping[str, Config], seeds: int, further: int
) -> Iterator[tuple[str, Way]]:
    """All arms, the grid, and after so many ``further`` rollouts of the window, of these ``seeds``,
    the bound."""
    history, metadata = trainer.sampler.history, stage.metadata
    for name, config in configs.items():
        yield name, Way(config, history, metadata, FRACTIONS.get(name, 1))
    if not further:
        return
    ids, samples = metadata.prompt_ids, metadata.rewards.shape[1]
    selection = Selection(ids, np.ones(len(ids)), window=len(ids))
    right, tokens = np.zeros((2, len(ids)))
    for number in range(further):
        rollouts = trainer.roll_out(
            StepRollouts(selection, trainer.config.run.steps + seeds + number)
        )
        right += (rollouts.metadata.rewards == 1.0).sum(axis=1)
        tokens += rollouts.metadata.response_lengths.mean(axis=1) / further
    chance = (right + 0.5) / (further * samples + 1.0)
    known = Known(1.0 - chance**samples - (1.0 - chance) ** samples, np.maximum(tokens, 1.0))
    true = dataclasses.replace(metadata, score_norms=stage.unit_norms)
    for name, config in configs.items():
        if name.startswith("grid"):
            yield name.replace("grid", "known"), Way(config, known, true)


def main() -> None:
    parser = arguments(
        __doc__,
        prompts=(64, "of a window"),
        samples=(8, "completions per prompt"),
        steps=(150, "most steps of training until the late stage is measured"),
        windows=(10, "of each stage"),
        draws=(60, "of each arm on each window"),
        repeats=(8, "of the timed steps of each size"),
        further=(
            4,
            "rollouts of a window, by which the bound knows how likely a prompt's group is to be "
            "mixed; 0: none",
        ),
    )
    parser.add_argument("--task", choices=list(TASKS), default="sums")
    parser.add_argument("settings", nargs="*", help="more settings of the training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sizes = options.prompts, options.samples, options.steps, Path(folder)
        visit = partial(visited, options=options)
        visits = list(training_stages(TASKS[options.task], *sizes, options.settings, visit))
    costs = costs_of([row for each in visits for row in each.timed])
    finish({"task": options.task, "stages": [each.figures(costs) for each in visits]}, options)


if __name__ == "__main__":
    main()
