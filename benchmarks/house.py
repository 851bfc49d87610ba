"""Counts what a reader of the package has to read, and the imports that go the wrong way.

    python benchmarks/house.py --json

Rooms stand on floors, and imports go down or stay on a floor. ``circles`` counts the groups of files that import each
other, ``upward_imports`` the imports from a lower floor to a higher one. A line of code is one that is neither blank
nor a comment nor part of a docstring. Imports within functions count like all others.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import statistics
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_dppo"
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "process", "hub", "config", "settings"),
    ("rl",),
    ("parallel", "data"),
    ("models",),
    ("rewards", "observe", "plugins", "bridge"),
    ("rollout",),
    ("evaluation",),
    ("trainer", "report"),
    ("launch", "estimate", "compress", "rehearse", "doctor"),
    ("train", "sft", "eval", "probe_tree", "init", "export", "api", "cli", "__main__"),
)
"""Rooms, from the ground floor up. A room is a folder of the package, or a file at its top."""
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Files of the package by the names they are imported by."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(modules: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Pairs of names: a module, and one of the package that it imports."""
    for name, path in modules.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                targets = [f"{source}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                if target not in modules:  # a name within a module
                    target = target.rpartition(".")[0]
                if target in modules and target != name:
                    yield name, target


def room(module: str) -> str:
    """The folder or file at the top of the package that a module belongs to; empty for the package itself."""
    return (*module.split("."), "")[1]


def upward(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Imports from a lower floor to a higher one, or of a room that no floor has."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    wrong = []
    for importer, imported in sorted(pairs):
        if "" not in (room(importer), room(imported)):
            own, other = floor.get(room(importer)), floor.get(room(imported))
            if own is None or other is None or own < other:
                wrong.append((importer, imported))
    return wrong


def circles(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or by way of others."""
    groups = networkx.strongly_connected_components(networkx.DiGraph(pairs))
    return [sorted(group) for group in groups if len(group) > 1]


def code_lines(source: str) -> int:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def measure(root: Path = ROOT) -> dict[str, float]:
    files = modules(root)
    sources = [path.read_text(encoding="utf-8") for path in files.values()]
    lengths = [len(source.splitlines()) for source in sources]
    pairs = set(imports(files))
    return {
        "package_code_lines": sum(map(code_lines, sources)),
        "package_lines": sum(lengths),
        "files": len(files),
        "median_file": statistics.median(lengths),
        "longest_file": max(lengths),
        "files_under_40_lines": sum(length < 40 for length in lengths),
        "circles": len(circles(pairs)),
        "upward_imports": len(upward(pairs)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    asked = parser.parse_args()
    figures = measure()
    if not asked.json:
        pairs = set(imports(modules()))
        for importer, imported in upward(pairs):
            print(f"upward: {importer} imports {imported}")
        for group in circles(pairs):
            print(f"circle: {' '.join(group)}")
    json.dump(figures, sys.stdout)
    print()


if __name__ == "__main__":
    main()
