"""Output for a person while a run goes on: a row for each step, notes, and warnings about the
responses' length.

The report's page and pictures have the console's colours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TextIO

import rich.console
import yaml
from rich.text import Text

from megatron_dppo.errors import sanitize_text
from megatron_dppo.observe.timers import compute_breakdown

HEADER_EVERY = 25
"""Rows between two headers."""
BAR = 16
"""Characters of the bar of phases."""
FIRST = 3
"""Steps whose mean length later ones are compared with."""
RECENT = 3
"""Steps in the running mean that is compared."""
TRUNCATED = 0.1
"""A rise of the truncated share by this much counts as growth: a length that is cut off cannot show
it."""
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
"""Title, metric and form of each column. "prompts" and "tokens" are the shares that pruning kept;
"noise" is the factor by which pruning multiplied the gradient's estimated variance."""
_WARM_UP = ("loss", "grad", "lr", "seconds")


class Console:
    """Output of rank 0. On a terminal it has colours and a bar of phases; elsewhere it writes plain
    lines.

    Args:
        total_steps: of the whole run, resumes included.
        file: where to write, stdout unless a test says otherwise.
    """

    def __init__(self, total_steps: int, file: TextIO | None = None) -> None:
        self._total = total_steps
        self._out = rich.console.Console(file=file, highlight=False, soft_wrap=True)
        self._columns: Sequence[tuple[str, str, str]] = ()
        self._rows = 0
        self._recent: deque[float] = deque(maxlen=10)
        self._printed: set[str] = set()

    def print_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row. A metric that this step does not have (no evaluation, nothing trained on) is a
        dash."""
        if not any(key in metrics for _, key, _ in _COLUMNS):
            return
        if not self._columns:
            warm_up = "train/loss" in metrics and "rollout/raw_reward" not in metrics
            self._columns = [
                c for c in _COLUMNS if (c[0] in _WARM_UP if warm_up else c[0] != "loss")
            ]
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
        """Print a line of words. The same words are printed once in a run, unless ``repeat``."""
        if repeat or text not in self._printed:
            self._printed.add(text)
            self._print(
                Text("note  ", style="bold yellow").append(
                    sanitize_text(text), style="not bold default"
                )
            )

    def print_banner(self, lines: Sequence[str]) -> None:
        """Print a few lines with an empty line before and after them."""
        self._print(
            Text(
                sanitize_text(
                    "\n" + "\n".join(f"  {line}" if line else "" for line in lines) + "\n"
                )
            )
        )

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
        """Time to the last step at the pace of the latest ten, evaluations aside."""
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
        edge = 0.0
        drawn = 0
        for name, part in parts.items():
            edge += part / total * BAR
            bar.append("█" * (round(edge) - drawn), style=get_colour(f"phase-{name}"))
            drawn = round(edge)
        return bar


def _get_width(title: str) -> int:
    return 7 if title == "lr" else max(len(title), 5)


class LengthGate:
    """Warns when the length of the responses leaves where it began. It never stops a run.

    A policy that has two styles of answering can settle on the shorter one within a few steps,
    because that one is better for a while. It then has no long answers left to learn from. The
    length shows this before the reward does, which still rises on the way into such a local
    optimum.

    It takes one row of metrics per step, in order; after a resume the earlier rows come first.
    """

    def __init__(self, bound: float | None) -> None:
        """
        Args:
            bound: ``run.length_gate``, the factor by which the running mean may fall or rise; None:
                it never warns.
        """
        self._bound = bound
        self._first: list[tuple[float, float]] = []
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._outside = ""

    def check(self, step: int, row: Mapping[str, float]) -> str | None:
        """A warning when the length crosses a bound, else None. It warns again only if the length
        had come back.

        Args:
            step: counted from 1, as in the log.
            row: the step's metrics; one without ``rollout/response_len/mean`` (an evaluation's) is
                passed over.
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
        (before, cut_before), (now, cut) = (
            map(mean, zip(*window, strict=True)) for window in (self._first, self._recent)
        )
        outside = ""
        if now * self._bound < before:
            outside = "fell"
        elif now > before * self._bound or cut > cut_before + TRUNCATED:
            outside = "rose"
        crossed = outside not in ("", self._outside)
        self._outside = outside
        if not crossed:
            return None
        return (
            f"response length {outside}: {now:.1f} tokens, mean of steps {step - RECENT + 1} to "
            f"{step}, against "
            f"{before:.1f} in the first {FIRST}; {cut:.0%} cut off, against {cut_before:.0%}. "
            + (_ON_FALL if outside == "fell" else _ON_RISE)
            + (_PRUNED if row.get("prune/max_weight", 1.0) > 1.0 else "")
        )


_COLOURS = yaml.safe_load(Path(__file__).with_name("palette.yaml").read_bytes())
PALETTE: Mapping[str, tuple[str, str]] = _COLOURS["palette"]
"""Colours by name: on light paper and on dark."""
SAME: Mapping[str, str] = _COLOURS["same"]
"""Names for a second use of a colour."""


def get_colour(name: str) -> str:
    """On light paper; ``name`` may have words behind it, as the classes of a page's element."""
    word = name.partition(" ")[0]
    return PALETTE[SAME.get(word, word)][0]
