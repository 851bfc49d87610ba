"""Confidence intervals of resampled values."""

import numpy as np

from megatron_dppo.rl.intervals import estimate


def test_interval_holds_95_percent_of_the_resampled_values() -> None:
    resampled = np.append(np.arange(1001) / 1000, np.nan)
    found = estimate(0.4, resampled)
    np.testing.assert_allclose([found.value, found.low, found.high], [0.4, 0.025, 0.975])
