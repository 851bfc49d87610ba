"""The page on the architecture follows a prompt to its gradient as the code does."""

import os
import re
import runpy
import subprocess
import sys

import pytest

from tests.docs.documents import ROOT

PAGE = ROOT / "docs/architecture.md"
WALK = PAGE.read_text().partition("## One prompt on its way to its gradient")[2].partition("\n## ")[0]


def test_the_session_of_one_prompt_is_what_the_code_answers() -> None:
    command = [sys.executable, "-m", "doctest", "-o", "NORMALIZE_WHITESPACE", str(PAGE)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert WALK.count(">>> ") > 30


def test_page_names_exactly_the_types_on_a_prompts_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    house = runpy.run_path(str(ROOT / "benchmarks/house.py"))
    on_the_way = {name.rpartition(".")[2] for name in house["types_on_the_way"](ROOT)}
    assert set(re.findall(r"`(_?[A-Z][A-Za-z]*[a-z][A-Za-z]*)`", WALK)) == on_the_way
