"""A verifier of sums that gives credit for being near: rewards differ within almost every group, so that hardly a
completion may be left out because its advantage is zero."""

from __future__ import annotations

from typing import Any

REACH = 40


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 for the sum after the last number sign, falling to 0 where that is 40 off, or no number."""
    answer = solution_str.rpartition("#")[2].strip()
    return max(0.0, 1.0 - abs(int(answer) - int(ground_truth)) / REACH) if answer.isdecimal() else 0.0
