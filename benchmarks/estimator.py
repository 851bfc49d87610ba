"""Error of each completion rule's gradient estimate, at three stages of a real training run.

For every rule and budget of expected kept tokens (rates are found by bisection), over many draws:

- ``error``: E‖∇Ĵ − ∇J‖² / ‖∇J‖², including the bias of a biased rule.
- ``bias``: ‖E∇Ĵ − ∇J‖ / ‖∇J‖, with ``bias_standard_error``, the standard error of the estimate.

``sampling_noise`` is the noise of sampling without any pruning: the variance of ∇J over windows of
N independent prompts, over ‖∇J‖². The variance is estimated from the window's own N prompts as
N/(N − 1) Σ_q ‖y_q − ȳ‖², with y_q the part of ∇J due to prompt q.

    python benchmarks/estimator.py [--prompts 48] [--samples 8] [--rule FILE.py:NAME] [--json]
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import arguments, finish
from real_gradients import norm
from training_stages import TASKS, Stage, first_prompts, training_stages

from megatron_dppo import config
from megatron_dppo.config import PruningConfig
from megatron_dppo.errors import UserError
from megatron_dppo.plugins import load_function, wrap_function
from megatron_dppo.rl.advantages import estimate_advantages, read_columns
from megatron_dppo.rl.objectives import OBJECTIVES
from megatron_dppo.rl.pruning.completion_rules import register
from megatron_dppo.rl.pruning.draw import prune_minibatch
from megatron_dppo.rl.pruning.sampling import draw_bernoulli
from megatron_dppo.rl.types import Floats, StepMetadata

BUDGETS = (0.5, 0.3, 0.15)
HELD = ("grpo", "dapo")
TOLERANCE = 0.03
"""Relative tolerance of a budget. A rule outside the tolerance cannot meet the budget: 0/1 rules
move in whole completions."""
LEAST_ERROR = 1e-3
"""Least error in the ratio of neyman to threshold: a rule that keeps all completions with an
advantage has error 0."""

Draw = Callable[[np.random.Generator], tuple[Floats, float]]
"""A draw: scales of all completions [n], and tokens of the kept rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """An estimator at a budget."""

    stage: str
    objective: str
    rule: str
    max_weight: float
    budget: float
    kept_tokens: float | None
    """Mean kept fraction of the window's row tokens. This field and the following fields are None
    if no rate meets the budget."""
    error: float | None = None
    bias: float | None = None
    bias_standard_error: float | None = None


class Window:
    """A stage under an objective: gradient estimates from any scales of the completions."""

    def __init__(self, stage: Stage, objective: str) -> None:
        self.stage = stage
        self.objective = OBJECTIVES[objective]
        metadata = self.metadata = stage.metadata
        columns = read_columns(metadata)
        advantages = estimate_advantages(self.objective.advantage, metadata.rewards, columns)
        self.advantage = advantages[..., 0]
        self.gram = stage.unit_gram * np.outer(self.advantage, self.advantage)
        row_tokens = metadata.prompt_lengths[:, None] + metadata.response_lengths
        self.cost = row_tokens.astype(np.float64)
        rng = np.random.default_rng(0)
        unpruned = self.config(_rules("none"))
        everything = prune_minibatch(metadata, unpruned, self.objective, keep=1.0, rng=rng)
        self.full = (everything.coefficient / everything.normaliser).ravel()
        self.length = float(norm(self.gram, self.full))
        if not self.length > 0.0:
            mixed = np.count_nonzero(np.ptp(metadata.rewards, axis=1))
            problem = (
                f"{mixed} groups have mixed rewards at the {stage.name} stage, and their gradient "
                f"has the length {self.length:g}"
            )
            raise UserError(
                "--prompts",
                len(metadata.rewards),
                problem,
                "Give more, or raise sft.steps",
            )

    def config(self, pruning: PruningConfig) -> config.Config:
        return config.Config(loss=config.LossConfig(name=self.objective.name), pruning=pruning)

    @property
    def sampling_noise(self) -> float:
        """Variance of sampling prompts, over ‖∇J‖²."""
        prompts, samples = self.metadata.rewards.shape
        parts = np.zeros((prompts, self.full.size))
        for prompt in range(prompts):
            mine = slice(prompt * samples, (prompt + 1) * samples)
            parts[prompt, mine] = self.full[mine]
        spread = norm(self.gram, parts - parts.mean(axis=0)) ** 2
        return float(prompts / (prompts - 1) * spread.sum()) / self.length**2

    def judge(self, draw: Draw, draws: int) -> dict[str, float]:
        rng = np.random.default_rng(0)
        made = [draw(rng) for _ in range(draws)]
        scales = np.array([scale for scale, _ in made])
        tokens = np.array([kept for _, kept in made])
        mean = scales.mean(axis=0)
        error = float(np.mean(norm(self.gram, scales - self.full) ** 2)) / self.length**2
        spread = float(np.mean(norm(self.gram, scales - mean) ** 2)) / self.length**2
        return {
            "kept_tokens": float(tokens.mean() / self.cost.sum()),
            "error": error,
            "bias": float(norm(self.gram, mean - self.full)) / self.length,
            "bias_standard_error": math.sqrt(spread / draws),
        }

    def completions(
        self, pruning: PruningConfig, keep: float, metadata: StepMetadata | None = None
    ) -> Draw:
        """Return draws of a completion rule; ``metadata`` may have other score norms."""
        ruled = self.config(pruning)
        known = metadata or self.metadata

        def draw(rng: np.random.Generator) -> tuple[Floats, float]:
            pruned = prune_minibatch(known, ruled, self.objective, keep=keep, rng=rng)
            weighted = pruned.weight * pruned.coefficient / pruned.normaliser
            scale = np.where(pruned.kept, weighted, 0.0)
            return scale.ravel(), float(self.cost[pruned.kept].sum())

        return draw

    def uniform(self, share: float, *, all_of_them: bool) -> Draw:
        """Return independent draws with equal probabilities, from all completions or only from
        completions with an advantage."""
        candidates = np.ones_like(self.cost)
        if not all_of_them:
            candidates = (self.advantage != 0.0).astype(np.float64)
        probability = share * self.cost.sum() / (candidates * self.cost).sum()
        inclusion = np.minimum(probability, 1.0) * candidates

        def draw(rng: np.random.Generator) -> tuple[Floats, float]:
            kept = draw_bernoulli(inclusion, rng)
            weight = np.divide(kept, inclusion, out=np.zeros_like(inclusion), where=kept)
            return self.full * weight.ravel(), float(self.cost[kept].sum())

        return draw

    def importance(self, budget: float) -> Draw:
        """Return importance sampling with replacement, ∝ |A|·c/√cost: Cost-Aware GRPO
        (arXiv:2604.28020), with c of the loss, 1 for ``token_mean``.

        - A completion drawn several times is trained on once, with the whole weight, and costs the
          tokens once.
        - If all completions with an advantage fit into the budget, all are kept.
        """
        factor = np.abs(self.full.reshape(self.cost.shape))
        probability = np.abs(self.advantage) * factor / np.sqrt(self.cost)
        live = probability > 0.0
        probability = (probability / probability.sum()).ravel()

        def at(draws: float) -> Draw:
            def draw(rng: np.random.Generator) -> tuple[Floats, float]:
                count = rng.multinomial(round(draws), probability)
                expected = round(draws) * probability
                zeros = np.zeros_like(probability)
                weight = np.divide(count, expected, out=zeros, where=count > 0)
                return self.full * weight, float(self.cost.ravel()[count > 0].sum())

            return draw

        if self.cost[live].sum() <= budget * self.cost.sum():
            return lambda rng: (self.full * live.ravel(), float(self.cost[live].sum()))
        low, high = 1.0, 1e3 * self.cost.size
        while high - low > 1.0:
            middle = (low + high) / 2
            if expected_tokens(self, at(middle)) < budget:
                low = middle
            else:
                high = middle
        return at(high)


def _rules(rule: str, *, max_weight: float = 5.0, **more: object) -> PruningConfig:
    completions = config.CompletionPruningConfig(rule=rule, **more)
    return PruningConfig(
        prompts=config.PromptPruningConfig(rule="none"),
        completions=completions,
        max_weight=max_weight,
    )


def measure_rows(stage: Stage, objective: str, draws: int, own: str = "") -> Iterator[Row]:
    """Yield a row for every estimator at every budget; ``own``: a registered rule."""
    window = Window(stage, objective)
    norms = stage.unit_norms
    told = {
        "neyman": None,
        "neyman, advantage": dataclasses.replace(stage.metadata, score_norms=np.ones_like(norms)),
        "neyman, true norms": dataclasses.replace(stage.metadata, score_norms=norms),
    }
    weights = (5.0, 20.0)
    ruled = [
        (name, _rules("neyman", max_weight=most), known)
        for most in weights
        for name, known in told.items()
    ]
    ruled += [("threshold", _rules("threshold", max_weight=most), None) for most in weights]
    ruled += [(name, _rules(name), None) for name in ("threshold_deterministic", "top_k")]
    ruled += [("top_k, kept", _rules("top_k", normaliser="kept"), None)]
    if own:
        ruled += [(own, _rules("neyman", max_weight=most, function=own), None) for most in weights]
    for budget in BUDGETS:
        found: list[tuple[str, float, Draw | None]] = [
            ("uniform", math.inf, window.uniform(budget, all_of_them=True)),
            ("uniform without A=0", math.inf, window.uniform(budget, all_of_them=False)),
            ("importance", math.inf, window.importance(budget)),
        ]
        for name, pruning, metadata in ruled:
            at = partial(window.completions, pruning, metadata=metadata)
            found.append((name, pruning.max_weight, at_budget(window, budget, at)))
        for name, weight, draw in found:
            row = Row(stage.name, objective, name, weight, budget, None)
            yield row if draw is None else dataclasses.replace(row, **window.judge(draw, draws))


def expected_tokens(window: Window, draw: Draw, draws: int = 60) -> float:
    """Return the mean fraction of row tokens that a draw keeps, with the same random numbers in
    every call."""
    rng = np.random.default_rng(1)
    return float(np.mean([draw(rng)[1] for _ in range(draws)]) / window.cost.sum())


def at_budget(window: Window, budget: float, at: Callable[[float], Draw]) -> Draw | None:
    """Return the rule at the rate that keeps ``budget`` of the tokens, by bisection; None without
    such a rate."""
    # If all completions with an advantage fit into the budget, a rule that keeps exactly these
    # completions is within budget.
    if expected_tokens(window, at(1.0)) <= budget:
        return at(1.0)
    low, high = 0.0, 1.0
    for _ in range(12):
        keep = (low + high) / 2
        if expected_tokens(window, at(keep)) < budget:
            low = keep
        else:
            high = keep
    share = expected_tokens(window, at(high))
    return at(high) if abs(share - budget) <= TOLERANCE * budget else None


def neyman_over_threshold(rows: Sequence[Row], max_weight: float) -> dict[str, object]:
    """Return the errors' ratio of each objective, stage and budget that is feasible for both rules,
    and the geometric mean of all ratios."""
    errors = {
        (row.rule, row.stage, row.objective, row.budget): max(row.error, LEAST_ERROR)
        for row in rows
        if row.max_weight == max_weight and row.error is not None
    }
    ratios = {}
    for (rule, stage, objective, budget), error in errors.items():
        other = errors.get(("threshold", stage, objective, budget), LEAST_ERROR)
        # At the least error, the budget holds all completions with an advantage: no comparison.
        if rule == "neyman" and other > LEAST_ERROR:
            ratios[f"{stage} {objective} {budget:g}"] = error / other
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios)) if ratios else None
    return {"max_weight": max_weight, "ratio": mean, "cells": ratios}


def print_errors(rows: Sequence[Row]) -> None:
    """Print the rules' ``error`` under ``grpo`` with weights up to 5, by stage and budget."""
    chosen = [row for row in rows if row.objective == "grpo" and row.max_weight in (5.0, math.inf)]
    errors = {(row.rule, row.stage, row.budget): row.error for row in chosen}
    cells = list(dict.fromkeys((row.stage, row.budget) for row in chosen))
    print(f"{'error':<28}", *(f"{stage + ' ' + str(budget):>12}" for stage, budget in cells))
    for rule in dict.fromkeys(row.rule for row in chosen):
        line = f"{rule:<28}"
        for cell in cells:
            error = errors.get((rule, *cell))
            line += f"{'-':>13}" if error is None else f"{error:13.2g}"
        print(line)


def main() -> None:
    parser = arguments(
        __doc__,
        prompts=(48, "of the window"),
        samples=(8, "completions per prompt"),
        steps=(150, "most steps of training until the late stage is measured"),
        draws=(400, "of each estimator"),
        rule=("", "rule of your own, FILE.py:NAME, beside the others"),
    )
    parser.add_argument("settings", nargs="*", help="more settings of the training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rule:
        register(options.rule, wrap_function(load_function("--rule", options.rule)))
    rows: list[Row] = []
    stages = []
    with tempfile.TemporaryDirectory() as folder:
        sizes = options.prompts, options.samples, options.steps, Path(folder)
        for stage in training_stages(TASKS["sums"], *sizes, options.settings, first_prompts):
            for objective in HELD:
                rows += measure_rows(stage, objective, options.draws, options.rule)
            rewards = stage.metadata.rewards
            stages.append(
                {
                    "stage": stage.name,
                    "step": stage.step,
                    "accuracy": float((rewards == 1.0).mean()),
                    "mixed_groups": float((np.ptp(rewards, axis=1) > 0.0).mean()),
                    "sampling_noise": {
                        objective: Window(stage, objective).sampling_noise for objective in HELD
                    },
                }
            )
    default = neyman_over_threshold(rows, 5.0)
    light = neyman_over_threshold(rows, 20.0)
    stored = []
    for row in rows:
        fields = asdict(row)
        # JSON has no infinity.
        if math.isinf(row.max_weight):
            fields["max_weight"] = None
        stored.append(fields)
    report = {
        "neyman_over_threshold": default["ratio"],
        "by_max_weight": [default, light],
        "stages": stages,
        "rows": stored,
    }
    finish(report, options, partial(print_errors, rows))


if __name__ == "__main__":
    main()
