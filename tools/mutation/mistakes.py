"""Make mistakes in a copy of the package, run the tests that must fail, and print the survivors.

    python tools/mutation/mistakes.py [--only TEXT] [--part 3/12]
    python tools/mutation/mistakes.py --check

``mistakes.txt`` lists mistakes in code that needs ranks or servers, for which mutmut is too slow. A
mistake has three lines: name and tests, file and right text, wrong text. The right text occurs once
in the file. ``--check``, a part of lint.sh, checks that each right text occurs once and that the
tests exist.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "megatron_dppo",
    "tests",
    "configs",
    "benchmarks",
    "docs",
    "scripts",
    "tools",
    "pyproject.toml",
    "README.md",
)
TIMEOUT_S = 600.0
"""Time limit of the tests of a mistake; a timeout counts as caught."""


class Mistake(NamedTuple):
    name: str
    tests: list[str]
    file: str
    """Relative to ``megatron_dppo``."""
    right: str
    wrong: str


def read_mistakes(text: str) -> list[Mistake]:
    mistakes = []
    for block in text.strip().split("\n\n"):
        head, place, wrong = block.splitlines()
        name, _, tests = head.partition(": ")
        file, _, right = place.strip().partition(": ")
        mistakes.append(Mistake(name, tests.split(), file, right, wrong.strip()))
    return mistakes


def find_problem(mistake: Mistake) -> str:
    """Return why a mistake cannot be made in this checkout; empty if it can."""
    file = ROOT / "megatron_dppo" / mistake.file
    count = file.read_text(encoding="utf-8").count(mistake.right) if file.exists() else 0
    if count != 1:
        return f"{mistake.name}: {mistake.right!r} occurs {count} times in {mistake.file}"
    missing = [test for test in mistake.tests if not (ROOT / test.partition("::")[0]).exists()]
    return f"{mistake.name}: {missing[0]} does not exist" if missing else ""


def find_outcome(mistake: Mistake, copy: Path) -> str:
    """Return ``caught``, ``survived``, or why the tests did not run."""
    file = copy / "megatron_dppo" / mistake.file
    text = file.read_text(encoding="utf-8")
    if text.count(mistake.right) != 1:
        return (
            f"not made: {mistake.right!r} occurs {text.count(mistake.right)} times in "
            f"{mistake.file}"
        )
    file.write_text(text.replace(mistake.right, mistake.wrong), encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mistake.tests]
    environ = os.environ | {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            words, cwd=copy, env=environ, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "caught"
    finally:
        # The next mistake needs the right text.
        file.write_text(text, encoding="utf-8")
    return {0: "survived", 1: "caught"}.get(
        done.returncode, f"not run: pytest's exit code is {done.returncode}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="mistakes whose name has this text in it"
    )
    parser.add_argument(
        "--part", default="0/1", help="K/N: only the K-th of N equal parts of the list, from 0"
    )
    parser.add_argument("--list", type=Path, default=Path(__file__).with_name("mistakes.txt"))
    parser.add_argument(
        "--check", action="store_true", help="make none, and see whether all can be made"
    )
    options = parser.parse_args()
    listed = read_mistakes(options.list.read_text(encoding="utf-8"))
    if options.check:
        problems = [*filter(None, map(find_problem, listed))]
        print(*problems, sep="\n", end="\n" * bool(problems))
        return int(bool(problems))
    part, parts = map(int, options.part.split("/"))
    chosen = [mistake for mistake in listed if options.only in mistake.name][part::parts]
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mistakes-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        for mistake in chosen:
            outcome = find_outcome(mistake, copy)
            survivors += outcome != "caught"
            print(f"{outcome:9} {mistake.name}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mistakes were caught")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
