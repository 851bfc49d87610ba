"""The structure of the package: who may import whom."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def house() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("house")


@pytest.fixture(scope="module")
def pairs(house: ModuleType) -> list[tuple[str, str]]:
    return list(house.imports(house.modules()))


def test_no_import_goes_up_a_layer(house: ModuleType, pairs: list[tuple[str, str]]) -> None:
    assert len(pairs) > 500, "imports are found"
    assert not house.upward(pairs)


def test_no_files_import_in_a_circle(house: ModuleType, pairs: list[tuple[str, str]]) -> None:
    assert not house.circles(pairs)


def test_compress_stands_alone(house: ModuleType, pairs: list[tuple[str, str]]) -> None:
    """The command line's table of commands names compress by strings only."""
    packages = [[house.room(module) for module in pair] for pair in pairs]
    assert {importer for importer, imported in packages if imported == "compress"} == {"compress"}


def test_contributing_lists_the_layers(house: ModuleType) -> None:
    rows = re.findall(r"^\| (\d) \| (.+?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    shown = {int(floor): set(re.findall(r"`(\w+)/?`", rooms)) for floor, rooms in rows}
    assert shown == {floor: set(rooms) - {"__main__"} for floor, rooms in enumerate(house.FLOORS)}
