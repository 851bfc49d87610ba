"""The verifier for answers that have one spelling."""

from __future__ import annotations

from typing import Any


def exact_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 if the text after the last number sign, or the whole answer where there is none, is the label; else 0."""
    return float(solution_str.rpartition("#")[2].strip() == ground_truth.rpartition("#")[2].strip())
