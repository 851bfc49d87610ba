"""What a probe makes of gradients' norms, on vectors that are known."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo.rl.trees import ForkStatistics, interval, variance_parts
from megatron_dppo.rl.types import Floats


def drawn(between: float, within: float, prompts: int = 4000) -> Floats:
    """[P, 3, 4, 5], gradients of five parameters; between and within are variances of the whole vector."""
    rng = np.random.default_rng(1)
    of_prompt = rng.normal(size=(prompts, 1, 1, 5))
    of_response = rng.normal(size=(prompts, 3, 1, 5)) * np.sqrt(between / 5)
    return of_prompt + of_response + rng.normal(size=(prompts, 3, 4, 5)) * np.sqrt(within / 5)


def parts_of(gradients: Floats) -> tuple[Floats, Floats]:
    squares = [(gradients.sum(axis=axes) ** 2).sum(axis=-1) for axes in ((), (2,), (1, 2))]
    return variance_parts(*squares)


def test_each_prompts_parts_are_those_of_an_analysis_of_variance() -> None:
    gradients = drawn(1.0, 1.0, prompts=6)
    between, within = parts_of(gradients)
    of_responses = gradients.mean(axis=2)
    assert within == pytest.approx(gradients.var(axis=2, ddof=1).sum(axis=-1).mean(axis=1))
    assert between == pytest.approx(of_responses.var(axis=1, ddof=1).sum(axis=-1) - within / 4)


def known(within: float, after: float, of_rewards: float = 0.5) -> ForkStatistics:
    ones = np.ones(20)
    shares = [ones * share for share in (1 - within, within, 1 - of_rewards, of_rewards)]
    return ForkStatistics(*shares, length=ones * 100, before=ones * 100 * (1 - after))


EVERYONE = np.arange(20)
MANY = 10**6
"""Roots whose mean has no noise."""


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_no_tree_is_worth_a_flat_group_where_variance_arises_evenly(share: float) -> None:
    """(B + W)/((B + W/M)(a + M(1 − a))) has its largest value over all real M at 1 then."""
    assert known(share, share).gain(EVERYONE, MANY, 1) == pytest.approx(1.0)
    assert all(known(share, share).gain(EVERYONE, MANY, children) < 1.0 for children in range(2, 9))


def test_the_best_tree_gains_what_the_best_split_of_tokens_gains() -> None:
    """W/(B + W) = 0.9 after 0.1 of the tokens are left: M* = √(aW/(B(1 − a))) = 9."""
    statistics = known(0.9, 0.1)
    gains = [float(statistics.gain(EVERYONE, MANY, children)) for children in range(2, 20)]
    most = 1.0 / (np.sqrt(0.9 * 0.1) + np.sqrt(0.1 * 0.9)) ** 2
    assert 2 + int(np.argmax(gains)) == 9 and max(gains) == pytest.approx(most)
    roots, children, gain = statistics.best(40)
    assert roots * children <= 40 and 4 <= children <= 9 and 0.7 * most < gain.value < most
    assert gain.low == pytest.approx(gain.high), "all prompts say the same"
    assert statistics.best(3)[:2] == (2, 2), "the least tree that there is"


@pytest.mark.parametrize(("roots", "children"), [(4, 2), (2, 4), (3, 3)])
def test_few_roots_make_a_noisy_baseline(roots: int, children: int) -> None:
    """Rewards of all roots drawn, and the mean of the other roots taken from those of one."""
    rng, draws = np.random.default_rng(5), 200_000
    between, within = 0.7, 0.3
    of_roots = rng.normal(size=(draws, roots, 1)) * np.sqrt(between)
    rewards = of_roots + rng.normal(size=(draws, roots, children)) * np.sqrt(within)
    tree = (rewards[:, 0, 0] - rewards[:, 1:].mean(axis=(1, 2))).var()
    flat = 1.0 + 1.0 / (roots * children - 1)
    statistics = known(0.5, 0.5, of_rewards=within)
    noise = statistics.gain(EVERYONE, MANY, children) / statistics.gain(EVERYONE, roots, children)
    assert noise == pytest.approx(tree / flat, rel=0.02)


def test_an_interval_is_as_wide_as_prompts_differ() -> None:
    """Means of 30 prompts, each 0 or 1: their share of ones is known to ± 0.18."""
    late = np.random.default_rng(3).random(30) < 0.5
    found = interval(lambda prompts: late[prompts].mean(axis=-1), 30)
    assert found.value == late.mean()
    assert found.high - found.low == pytest.approx(4 * np.sqrt(0.25 / 30), rel=0.2)


def test_estimates_below_zero_count_as_none() -> None:
    less, ones = np.full(20, -0.1), np.ones(20)
    assert ForkStatistics(less, ones, less, ones, ones * 10, ones * 5).variance_after(EVERYONE) == 1.0
