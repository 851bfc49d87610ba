"""The two small built-in verifiers: one spelling of an answer, and the verdict of reasoning-gym's own verifiers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any


def exact_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 if the text after the last number sign, or the whole answer where there is none, is the label; else 0."""
    return float(solution_str.rpartition("#")[2].strip() == ground_truth.rpartition("#")[2].strip())


@functools.cache
def _verifier(task: str, settings: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym.factory import create_dataset

    return create_dataset(task, size=1, seed=0, **json.loads(settings)).score_answer


def reasoning_gym_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, object]:
    """What the task's verifier says of the last ``<answer>…</answer>``, or of all that is said where there is none.

    Verifiers give part of 1 for an answer that is close, or of the wrong form; right is what gets 1. Some of them raise
    on an answer that they cannot read, which is a wrong answer.

    Raises:
        KeyError: the prompt is none of reasoning-gym's.
    """
    from reasoning_gym.utils import extract_answer

    entry, settings = extra_info["entry"], json.dumps(extra_info["settings"], sort_keys=True)
    verify = _verifier(data_source.partition("/")[2], settings)
    answer = extract_answer(solution_str)
    answer = solution_str.strip() if answer is None else answer
    try:
        score = float(verify(answer, entry))
    except (ArithmeticError, AssertionError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
        score = 0.0
    return {"score": score, "acc": score >= 1.0, "pred": answer}
