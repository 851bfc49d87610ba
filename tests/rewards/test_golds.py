"""The labels of the benchmarks: each is right as an answer to itself, in its own spelling and in another."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.rewards.mathematics import math_score
from megatron_dppo.rewards.stated import stated_answer

FOLDER = os.environ.get("MEGATRON_DPPO_BENCHMARKS")
LABELS: dict[str, tuple[int, Callable[[dict[str, Any]], str]]] = {
    "gsm8k_test.jsonl": (1319, lambda row: row["answer"]),
    "gsm8k_train.jsonl": (7473, lambda row: row["answer"]),
    "aime24.jsonl": (30, lambda row: str(row["answer"])),
    "math500.jsonl": (500, lambda row: row["answer"]),
    "minerva_math.jsonl": (272, lambda row: row["solution"]),
    "olympiadbench.jsonl": (675, lambda row: ", ".join(row["final_answer"])),
    "math_train_rllm.json": (7474, lambda row: str(row["answer"])),
}
EMPTY = {"math_train_rllm.json": 2}
"""Rows whose label is the empty string: no answer is right, and scoring says so."""

pytestmark = pytest.mark.skipif(FOLDER is None, reason="MEGATRON_DPPO_BENCHMARKS names no folder of benchmark files")


@pytest.fixture(params=LABELS)
def labels(request: pytest.FixtureRequest) -> list[str]:
    file = Path(FOLDER or "") / request.param
    if not file.is_file():
        pytest.skip(f"there is no {file}")
    text = file.read_text("utf-8")
    rows = json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in text.split("\n") if line]
    count, label = LABELS[request.param]
    found = [label(row) for row in rows]
    assert len(found) == count
    assert sum(not text for text in found) == EMPTY.get(request.param, 0)
    return [text for text in found if text]


def test_every_label_is_right_as_its_own_answer(labels: list[str]) -> None:
    answers = [stated_answer(label) or label for label in labels]
    assert not [
        a for a, label in zip(answers, labels, strict=True) if math_score("", f"So \\boxed{{{a}}}.", label) != 1
    ]


def test_every_label_is_right_in_another_spelling(labels: list[str]) -> None:
    def respelled(text: str) -> str:
        wide = re.sub(r"(?<=[=+,])(?!\d{3}|})", r"\\, ", text.replace("\\!", "")).replace(r"\frac", r"\dfrac ")
        return wide if "$" in wide else f"$ {wide} $."

    answers = [respelled(stated_answer(label) or label) for label in labels]
    assert not [
        (a, label) for a, label in zip(answers, labels, strict=True) if math_score("", f"\\boxed{{{a}}}", label) != 1
    ]


def test_nonsense_and_the_neighbouring_label_are_wrong(labels: list[str]) -> None:
    stated = [stated_answer(label) or label for label in labels]
    assert not [label for label in stated if math_score("", r"\boxed{\text{mu}}", label) != 0]
    numbers = [text for text in stated if re.fullmatch(r"-?\d+", text)]
    assert not [text for text in numbers if math_score("", f"\\boxed{{{int(text) + 1}}}", text) != 0]
