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


def test_no_import_goes_up_a_floor(house: ModuleType) -> None:
    assert not house.upward(house.imports(house.modules()))


def test_no_files_import_each_other_in_a_circle(house: ModuleType) -> None:
    assert not house.circles(house.imports(house.modules()))


def test_compress_stands_alone(house: ModuleType) -> None:
    """Only the command line's table of commands names it, by strings."""
    pairs = [[house.room(module) for module in pair] for pair in house.imports(house.modules())]
    assert {importer for importer, imported in pairs if imported == "compress"} == {"compress"}


def test_imports_are_found_in_every_form_they_are_written_in(house: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "megatron_dppo"
    (package / "rl").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "rl" / "__init__.py").touch()
    (package / "train.py").write_text("from megatron_dppo.rl import plan\n")
    (package / "rl" / "plan.py").write_text("def plan():\n    import megatron_dppo.rl.pack\n")
    (package / "rl" / "pack.py").write_text("from .plan import plan\nfrom .. import train\n")
    pairs = set(house.imports(house.modules(tmp_path)))
    name = "megatron_dppo"
    assert pairs >= {
        (f"{name}.train", f"{name}.rl.plan"), (f"{name}.rl.plan", f"{name}.rl.pack"),
        (f"{name}.rl.pack", f"{name}.rl.plan"), (f"{name}.rl.pack", f"{name}.train"),
    }  # fmt: skip
    assert house.upward(pairs) == [(f"{name}.rl.pack", f"{name}.train")]
    assert house.circles(pairs) == [[f"{name}.rl.pack", f"{name}.rl.plan", f"{name}.train"]]


def test_contributing_shows_the_floors(house: ModuleType) -> None:
    rows = re.findall(r"^\| (\d) \| (.+?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    shown = {int(floor): set(re.findall(r"`(\w+)/?`", rooms)) for floor, rooms in rows}
    assert shown == {floor: set(rooms) - {"__main__"} for floor, rooms in enumerate(house.FLOORS)}
