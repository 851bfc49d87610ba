"""Confidence intervals, by resampling and by Student's t."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dppo.rl.types import Floats

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, and the bounds of its interval. Not a number if nothing could be measured."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def estimate(value: float, resampled: Floats) -> Estimate:
    """``value`` with its percentile bootstrap interval, of the resampled figures ``resampled`` that
    are numbers."""
    known = resampled[~np.isnan(resampled)]
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(known, [tail, 1.0 - tail]) if len(known) else (np.nan, np.nan)
    return Estimate(value if len(known) else np.nan, float(low), float(high))


def compute_student_t(dof: int) -> float:
    """Half of a mean's confidence interval, in standard errors: the 97.5% quantile of Student's t
    distribution.

    With t = √freedom · tan θ, the density of θ is proportional to cos^(freedom - 1) θ.
    """
    angles = np.linspace(0.0, np.pi / 2, 100_001)
    density = np.cos(angles) ** (dof - 1)
    area = np.append(0.0, np.cumsum(density[1:] + density[:-1]))
    return float(np.sqrt(dof) * np.tan(np.interp(CONFIDENCE * area[-1], area, angles)))
