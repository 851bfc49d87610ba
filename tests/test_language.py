"""Docstrings, comments and expressions follow CONTRIBUTING's rules of English."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CHECKER = runpy.run_path(str(ROOT / "tools/language.py"))
SMALL_FILE_WORDS = 150


def measure(*folders: str) -> dict[Path, Any]:
    """Return the counts of each Python file in these folders."""
    files = CHECKER["list_files"]([ROOT / folder for folder in folders])
    return {file: CHECKER["check_texts"](file.read_text(encoding="utf-8"))[0] for file in files}


@pytest.mark.parametrize(
    ("folders", "marks", "pronouns"),
    [
        (("megatron_dppo", "tools"), 4.0, 3.2),
        (("benchmarks",), 4.0, 3.2),
        # A ceiling of texts that were not rewritten: it may only fall.
        (("tests",), 21.5, 5.7),
    ],
    ids=["package", "benchmarks", "tests"],
)
def test_texts_have_few_marks(folders: tuple[str, ...], marks: float, pronouns: float) -> None:
    total = CHECKER["add_up"]([*measure(*folders).values()])
    assert total.words > 1000
    assert total.marks_per_1000 <= marks
    assert total.pronouns_per_100 <= pronouns


def test_no_file_of_the_package_is_far_above_the_mean() -> None:
    counts = measure("megatron_dppo", "tools").items()
    rates = {
        file.name: each.marks_per_1000 for file, each in counts if each.words >= SMALL_FILE_WORDS
    }
    assert {name: rate for name, rate in rates.items() if rate > 12.0} == {}


def test_an_expression_of_the_package_has_one_thought() -> None:
    hits: list[tuple[str, int, str]] = []
    for file in CHECKER["list_files"]([ROOT / "megatron_dppo", ROOT / "tools"]):
        for hit in CHECKER["check_expressions"](file.read_text(encoding="utf-8")):
            hits.append((file.name, hit.line, hit.rule))
    assert hits == []


def test_the_checker_finds_each_kind_of_hit() -> None:
    texts = CHECKER["check_texts"]('"""Those of which nothing is said."""\n')[0]
    assert texts.marks >= 3 and texts.pronouns >= 3
    source = "class A:\n def __init__(self):\n  self.a, self.b = 1, 2\n"
    source += "x = [[j for j in i] for i in y]\nz = [1 if i else 2 for i in y]\n"
    rules = [hit.rule for hit in CHECKER["check_expressions"](source)]
    expected = ["condition in a comprehension", "nested comprehension", "several assignments"]
    assert sorted(rules) == expected
