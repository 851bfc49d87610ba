"""Tables of measurements are made from the stored figures, and each stored figure has its origin."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.docs.documents import ROOT

FIGURES = runpy.run_path(str(ROOT / "tools/site/figures.py"))


@pytest.mark.parametrize("file", [pytest.param(file, id=file.name) for file in FIGURES["pages"]()])
def test_the_tables_of_a_page_are_those_of_the_stored_figures(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text == FIGURES["with_tables"](text)


def test_every_table_is_shown() -> None:
    shown = [found["name"] for text in FIGURES["pages"]().values() for found in FIGURES["TABLE"].finditer(text)]
    assert sorted(shown) == sorted(FIGURES["TABLES"])


@pytest.mark.parametrize("file", [pytest.param(file, id=file.name) for file in FIGURES["RESULTS"].glob("*.json")])
def test_every_figure_is_stored_with_its_origin_in_the_file_of_its_script(file: Path) -> None:
    for command, found in json.loads(file.read_text(encoding="utf-8")).items():
        assert found.keys() == {"commit", "date", "processor", "figures"}, command
        assert file.name == "earlier.json" or command.split()[0] == f"{file.stem}.py"
    assert file.name == "earlier.json" or (ROOT / "benchmarks" / f"{file.stem}.py").is_file()
