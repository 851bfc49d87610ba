"""``megatron_dppo.prune``, the part of the algorithm that other trainers can use."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import megatron_dppo
from megatron_dppo import prune
from megatron_dppo.rl.advantages import compute_group_advantages
from tests.rl.integration import FixedOffset

DRAWS = 1024
OFFSETS = (np.arange(DRAWS) + 0.5) / DRAWS
"""An even grid of the draw's offset, which misses each probability by at most one part in
``DRAWS``."""


def batch(prompts: int = 6) -> dict[str, object]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 60, size=(prompts, 8))
    logprobs = [[np.log(rng.uniform(0.2, 1.0, size=n)) for n in group] for group in lengths]
    return {
        "lengths": lengths,
        "rewards": rng.integers(0, 2, size=(prompts, 8)),
        "logprobs": logprobs,
    }


def assert_same_draw(**options: object) -> None:
    for ours, expected in zip(prune(**(batch() | options)), prune(**batch()), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_prune_needs_numpy_alone(tmp_path: Path):
    for library in Path(np.__file__).parents[1].glob("numpy*"):
        (tmp_path / library.name).symlink_to(library)
    places = [str(tmp_path), str(Path(megatron_dppo.__file__).parents[1])]

    def succeeds(code: str) -> bool:
        words = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path += {places}; {code}"]
        return subprocess.run(words, stderr=subprocess.DEVNULL).returncode == 0

    assert succeeds("from megatron_dppo import prune; prune([[9, 9]], [[0, 1]])")
    assert not succeeds("import pydantic")


@pytest.mark.parametrize(
    "options", [{}, {"sequence_mean": False, "prompt_lengths": range(20, 26)}, {"logprobs": None}]
)
def test_mean_weight_of_each_completion_is_one(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
):
    given = {**batch(), "budget": 0.4, "max_weight": 5.0, **options}
    monkeypatch.setattr(np.random, "default_rng", FixedOffset)
    weights = np.array([prune(**given, seed=offset).weights for offset in OFFSETS])
    mixed = np.broadcast_to(given["rewards"].std(axis=1, keepdims=True) > 0, weights.shape[1:])
    np.testing.assert_allclose(weights.mean(axis=0), mixed, atol=2 * 5 / DRAWS)
    assert weights.max() <= 5 + 1e-9


def test_budget_is_met_by_kept_tokens():
    given = batch(prompts=60)
    tokens = [
        given["lengths"][prune(**given, budget=0.4, seed=step).mask].sum() for step in range(20)
    ]
    assert np.mean(tokens) == pytest.approx(0.4 * given["lengths"].sum(), rel=0.03)
    kept, mixed = (
        prune(**given, budget="auto", max_weight=50.0).mask,
        given["rewards"].std(axis=1) > 0,
    )
    assert 0.2 < kept[mixed].mean() < 0.95


def test_surprising_completions_are_kept_more():
    sure, unsure = np.full(10, -0.05), np.full(10, -2.0)
    given = {
        "lengths": [[10] * 4],
        "rewards": [[1, 0, 1, 0]],
        "logprobs": [[unsure, sure, unsure, sure]],
    }
    often = np.mean([prune(**given, seed=(seed, 1)).mask[0] for seed in range(200)], axis=0)
    assert often[::2].min() > 0.6 and often[1::2].max() < 0.4


def test_trainer_may_give_its_own_advantages():
    own = compute_group_advantages(batch()["rewards"].astype(float), normalise=True)
    assert_same_draw(advantages=own)
    own[:, 1:] = 0.0
    assert not prune(**batch(), advantages=own).mask[:, 1:].any()


def test_weights_of_a_biased_rule_are_those_of_its_budget():
    kept = prune([[9] * 4], [[1, 0, 0, 0]], rule="threshold_deterministic", budget=0.4)
    assert kept.weights.tolist() == [[1.0, 0.0, 2.5, 2.5]]


def test_log_probabilities_may_be_padded():
    ragged = batch()
    padded = np.zeros((6, 8, 60))
    for place, length in np.ndenumerate(ragged["lengths"]):
        padded[place][:length] = ragged["logprobs"][place[0]][place[1]]
    assert_same_draw(logprobs=padded)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lengths": [3, 4]}, "lengths"),
        ({"rule": "best"}, "best"),
        ({"budget": 0.0}, "budget"),
        ({"budget": "auto", "rule": "top_k"}, "'auto' is for rule='neyman'"),
        ({"logprobs": [[[0.0]] * 8] * 6}, r"logprobs\[0\]\[0\] has 1 log-prob"),
        ({"logprobs": [[[0.0]] * 7] * 6}, "6 prompts of 8"),
        ({"advantages": [1.0]}, "advantages"),
    ],
)
def test_wrong_argument_is_named(change: dict[str, object], said: str):
    with pytest.raises(ValueError, match=said):
        prune(**{**batch(), **change})
