"""Learning of runs: reward, accuracy, signs of health, packs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

import numpy as np

from megatron_dppo.evaluation.benchmarks import BY_SOURCE, TAKEN
from megatron_dppo.report.charts import (
    Chart,
    Form,
    Line,
    format_number,
    make_line_chart,
    with_title,
)
from megatron_dppo.report.parts import Charts, Section, Table
from megatron_dppo.report.run import RunRecord
from megatron_dppo.rl.types import Floats
from megatron_dppo.trainer.agreement import MAX_LOGPROB_DIFF

# 95% of a normal distribution lie within this many standard deviations.
Z = 1.959964
Reduce = Callable[[Floats], float]
FIRST_MEAN_LAST: Sequence[Reduce] = (lambda values: values[0], np.mean, lambda values: values[-1])
# Label, metric and form of a row.
SIGNS: Sequence[tuple[str, str, Form]] = (
    ("Response length: mean tokens of a completion", "rollout/response_len/mean", "number"),
    ("Cut off: share of completions that reached the limit", "rollout/truncated_ratio", "share"),
    ("Entropy: of the policy, nats per token", "train/entropy_loss", "number"),
    ("Gradient norm: before clipping", "train/grad_norm", "number"),
    ("Clipped: share of tokens whose ratio was clipped", "train/pg_clipfrac", "share"),
    ("Loss: of a step, as the optimizer sees it", "train/loss", "number"),
    ("Distance: from the initial policy, KL per token", "train/kl_loss", "number"),
    (
        "No difference: share of groups whose rewards were all equal",
        "rollout/zero_std/ratio",
        "share",
    ),
)
DIFFERENCES: Sequence[tuple[str, str, Form, Reduce]] = (
    ("pack fill, mean", "pack/fill", "share", np.mean),
    ("mean |Δ log p| of a step, mean of all", "train/rollout_logprob_abs_diff", "number", np.mean),
    (
        "mean exp |Δ log p| − 1 of a step, largest",
        "train/token_mult_prob_error",
        "number",
        lambda values: values.max() - 1.0,
    ),
    ("|Δ log p| after a sync, largest of a token", "rollout/agreement_max_diff", "number", np.max),
    ("tokens that older weights made", "rollout/stale_tokens", "share", np.mean),
    ("age of completions in updates, mean", "staleness/mean", "number", np.mean),
    ("age of completions in updates, largest", "staleness/max", "number", np.max),
)
Positions = Callable[[RunRecord], Floats]
"""Function from a run to positions on an axis, [steps]."""


def compute_wilson_interval(share: float, trials: int) -> tuple[float, float]:
    """Return the 95% interval of a fraction of independent trials (Wilson 1927)."""
    centre = (share + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    reach = Z / (1 + Z**2 / trials) * sqrt(share * (1 - share) / trials + Z**2 / (4 * trials**2))
    return max(centre - reach, 0.0), min(centre + reach, 1.0)


def format_wilson_interval(share: float, trials: int) -> str:
    """Format in percent, such as ``61.5–84.9``."""
    low, high = compute_wilson_interval(share, trials)
    return f"{100 * low:.1f}–{100 * high:.1f}"


def make_learning_section(runs: Sequence[RunRecord]) -> Section:
    """Show reward and accuracy over four axes."""
    time = "perf/step_time"
    size, unit = _select_time_unit(
        max((float(_sum_metric(run, time)[-1]) for run in runs if run.steps), default=0.0)
    )
    axes: Sequence[tuple[str, str, Positions]] = (
        ("steps", "step", get_step_numbers),
        (
            "tokens generated",
            "tokens generated",
            lambda run: _sum_metric(run, "rollout/generated_tokens"),
        ),
        ("tokens trained on", "tokens trained on", lambda run: _sum_metric(run, "train/tokens")),
        ("time", f"{unit} in training steps", lambda run: _sum_metric(run, time) / size),
    )
    parts = []
    # The page displays a single axis at a time.
    for name, label, positions in axes:
        reward = make_reward_chart(runs, label, positions)
        parts.append(Charts([reward, make_accuracy_chart(runs, label, positions)], axis=name))
    lead = (
        "Time counts training steps and leaves evaluations out. Bold lines are means over a tenth "
        "of a run; the band around an accuracy is its 95% interval (Wilson's, over the held-out "
        "problems), where their number is known; of more than three runs there are only lines."
    )
    rules = [run.get_setting("pruning.prompts.rule") for run in runs]
    if len(runs) > 1 and any(rule not in (None, "none") for rule in rules):
        lead += (
            " Rewards of these runs are not comparable: a run that prunes prompts chooses those "
            "whose rewards are averaged. Held-out accuracies are: they use the same problems in "
            "all runs."
        )
    return Section(lead, [*parts, *_make_file_tables(runs)])


def make_signs_section(runs: Sequence[RunRecord]) -> Section:
    """Show early signs of failure."""
    rows = []
    # Three values suffice, because loggers draw the full curves.
    for label, key, form in SIGNS:
        cells = [_format_figures(run, key, form, *FIRST_MEAN_LAST) for run in runs]
        rows.append([label, *cells])
    measured = [row for row in rows if set(row[1:]) != {"–"}]
    table = Table(["first → mean → last", *(run.name for run in runs)], measured)
    lead = (
        "These show early that a run goes wrong: lengths collapse, the entropy nears zero, or "
        "gradients jump."
    )
    return Section(lead, [table] if measured else [], "No step has been recorded yet.")


def make_packs_section(runs: Sequence[RunRecord]) -> Section:
    lead = (
        "Empty slots of a pack cost time and train nothing. Trainer and engine score the same "
        "tokens with the same weights: they may differ by rounding only, and a run that passes "
        "the limit stops."
    )
    rows = []
    for label, key, form, number in DIFFERENCES:
        cells = [_format_figures(run, key, form, number) for run in runs]
        rows.append([label, *cells])
    rows.append(
        ["limit of mean |Δ log p|", *(format_number(_get_limit(run), "number") for run in runs)]
    )
    measured = any(run.compute_mean("pack/fill") is not None for run in runs)
    parts = [Table(["", *(run.name for run in runs)], rows)] if measured else []
    return Section(lead, parts, "Nothing was packed yet.")


def get_step_numbers(run: RunRecord) -> Floats:
    return np.array([row["step"] for row in run.steps], dtype=np.float64)


@with_title("Reward")
def make_reward_chart(
    runs: Sequence[RunRecord],
    label: str = "step",
    positions: Positions = get_step_numbers,
) -> Chart:
    key = "rollout/raw_reward"
    about = "mean over a step's completions"
    lines = [
        Line(run.name, run.colour, *_get_points(run, key, positions), noisy=True) for run in runs
    ]
    return make_line_chart(about, lines, x_label=label, empty="no rollouts")


@with_title("Held-out accuracy")
def make_accuracy_chart(
    runs: Sequence[RunRecord],
    label: str = "step",
    positions: Positions = get_step_numbers,
) -> Chart:
    lines = []
    for run in runs:
        x, y = _get_points(run, "eval/accuracy", positions)
        intervals = []
        if run.held_out:
            intervals = [compute_wilson_interval(share, run.held_out) for share in y]
        lines.append(Line(run.name, run.colour, x, y, *np.array(intervals).T))
    about = "share of the held-out problems that were answered correctly"
    return make_line_chart(about, lines, x_label=label, form="share", empty="no evaluation")


def _get_points(run: RunRecord, key: str, positions: Positions) -> tuple[Floats, Floats]:
    """Return positions and values of a metric."""
    steps, values = run.get_series(key)
    # The evaluation before the first step is at position 0.
    ends = np.concatenate([[0.0], positions(run)])
    return ends[np.searchsorted(get_step_numbers(run), steps, side="right")], values


def _sum_metric(run: RunRecord, key: str) -> Floats:
    return np.cumsum([row.get(key, 0.0) for row in run.steps], dtype=np.float64)


def _select_time_unit(longest: float) -> tuple[float, str]:
    units = ((3600.0, "hours"), (60.0, "minutes"))
    return next(((size, word) for size, word in units if longest > 2 * size), (1.0, "seconds"))


def _make_file_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """List accuracies by file or data source."""
    keys = {
        key.removeprefix("eval/")
        for run in runs
        for row in run.rows
        for key in row
        if key.startswith("eval/")
    }
    names = sorted(
        name
        for name in keys
        if ("/" not in name and name not in TAKEN) or name.startswith(BY_SOURCE)
    )
    rows = []
    for name in names:
        rows.append([name, *[_first_last(run, name) for run in runs]])
    return [Table(["held out, first → last", *(run.name for run in runs)], rows)] if rows else []


def _first_last(run: RunRecord, name: str) -> str:
    values = run.get_series(f"eval/{name}")[1]
    if not len(values):
        return "–"
    change = f"{100 * values[0]:.1f} → {100 * values[-1]:.1f}%"
    if name not in run.problems:
        return change
    return f"{change} ({format_wilson_interval(values[-1], run.problems[name])})"


def _format_figures(run: RunRecord, key: str, form: Form, *reduce: Reduce) -> str:
    values = run.get_series(key)[1]
    if not len(values):
        return "–"
    return " → ".join(format_number(float(number(values)), form) for number in reduce)


def _get_limit(run: RunRecord) -> float | None:
    own = run.get_setting("rollout.max_logprob_diff")
    return MAX_LOGPROB_DIFF.get(run.get_setting("model.dtype")) if own is None else own
