"""The P² law (arXiv:2411.10272): the loss of a policy that was made smaller, by the tokens it has recovered on.

L = L₀ + (1/ρ)^γ (1/N₀)^δ (N_C/N₀^α + D_C/D^β + E)

Every candidate form is a sum of terms, each a constant times powers of what a curve knows, perhaps above the loss of
the whole policy. The logarithms of constants, and the exponents, are what is fitted: terms are then never below 0.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from megatron_dppo.compress.job import RECORD
from megatron_dppo.data.rows import read_rows
from megatron_dppo.errors import UserError
from megatron_dppo.observe.metrics import read_metrics
from megatron_dppo.rl.types import Floats
from megatron_dppo.trainer.resume import WARM_UP

HUBER = 1e-3
"""Where the Huber loss of log-losses turns from squares to absolute values, as for Chinchilla (arXiv:2203.15556)."""
STARTS, POLISHED, STEPS = 40, 3, 300
SHARED, FALLING = (-2.0, 2.0), (0.05, 1.5)
"""Where starts draw the exponents that scale the whole bracket, and those of terms that fall."""


@dataclass(frozen=True, slots=True)
class Points:
    """Losses of P points of several curves. Each field is [P]; all but ``curve`` fp64.

        size 6e8, rate 0.25, tokens 1e8, loss 2.1, whole 1.9, curve 0

    is a policy of 600 million weights that lost a quarter of them, after 100 million tokens.
    """

    size: Floats
    """N₀, weights of the whole policy."""
    rate: Floats
    """ρ, share of them that is gone."""
    tokens: Floats
    """D, trained on since."""
    loss: Floats
    """L, in nats per token."""
    whole: Floats
    """L₀, the whole policy's."""
    curve: NDArray[np.int64]
    """Number of the curve, by which the bootstrap draws."""

    def __len__(self) -> int:
        return len(self.loss)

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> Points:
        """Some of the points."""
        return Points(*(getattr(self, field.name)[which] for field in fields(self)))

    def variable(self, name: str) -> Floats:
        """N₀, ρ, D, or N, the weights of the smaller policy."""
        named = {"N0": self.size, "rho": self.rate, "D": self.tokens, "N": self.size * (1 - self.rate)}
        return named[name]


@dataclass(frozen=True, slots=True)
class Form:
    """A candidate for the law: L = [L₀ +] Σ constant · Π variable^(−exponent)."""

    formula: str
    terms: Mapping[str, Mapping[str, str]]
    """By the name of a term's constant: its exponents, and the variable that each is of."""
    above_whole: bool
    """Whether L₀ is added."""
    needs: Mapping[str, int]
    """Least number of values of a variable that tell the coefficients apart."""

    @property
    def coefficients(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for constant, powers in self.terms.items() for name in (constant, *powers)))

    def fits(self, points: Points) -> bool:
        """Whether the points can tell the coefficients apart."""
        enough = all(len(np.unique(points.variable(name))) >= least for name, least in self.needs.items())
        return enough and len(points) > len(self.coefficients)


_SCALE = {"gamma": "rho", "delta": "N0"}
FORMS = {
    "p2": Form(
        "L0 + (1/rho)^gamma (1/N0)^delta (N_C/N0^alpha + D_C/D^beta + E)",
        {"N_C": {**_SCALE, "alpha": "N0"}, "D_C": {**_SCALE, "beta": "D"}, "E": _SCALE},
        above_whole=True,
        needs={"N0": 3, "rho": 2, "D": 3},
    ),
    "p2-two-sizes": Form(
        "L0 + (1/rho)^gamma (1/N0)^delta (D_C/D^beta + E)",
        {"D_C": {**_SCALE, "beta": "D"}, "E": _SCALE},
        above_whole=True,
        needs={"N0": 2, "rho": 2, "D": 3},
    ),
    "p2-one-size": Form(
        "L0 + (1/rho)^gamma (D_C/D^beta + E)",
        {"D_C": {"gamma": "rho", "beta": "D"}, "E": {"gamma": "rho"}},
        above_whole=True,
        needs={"rho": 2, "D": 3},
    ),
    "power": Form(
        "N_C/N^alpha + D_C/D^beta + E, with N = (1 - rho) N0",
        {"N_C": {"alpha": "N"}, "D_C": {"beta": "D"}, "E": {}},
        above_whole=False,
        needs={"N": 3, "D": 3},
    ),
}
"""The law, what is left of it where curves have too few sizes, and the plain power law (Chinchilla's), which knows
neither the whole policy's loss nor what was removed."""


class Problem:
    """A form on points: the loss is base + Σ_k exp(X_k θ), every variable over its geometric mean."""

    def __init__(self, form: Form, points: Points) -> None:
        self.names, self._form = form.coefficients, form
        self.means = {name: float(np.log(points.variable(name)).mean()) for name in ("N0", "rho", "D", "N")}
        self._base = points.whole if form.above_whole else np.zeros(len(points))
        self._design = np.zeros((len(form.terms), len(points), len(self.names)))  # [terms, P, coefficients]
        for rows, (constant, powers) in zip(self._design, form.terms.items(), strict=True):
            rows[:, self.names.index(constant)] = 1
            for exponent, name in powers.items():
                rows[:, self.names.index(exponent)] += self.means[name] - np.log(points.variable(name))
        self._log_loss = np.log(points.loss)
        self._typical = float(np.log(np.maximum(points.loss - self._base, 1e-3 * points.loss)).mean())

    def start(self, rng: np.random.Generator) -> Floats:
        spans = {name: FALLING if name in ("alpha", "beta") else SHARED for name in self.names}
        spans |= dict.fromkeys(self._form.terms, (-4.0, 0.5))
        return np.array([rng.uniform(*spans[name]) + self._typical * (name in self._form.terms) for name in self.names])

    @np.errstate(all="ignore")  # a step that goes too far is taken back
    def minimise(self, theta: Floats, huber: float) -> tuple[float, Floats]:
        """The least Huber loss from a start on, and where it is. An infinite ``huber`` means squares."""

        def terms(at: Floats) -> Floats:
            return np.exp(self._design @ at)

        def residuals(at: Floats) -> Floats:
            return np.log(self._base + terms(at).sum(0)) - self._log_loss

        def slopes(at: Floats) -> Floats:
            each = terms(at)
            return np.einsum("kp,kpc->pc", each, self._design) / (self._base + each.sum(0))[:, None]

        kind = {"loss": "huber", "f_scale": huber} if np.isfinite(huber) else {}
        found = least_squares(residuals, theta, slopes, max_nfev=STEPS, **kind)
        return float(found.cost), found.x

    def coefficients(self, theta: Floats) -> dict[str, float]:
        """In the variables' own units."""
        values = dict(zip(self.names, theta.tolist(), strict=True))
        for constant, powers in self._form.terms.items():
            log = values[constant] + sum(values[exponent] * self.means[name] for exponent, name in powers.items())
            values[constant] = float(np.exp(log))
        return values

    def theta(self, coefficients: Mapping[str, float]) -> Floats:
        """The way back."""
        values = dict(coefficients)
        for constant, powers in self._form.terms.items():
            log = np.log(max(values[constant], 1e-300))
            values[constant] = log - sum(values[exponent] * self.means[name] for exponent, name in powers.items())
        return np.clip(np.array([values[name] for name in self.names]), -60, 60)


def fit(form: Form, points: Points, *, seed: int, start: Mapping[str, float] | None = None) -> dict[str, float]:
    """The coefficients with the least Huber loss of log L̂ − log L.

    Args:
        start: where to begin; None: from :data:`STARTS` places, by squares at first, of which the best go on.
    """
    problem = Problem(form, points)
    if start is not None:
        return problem.coefficients(problem.minimise(problem.theta(start), HUBER)[1])
    rng = np.random.default_rng(seed)
    rough = sorted((problem.minimise(problem.start(rng), np.inf) for _ in range(STARTS)), key=lambda pair: pair[0])
    fine = [problem.minimise(theta, HUBER) for _, theta in rough[:POLISHED]]
    return problem.coefficients(min(fine, key=lambda pair: pair[0])[1])


def losses(form: Form, coefficients: Mapping[str, float], points: Points, *, without: Sequence[str] = ()) -> Floats:
    """[P] L̂, ``without`` the terms of some constants; ``points.loss`` is not read."""
    total = points.whole.copy() if form.above_whole else np.zeros(len(points))
    for constant in (name for name in form.terms if name not in without):
        total += _term(form, coefficients, points, constant)
    return total


def _term(form: Form, coefficients: Mapping[str, float], points: Points, constant: str, *, without: str = "") -> Floats:
    """[P] a constant times its powers, ``without`` those of a variable."""
    powers = ((exponent, name) for exponent, name in form.terms[constant].items() if name != without)
    factors = [points.variable(name) ** -coefficients[exponent] for exponent, name in powers]
    return coefficients[constant] * np.prod([np.ones(len(points)), *factors], axis=0)


def tokens_to(form: Form, coefficients: Mapping[str, float], points: Points) -> Floats:
    """[P] the tokens at which L̂ is ``points.loss``; infinite where no number of them is enough. ``points.tokens`` is
    not read."""
    beta = coefficients["beta"]
    if beta <= 0:
        return np.full(len(points), np.inf)
    gap = points.loss - losses(form, coefficients, points, without=["D_C"])
    scale = _term(form, coefficients, points, "D_C", without="D")
    return np.where(gap > 0, (scale / np.where(gap > 0, gap, 1.0)) ** (1 / beta), np.inf)


def slope_difference(form: Form, coefficients: Mapping[str, float], points: Points) -> float:
    """Mean over neighbours of a curve of |ΔL̂/ΔD − ΔL/ΔD|, in nats per token: the paper's average slope difference."""
    predicted, apart = losses(form, coefficients, points), []
    for number in np.unique(points.curve):
        of = np.flatnonzero(points.curve == number)
        of = of[np.argsort(points.tokens[of])]
        steps = np.diff(points.tokens[of])
        apart.append(np.abs(np.diff(predicted[of]) - np.diff(points.loss[of])) / steps)
    return float(np.concatenate(apart).mean())


def bootstrap(
    form: Form, points: Points, estimate: Mapping[str, float], *, draws: int, seed: int
) -> list[dict[str, float]]:
    """Coefficients of as many curves as there are, drawn with replacement, each fitted from the estimate on. Draws that
    cannot tell the coefficients apart are drawn again."""
    rng, numbers = np.random.default_rng(seed), np.unique(points.curve)
    places = {number: np.flatnonzero(points.curve == number) for number in numbers}
    chosen = (rng.choice(numbers, len(numbers)) for _ in range(20 * draws))
    drawn = (points.take(np.concatenate([places[number] for number in of])) for of in chosen)
    return [fit(form, each, seed=seed, start=estimate) for each in islice(filter(form.fits, drawn), draws)]


def interval(values: Sequence[float] | Floats) -> tuple[float, float]:
    """From the 5th to the 95th percentile."""
    low, high = np.quantile(np.asarray(values), (0.05, 0.95))
    return float(low), float(high)


def held_out(points: Points) -> dict[str, NDArray[np.bool_]]:
    """Which points are held out in turn: those of the largest policy, of the largest ρ, and of each curve's last half
    of tokens."""
    last = {number: points.tokens[points.curve == number].max() for number in np.unique(points.curve)}
    return {
        "N0": points.size == points.size.max(),
        "rho": points.rate == points.rate.max(),
        "D": points.tokens > np.array([last[number] for number in points.curve]) / 2,
    }


def held_out_error(
    form: Form, points: Points, held: NDArray[np.bool_], *, draws: int, seed: int
) -> dict[str, float | tuple[float, float] | None] | None:
    """Mean |log L̂ − log L| of points that the fit has not seen, with its interval over curves drawn anew for the fit.

    None: what is left cannot tell the coefficients apart.
    """
    seen, unseen = points.take(~held), points.take(held)
    if not form.fits(seen) or not len(unseen):
        return None

    def error(coefficients: Mapping[str, float]) -> float:
        return float(np.abs(np.log(losses(form, coefficients, unseen) / unseen.loss)).mean())

    estimate = fit(form, seen, seed=seed)
    drawn = [error(each) for each in bootstrap(form, seen, estimate, draws=draws, seed=seed)]
    return {"error": error(estimate), "interval": interval(drawn) if drawn else None}


COLUMNS = ("size", "rate", "tokens", "loss", "whole_loss")
"""Columns of a file: N₀, ρ, D, L, L₀. Rows of equal N₀, ρ, L₀ and, if there is such a column, ``curve`` are one
curve."""
WINDOWS, FIRST = 12, 1 / 32
"""Points of a recovery, and the share of its tokens that is left out: losses fall fast at first."""


def read_curves(sources: Sequence[Path]) -> Points:
    """The points of all sources.

    Raises:
        UserError: naming the file and the row, or the folder, and what it lacks.
    """
    rows: list[list[float]] = []
    curves: dict[tuple[Any, ...], int] = {}
    for source in sources:
        for place, values in _recovery(source) if source.is_dir() else _rows(source):
            point = [_number(values, name, place) for name in COLUMNS]
            key = source, values.get("curve"), *(point[COLUMNS.index(name)] for name in ("size", "rate", "whole_loss"))
            rows.append([*point, curves.setdefault(key, len(curves))])
    size, rate, tokens, loss, whole, curve = np.array(rows, np.float64).T
    return Points(size, rate, tokens, loss, whole, curve.astype(np.int64))


def _rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if file.suffix != ".csv":
        yield from ((row.place, row.values) for row in read_rows(str(file), "FILES"))
        return
    try:
        with file.open(newline="", encoding="utf-8") as text:
            rows = list(csv.DictReader(text))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError("FILES", file, f"cannot be read ({error})", "Give a CSV or JSONL file") from error
    if not rows:
        raise UserError("FILES", file, "holds no rows", f"Give a file with columns {', '.join(COLUMNS)}")
    yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, 1))


def _number(values: Mapping[str, Any], name: str, place: str) -> float:
    if values.get(name) is None:
        have = ", ".join(str(column) for column in values) or "none"
        raise UserError("FILES", place, f"has no {name} (it has {have})", f"Name the columns {', '.join(COLUMNS)}")
    try:
        number = float(values[name])
    except (TypeError, ValueError):
        number = math.nan
    if not (0 < number < math.inf and (name != "rate" or number < 1)):
        wanted = "a share between 0 and 1" if name == "rate" else "a number above 0"
        raise UserError("FILES", place, f"has {values[name]!r} as {name}", f"Give {wanted}")
    return number


def _recovery(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Points of a policy that ``sft`` has written: its training loss, in windows of tokens, evenly in their logarithm.

    The training loss of a batch that is new to the policy is that of held-out data. Its L₀ is ``loss_before`` of
    compress.json, which is of the sequences that ``compress`` was given: they have to be of the same kind.
    """
    try:
        settings = json.loads((folder / WARM_UP).read_text())
        record = json.loads((Path(settings["model.path"]) / RECORD).read_text())
        known = {name: record[name] for name in ("weights_before", "weights_after", "loss_before")}
    except (OSError, ValueError, KeyError) as error:
        problem = f"is a folder, and not of a policy that `compress --calibrate` made and `sft` trained on ({error})"
        raise UserError("FILES", folder, problem, "Give the folder that sft.out named, or a file of points") from error
    log = Path(settings["run.dir"]) / "sft-log"
    rows = read_metrics(log)
    if len(rows) < 2 * WINDOWS:
        problem = f"has {len(rows)} steps in {log}, too few for {WINDOWS} points"
        raise UserError("FILES", folder, problem, f"Train for {2 * WINDOWS} steps or more")
    tokens = np.cumsum([row["train/tokens"] for row in rows])
    losses = np.array([row["train/loss"] for row in rows])
    window = np.digitize(tokens, np.geomspace(FIRST * tokens[-1], tokens[-1], WINDOWS + 1)[:-1])
    for number in range(1, WINDOWS + 1):
        if (inside := window == number).any():
            yield (
                str(folder),
                {
                    "size": known["weights_before"],
                    "rate": 1 - known["weights_after"] / known["weights_before"],
                    "tokens": tokens[inside].mean(),
                    "loss": losses[inside].mean(),
                    "whole_loss": known["loss_before"],
                },
            )
