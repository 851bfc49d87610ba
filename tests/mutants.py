"""Mistakes that tests must notice: ``python tests/mutants.py`` makes each in a copy of the package and runs its tests.

``tests/mutants.txt`` lists them. A mistake is caught if its tests fail. One that survives wants a better test. One that
can no longer be made, because its function or expression is gone, wants a new line: ``tests/test_mutants.py`` names it
at every run of the suite.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import importlib
import json
import multiprocessing
import os
import py_compile
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_dppo"
COPIED = (PACKAGE, "tests", "configs", "benchmarks", "docs", "pyproject.toml")
"""What the tests of a mutant need."""
TIMEOUT_S = 300.0
"""A mutant whose tests hang for so long is caught, too."""
IMPORTED = ("torch.distributed.checkpoint", "transformers", "megatron.core.optimizer", "aiohttp", "pyarrow")
"""Modules outside of the package that take long to import: forks inherit them."""


class Mutant(NamedTuple):
    """A mistake."""

    name: str
    """With its area in front: ``loss/sign``."""
    tests: str
    """Tests of which one must fail, in pytest's spelling below ``tests/``, with spaces between."""
    place: str
    """Name of the function, class or module, with as many of the names around it as make it the only one."""
    before: str
    """An expression or statement that stands there once, as ``ast.unparse`` writes it."""
    after: str


def read_table(text: str) -> list[Mutant]:
    """Mutants, two lines each: ``name: tests`` and, indented, ``place: before => after``. Further lines of one of the
    two are indented by eight spaces."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" " * 8):
            lines[-1] += " " + line.strip()
        else:
            lines.append(line.strip())
    mutants = []
    for head, change in zip(lines[::2], lines[1::2], strict=True):
        name, tests = head.split(": ", 1)
        place, change = change.split(": ", 1)
        mutants.append(Mutant(name, tests, place, *change.split(" => ")))
    return mutants


MUTANTS = read_table((ROOT / "tests/mutants.txt").read_text(encoding="utf-8"))


@cache
def definitions(package: Path) -> dict[str, list[tuple[Path, ast.AST]]]:
    """Modules, classes and functions with their files, by each ending of their dotted names."""
    found: dict[str, list[tuple[Path, ast.AST]]] = {}

    def enter(node: ast.AST, names: tuple[str, ...], file: Path) -> None:
        for i in range(len(names)):
            found.setdefault(".".join(names[i:]), []).append((file, node))
        inside(node, names, file)

    def inside(node: ast.AST, names: tuple[str, ...], file: Path) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                enter(child, (*names, child.name), file)
            else:
                inside(child, names, file)

    for file in sorted(package.rglob("*.py")):
        enter(ast.parse(file.read_text(encoding="utf-8")), file.relative_to(package).with_suffix("").parts, file)
    return found


def locate(mutant: Mutant, package: Path) -> list[tuple[Path, ast.expr | ast.stmt]]:
    """Files and nodes that a mutant may mean: exactly one, if it can be made."""
    found = []
    for file, place in definitions(package).get(mutant.place, []):
        statements = set()
        for node in ast.walk(place):
            if isinstance(node, ast.Expr):
                statements.add(node.value)  # an expression that is a statement is found once
            if isinstance(node, ast.expr | ast.stmt) and node not in statements and ast.unparse(node) == mutant.before:
                found.append((file, node))
    return found


def mutated(mutant: Mutant, package: Path) -> tuple[Path, str]:
    """The file of a mutant, and its text with the mistake."""
    [(file, node)] = locate(mutant, package)
    lines = file.read_text(encoding="utf-8").encode().splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or 0) - 1
    after = mutant.after if isinstance(node, ast.stmt) else f"({mutant.after})"
    changed = lines[first][: node.col_offset] + after.encode() + lines[last][node.end_col_offset :]
    return file, b"".join((*lines[:first], changed, *lines[last + 1 :])).decode()


def outcomes(mutants: list[Mutant], *, unchanged: bool = False) -> Iterator[tuple[Mutant, str, float]]:
    """For each mutant ``caught``, ``survived`` or ``not run``, and its seconds."""
    for module in IMPORTED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copied(Path(folder))
        for mutant in mutants:
            began = time.monotonic()
            file, text = mutated(mutant, copy / PACKAGE)
            right = file.read_text(encoding="utf-8")
            file.write_text(right if unchanged else text, encoding="utf-8")
            try:
                outcome = {0: "survived", 1: "caught", None: "caught"}.get(exit_code(mutant.tests, copy), "not run")
            finally:
                file.write_text(right, encoding="utf-8")
            yield mutant, outcome, time.monotonic() - began


def copied(folder: Path) -> Path:
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for stale in folder.rglob("__pycache__"):
        shutil.rmtree(stale)
    by_hash = py_compile.PycInvalidationMode.CHECKED_HASH  # a mutant may be made within the second of the last one
    compileall.compile_dir(str(folder), quiet=2, invalidation_mode=by_hash)
    return folder


def exit_code(tests: str, copy: Path) -> int | None:
    """The exit code of pytest, which a fork of this process runs; None if it did not end."""
    words = [f"tests/{word}" if ".py" in word else word for word in tests.split()]
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(words, copy))
    process.start()
    process.join(TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return None if process.exitcode == -signal.SIGKILL else process.exitcode


def run_tests(words: list[str], copy: Path) -> None:
    """In a fork, with the copy in the place of the package."""
    os.setsid()
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "RANKS_ARE": "fork"}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests"))]
    for number in (1, 2):
        os.dup2(os.open(copy / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    # A failure is enough: to make it small takes hypothesis half a minute.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", phases=phases, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *words])
    sys.stdout.flush()
    os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="those whose name has this text in it")
    parser.add_argument("--json", action="store_true", help="print one object at the end, and nothing else")
    parser.add_argument("--unchanged", action="store_true", help="make no mistake: all of them have to survive")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if options.unchanged:
        chosen = [*{mutant.tests: mutant for mutant in chosen}.values()]
    found: dict[str, str] = {}
    began = time.monotonic()
    for mutant, outcome, seconds in outcomes(chosen, unchanged=options.unchanged):
        found[mutant.name] = outcome
        if not options.json:
            print(f"{outcome:9}{seconds:6.1f} s  {mutant.name}", flush=True)
    others = {name: outcome for name, outcome in found.items() if outcome != "caught"}
    caught, seconds = len(found) - len(others), time.monotonic() - began
    if options.json:
        print(json.dumps({"caught": caught, "total": len(found), "seconds": round(seconds), "others": others}))
    else:
        print(*(f"{outcome}: {name}" for name, outcome in others.items()), sep="\n")
        print(f"{caught} of {len(found)} mutants were caught, in {seconds:.0f} s")
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
