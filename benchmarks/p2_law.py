"""Measure the P² law (arXiv:2411.10272) on seven recoveries: errors on points kept out of the fit.

    python benchmarks/p2_law.py [--json]

    L = L0 + (1/rho)^gamma (1/N0)^delta (N_C/N0^alpha + D_C/D^beta + E)

- L: loss after recovery [nats per token]; L0: loss of the whole policy
- rho: removed fraction of the weights; N0: weights of the whole policy; D: tokens of the recovery

Points: ``results/recovery_curves.csv``. An error is the geometric mean of max(predicted / measured,
measured / predicted): 1 is exact, 2 a factor of two.
"""

import numpy as np
from harness import RESULTS, arguments, finish
from numpy.typing import NDArray
from scipy.optimize import least_squares

Floats = NDArray[np.float64]
STARTS = 10
LOWEST, HIGHEST = [-4, -4, -4, 0, 0, -3, -1], [1, 1, 1, 2, 2, 3, 1]


def compute_log_errors(theta: Floats, points: Floats) -> Floats:
    """Return log(predicted / measured) for log N_C, log D_C, log E and the exponents."""
    n_c, d_c, e, alpha, beta, gamma, delta = theta
    # N0 and D are in units of 1e5, so that coefficients are near 1.
    size, tokens = np.log(points[:, [0, 2]] / 1e5).T
    terms = np.exp(n_c - alpha * size) + np.exp(d_c - beta * tokens) + np.exp(e)
    excess = np.exp(-gamma * np.log(points[:, 1]) - delta * size) * terms
    return np.log((points[:, 4] + excess) / points[:, 3])


def measure_error(seen: Floats, unseen: Floats) -> float:
    """Fit by the least soft L1 loss, from random starts; return the error on the unseen points."""
    robust = {"loss": "soft_l1", "f_scale": 0.1, "bounds": ([-20] * 3 + [0, 0, -10, -10], 10)}
    starts = np.random.default_rng(1).uniform(LOWEST, HIGHEST, (STARTS, 7))
    fits = [least_squares(compute_log_errors, start, args=(seen,), **robust) for start in starts]
    theta = min(fits, key=lambda fit: fit.cost).x
    return float(np.exp(np.abs(compute_log_errors(theta, unseen)).mean()))


def main() -> None:
    options = arguments(__doc__).parse_args()
    points = np.loadtxt(RESULTS / "recovery_curves.csv", delimiter=",", skiprows=1)
    rate, tokens, loss, whole, curve = points[:, 1:].T
    last = np.array([tokens[curve == number].max() for number in curve])
    unseen = {"largest_rate": rate > 0.7, "last_half_of_tokens": tokens > last / 2}
    unseen |= {f"curve_{number:.0f}": curve == number for number in np.unique(curve)}
    figures = {"points": len(points), "points_below_L0": int((loss < whole).sum())}
    figures["error_all_seen"] = measure_error(points, points)
    for name, rows in unseen.items():
        figures[f"error_{name}"] = measure_error(points[~rows], points[rows])
    finish(figures, options)


if __name__ == "__main__":
    main()
