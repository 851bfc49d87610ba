"""Watch a training that takes steps in turn with other trainings: wait before each step, then
measure the step.

- Only the standard library and ``harness.py`` are imported, so that any environment suffices.
- stdout has a JSON object per step; the training's prints go to stderr.
- stdin has a line for each step that may begin.
- ``compute_score`` is the reward of both trainers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from harness import MIB, own_status

REACH = 40
"""Least error of a sum with reward 0."""


class StepWatch:
    """Measure wall-clock seconds, processor seconds and peak memory of each step."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._start: tuple[float, float] | None = None
        self._loaded = 0.0

    def turn(self) -> None:
        """Report the last step, or the loaded memory before the first step. Then wait for the next
        step."""
        if self._start is None:
            # Restart the peak of resident memory.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._loaded = own_status("VmRSS") / MIB
            self._say({"loaded_mib": self._loaded})
        else:
            self._say(self._step())
        if not sys.stdin.readline():
            sys.exit("nobody is left to say when the next step may begin")
        self._start = time.perf_counter(), time.process_time()

    def finish(self, **figures: object) -> None:
        """Report the last step."""
        self._say(self._step() | figures)

    def _step(self) -> dict[str, object]:
        wall, processor = self._start or (0.0, 0.0)
        seconds = time.perf_counter() - wall
        cpu_seconds = time.process_time() - processor
        peak = own_status("VmHWM") / MIB
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "peak_mib": peak,
            "peak_above_loaded_mib": peak - self._loaded,
        }

    def _say(self, figures: dict[str, object]) -> None:
        self._out.write(json.dumps(figures) + "\n")
        self._out.flush()


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """Return 1 if the right sum follows the last number sign, falling to 0 at an error of 40; 0
    without a number.

    Rewards differ within almost every group, so that hardly any completion can be left out for a
    zero advantage.
    """
    answer = solution_str.rpartition("#")[2].strip()
    if not answer.isdecimal():
        return 0.0
    return max(0.0, 1.0 - abs(int(answer) - int(ground_truth)) / REACH)
