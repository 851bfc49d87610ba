"""Confidence intervals, by resampling and by Student's t."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dppo.rl.types import Floats

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """Value and bounds of the confidence interval; NaN without measurements."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def estimate(value: float, resampled: Floats) -> Estimate:
    """Return ``value`` with the percentile bootstrap interval of ``resampled``, without NaN."""
    known = resampled[~np.isnan(resampled)]
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(known, [tail, 1.0 - tail]) if len(known) else (np.nan, np.nan)
    return Estimate(value if len(known) else np.nan, float(low), float(high))


def compute_student_t(dof: int) -> float:
    """Return half of a mean's confidence interval, in standard errors.

    The result is the 97.5% quantile of Student's t distribution with ``dof`` degrees of freedom.
    """
    # With t = √dof · tan θ, the density of θ is proportional to cos^(dof − 1) θ.
    angles = np.linspace(0.0, np.pi / 2, 100_001)
    density = np.cos(angles) ** (dof - 1)
    area = np.append(0.0, np.cumsum(density[1:] + density[:-1]))
    return float(np.sqrt(dof) * np.tan(np.interp(CONFIDENCE * area[-1], area, angles)))
