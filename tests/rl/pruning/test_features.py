"""Features of a prompt are read off it alone, are of one scale over the pool, and the same in every process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from megatron_dppo.rl.pruning.forecast import WIDEST, PromptFeatures
from megatron_dppo.rl.types import Prompt
from tests.rl.plans import made_up_pool

SHOWN = """
import numpy as np
from megatron_dppo.rl.pruning.forecast import PromptFeatures
from tests.rl.plans import made_up_pool
print(PromptFeatures(made_up_pool(40)).of(np.arange(40)).tobytes().hex())
"""


def sums(count: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    texts = ["+".join(map(str, rng.integers(1, 10, rng.integers(2, 7)))) + "=" for _ in range(count)]
    return [Prompt(id=i, token_ids=np.frombuffer(t.encode(), np.uint8), text=t, label="") for i, t in enumerate(texts)]


def test_features_have_the_same_scale_over_the_pool() -> None:
    features = PromptFeatures(sums(200)).of(np.arange(200))
    assert features.shape == (200, PromptFeatures.size)
    np.testing.assert_array_equal(features[:, 0], 1.0)
    np.testing.assert_allclose(features[:, 1:].mean(axis=0), 0.0, atol=0.05)
    assert np.abs(features[:, 1:]).max() <= WIDEST**2
    np.testing.assert_allclose(features[:, 1:10].std(axis=0), 1.0, atol=0.1)


def test_what_is_the_same_in_all_prompts_says_nothing() -> None:
    pool = [Prompt(id=i, token_ids=np.array([1, 2], np.int32), text="3+4=", label="") for i in range(5)]
    features = PromptFeatures(pool).of(np.arange(5))
    np.testing.assert_array_equal(features[:, 1:], 0.0)


def test_the_data_source_tells_prompts_apart() -> None:
    pool = [
        Prompt(id=i, token_ids=np.array([1], np.int32), text="x", label="", data_source=("gsm8k", "math")[i % 2])
        for i in range(6)
    ]
    features = PromptFeatures(pool).of(np.arange(6))
    assert (features[::2] == features[0]).all() and (features[1] != features[0]).any()


def test_labels_and_numbers_past_all_bounds_do_no_harm() -> None:
    pool = sums(20)
    endless = Prompt(id=20, token_ids=np.arange(5, dtype=np.int32), text="9" * 5000 + " ²", label="never read")
    features = PromptFeatures([*pool, endless]).of(np.array([20, 0]))
    assert np.isfinite(features).all()


def test_another_process_reads_the_same_features() -> None:
    """Python's hash of a text differs from process to process; a resumed run must not."""
    made = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True, check=True).stdout.strip()
    assert made == PromptFeatures(made_up_pool(40)).of(np.arange(40)).tobytes().hex()
