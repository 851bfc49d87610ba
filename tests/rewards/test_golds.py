"""The labels of the benchmarks: each is right as an answer to itself, in its own spelling and in another."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks.mutated_labels import mutated
from benchmarks.sympy_equivalence import equivalent
from megatron_dppo.data.rows import read_rows
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.benchmarks import BENCHMARKS, find_file, read_benchmark
from megatron_dppo.rewards.math.completion import stated_answer
from megatron_dppo.rewards.math.verdict import judge, math_verdict

FOLDER = os.environ.get("MEGATRON_DPPO_BENCHMARKS")
TRAINING: dict[str, tuple[int, int]] = {"gsm8k_train.jsonl": (7473, 0), "math_train_rllm.json": (7474, 2)}
"""Problems to train on: how many, and how many whose label is the empty string: no answer is right, and scoring says
so."""

pytestmark = pytest.mark.skipif(FOLDER is None, reason="MEGATRON_DPPO_BENCHMARKS names no folder of benchmark files")


@pytest.fixture(params=[*BENCHMARKS, *TRAINING])
def labels(request: pytest.FixtureRequest) -> list[str]:
    folder, name = Path(FOLDER or ""), request.param
    if name in BENCHMARKS:
        try:
            file = find_file(name, folder)
        except UserError as absent:
            pytest.skip(str(absent))
        return [question.label for question in read_benchmark(name, str(file), BENCHMARKS[name])]
    if not (folder / name).is_file():
        pytest.skip(f"there is no {folder / name}")
    found = [str(row["answer"]) for row in read_rows(str(folder / name), "data.train")]
    assert (len(found), sum(not text for text in found)) == TRAINING[name]
    return [text for text in found if text]


def test_every_label_is_right_as_its_own_answer(labels: list[str]) -> None:
    answers = [stated_answer(label) or label for label in labels]
    assert not [
        a
        for a, label in zip(answers, labels, strict=True)
        if math_verdict("", f"So \\boxed{{{a}}}.", label)["score"] != 1
    ]


def test_every_label_is_right_in_another_spelling(labels: list[str]) -> None:
    def respelled(text: str) -> str:
        wide = re.sub(r"(?<=[=+,])(?!\d{3}|})", r"\\, ", re.sub(r",\\!\s*", "{,}", text)).replace(r"\frac", r"\dfrac ")
        return wide if "$" in wide else f"$ {wide} $."

    answers = [respelled(stated_answer(label) or label) for label in labels]
    assert not [
        (a, label)
        for a, label in zip(answers, labels, strict=True)
        if math_verdict("", f"\\boxed{{{a}}}", label)["score"] != 1
    ]


def test_no_answer_with_one_change_is_right(labels: list[str]) -> None:
    stated = [stated_answer(label) or label for label in labels]
    right = [pair for pair in mutated(stated, 250) if judge(pair.label, pair.answer).right]
    assert not [pair for pair in right if not equivalent(pair.label, pair.answer)]


def test_nonsense_and_the_neighbouring_label_are_wrong(labels: list[str]) -> None:
    stated = [stated_answer(label) or label for label in labels]
    assert not [label for label in stated if math_verdict("", r"\boxed{\text{mu}}", label)["score"] != 0]
    numbers = [text for text in stated if re.fullmatch(r"-?\d+", text)]
    assert not [text for text in numbers if math_verdict("", f"\\boxed{{{int(text) + 1}}}", text)["score"] != 0]
