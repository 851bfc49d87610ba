"""The structure of the package: who may import whom, and how long a file may be."""

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


def test_what_a_reader_has_to_read_is_counted(house: ModuleType, tmp_path: Path) -> None:
    for room in ("rl", "rehearse", "rewards/math"):
        (tmp_path / "megatron_dppo" / room).mkdir(parents=True)
    plan = '''"""Of a plan."""
# a comment

class Plan:
    size: int
    """What it takes."""


def short():
    a = 1

    return a


def long():
    """Often
    long."""
'''
    (tmp_path / "megatron_dppo" / "rl" / "plan.py").write_text(plan + "    a = 1\n" * 60)
    (tmp_path / "megatron_dppo" / "rehearse" / "plan.py").write_text("class Plan:\n    a = 1\n")
    (tmp_path / "megatron_dppo" / "rewards" / "math" / "verdict.py").write_text("A = 1\n")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "speed.py").write_text("a = 1\n\n# b\n")
    figures = house.measure(tmp_path)
    assert figures["benchmark_lines"] == 3
    assert figures["package_code_lines"] == 2 + 3 + 61 + 2 + 1
    assert figures["package_code_lines_without_rehearse"] == 2 + 3 + 61 + 1
    assert figures["trainer_code_lines"] == 2 + 3 + 61
    assert figures["files"] == 3
    assert figures["functions_over_60"] == 1
    assert figures["docstrings_beginning_of_or_what"] == 2
    assert figures["class_names_twice"] == 1


STEP = {
    "rl/types.py": """
from dataclasses import dataclass

@dataclass
class Prompt:
    id: int

@dataclass
class Completion:
    prompt: "Prompt"

Scored = tuple[Completion, float]

@dataclass
class Unrelated:
    size: int

class Nothing:
    prompt: Prompt
""",
    "rl/plan.py": """
from typing import NamedTuple

from megatron_dppo.rl.types import Completion, Scored
from megatron_dppo.models import actor

class Draw(NamedTuple):
    kept: bool

class Rule(NamedTuple):
    share: float

class DeadEnd(NamedTuple):
    by: Draw

def draw(rule: Rule) -> float:
    return DeadEnd(rule)

def plan(scored: Scored, rest: Completion) -> None:
    Draw(draw(0.5))

async def pack(rest: list[Scored]):
    return actor.Pack(rest)
""",
    "models/actor.py": """
from dataclasses import dataclass
from typing import TypedDict

class Pack(TypedDict):
    tokens: int

@dataclass
class UpdateResult:
    loss: float

@dataclass
class Folder:
    path: str

@dataclass
class Weights:
    size: int

def load(folder: Folder) -> Weights: ...

class Actor:
    def update(self, packs: list[Pack], weights: Weights) -> UpdateResult: ...
""",
}


def test_types_on_the_way_follow_the_annotations(house: ModuleType, tmp_path: Path) -> None:
    for name, text in STEP.items():
        file = tmp_path / "megatron_dppo" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = {name.rpartition(".")[2] for name in house.types_on_the_way(tmp_path)}
    way, beside = {"Prompt", "Completion", "Scored", "Pack", "UpdateResult"}, {"Draw", "Rule", "Weights"}
    assert found == way | beside
    assert {house.FIRST, house.LAST} <= house.Names(ROOT).types, "the way begins and ends at types that there are"


def test_contributing_shows_the_floors(house: ModuleType) -> None:
    rows = re.findall(r"^\| (\d) \| (.+?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    shown = {int(floor): set(re.findall(r"`(\w+)/?`", rooms)) for floor, rooms in rows}
    assert shown == {floor: set(rooms) - {"__main__"} for floor, rooms in enumerate(house.FLOORS)}


def test_a_file_fits_the_head(house: ModuleType) -> None:
    long = {name for name, path in house.modules().items() if len(path.read_text().splitlines()) > 400}
    assert not long
