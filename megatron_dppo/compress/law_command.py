"""``megatron-dppo compress fit`` and ``compress predict``: a law from curves, and what it says of a policy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dppo.bridge.convert_commands import positive
from megatron_dppo.compress.law import (
    COLUMNS,
    FORMS,
    Points,
    bootstrap,
    fit,
    held_out,
    held_out_error,
    interval,
    losses,
    read_curves,
    slope_difference,
    tokens_to,
)
from megatron_dppo.errors import UserError
from megatron_dppo.process.files import replacing_file
from megatron_dppo.rl.types import Floats

RATES = tuple(round(0.1 * tenth, 1) for tenth in range(1, 9))
HUNDREDTHS = np.arange(1, 100) / 100
SEEN = ("size", "rate", "tokens")
HELD = {"N0": "largest size", "rho": "largest rate", "D": "last half of tokens"}


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``megatron-dppo compress fit``."""
    what = f"JSONL, CSV or parquet files with columns {', '.join(COLUMNS)}, or policies that sft has recovered"
    parser.add_argument("files", nargs="+", metavar="FILES", type=Path, help=what)
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("law.json"), help="(default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE")
    parser.add_argument("--form", choices=list(FORMS), help="(default: that of the least average slope difference)")
    draws = "fits to curves drawn anew, from which intervals come (default: %(default)s)"
    parser.add_argument("--draws", metavar="N", type=positive(int), default=200, help=draws)
    parser.add_argument("--seed", type=int, default=1, help="of starts and draws")


def fit_law(chosen: argparse.Namespace) -> None:
    """Fit every form that the curves can tell, say how each does on what it has not seen, and write the one chosen.

    Raises:
        UserError: for rows that are no points, or curves that fit no form; ``--out`` is as it was.
    """
    if chosen.out.exists() and not chosen.overwrite:
        raise UserError("--out", chosen.out, "is there already", "Name another file, or give --overwrite")
    points = read_curves(chosen.files)
    able = {name: form for name, form in FORMS.items() if form.fits(points)}
    wanted = [chosen.form] if chosen.form else list(FORMS)
    if not able.keys() & set(wanted):
        problem = (
            f"hold {len(points)} points of {len(np.unique(points.curve))} curves, which do not tell a law's numbers"
        )
        needs = "; ".join(
            f"{name} needs " + ", ".join(f"{least} values of {of}" for of, least in FORMS[name].needs.items())
            for name in wanted
        )
        raise UserError("FILES", " ".join(map(str, chosen.files)), problem, f"Add curves: {needs}")
    fits = {name: fit(form, points, seed=chosen.seed) for name, form in able.items()}
    slopes = {name: slope_difference(form, fits[name], points) for name, form in able.items()}
    found = {
        name: {
            "formula": form.formula,
            "slope_difference": slopes[name],
            "held_out": {
                what: held_out_error(form, points, held, draws=max(2, chosen.draws // 4), seed=chosen.seed)
                for what, held in held_out(points).items()
            },
        }
        for name, form in able.items()
    }
    name = chosen.form or min(slopes, key=lambda each: slopes[each])
    drawn = bootstrap(FORMS[name], points, fits[name], draws=chosen.draws, seed=chosen.seed)
    law = {
        "form": name,
        "coefficients": fits[name],
        "intervals": {key: interval([each[key] for each in drawn]) for key in fits[name]} if drawn else {},
        "forms": found,
        "points": len(points),
        "curves": len(np.unique(points.curve)),
        "seen": {key: [float(getattr(points, key).min()), float(getattr(points, key).max())] for key in SEEN},
        "draws": drawn,
    }
    with replacing_file(chosen.out) as partial:
        partial.write_text(json.dumps(law, indent=1) + "\n", encoding="utf-8")
    print("\n".join(_fit_text(law)))
    if below := int((points.loss < points.whole).sum()):
        why = "forms with L0 end above it, and fit only what is being recovered, not what is newly learned"
        print(f"{below} of {len(points)} points have a loss below the whole policy's: {why}")
    print(f"{chosen.out}: give it to `megatron-dppo compress predict`")


def _fit_text(law: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{law['points']} points of {law['curves']} curves",
        "",
        "mean error of log-losses that a fit has not seen:",
    ]
    lines.append(f"{'form':14s}{'slopes apart':>14s}" + "".join(f"{title:>28s}" for title in HELD.values()))
    for name, of in law["forms"].items():
        cells = [_share(of["held_out"][what]) for what in HELD]
        lines.append(f"{name:14s}{of['slope_difference']:14.3g}" + "".join(f"{cell:>28s}" for cell in cells))
    lines += ["", f"{law['form']}: {law['forms'][law['form']]['formula']}"]
    for key, value in law["coefficients"].items():
        low, high = law["intervals"].get(key, (np.nan, np.nan))
        lines.append(f"{key:8s}{value:12.4g}  [{low:.4g}, {high:.4g}]")
    return lines


def _share(error: Mapping[str, Any] | None) -> str:
    if error is None:
        return "-"
    bounds = ", ".join(f"{bound:.1%}" for bound in error["interval"] or ())
    return f"{error['error']:.1%} [{bounds}]"


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``megatron-dppo compress predict``."""
    parser.add_argument("law", metavar="LAW", type=Path, help="what `compress fit` has written")
    size = "weights of the whole policy"
    parser.add_argument("--size", metavar="N0", type=positive(float), required=True, help=size)
    whole = "its loss, in nats per token, on what the smaller policies will be measured on"
    parser.add_argument("--whole-loss", metavar="L0", type=positive(float), required=True, help=whole)
    tokens = "to recover on"
    parser.add_argument("--tokens", metavar="D", type=positive(float), required=True, help=tokens)
    parser.add_argument("--to", metavar="LOSS", type=positive(float), help="the loss to recover to")
    rates = "shares of the weights that go (default: 0.1 to 0.8)"
    parser.add_argument("--rates", metavar="RHO", type=float, nargs="+", default=list(RATES), help=rates)
    run = "of the run that the smaller policy is for: says at which rate run and recovery take least time"
    parser.add_argument("--run-tokens", metavar="T", type=positive(float), help=run)
    parser.add_argument("--json", action="store_true", help="print JSON")


def predict(chosen: argparse.Namespace) -> None:
    """Print what the law says of a policy, with intervals, and mark what lies beyond the curves that it comes from.

    Raises:
        UserError: if the file holds no law, or a rate is no share.
    """
    for rate in chosen.rates:
        if not 0 < rate < 1:
            raise UserError("--rates", rate, "is no share between 0 and 1", "Give 0.25, for instance")
    if chosen.run_tokens and not chosen.to:
        raise UserError("--run-tokens", chosen.run_tokens, "needs a loss to recover to", "Give --to")
    try:
        law = json.loads(chosen.law.read_text(encoding="utf-8"))
        made = [law["coefficients"], *law["draws"]]
        seen = {name: tuple(law["seen"][name]) for name in SEEN}
        found = _predict(chosen, law["form"], made, HUNDREDTHS[1.001 * seen["rate"][1] >= HUNDREDTHS])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("LAW", chosen.law, f"holds no law ({error})", "Give what `compress fit` has written") from error
    beyond = [
        f"{name} {value:g} lies outside the curves' {low:g} to {high:g}"
        for name, value in (("size", chosen.size), ("tokens", chosen.tokens), *(("rate", r) for r in chosen.rates))
        for low, high in [seen[name]]
        if not 0.999 * low <= value <= 1.001 * high
    ]
    if chosen.json:
        print(json.dumps({**found, "beyond": beyond}))
    else:
        print("\n".join([*_predict_text(found, chosen), *(f"beyond what was fitted: {each}" for each in beyond)]))


def _predict(
    chosen: argparse.Namespace, form: str, made: Sequence[Mapping[str, float]], grid: Floats
) -> dict[str, Any]:
    """Estimates with intervals: the first coefficients are the estimate, the others are drawn. Of rates the best is
    looked for in ``grid``, which goes no further than the curves."""
    kind = FORMS[form]

    def at(rates: Floats, tokens: float = 1.0) -> Points:
        known = (chosen.size, rates, tokens, chosen.to or 1.0, chosen.whole_loss)
        size, rate, spent, loss, whole = (of * np.ones(len(rates)) for of in known)
        return Points(size, rate, spent, loss, whole, np.zeros(len(rates), np.int64))

    rates = np.array(chosen.rates)
    after = np.array([losses(kind, each, at(rates, chosen.tokens)) for each in made])
    at_last = np.array([losses(kind, each, at(rates, np.inf)) for each in made])
    found: dict[str, Any] = {
        "rates": chosen.rates,
        "loss": _with_interval(after),
        "loss_at_last": _with_interval(at_last),
    }
    if chosen.to is None:
        return found
    needed = np.array([tokens_to(kind, each, at(rates)) for each in made])
    along = np.array([tokens_to(kind, each, at(grid)) for each in made])
    highest = np.where(along <= chosen.tokens, grid, 0.0).max(axis=1, keepdims=True)
    found |= {"tokens": _with_interval(needed), "highest_rate": _with_interval(highest)[0]}
    if chosen.run_tokens:  # a token takes time in proportion to the weights that are left
        time = (1 - grid) * (chosen.run_tokens + along) / chosen.run_tokens
        found["cheapest_rate"] = _with_interval(grid[time.argmin(axis=1)][:, None])[0]
        found["least_time"] = _with_interval(time.min(axis=1)[:, None])[0]
    return found


def _with_interval(values: Floats) -> list[dict[str, Any]]:
    """First value of each column, and the interval of the others; null if infinite."""

    def plain(value: float) -> float | None:
        return float(value) if np.isfinite(value) else None

    drawn = values[1:] if len(values) > 1 else np.full((1, values.shape[1]), np.nan)
    # Unlike those of :func:`interval`, bounds are draws that exist, so that infinite ones do no harm.
    low, high = np.quantile(drawn, 0.05, axis=0, method="lower"), np.quantile(drawn, 0.95, axis=0, method="higher")
    return [
        {"value": plain(value), "interval": [plain(bound) for bound in bounds]}
        for value, *bounds in zip(values[0], low, high, strict=True)
    ]


def _predict_text(found: Mapping[str, Any], chosen: argparse.Namespace) -> list[str]:
    heads = [f"loss after {chosen.tokens:g} tokens", "loss at last"]
    columns = [found["loss"], found["loss_at_last"]]
    if "tokens" in found:
        heads.append(f"tokens to {chosen.to:g}")
        columns.append(found["tokens"])
    lines = [f"{'rate':6s}" + "".join(f"{head:>34s}" for head in heads)]
    lines += [
        f"{rate:<6g}" + "".join(f"{_cell(column[row]):>34s}" for column in columns)
        for row, rate in enumerate(found["rates"])
    ]
    if "highest_rate" in found:
        lines.append(
            f"highest rate that {chosen.tokens:g} tokens bring to {chosen.to:g}: {_cell(found['highest_rate'])}"
        )
    if "cheapest_rate" in found:
        lines.append(
            f"with {chosen.run_tokens:g} tokens to come, least time at rate {_cell(found['cheapest_rate'])}: "
            f"{_cell(found['least_time'])} of the whole policy's"
        )
    return lines


def _cell(estimate: Mapping[str, Any]) -> str:
    value, low, high = (
        "never" if each is None else f"{each:.4g}" for each in (estimate["value"], *estimate["interval"])
    )
    return f"{value} [{low}, {high}]"
