"""What a run came to: ``summary.json`` for programs, a few lines for people. Both are computed from the metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.observe.console import Console
from megatron_dppo.observe.metrics import FILE as METRICS
from megatron_dppo.observe.metrics import read_metrics
from megatron_dppo.observe.timers import breakdown

FILE = "summary.json"
Rows = Sequence[Mapping[str, float]]

PLACES: Sequence[tuple[str, str]] = (
    ("picture", "progress.png"),
    ("picture of pruning", "pruning.png"),
    ("TensorBoard log", "tensorboard"),
    ("metrics", "metrics.jsonl"),
    ("checkpoints", "checkpoints"),
    ("Hugging Face export", "hf"),
)


def summarise(metrics: Rows) -> dict[str, Any]:
    """The figures of a run, from its rows of ``metrics.jsonl``. A figure that no row knows is None.

    Fractions are means over the steps that have them, of pack fill over those that packed anything. ``seconds`` adds up
    the timed steps and evaluations: of a resumed run, those whose rows were kept, so that nothing is counted twice.
    What estimates the noise of the gradient is None where a step has no estimate, as under a biased rule: the mean of
    the others would be no figure of the run.
    """
    held_out = [row["eval/accuracy"] for row in metrics if "eval/accuracy" in row]
    steps = [row for row in metrics if "perf/step_time" in row]
    pruned = [row for row in metrics if "prune/kept_token_fraction" in row]
    seconds = _total(steps, "perf/step_time") + _total(metrics, "perf/eval_time")
    return {
        "accuracy_before": held_out[0] if held_out else None,
        "accuracy_after": held_out[-1] if held_out else None,
        "seconds": seconds,
        "seconds_per_step": _mean(steps, "perf/step_time"),
        "kept_prompt_fraction": _mean(metrics, "prune/kept_prompt_fraction"),
        "kept_token_fraction": _mean(metrics, "prune/kept_token_fraction"),
        "saved_tokens_prompts": _whole(pruned, "prune/saved_tokens_prompts"),
        "saved_tokens_completions": _whole(pruned, "prune/saved_tokens_completions"),
        "zero_advantage_tokens": _whole(pruned, "prune/zero_advantage_tokens"),
        "saved_seconds_prompts": _total(pruned, "perf/saved_prompts_time"),
        "saved_seconds_completions": _total(pruned, "perf/saved_completions_time"),
        "effective_sample_size": _mean(pruned, "prune/effective_sample_size"),
        "variance_inflation": _mean_of_all(pruned, "prune/variance_inflation"),
        "noise_share_prompts": _mean_of_all(pruned, "prune/noise_share_prompts"),
        "noise_share_completions": _mean_of_all(pruned, "prune/noise_share_completions"),
        "discarded_groups": _whole(pruned, "prune/discarded_groups"),
        "pack_fill": _mean([row for row in metrics if "train/grad_norm" in row], "pack/fill"),
        "steps": len(steps),
        "generated_tokens": _whole(metrics, "rollout/generated_tokens"),
        "trained_tokens": _whole(metrics, "train/tokens"),
        "no_op_steps": sum("rollout/raw_reward" in row and "train/grad_norm" not in row for row in metrics),
        "reward_timeouts": _whole(metrics, "reward/timeouts"),
        "reward_errors": _whole(metrics, "reward/errors"),
        "phase_seconds": _phases(steps) | {"evaluation": _total(metrics, "perf/eval_time")},
    }


def write_summary(run_dir: Path | str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Summarise the run in ``run_dir``, write ``summary.json`` there in one piece, and return it.

    Args:
        run_dir: a directory with ``metrics.jsonl``.
        extra: further JSON-able figures to write with the others.
    """
    folder = Path(run_dir)
    summary = summarise(read_metrics(folder)) | dict(extra or {})
    partial = folder / (FILE + ".partial")
    partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / FILE)
    return summary


def read_summary(run_dir: Path | str) -> dict[str, Any] | None:
    """What was written last; None if there is none of all that the metrics hold."""
    file, metrics = Path(run_dir, FILE), Path(run_dir, METRICS)
    try:
        if metrics.exists() and file.stat().st_mtime < metrics.stat().st_mtime:
            return None
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def print_summary(run_dir: Path | str, summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Say what was learned, what pruning saved, and where things lie (those that exist)."""
    console = console or Console(int(summary["steps"]))
    console.banner([*_learned(summary), *_saved(summary), *_faults(summary), "", *_places(Path(run_dir))])


def _learned(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if before is not None and after is not None:
        points = 100 * (after - before)
        lines = [f"held-out accuracy {100 * before:.1f}% before, {100 * after:.1f}% after ({points:+.1f} points)"]
    if summary["seconds_per_step"] is not None:
        pace, total = summary["seconds_per_step"], summary["seconds"]
        lines.append(f"{_steps(summary['steps'])} of {pace:.2f} s; {total:.0f} s with evaluations")
    return lines


def _saved(summary: Mapping[str, Any]) -> list[str]:
    """What a run with both rules ``none`` would have rolled out and trained on besides: it drops zero advantages, too.

    The tokens of prompts that were not rolled out are taken to be like those of the others.
    """
    prompts, tokens, fill = summary["kept_prompt_fraction"], summary["kept_token_fraction"], summary["pack_fill"]
    unseen, pruned, trained, idle = (
        summary.get(name, 0)  # a summary of an earlier version knows of no zero advantages
        for name in ("saved_tokens_prompts", "saved_tokens_completions", "trained_tokens", "zero_advantage_tokens")
    )
    lines = []
    if prompts is not None and tokens is not None:
        lines = [
            f"of the prompts {100 * prompts:.0f}% were rolled out, and {100 * tokens:.0f}% of their tokens trained on"
        ]
        rolled_out = trained + pruned + idle
        if idle:
            lines.append(f"  {100 * idle / rolled_out:.0f}% of their tokens had zero advantage: no run trains on those")
        if unseen or pruned:
            generation = unseen / (rolled_out + unseen)
            training = 1.0 - (1.0 - generation) * trained / (trained + pruned) if trained + pruned else generation
            lines.append(
                f"  pruning saved about {100 * generation:.0f}% of the tokens to roll out and {100 * training:.0f}% of "
                "those to train on"
            )
        lines += [*_levels(summary), *_noise(summary)]
    if fill is not None:
        lines.append(f"packs were {100 * fill:.1f}% full")
    return lines


def _levels(summary: Mapping[str, Any]) -> list[str]:
    """What each level saved, the other left as it is."""
    lines = []
    for level, what in (("prompts", "tokens not rolled out"), ("completions", "tokens not trained on")):
        tokens, seconds = summary[f"saved_tokens_{level}"], summary[f"saved_seconds_{level}"]
        if not tokens:
            continue
        lines.append(f"  {level:<12}{tokens:>12,} {what}, about {seconds:.0f} s")
    if summary["discarded_groups"]:
        lines.append(f"  {summary['discarded_groups']:,} groups were rolled out and thrown away, which saved nothing")
    return lines


def _noise(summary: Mapping[str, Any]) -> list[str]:
    sample, inflation = summary["effective_sample_size"], summary["variance_inflation"]
    if sample is None:
        return []
    lines = [f"weights leave an effective sample size of {100 * sample:.0f}% of what was trained on"]
    if inflation is None:
        return [*lines, "no variance is estimated: what a biased rule drops, no weight makes up for"]
    by_prompts, by_completions = summary["noise_share_prompts"], summary["noise_share_completions"]
    by_sampling = 1.0 - by_prompts - by_completions
    return [
        *lines,
        f"the gradient's variance, estimated for independent draws: {inflation:.2f} times the full batch's",
        f"  its noise: {100 * by_sampling:.0f}% sampling, {100 * by_prompts:.0f}% pruned prompts, "
        f"{100 * by_completions:.0f}% pruned completions",
    ]


def _faults(summary: Mapping[str, Any]) -> list[str]:
    """Nothing is silent: what went wrong and was survived is said again at the end."""
    faults = []
    if summary["no_op_steps"]:
        faults.append(f"{_steps(summary['no_op_steps'])} kept nothing to train on and changed no weight")
    if summary["reward_timeouts"] or summary["reward_errors"]:
        timeouts, errors = summary["reward_timeouts"], summary["reward_errors"]
        faults.append(f"scoring failed for some completions ({timeouts} timeouts, {errors} errors): their groups left")
    return faults


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _places(folder: Path) -> list[str]:
    there = [(title, folder / name) for title, name in PLACES if (folder / name).exists()]
    return [f"{title:<20} {place}" for title, place in there]


def _phases(steps: Rows) -> dict[str, float]:
    total: dict[str, float] = {}
    for row in steps:
        for phase, seconds in breakdown(row).items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total


def _total(metrics: Rows, key: str) -> float:
    return sum((row[key] for row in metrics if key in row), 0.0)


def _whole(metrics: Rows, key: str) -> int:
    return round(_total(metrics, key))


def _mean_of_all(metrics: Rows, key: str) -> float | None:
    """None where any row lacks the number."""
    return _mean(metrics, key) if all(key in row for row in metrics) else None


def _mean(metrics: Rows, key: str) -> float | None:
    values = [row[key] for row in metrics if key in row]
    return sum(values) / len(values) if values else None
