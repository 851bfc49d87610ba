"""The part that all benchmarks share: arguments, turns, ratios, memory, and the last line of their output."""

import importlib
import json
import math
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def harness() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("harness")


def test_an_option_is_made_of_its_default(harness: ModuleType) -> None:
    parser = harness.arguments("", steps=6, keep=(0.5, "of the tokens"), tp=[1, 2], tiny=False, out=Path)
    assert vars(parser.parse_args([])) == {
        "json": False, "record": False, "steps": 6, "keep": 0.5, "tp": [1, 2], "tiny": False, "out": None,
    }  # fmt: skip
    words = ["--json", "--steps", "2", "--keep", "0.25", "--tp", "4", "--tiny", "--out", "here"]
    assert vars(parser.parse_args(words)) == {
        "json": True, "record": False, "steps": 2, "keep": 0.25, "tp": [4], "tiny": True, "out": Path("here"),
    }  # fmt: skip


def test_contenders_take_turns_and_the_first_rounds_are_dropped(harness: ModuleType) -> None:
    called: list[tuple[str, int]] = []

    def contender(name: str, number: int) -> int:
        called.append((name, number))
        return number

    runs = {name: lambda number, name=name: contender(name, number) for name in ("one", "other")}
    assert harness.in_turn(runs, 2, warm_up=1) == {"one": [1, 2], "other": [1, 2]}
    assert called == [(name, number) for number in range(3) for name in ("one", "other")]


def test_a_paired_ratio_has_student_s_interval_of_the_geometric_mean(harness: ModuleType) -> None:
    found = harness.paired_ratio([2.0, 4.0, 8.0], [1.0, 1.0, 1.0])
    assert found["ratio"] == pytest.approx(4.0)
    reach = 4.303 * math.log(2.0) / math.sqrt(3)
    assert found["interval"] == pytest.approx([4.0 / math.exp(reach), 4.0 * math.exp(reach)])
    assert harness.paired_ratio([3.0], [2.0]) == {"ratio": pytest.approx(1.5), "interval": None, "pairs": 1}


def test_memory_that_was_given_back_is_in_the_peak(harness: ModuleType) -> None:
    # New pages: an allocator may give what earlier tests have freed.
    new_pages = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with harness.PeakMemory("RssAnon", every_s=0.001) as memory, new_pages as held:
        held.write(bytes(64 << 20))
        harness.time.sleep(0.05)
    assert 60 << 20 < memory.grown < 200 << 20


def test_a_process_of_its_own_returns_its_result_or_ends_the_benchmark(harness: ModuleType) -> None:
    assert harness.in_own_process(math.hypot, 3.0, 4.0) == 5.0
    with pytest.raises(SystemExit, match=r"sqrt: the process ended with exit code 1"):
        harness.in_own_process(math.sqrt, -1.0)


def test_the_last_line_is_all_figures_as_json(harness: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"ratio": 0.123456, "arms": [{"name": "one", "seconds": [1, 2]}]}
    harness.finish(figures, harness.arguments("").parse_args([]))
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [
        ["ratio", "0.1235"], ["arms.0.name", "one"], ["arms.0.seconds", "[1, 2]"],
    ]  # fmt: skip
    assert json.loads(last) == figures
    harness.finish(figures, harness.arguments("").parse_args(["--json"]))
    assert json.loads(capsys.readouterr().out) == figures


def test_recorded_figures_stand_under_their_command_with_their_origin(
    harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "origin", lambda: {"commit": "0bd57a8"})
    for steps in ("6", "7"):
        monkeypatch.setattr(sys, "argv", ["benchmarks/speed.py", "--json", "--steps", steps, "--record"])
        harness.finish({"ratio": float(steps)}, harness.arguments("", steps=5).parse_args())
    capsys.readouterr()
    assert json.loads((tmp_path / "speed.json").read_text()) == {
        "speed.py --steps 6": {"commit": "0bd57a8", "figures": {"ratio": 6.0}},
        "speed.py --steps 7": {"commit": "0bd57a8", "figures": {"ratio": 7.0}},
    }
