"""Law 2 on the gradients of a real policy: the expected pruned gradient is the full one.

Every estimate is Σ_i scale_i g_i, and the inner products of the g_i are known. Draws are integrated over their offsets.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from benchmarks.real_gradients import norm
from megatron_dppo.config import Config, replace
from megatron_dppo.rl.objectives import objective_for
from megatron_dppo.rl.pruning.completion_rules import COMPLETION_RULES
from megatron_dppo.rl.pruning.prompt_rules import PROMPT_RULES, select
from megatron_dppo.rl.pruning.sampling import draw_systematic
from megatron_dppo.rl.types import Floats, Selection
from megatron_dppo.settings import load_config
from tests.laws.real_windows import (
    CASES,
    LIMIT,
    PROMPTS,
    SAMPLES,
    WINDOW,
    RealWindow,
    make_windows,
    read_windows,
    select_groups,
)
from tests.rl.integration import FixedOffset, all_plans, outcomes, recorded_draws

WINDOWS = read_windows()
ROUNDING = 1e-6
BIAS = 1e-3
UNBIASED = ("none", "threshold", "neyman")


def configure(window: RealWindow, prompts: str, completions: str, *more: str) -> Config:
    settings = f"""
    rollout.max_response_tokens={LIMIT}
    pruning.prompts.rule={prompts} pruning.prompts.keep=0.6
    pruning.completions.rule={completions} pruning.completions.keep=0.5
    """
    return replace(load_config(None, [*settings.split(), *more]), loss=window.loss)


def bias(window: RealWindow, config: Config) -> float:
    """Return ‖E[∇Ĵ] − ∇J‖ / ‖∇J‖, integrated over systematic draws of both levels."""
    expected, total = np.zeros((PROMPTS, SAMPLES)), 0.0
    prompts, completions = config.pruning.prompts.rule, config.pruning.completions.rule
    with draw_systematically(PROMPT_RULES, prompts) as drawn, draw_systematically(COMPLETION_RULES, completions):
        select_prompts(window, config, 0.0)
        for offset, chosen in outcomes(drawn[0][0]):
            part = select_groups(window.metadata, select_prompts(window, config, offset))
            for step, chance in all_plans(part, config):
                samples = step.minibatches[0].samples
                place = part.prompt_ids[samples.group], samples.completion
                expected[place] += chosen * chance * samples.scale
                total += chosen * chance
    assert total == pytest.approx(1.0, abs=1e-12)
    full = full_scales(window)
    return float(norm(window.gram, (expected - full).ravel()) / norm(window.gram, full.ravel()))


def draw_systematically(rules: Any, name: str) -> AbstractContextManager[Any]:
    return recorded_draws(rules, name, dataclasses.replace(rules[name], draw=draw_systematic))


def select_prompts(window: RealWindow, config: Config, offset: float) -> Selection:
    return select(
        WINDOW.prompt_ids,
        window.history,
        config.pruning.prompts,
        group_size=SAMPLES,
        normalised=objective_for(config.loss).normalise,
        keep=config.pruning.prompts.keep,
        rng=FixedOffset(offset),
    )


def full_scales(window: RealWindow) -> Floats:
    """[PROMPTS, SAMPLES], c/Z of the unpruned window, by the table of objectives."""
    lengths = window.metadata.response_lengths.astype(float)
    count = PROMPTS * SAMPLES
    return {
        "grpo": 1.0 / (lengths * count),
        "gspo": 1.0 / (lengths * count),
        "dapo": np.full_like(lengths, 1.0 / lengths.sum()),
        "dr_grpo": np.full_like(lengths, 1.0 / (count * LIMIT)),
    }[window.loss.name]


def test_packed_gradient_is_the_sum_of_its_rows(ranks, tmp_path):
    """Tie the algebra below to the system: plans of both levels, two updates, several packs, one actor."""
    errors = make_windows(ranks, tmp_path, warm_up=60, updates=2)["packed_errors"]
    # With binary rewards a whole minibatch may be without advantage.
    assert all(errors[case] for case in CASES if case[0] == "graded")
    assert max(max(of_plans, default=0.0) for of_plans in errors.values()) < 1e-5


# With pruned prompts the loss of dapo is a ratio of two estimates, which is biased.
@pytest.mark.parametrize(
    ("kind", "loss", "prompts", "completions"),
    [
        *(("binary", "grpo", prompts, completions) for prompts in UNBIASED for completions in UNBIASED),
        *((*case, "none" if case[1] == "dapo" else "neyman", "neyman") for case in CASES[1:]),
    ],
)
def test_expected_pruned_gradient_is_the_full_one(kind, loss, prompts, completions):
    window = WINDOWS[kind, loss]
    assert bias(window, configure(window, prompts, completions)) < ROUNDING


BIASED = [
    *(("none", rule) for rule in ("threshold_deterministic", "top_k", "extremes")),
    *((rule, "none") for rule in ("greso", "dynamic_sampling")),
]


def test_biased_rules_are_named():
    rules = [*(("none", rule) for rule in COMPLETION_RULES), *((rule, "none") for rule in PROMPT_RULES)]
    named = [pair for pair in rules if PROMPT_RULES[pair[0]].biased or COMPLETION_RULES[pair[1]].biased]
    assert sorted(named) == sorted(BIASED)
    assert {name for pair in rules for name in pair} == {*UNBIASED, *(name for pair in BIASED for name in pair)}


@pytest.mark.parametrize(
    ("prompts", "completions", "normaliser"), [*((*pair, "full") for pair in BIASED), ("none", "top_k", "kept")]
)
def test_rule_named_biased_is_biased(prompts, completions, normaliser):
    window = WINDOWS["binary", "grpo"]
    settings = (f"pruning.completions.normaliser={normaliser}", "pruning.completions.keep=0.25")
    assert bias(window, configure(window, prompts, completions, *settings)) > BIAS
