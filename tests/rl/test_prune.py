"""``megatron_dppo.prune``, the part of the algorithm that other trainers can use."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import megatron_dppo
from megatron_dppo import prune
from megatron_dppo.rl.advantages import group_advantages
from tests.rl.integration import FixedOffset

DRAWS = 1024


def batch(prompts: int = 6) -> dict[str, object]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 60, size=(prompts, 8))
    logprobs = [[np.log(rng.uniform(0.2, 1.0, size=n)) for n in group] for group in lengths]
    return {"lengths": lengths, "rewards": rng.integers(0, 2, size=(prompts, 8)), "logprobs": logprobs}


def test_it_wants_numpy_alone(tmp_path: Path):
    for library in Path(np.__file__).parents[1].glob("numpy*"):
        (tmp_path / library.name).symlink_to(library)
    places = [str(tmp_path), str(Path(megatron_dppo.__file__).parents[1])]

    def succeeds(code: str) -> bool:
        words = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path += {places}; {code}"]
        return subprocess.run(words, stderr=subprocess.DEVNULL).returncode == 0

    assert succeeds("from megatron_dppo import prune; prune([[9, 9]], [[0, 1]])")
    assert not succeeds("import pydantic")


@pytest.mark.parametrize("options", [{}, {"sequence_mean": False, "prompt_lengths": 20}, {"logprobs": None}])
def test_the_mean_weight_of_each_completion_is_one(options: dict[str, object], monkeypatch: pytest.MonkeyPatch):
    """Law 2 over an even grid of the draw's offset: that misses each probability by at most one part in ``DRAWS``."""
    given = {**batch(), "budget": 0.4, "max_weight": 5.0, **options}
    monkeypatch.setattr(np.random, "default_rng", FixedOffset)
    draws = [prune(**given, seed=(draw + 0.5) / DRAWS) for draw in range(DRAWS)]
    mixed = np.broadcast_to(given["rewards"].std(axis=1, keepdims=True) > 0, draws[0].mask.shape)
    weights = np.array([kept.weights for kept in draws])
    np.testing.assert_allclose(weights.mean(axis=0), mixed, atol=2 * 5 / DRAWS)
    assert weights.max() <= 5 + 1e-9
    assert all(((kept.weights > 0) == kept.mask).all() for kept in draws[:10])


def test_the_budget_is_met_and_the_surprising_are_kept_more_often():
    given = batch(prompts=60)
    tokens = [given["lengths"][prune(**given, budget=0.4, seed=step).mask].sum() for step in range(20)]
    assert np.mean(tokens) == pytest.approx(0.4 * given["lengths"].sum(), rel=0.03)
    lengths, rewards = np.full((1, 4), 10), [[1, 0, 1, 0]]
    logprobs = [[np.full(10, -2.0), np.full(10, -2.0), np.full(10, -0.05), np.full(10, -0.05)]]
    masks = [prune(lengths, rewards, logprobs, 0.5, seed=(step, 1)).mask[0] for step in range(200)]
    often = np.mean(masks, axis=0)
    assert often[:2].min() > 0.6 > 0.4 > often[2:].max()


def test_without_log_probabilities_the_advantage_alone_is_the_score():
    """Long completions of equal |A| cost more, and are kept less often."""
    group = [[10, 1000] * 4], [[1, 1, 0, 0] * 2]
    masks = [prune(*group, budget=0.5, sequence_mean=False, seed=seed).mask for seed in range(99)]
    often = np.mean(masks, axis=(0, 1))
    assert often[::2].min() > 0.9 > 0.7 > often[1::2].max()


def test_the_most_efficient_share_keeps_part_of_what_has_a_gradient():
    given = batch(prompts=60)
    kept, mixed = prune(**given, budget="auto", max_weight=50.0).mask, given["rewards"].std(axis=1) > 0
    assert 0.2 < kept[mixed].mean() < 0.95


def test_a_trainer_may_have_advantages_of_its_own():
    given = batch()
    own = group_advantages(given["rewards"].astype(float), normalise=True)
    for ours, expected in zip(prune(**given, advantages=own), prune(**given), strict=True):
        np.testing.assert_array_equal(ours, expected)
    own[:, 1:] = 0.0
    assert not prune(**given, advantages=own).mask[:, 1:].any()
    with pytest.raises(ValueError, match="advantages"):
        prune(**given, advantages=own[0])


def test_log_probabilities_may_be_padded():
    ragged = batch()
    padded = np.zeros((6, 8, 60))
    for place, length in np.ndenumerate(ragged["lengths"]):
        padded[place][:length] = ragged["logprobs"][place[0]][place[1]]
    for ours, expected in zip(prune(**{**ragged, "logprobs": padded}), prune(**ragged), strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lengths": [3, 4]}, "lengths"),
        ({"rule": "best"}, "best"),
        ({"budget": 0.0}, "budget"),
        ({"budget": "auto", "rule": "top_k"}, "'auto' is for rule='neyman'"),
        ({"logprobs": [[[0.0]] * 8] * 6}, r"logprobs\[0\]\[0\] has 1 log-prob"),
        ({"logprobs": [[[0.0]] * 7] * 6}, "6 prompts of 8"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], said: str):
    with pytest.raises(ValueError, match=said):
        prune(**{**batch(), **change})


DIVISORS = {
    "grpo": lambda lengths, mask, longest: mask.sum(),
    "dr_grpo": lambda lengths, mask, longest: mask.sum() * longest,
    "luspo": lambda lengths, mask, longest: mask.sum(),
    "bnpo": lambda lengths, mask, longest: lengths[mask].sum(),
    "dapo": lambda lengths, mask, longest: lengths.sum(),
}
"""What other trainers divide the sum over rows by, of the rows that they see."""


@pytest.mark.parametrize("name", DIVISORS)
@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_with_the_factor_of_its_loss_another_trainer_has_the_gradient_of_the_whole_batch(
    name: str, kl: float, monkeypatch: pytest.MonkeyPatch
):
    """Over an even grid of the draw's offset; a completion's gradients of policy and KL are two numbers."""
    given, longest = batch(), 60
    monkeypatch.setattr(np.random, "default_rng", FixedOffset)
    lengths, rewards = given["lengths"], given["rewards"].astype(float)
    advantage = group_advantages(rewards, normalise=name != "dr_grpo")
    policy, divergence = np.random.RandomState(0).rand(2, *lengths.shape) * np.sqrt(lengths)
    policy *= np.sign(advantage)  # all terms are positive: nothing cancels out
    whole, mixed = np.ones_like(lengths, bool), advantage != 0.0
    own = 1.0 / lengths if name == "grpo" else np.ones(lengths.shape)
    count = DIVISORS[name]
    full = (own * (advantage * policy + kl * divergence))[mixed].sum() / count(lengths, whole, longest)
    found, unscaled = [], []
    for draw in range(DRAWS):
        mask, weights = prune(
            **given, budget=0.4, normalise=name != "dr_grpo", sequence_mean=name == "grpo", seed=(draw + 0.5) / DRAWS
        )
        factor = {"bnpo": lengths[mask].sum() / lengths.sum(), "dapo": 1.0}.get(name, mask.sum() / mask.size)
        terms = (weights * own * (advantage * policy + kl * divergence))[mask].sum() / count(lengths, mask, longest)
        found.append(factor * terms)
        unscaled.append(terms)
    assert np.mean(found) == pytest.approx(full, rel=0.02)
    assert name == "dapo" or np.mean(unscaled) > 1.5 * full
