"""Console output of a run: a row per step, notes, and warnings about the length of responses.

The report uses the same colours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TextIO

import rich.console
import yaml
from rich.text import Text

from megatron_dppo.errors import sanitize_text
from megatron_dppo.observe.timers import compute_breakdown

HEADER_EVERY = 25
BAR = 16
FIRST = 3
"""First steps in the reference mean length."""
RECENT = 3
"""Steps in the running mean length."""
CUT_OFF = 0.9
"""Fraction of truncated responses above which a step counts as cut off."""
CUT_OFF_STEPS = 5
TRUNCATED = 0.1
"""Rise of the truncated fraction that counts as growth."""
_ON_FALL = (
    "The policy may be settling on a short style for good: read some answers, and watch "
    "held-out accuracy"
)
_ON_RISE = "Read some answers, and raise rollout.max_response_tokens if right ones are cut off"
_PRUNED = (
    "; if a run without pruning does not do this, raise pruning.completions.keep or lower "
    "pruning.max_weight"
)

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "rollout/raw_reward", "{:.3f}"),
    ("held-out", "eval/accuracy", "{:.3f}"),
    ("loss", "train/loss", "{:.3f}"),
    ("length", "rollout/response_len/mean", "{:.0f}"),
    ("prompts", "prune/kept_prompt_fraction", "{:.0%}"),
    ("tokens", "prune/kept_token_fraction", "{:.0%}"),
    ("noise", "prune/variance_inflation", "{:.2f}x"),
    ("fill", "pack/fill", "{:.0%}"),
    ("grad", "train/grad_norm", "{:.2f}"),
    ("lr", "train/lr", "{:.1e}"),
    ("seconds", "perf/step_time", "{:.2f}"),
)
"""Title, metric and form. "prompts" and "tokens": fractions kept by pruning. "noise": estimated
variance of the gradient, relative to no pruning."""
_WARM_UP = ("loss", "grad", "lr", "seconds")


class Console:
    """Output of rank 0: colours and a bar of phases on a terminal, else plain lines.

    Args:
        total_steps: steps of the whole run, resumes included.
        file: output; None: standard output.
    """

    def __init__(self, total_steps: int, file: TextIO | None = None) -> None:
        self._total = total_steps
        self._out = rich.console.Console(file=file, highlight=False, soft_wrap=True)
        self._columns: Sequence[tuple[str, str, str]] = ()
        self._rows = 0
        self._recent: deque[float] = deque(maxlen=10)
        self._printed: set[str] = set()

    def print_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a row. An absent metric (no evaluation, no training) is a dash."""
        if not any(key in metrics for _, key, _ in _COLUMNS):
            return
        if not self._columns:
            warm_up = "train/loss" in metrics and "rollout/raw_reward" not in metrics
            if warm_up:
                self._columns = [column for column in _COLUMNS if column[0] in _WARM_UP]
            else:
                self._columns = [column for column in _COLUMNS if column[0] != "loss"]
        if self._rows % HEADER_EVERY == 0:
            self._print(self._make_header(metrics))
        self._rows += 1
        cells = [f"{step:>{len(str(self._total))}}/{self._total}"]
        for title, key, form in self._columns:
            cell = form.format(metrics[key]) if key in metrics else "-"
            cells.append(f"{cell:>{_get_width(title)}}")
        row = Text("  ".join(cells) + "  ")
        row.append(self._format_remaining(step, metrics), style="dim")
        self._print(row.append("  ").append_text(self._render_phases(metrics)))

    def print_note(self, text: str, *, repeat: bool = False) -> None:
        """Print a note, by default only the first of equal notes."""
        if repeat or text not in self._printed:
            self._printed.add(text)
            note = Text("note  ", style="bold yellow")
            self._print(note.append(sanitize_text(text), style="not bold default"))

    def print_banner(self, lines: Sequence[str]) -> None:
        """Print lines between two empty lines."""
        indented = []
        for line in lines:
            indented.append(f"  {line}" if line else "")
        body = "\n".join(indented)
        self._print(Text(sanitize_text(f"\n{body}\n")))

    def _print(self, text: Text) -> None:
        self._out.print(text)
        self._out.file.flush()

    def _make_header(self, metrics: Mapping[str, float]) -> Text:
        titles = [f"{'step':>{2 * len(str(self._total)) + 1}}"]
        titles += [f"{title:>{_get_width(title)}}" for title, _, _ in self._columns]
        header = Text("  ".join(titles) + f"  {'left':>7}  ", style="bold")
        if self._out.is_terminal:
            for phase in compute_breakdown(metrics):
                header.append(f"■ {phase} ", style=f"not bold {get_colour(f'phase-{phase}')}")
        return header

    def _format_remaining(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return the time to the last step, without evaluations."""
        # Use the pace of the last ten steps, because response lengths change during training.
        if "perf/step_time" in metrics:
            self._recent.append(metrics["perf/step_time"])
        if not self._recent:
            return f"{'-':>7}"
        seconds = round((self._total - step) * sum(self._recent) / len(self._recent))
        hours, minutes = divmod(seconds // 60, 60)
        clock = f"{minutes}:{seconds % 60:02}"
        if hours:
            clock = f"{hours}:{minutes:02}:{seconds % 60:02}"
        return f"{clock:>7}"

    def _render_phases(self, metrics: Mapping[str, float]) -> Text:
        parts = compute_breakdown(metrics)
        total = sum(parts.values())
        if total <= 0 or len(parts) == 1:
            return Text("")
        if not self._out.is_terminal:
            shares = {name: part / total for name, part in parts.items() if part >= 0.01 * total}
            return Text("  ".join(f"{name} {share:.0%}" for name, share in shares.items()))
        bar = Text()
        # Round the edges, not the widths, so that the widths add up to the whole bar.
        edge = 0.0
        drawn = 0
        for name, part in parts.items():
            edge += part / total * BAR
            bar.append("█" * (round(edge) - drawn), style=get_colour(f"phase-{name}"))
            drawn = round(edge)
        return bar


def _get_width(title: str) -> int:
    return 7 if title == "lr" else max(len(title), 5)


class CutOffGate:
    """Note after ``CUT_OFF_STEPS`` successive steps with nearly all responses cut off."""

    def __init__(self) -> None:
        self._steps = 0

    def check(self, row: Mapping[str, float]) -> str | None:
        """Return the note once the steps are reached. Rows without rollouts are skipped."""
        ratio = row.get("rollout/truncated_ratio")
        if ratio is not None:
            self._steps = self._steps + 1 if ratio > CUT_OFF else 0
        if self._steps < CUT_OFF_STEPS:
            return None
        return (
            f"more than {CUT_OFF:.0%} of the answers were cut off in {CUT_OFF_STEPS} successive "
            "steps: read some answers, and raise rollout.max_response_tokens"
        )


class LengthGate:
    """Warning if the mean length of responses departs from the first steps. Never stops a run.

    A policy with a short and a long style of answers can settle on the short style within a few
    steps, because short answers are better for a while. The policy then no longer learns
    from long answers. The length shows this before the reward, because the reward rises at first.

    Takes a row of metrics per step in order; after a resume, first the earlier rows.
    """

    def __init__(self, bound: float | None) -> None:
        """
        Args:
            bound: ``run.length_gate``, maximum factor between running and first mean; None: off.
        """
        self._bound = bound
        self._first: list[tuple[float, float]] = []
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._outside = ""

    def check(self, step: int, row: Mapping[str, float]) -> str | None:
        """Return a warning if the length crosses a bound, else None.

        A further warning for the same bound requires a return within bounds.

        Args:
            step: counted from 1 as in the log.
            row: metrics. Rows without ``rollout/response_len/mean`` (evaluations) are skipped.
        """
        if self._bound is None or "rollout/response_len/mean" not in row:
            return None
        measured = row["rollout/response_len/mean"], row.get("rollout/truncated_ratio", 0.0)
        if len(self._first) < FIRST:
            self._first.append(measured)
            return None
        self._recent.append(measured)
        if len(self._recent) < RECENT:
            return None
        before, cut_before = _compute_means(self._first)
        now, cut = _compute_means(self._recent)
        # Lengths at the limit cannot rise, so a rise of truncated responses counts, too.
        outside = ""
        if now * self._bound < before:
            outside = "fell"
        elif now > before * self._bound or cut > cut_before + TRUNCATED:
            outside = "rose"
        # Warn at the crossing only, not at every step outside.
        crossed = outside not in ("", self._outside)
        self._outside = outside
        if not crossed:
            return None
        return (
            f"response length {outside}: {now:.1f} tokens, mean of steps {step - RECENT + 1} to "
            f"{step}, against {before:.1f} in the first {FIRST}; "
            f"{cut:.0%} cut off, against {cut_before:.0%}. "
            + (_ON_FALL if outside == "fell" else _ON_RISE)
            + (_PRUNED if row.get("prune/max_weight", 1.0) > 1.0 else "")
        )


def _compute_means(measured: Collection[tuple[float, float]]) -> tuple[float, float]:
    lengths = [length for length, _ in measured]
    truncated_ratios = [ratio for _, ratio in measured]
    return mean(lengths), mean(truncated_ratios)


_COLOURS = yaml.safe_load(Path(__file__).with_name("palette.yaml").read_bytes())
PALETTE: Mapping[str, tuple[str, str]] = _COLOURS["palette"]
"""Colours by name: on light paper and on dark."""
SAME: Mapping[str, str] = _COLOURS["same"]
"""Second names."""


def get_colour(name: str) -> str:
    """Return a colour for light paper. Only the first word of ``name`` counts."""
    word = name.partition(" ")[0]
    return PALETTE[SAME.get(word, word)][0]
