"""From an evaluation's answers to its scores, to a table of them, and to what differs between two
evaluations.

Every figure has the 95% interval that resampling its problems gives. Notation: P problems, k
answers to each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.answers import AnswerRow, read_finished
from megatron_dppo.rl.intervals import CONFIDENCE, Estimate, estimate
from megatron_dppo.rl.types import Floats

FEWEST = 10
"""With fewer problems resampling says nothing about a difference: with one problem the interval is
a point."""
RESAMPLES = 4000
SEED = 20210707
"""The seed of the resampling: the same answers have the same intervals."""
Cell = Mapping[str, float | None]
"""An estimate as JSON has it: null for what is not a number."""


def compute_pass_at_k(correct: Floats, k: int) -> Floats:
    """The chance that one of k answers is right, for each problem: 1 − C(n − c, k) / C(n, k) with c
    right ones among n (Chen et al. 2021, arXiv:2107.03374), which is unbiased for every k up to n.

    Args:
        correct: [P, answers], 1 or 0; not a number where scoring failed, and then none of the n.
        k: at least 1.

    Returns:
        [P], not a number where fewer than k answers were scored.
    """
    scored = (~np.isnan(correct)).sum(axis=1)
    right = np.nansum(correct, axis=1).astype(int)
    # Whole numbers in Python: of a thousand answers no coefficient fits in a float.
    ways = [
        (comb(n, k), comb(n - c, k)) for n, c in zip(scored.tolist(), right.tolist(), strict=True)
    ]
    return np.array([(all_ - wrong) / all_ if all_ else np.nan for all_, wrong in ways], np.float64)


def list_powers(samples: int) -> list[int]:
    """1, 2, 4, … and ``samples`` itself."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples})


def compute_problem_means(values: Floats) -> Floats:
    """Mean over the answers of each problem that could be scored. [P, k] → [P]; not a number where
    none could."""
    return _compute_ratio(np.nansum(values, axis=1), (~np.isnan(values)).sum(axis=1))


def compute_mean(values: Floats) -> float:
    """Mean over the problems that have a value."""
    known = values[~np.isnan(values)]
    return float(known.sum() / len(known)) if len(known) else float("nan")


def estimate_means(columns: Mapping[str, Floats]) -> dict[str, Estimate]:
    """The mean of each column over its problems, with its 95% interval by the percentile bootstrap.

    Whole problems are drawn with replacement, as many as there are, and their answers come along:
    answers to one problem are alike, and another benchmark of the kind would have other problems.
    All columns see the same draws.

    Args:
        columns: [P] each, not a number where a problem has no value.
    """
    values = np.stack(list(columns.values()), axis=1)
    problems = len(values)
    draws = np.random.default_rng(SEED).integers(problems, size=(RESAMPLES, problems))
    draws += np.arange(RESAMPLES)[:, None] * problems
    times = (
        np.bincount(draws.ravel(), minlength=RESAMPLES * problems)
        .reshape(RESAMPLES, problems)
        .astype(np.float64)
    )
    known = ~np.isnan(values)
    means = _compute_ratio(times @ np.where(known, values, 0.0), times @ known)
    return {
        name: estimate(compute_mean(values[:, i]), means[:, i]) for i, name in enumerate(columns)
    }


def estimate_difference(candidate: Floats, baseline: Floats) -> Estimate:
    """Mean of ``mine − theirs``, paired problem by problem, with its interval: how hard a problem
    is cancels out."""
    return estimate_means({"difference": candidate - baseline})["difference"]


def bound_fraction(interval: Estimate, problems: int) -> Estimate:
    """The interval of a share, also where every problem has 0 or every problem has 1, and
    resampling gives a point.

    The bound is then the exact binomial one: if more than a share s of all problems were otherwise,
    P drawn problems would all agree with a probability below (1 − s)^P.
    """
    reach = 1.0 - ((1.0 - CONFIDENCE) / 2) ** (1.0 / max(problems, 1))
    if interval.low == interval.high == 0.0:
        return Estimate(0.0, 0.0, reach)
    if interval.low == interval.high == 1.0:
        return Estimate(1.0, 1.0 - reach, 1.0)
    return interval


def group_by_benchmark(rows: Sequence[AnswerRow]) -> dict[str, list[list[AnswerRow]]]:
    """The rows of each benchmark, problem by problem."""
    found: dict[str, dict[int, list[AnswerRow]]] = {}
    for row in rows:
        found.setdefault(row["benchmark"], {}).setdefault(row["problem"], []).append(row)
    return {
        name: [problems[number] for number in sorted(problems)] for name, problems in found.items()
    }


def score(problems: Sequence[Sequence[AnswerRow]]) -> dict[str, Any]:
    """The scores of one benchmark, as ``scores.json`` has them.

    Args:
        problems: [P][k], the rows of ``answers.jsonl``.
    """
    powers = list_powers(len(problems[0]))
    correct = _get_column(problems, "correct")
    columns = {
        "avg@k": compute_problem_means(correct),
        **{f"pass@{k}": compute_pass_at_k(correct, k) for k in powers},
        "majority": _get_column(problems, "majority")[:, 0],
        "mean_reward": compute_problem_means(_get_column(problems, "reward")),
        "mean_length": _get_column(problems, "tokens").mean(axis=1),
        "truncated": np.array(
            [[row["finish"] == "length" for row in rows] for rows in problems], np.float64
        ).mean(axis=1),
    }
    found = {
        name: _make_cell(each if name.startswith("mean_") else bound_fraction(each, len(problems)))
        for name, each in estimate_means(columns).items()
    }
    return {
        "problems": len(problems),
        "avg@k": found.pop("avg@k"),
        "pass@k": {str(k): found.pop(f"pass@{k}") for k in powers},
        **found,
        "unscored": int(np.isnan(correct).sum()),
    }


def format_table(benchmarks: Mapping[str, Mapping[str, Any]], samples: int) -> list[str]:
    """The scores as lines of text, percentages with their 95% intervals."""
    width = max(len(name) for name in [*benchmarks, "benchmark"])
    most = str(max(list_powers(samples)))
    titles = [f"avg@{samples}", *([f"pass@{most}", f"maj@{samples}"] if samples > 1 else [])]
    named = "  ".join(f"{title:<19}" for title in titles)
    lines = [f"{'benchmark':<{width}}  problems  {named}  reward  tokens  cut off"]
    for name, entry in benchmarks.items():
        cells = [
            entry["avg@k"],
            *([entry["pass@k"][most], entry["majority"]] if samples > 1 else []),
        ]
        shares = "  ".join(f"{_format_interval(cell):<19}" for cell in cells)
        unscored = f"  {entry['unscored']} unscored" if entry["unscored"] else ""
        length = entry["mean_length"]["value"]
        cut_off = _format_percent(entry["truncated"]["value"])
        reward = (
            "-" if entry["mean_reward"]["value"] is None else f"{entry['mean_reward']['value']:.3f}"
        )
        figures = f"{shares}  {reward:>6}  {length:>6.0f}  {cut_off:>6}%"
        lines.append(f"{name:<{width}}  {entry['problems']:>8}  {figures}{unscored}")
    return [*lines, "[ ] 95% interval, from resampling the problems"]


def compare(
    rows: Sequence[AnswerRow], baseline_rows: Sequence[AnswerRow], *, baseline_name: str
) -> list[str]:
    """Differences between two evaluations on shared problems, paired problem by problem, as lines
    of text.

    Args:
        rows, others: of ``answers.jsonl``.
        baseline_name: the folder of the others.

    Raises:
        UserError: if they share no problem, or a problem's label differs.
    """
    mine = group_by_benchmark(rows)
    baseline = group_by_benchmark(baseline_rows)
    lines = [f"against {baseline_name}, paired by problem: points of avg@k [95% interval]"]
    width = max(map(len, mine))
    for name in mine:
        pairs = _match_problems(name, mine[name], baseline.get(name, []), baseline_name)
        if pairs:
            found = estimate_difference(
                *(
                    compute_problem_means(_get_column(side, "correct"))
                    for side in zip(*pairs, strict=True)
                )
            )
            verdict = "differs" if found.low > 0.0 or found.high < 0.0 else "no difference shown"
            verdict = verdict if len(pairs) >= FEWEST else "too few problems to say"
            low, value, high = (f"{100 * x:+.1f}" for x in (found.low, found.value, found.high))
            lines.append(
                f"{name:<{width}}  {len(pairs):>5} problems  {value} [{low}, {high}]  {verdict}"
            )
    if len(lines) == 1:
        raise UserError(
            "eval.against",
            baseline_name,
            "shares no problem with this evaluation",
            "Name another folder",
        )
    return lines


def compare_folders(folder: Path, baseline_folder: Path) -> list[str]:
    """``compare`` for two finished evaluations.

    Raises:
        UserError: as ``compare``, and if one of them is not finished.
    """
    return compare(
        read_finished(folder, "--out"),
        read_finished(baseline_folder, "--against"),
        baseline_name=str(baseline_folder),
    )


def _match_problems(
    name: str,
    candidate: Sequence[Sequence[AnswerRow]],
    baseline: Sequence[Sequence[AnswerRow]],
    baseline_name: str,
) -> list[tuple[Sequence[AnswerRow], Sequence[AnswerRow]]]:
    known = {rows[0]["problem"]: rows for rows in baseline}
    pairs = [(rows, known[rows[0]["problem"]]) for rows in candidate if rows[0]["problem"] in known]
    for one, other in pairs:
        if one[0]["label"] != other[0]["label"]:
            place = f"problem {one[0]['problem']} of {name}"
            problem = (
                f"has the answer {other[0]['label']!r:.60} for {place}, and here it is "
                f"{one[0]['label']!r:.60}"
            )
            raise UserError(
                "eval.against", baseline_name, problem, "Compare evaluations on the same files"
            )
    return pairs


def _get_column(problems: Sequence[Sequence[AnswerRow]], key: str) -> Floats:
    """[P, k], not a number where a row has null. Where two evaluations have different k, each has
    its own."""
    return np.array(
        [[np.nan if row[key] is None else row[key] for row in rows] for rows in problems],
        np.float64,
    )


def _compute_ratio(sums: Floats, counts: Floats) -> Floats:
    """Not a number where nothing was counted."""
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)


def _make_cell(found: Estimate) -> Cell:
    return {name: None if math.isnan(bound) else bound for name, bound in asdict(found).items()}


def _format_interval(cell: Cell) -> str:
    return (
        f"{_format_percent(cell['value'])}% [{_format_percent(cell['low'])}, "
        f"{_format_percent(cell['high'])}]"
    )


def _format_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
