"""Scores of an evaluation, and differences between two evaluations.

Every figure has a 95% interval from resampling problems: P problems, k answers each.
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
from megatron_dppo.rl.numbers import is_right
from megatron_dppo.rl.score import Score
from megatron_dppo.rl.types import Floats

# With fewer problems resampling is meaningless: with a single problem the interval is a point.
FEWEST = 10
RESAMPLES = 4000
# A fixed random seed: the same answers give the same intervals.
SEED = 20210707
DIFFERENCES = (("correct", "avg@k ", 100, "{:+.1f}"), ("reward", "reward", 1, "{:+.3f}"))
"""Compared columns of ``answers.jsonl``: name, title, factor and form of the difference."""
Cell = Mapping[str, float | None]
"""Estimate in JSON; null for NaN."""


def describe_correctness(scores: Sequence[Score]) -> list[str]:
    """Return a note if rewards are partial, and an answer is correct only with a reward of 1."""
    is_partial = any(score.reward not in (0.0, 1.0) for score in scores)
    if not is_partial or any(score.correct != is_right(score.reward) for score in scores):
        return []
    return [
        "correct means a score of 1 or more, because the reward function returns no acc; partial "
        "scores count in eval/reward alone"
    ]


def compute_pass_at_k(correct: Floats, k: int) -> Floats:
    """Return the probability per problem that some of k answers is right.

    1 − C(n − c, k) / C(n, k) with c right answers among n, unbiased for every k ≤ n (Chen et al.
    2021, arXiv:2107.03374).

    Args:
        correct: [P, answers], 1 or 0; NaN if scoring failed, then not counted in n.

    Returns:
        [P], NaN for fewer than k scored answers.
    """
    scored = (~np.isnan(correct)).sum(axis=1)
    right = np.nansum(correct, axis=1).astype(int)
    # Use Python integers: at a thousand answers the coefficients overflow a float.
    result = np.full(len(correct), np.nan)
    for i, (n, c) in enumerate(zip(scored.tolist(), right.tolist(), strict=True)):
        ways = comb(n, k)
        if ways:
            result[i] = (ways - comb(n - c, k)) / ways
    return result


def list_powers(samples: int) -> list[int]:
    """Return 1, 2, 4, … and ``samples``."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples})


def compute_problem_means(values: Floats) -> Floats:
    """Return means over scored answers. [P, k] → [P]; NaN without scores."""
    return _compute_ratio(np.nansum(values, axis=1), (~np.isnan(values)).sum(axis=1))


def compute_mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.sum() / len(known)) if len(known) else float("nan")


def estimate_means(columns: Mapping[str, Floats]) -> dict[str, Estimate]:
    """Return each column's mean, with a 95% percentile-bootstrap interval.

    Args:
        columns: [P] each, NaN for a problem without value.
    """
    values = np.stack(list(columns.values()), axis=1)
    problems = len(values)
    # Draw whole problems with replacement, with all answers: answers to a problem are correlated,
    # and a similar benchmark would have other problems.
    # All columns share the draws.
    draws = np.random.default_rng(SEED).integers(problems, size=(RESAMPLES, problems))
    draws += np.arange(RESAMPLES)[:, None] * problems
    counts = np.bincount(draws.ravel(), minlength=RESAMPLES * problems)
    times = counts.reshape(RESAMPLES, problems).astype(np.float64)
    known = ~np.isnan(values)
    means = _compute_ratio(times @ np.where(known, values, 0.0), times @ known)
    return {
        name: estimate(compute_mean(values[:, i]), means[:, i]) for i, name in enumerate(columns)
    }


def estimate_difference(candidate: Floats, baseline: Floats) -> Estimate:
    # Pair by problem: differences in difficulty cancel out.
    return estimate_means({"difference": candidate - baseline})["difference"]


def bound_fraction(interval: Estimate, problems: int) -> Estimate:
    """Return the interval of a fraction, also if all problems have 0 or all have 1."""
    # Resampling equal values gives a point. Replace the point by the exact binomial bound.
    # If more than a fraction s of all problems differed, P drawn problems would agree with
    # probability below (1 − s)^P.
    reach = 1.0 - ((1.0 - CONFIDENCE) / 2) ** (1.0 / max(problems, 1))
    if interval.low == interval.high == 0.0:
        return Estimate(0.0, 0.0, reach)
    if interval.low == interval.high == 1.0:
        return Estimate(1.0, 1.0 - reach, 1.0)
    return interval


def group_by_benchmark(rows: Sequence[AnswerRow]) -> dict[str, list[list[AnswerRow]]]:
    """Group by benchmark, then by problem."""
    found: dict[str, dict[int, list[AnswerRow]]] = {}
    for row in rows:
        found.setdefault(row["benchmark"], {}).setdefault(row["problem"], []).append(row)
    groups = {}
    for name, problems in found.items():
        groups[name] = [problems[number] for number in sorted(problems)]
    return groups


def score(problems: Sequence[Sequence[AnswerRow]]) -> dict[str, Any]:
    """Return the scores of problems, [P][k] rows of ``answers.jsonl``, for ``scores.json``."""
    powers = list_powers(len(problems[0]))
    correct = _get_column(problems, "correct")
    is_truncated = []
    for of in problems:
        is_truncated.append([row["finish"] == "length" for row in of])
    columns = {
        "avg@k": compute_problem_means(correct),
        **{f"pass@{k}": compute_pass_at_k(correct, k) for k in powers},
        "majority": _get_column(problems, "majority")[:, 0],
        "mean_reward": compute_problem_means(_get_column(problems, "reward")),
        "mean_length": _get_column(problems, "tokens").mean(axis=1),
        "truncated": np.array(is_truncated, np.float64).mean(axis=1),
    }
    found = {}
    for name, each in estimate_means(columns).items():
        is_fraction = not name.startswith("mean_")
        found[name] = _make_cell(bound_fraction(each, len(problems)) if is_fraction else each)
    return {
        "problems": len(problems),
        "avg@k": found.pop("avg@k"),
        "pass@k": {str(k): found.pop(f"pass@{k}") for k in powers},
        **found,
        "unscored": int(np.isnan(correct).sum()),
    }


def format_table(benchmarks: Mapping[str, Mapping[str, Any]], samples: int) -> list[str]:
    """Format percentages with 95% intervals."""
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
    rows: Sequence[AnswerRow],
    baseline_rows: Sequence[AnswerRow],
    *,
    baseline_name: str,
) -> list[str]:
    """List differences of accuracy and reward on shared problems, paired by problem.

    Raises:
        UserError: if the evaluations share no problem, or a problem's labels differ.
    """
    mine = group_by_benchmark(rows)
    baseline = group_by_benchmark(baseline_rows)
    lines = [f"against {baseline_name}, paired by problem: points of avg@k, reward [95% interval]"]
    width = max(map(len, mine))
    for name in mine:
        pairs = _match_problems(name, mine[name], baseline.get(name, []), baseline_name)
        if pairs:
            candidate, reference = zip(*pairs, strict=True)
            told = None
            for key, title, unit, form in DIFFERENCES:
                found = estimate_difference(
                    compute_problem_means(_get_column(candidate, key)),
                    compute_problem_means(_get_column(reference, key)),
                )
                # Rewards of 0 and 1 repeat the accuracy.
                if found == told:
                    continue
                told = found
                differs = found.low > 0.0 or found.high < 0.0
                verdict = "differs" if differs else "no difference shown"
                verdict = verdict if len(pairs) >= FEWEST else "too few problems to say"
                bounds = found.value, found.low, found.high
                value, low, high = (form.format(unit * bound) for bound in bounds)
                place = f"{name:<{width}}  {len(pairs):>5} problems  {title}"
                lines.append(f"{place}  {value} [{low}, {high}]  {verdict}")
    if len(lines) == 1:
        raise UserError(
            "eval.baseline",
            baseline_name,
            "shares no problem with this evaluation",
            "Name another folder",
        )
    return lines


def compare_folders(folder: Path, baseline_folder: Path) -> list[str]:
    """Call ``compare`` on two finished evaluations, with the same errors."""
    return compare(
        read_finished(folder, "--out"),
        read_finished(baseline_folder, "--baseline"),
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
                "eval.baseline", baseline_name, problem, "Compare evaluations on the same files"
            )
    return pairs


def _get_column(problems: Sequence[Sequence[AnswerRow]], key: str) -> Floats:
    """Return [P, k] values, NaN for null. Evaluations may differ in k."""
    values = []
    for rows in problems:
        # With dtype float64, NumPy turns null into NaN.
        values.append([row[key] for row in rows])
    return np.array(values, np.float64)


def _compute_ratio(sums: Floats, counts: Floats) -> Floats:
    """Divide elementwise; NaN for a count of 0."""
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)


def _make_cell(found: Estimate) -> Cell:
    cell: dict[str, float | None] = {}
    for name, bound in asdict(found).items():
        cell[name] = None if math.isnan(bound) else bound
    return cell


def _format_interval(cell: Cell) -> str:
    return (
        f"{_format_percent(cell['value'])}% [{_format_percent(cell['low'])}, "
        f"{_format_percent(cell['high'])}]"
    )


def _format_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
