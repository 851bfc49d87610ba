"""Write metrics of a run: ``metrics.jsonl``, ``run.loggers`` and ``summary.json``.

Only metrics under ``perf/`` depend on the machine or the clock. Other metrics depend on settings
and random seed alone: a resumed run's file equals an uninterrupted run's, bit for bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.bridge.checkpoint_folder import find_latest_step
from megatron_dppo.errors import UserError
from megatron_dppo.observe.console import Console
from megatron_dppo.observe.loggers import Loggers
from megatron_dppo.observe.timers import compute_breakdown, format_duration
from megatron_dppo.process.files import replace_file, replace_text
from megatron_dppo.process.streams import print_message

FILE = "metrics.jsonl"
SUMMARY = "summary.json"
REWARD = "reward/"
COUNTED = {f"{REWARD}timeouts", f"{REWARD}errors"}
# A name for each completion would fill every logger.
MOST_NAMED = 50
"""Maximum number of metrics that reward functions may name."""
MOST_SHOWN = 5
"""Omitted names in the note."""


class StepLog:
    """File with a line of JSON per step, on the disk before the next step.

    Args:
        file: path; a missing folder is made.
        resume_step: finished steps of the resumed checkpoint. Later rows are dropped; 0 or less:
            all.
    """

    def __init__(self, file: Path, resume_step: int) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        # The run repeats later steps, and a step must not have two rows.
        _drop_rows_past(file, resume_step)
        self._file = file.open("a", encoding="utf-8")

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Add a row; floats keep all bits."""
        self._file.write(json.dumps({"step": int(step), **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class MetricsLog:
    """Writer of ``metrics.jsonl`` and of all loggers, on rank 0 only.

    ``resume_step``: see ``StepLog``. ``settings`` by dotted key are for the loggers.

    Raises:
        UserError: a logger cannot be opened.
    """

    def __init__(
        self,
        run_dir: Path | str,
        resume_step: int,
        *,
        loggers: Sequence[str] = ("tensorboard",),
        settings: Mapping[str, Any] | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        folder = Path(run_dir)
        self._rows = StepLog(folder / FILE, resume_step)
        self._log = log
        past = read_metrics(folder)
        self._named = {name for row in past for name in row if name.startswith(REWARD)} - COUNTED
        self._has_left_out = False
        self._loggers = Loggers(
            loggers, folder, resume_step=resume_step, past=past, settings=settings or {}, log=log
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a row with sorted keys."""
        # Escape characters that are not UTF-8, because loggers require UTF-8.
        named = {
            key.encode(errors="backslashreplace").decode(): value for key, value in metrics.items()
        }
        row = {key: _plain(named[key]) for key in sorted(named)}
        self._drop_excess_names(row)
        self._rows.write(step, row)
        self._loggers.write(step, row)

    def _drop_excess_names(self, row: dict[str, float]) -> None:
        """Keep ``MOST_NAMED`` names of reward functions."""
        new = [
            name for name in row if name.startswith(REWARD) and name not in COUNTED | self._named
        ]
        room = max(MOST_NAMED - len(self._named), 0)
        self._named.update(new[:room])
        for name in (left_out := new[room:]):
            del row[name]
        if left_out and not self._has_left_out:
            self._has_left_out = True
            shown = ", ".join(f"{name:.60}" for name in left_out[:MOST_SHOWN])
            self._log(
                f"reward functions name more than {MOST_NAMED} metrics: further metrics are "
                f"dropped, first {shown}. Log one name for all completions: the metric is a mean "
                "over them"
            )

    def close(self, *, finished: bool = True) -> None:
        """Close the file and the loggers. Safe to call twice."""
        self._rows.close()
        self._loggers.close(finished=finished)


class RowFollower:
    """Follower of ``metrics.jsonl``: a callback per row after the last checkpoint, unless None."""

    def __init__(
        self,
        run_dir: Path,
        callback: Callable[[dict[str, float]], object] | None,
    ) -> None:
        self._file = run_dir / FILE
        self._callback = callback
        done = find_latest_step(run_dir / "checkpoints")
        self._last = -1 if done is None else done
        self._size = 0
        self._before = self._file.stat().st_ino if self._file.exists() else None

    def read_new_rows(self) -> None:
        if self._callback is None:
            return
        now = self._file.stat() if self._file.exists() else None
        # At the start a run replaces the file, without the rows of repeated steps. Wait for the
        # replacement.
        if now is None or now.st_ino == self._before:
            return
        if now.st_size == self._size:
            return
        self._size = now.st_size
        for row in read_rows(self._file):
            if row["step"] > self._last:
                self._last = row["step"]
                self._callback(row)


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl``."""
    return read_rows(Path(run_dir) / FILE)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a ``StepLog`` in order; empty if the file is absent.

    Raises:
        UserError: a line is no row. The error names file and line.
    """
    return [row for _, row in _read_lines(file)]


def _read_lines(file: Path) -> list[tuple[bytes, dict[str, Any]]]:
    if not os.path.lexists(file):
        return []
    # Skip no line silently, except a last line that a kill cut short.
    lines = file.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if (row := _parse(line)) is not None:
            rows.append((line, row))
        # After the last newline the file is empty, or a killed process left part of a row.
        elif number < len(lines):
            problem = f"line {number} is no row of a run: {line[:60].decode(errors='replace')!r}"
            remedy = (
                "Copy the file again, remove that line, or move the file away; the run can "
                "resume without it"
            )
            raise UserError("run.dir", file, problem, remedy)
    return rows


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _drop_rows_past(file: Path, step: int) -> None:
    """Remove rows past ``step``, atomically. Other lines keep their bytes."""
    rows = _read_lines(file)
    if not file.exists():
        return
    kept = [line for line, row in rows if row["step"] <= step] if step > 0 else []
    last = max((row["step"] for _, row in rows), default=0)
    if step > 0 and last < step:
        text = (
            f"note: {file} ends at step {last}, and the run resumes from step {step}: the rows "
            "between are lost"
        )
        print_message(text)
    with replace_file(file) as partial, partial.open("wb") as rewritten:
        rewritten.writelines(line + b"\n" for line in kept)
        rewritten.flush()
        os.fsync(rewritten.fileno())


def _plain(value: float) -> float:
    # NumPy's and torch's scalars have another JSON form, or cannot be written as JSON.
    return value if type(value) in (int, float) else float(value)


Rows = Sequence[Mapping[str, float]]

PLACES: Sequence[tuple[str, str]] = (
    ("picture", "progress.png"),
    ("picture of pruning", "pruning.png"),
    ("TensorBoard log", "tensorboard"),
    ("metrics", "metrics.jsonl"),
    ("checkpoints", "checkpoints"),
    ("Hugging Face export", "hf"),
    ("adapter for PEFT", "adapter"),
)


def compute_summary(metrics: Rows) -> dict[str, Any]:
    """Compute the summary from the rows of ``metrics.jsonl``.

    - A figure without values is None.
    - A fraction is the mean over steps with a value; pack fill over steps with packs.
    - ``seconds`` is the sum over timed steps and evaluations. Dropped rows do not count.
    - Noise estimates are None if any step has no estimate, as under a biased rule.
    """
    held_out = _get_values(metrics, "eval/accuracy")
    rewards = _get_values(metrics, "eval/reward")
    steps = [row for row in metrics if "perf/step_time" in row]
    pruned = [row for row in metrics if "prune/kept_token_fraction" in row]
    phases: dict[str, float] = {}
    for row in steps:
        for phase, seconds in compute_breakdown(row).items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    evaluation = _sum_values(metrics, "perf/eval_time")
    return {
        "accuracy_before": held_out[0] if held_out else None,
        "accuracy_after": held_out[-1] if held_out else None,
        "reward_before": rewards[0] if rewards else None,
        "reward_after": rewards[-1] if rewards else None,
        "seconds": _sum_values(steps, "perf/step_time") + evaluation,
        "seconds_per_step": _compute_mean(steps, "perf/step_time"),
        "kept_prompt_fraction": _compute_mean(metrics, "prune/kept_prompt_fraction"),
        "kept_token_fraction": _compute_mean(metrics, "prune/kept_token_fraction"),
        "saved_tokens_prompts": _round_sum(pruned, "prune/saved_tokens_prompts"),
        "saved_tokens_completions": _round_sum(pruned, "prune/saved_tokens_completions"),
        "zero_advantage_tokens": _round_sum(pruned, "prune/zero_advantage_tokens"),
        "saved_seconds_prompts": _sum_values(pruned, "perf/saved_prompts_time"),
        "saved_seconds_completions": _sum_values(pruned, "perf/saved_completions_time"),
        "pruning_efficiency": _compute_mean(pruned, "perf/pruning_efficiency", require_all=True),
        "effective_sample_size": _compute_mean(pruned, "prune/effective_sample_size"),
        "variance_inflation": _compute_mean(pruned, "prune/variance_inflation", require_all=True),
        "noise_share_prompts": _compute_mean(pruned, "prune/noise_share_prompts", require_all=True),
        "noise_share_completions": _compute_mean(
            pruned, "prune/noise_share_completions", require_all=True
        ),
        "discarded_groups": _round_sum(pruned, "prune/discarded_groups"),
        "pack_fill": _compute_mean(
            [row for row in metrics if "train/grad_norm" in row], "pack/fill"
        ),
        "steps": len(steps),
        "generated_tokens": _round_sum(metrics, "rollout/generated_tokens"),
        "trained_tokens": _round_sum(metrics, "train/tokens"),
        "no_op_steps": sum(
            "rollout/raw_reward" in row and "train/grad_norm" not in row for row in metrics
        ),
        "reward_timeouts": _round_sum(metrics, "reward/timeouts"),
        "reward_errors": _round_sum(metrics, "reward/errors"),
        "phase_seconds": phases | {"evaluation": evaluation},
    }


def write_summary(run_dir: Path | str) -> dict[str, Any]:
    """Write ``summary.json`` atomically, and return the summary."""
    folder = Path(run_dir)
    summary = compute_summary(read_metrics(folder))
    replace_text(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary


def read_summary(run_dir: Path | str) -> dict[str, Any] | None:
    """Return the last summary; None if absent, or older than the metrics."""
    file = Path(run_dir, SUMMARY)
    metrics = Path(run_dir, FILE)
    try:
        # A resumed run may have written metrics after the summary.
        if metrics.exists() and file.stat().st_mtime < metrics.stat().st_mtime:
            return None
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def print_summary(run_dir: Path | str, summary: Mapping[str, Any], console: Console) -> None:
    folder = Path(run_dir)
    places = [f"{title:<20} {folder / name}" for title, name in PLACES if (folder / name).exists()]
    places.append(f"{'the rest':<20} megatron-dppo report {folder}")
    console.print_banner(
        [
            *_format_learning(summary),
            *_format_savings(summary),
            *_format_faults(summary),
            "",
            *places,
        ]
    )


def _format_learning(summary: Mapping[str, Any]) -> Iterator[str]:
    before = summary["accuracy_before"]
    after = summary["accuracy_after"]
    if before is not None and after is not None:
        points = 100 * (after - before)
        rewards = (summary.get("reward_before"), summary.get("reward_after"))
        partial = ""
        if None not in rewards and rewards != (before, after):
            partial = "; reward {:.3f} before, {:.3f} after".format(*rewards)
        yield (
            f"held-out accuracy {100 * before:.1f}% before, {100 * after:.1f}% after "
            f"({points:+.1f} points){partial}"
        )
    if summary["seconds_per_step"] is not None:
        pace = summary["seconds_per_step"]
        total = summary["seconds"]
        yield (
            f"{_format_steps(summary['steps'])} of {format_duration(pace)}; "
            f"{format_duration(total)} with evaluations"
        )


def _format_savings(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line on the savings, and a line on the noise, compared with a run without pruning."""
    if summary["kept_prompt_fraction"] is None or summary["kept_token_fraction"] is None:
        return
    # A run without pruning does not train on completions with zero advantage either. Tokens of
    # pruned prompts are assumed to be like the tokens of other prompts.
    unseen = summary["saved_tokens_prompts"]
    pruned = summary["saved_tokens_completions"]
    trained = summary["trained_tokens"]
    # Rolled-out tokens are trained on, pruned, or without gradient in any run.
    rolled_out = trained + pruned + summary["zero_advantage_tokens"]
    if trained and (unseen or pruned):
        generation = unseen / (rolled_out + unseen)
        kept = trained / (trained + pruned)
        training = 1.0 - (1.0 - generation) * kept
        discarded = summary["discarded_groups"]
        rest = f"; {discarded:,} groups were rolled out and discarded" if discarded else ""
        yield (
            f"pruning saved about {100 * generation:.0f}% of the tokens to roll out and "
            f"{100 * training:.0f}% of the tokens to train on{rest}"
        )
    inflation = summary["variance_inflation"]
    if inflation is None and summary["effective_sample_size"] is not None:
        yield "no variance is estimated: what a biased rule drops, no weight makes up for"
    elif inflation is not None:
        noise = f"{inflation:.2f} times the gradient's variance, estimated"
        efficiency = summary.get("pruning_efficiency")
        yield f"worth {efficiency:.2f} of a smaller batch ({noise})" if efficiency else noise


def _format_faults(summary: Mapping[str, Any]) -> Iterator[str]:
    if summary["no_op_steps"]:
        yield (
            f"{_format_steps(summary['no_op_steps'])} kept nothing to train on and changed no "
            "weight"
        )
    if summary["reward_timeouts"] or summary["reward_errors"]:
        timeouts = summary["reward_timeouts"]
        errors = summary["reward_errors"]
        yield (
            f"scoring failed for some completions ({timeouts} timeouts, {errors} errors): their "
            "groups left"
        )


def _format_steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _get_values(metrics: Rows, key: str) -> list[float]:
    return [row[key] for row in metrics if key in row]


def _sum_values(metrics: Rows, key: str) -> float:
    return sum(_get_values(metrics, key), 0.0)


def _round_sum(metrics: Rows, key: str) -> int:
    return round(_sum_values(metrics, key))


def _compute_mean(metrics: Rows, key: str, *, require_all: bool = False) -> float | None:
    """Return the mean; None without values, or with ``require_all`` if any is missing."""
    values = _get_values(metrics, key)
    if not values or (require_all and len(values) < len(metrics)):
        return None
    return sum(values) / len(values)
