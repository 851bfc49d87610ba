"""Verdicts on wrong and right answers made from real labels: false positives, false
negatives and time.

Our verifier and plain math-verify (``verify(parse(label), parse(answer))``) judge the same pairs.

- Wrong answers are labels with one change. An accepted answer of equal value
  (``sympy_equivalence.py``) is no false positive.
- Right answers are the labels in other spellings.
- Our verifier also judges the worked solution of each problem.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import arguments, finish
from math_verify import parse, verify
from mutated_labels import Pair, mutated
from respelled_labels import respelled
from sympy_equivalence import equivalent

from megatron_dppo.data.rows import read_rows
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.benchmarks import (
    BENCHMARKS,
    DEFAULT_FOLDER,
    FOLDER,
    find_file,
    read_benchmark,
)
from megatron_dppo.rewards.math.completion import extract_marked_answer
from megatron_dppo.rewards.math.verdict import grade_answer, math_verdict

TRAINING = ("gsm8k_train.jsonl", "math_train_rllm.json")
"""Optional training files, as a source of further labels."""
SHOWN = 10
Judge = Callable[[str, str], bool]


def ours(label: str, answer: str) -> bool:
    return grade_answer(label, answer).right


def plain(label: str, answer: str) -> bool:
    return bool(verify(parse(_as_formula(label)), parse(_as_formula(answer))))


def _as_formula(text: str) -> str:
    return text if "$" in text or r"\(" in text else f"${text}$"


def labels_and_solutions(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Read distinct labels, without their marks, and pairs of a worked solution and its label."""
    labels: dict[str, None] = {}
    solutions = []
    for name, benchmark in BENCHMARKS.items():
        try:
            questions = read_benchmark(name, str(find_file(name, folder)), benchmark)
        except UserError:
            continue
        for question in questions:
            labels[question.label] = None
            if benchmark.worked:
                worked = str(question.row.values[benchmark.label])
            else:
                worked = str(question.row.values.get("solution", ""))
                if "boxed" not in worked:
                    worked = _boxed(question.label)
            solutions.append((worked, question.label))
    for name in TRAINING:
        if (folder / name).is_file():
            for row in read_rows(str(folder / name), "data.train"):
                text = str(row["answer"])
                marked = extract_marked_answer(text)
                label = marked or text
                if label.strip():
                    labels[label] = None
                    solutions.append((text if marked else _boxed(label), label))
    return list(labels), solutions


def _boxed(label: str) -> str:
    return rf"\boxed{{{label}}}"


def judged(pairs: list[Pair], right: bool, judges: Judge) -> tuple[list[Pair], float]:
    """Return the misjudged pairs, and CPU milliseconds per verdict.

    Args:
        right: correct verdict on all pairs.
    """
    wrong = []
    start = time.process_time()
    for pair in pairs:
        if judges(pair.label, pair.answer) is not right:
            wrong.append(pair)
    milliseconds = 1000 * (time.process_time() - start) / max(1, len(pairs))
    return wrong, milliseconds


def results(options: argparse.Namespace) -> dict[str, Any]:
    labels, solutions = labels_and_solutions(options.folder)
    if not labels:
        raise SystemExit(
            f"there are no benchmark files in {options.folder}: name their folder with --folder"
        )
    wrong = list(mutated(labels, options.pairs, options.seed))
    right = [Pair(label, answer, name) for label in labels for name, answer in respelled(label)]
    right = random.Random(options.seed).sample(right, min(len(right), options.right))
    found: dict[str, Any] = {
        "labels": len(labels),
        "wrong_answers": len(wrong),
        "right_answers": len(right),
        "seed": options.seed,
    }
    for name, judges in (("ours", ours), ("math_verify", plain)):
        # The first calls build grammars.
        for pair in right[:20]:
            judges(pair.label, pair.answer)
        accepted, of_wrong = judged(wrong, False, judges)
        refused, of_right = judged(right, True, judges)
        false = [pair for pair in accepted if not equivalent(pair.label, pair.answer)]
        total = of_wrong * len(wrong) + of_right * len(right)
        shown = false[:SHOWN] + refused[:SHOWN]
        found[name] = {
            "false_positives": len(false),
            "right_all_the_same": len(accepted) - len(false),
            "false_negatives": len(refused),
            "milliseconds": total / max(1, len(wrong) + len(right)),
            "examples": [f"{pair.label}  <-  {pair.answer}  ({pair.change})" for pair in shown],
        }
    found["milliseconds_over_math_verify"] = (
        found["ours"]["milliseconds"] / found["math_verify"]["milliseconds"]
    )
    start = time.process_time()
    missed = [label for text, label in solutions if math_verdict("", text, label)["score"] != 1]
    found["solutions"] = {
        "read": len(solutions),
        "refused": len(missed),
        "milliseconds": 1000 * (time.process_time() - start) / max(1, len(solutions)),
        "examples": missed[:SHOWN],
    }
    return found


def main() -> None:
    folder = Path(os.environ.get(FOLDER) or DEFAULT_FOLDER)
    options = arguments(
        __doc__,
        folder=(folder, f"benchmarks' files (default: ${FOLDER})"),
        pairs=(20_000, "wrong answers"),
        right=(5_000, "right answers"),
        seed=0,
    ).parse_args()
    # math-verify warns of each unreadable text.
    logging.disable(logging.ERROR)
    finish(results(options), options)


if __name__ == "__main__":
    main()
