"""Counts what a reader of the package has to read, and the imports that go the wrong way.

    python benchmarks/house.py [--json] [--root DIR]

Rooms stand on floors, and imports go down or stay on a floor. ``circles`` counts the groups of files that import each
other, ``upward_imports`` the imports from a lower floor to a higher one. A line of code is one that is neither blank
nor a comment nor part of a docstring. ``trainer_code_lines`` leaves out the rooms of ``BESIDE``. Docstrings are also
those of attributes. Imports within functions count like all others.

``types_on_the_way`` counts the types that a prompt passes on its way to its gradient, by the annotations of a run with
the local engine: dataclasses, named tuples, typed dicts, protocols with fields, and named tuple or dict types. A
function leads from each type that it takes to each type that it returns or builds, a field from its type to its owner
and back. A type counts if such steps lead from ``Prompt`` over it to ``UpdateResult``. So do the types that functions
on the way take, build, or hand to a function that they call. ``--types`` prints their names.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx
from harness import arguments, finish

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_dppo"
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "process", "hub", "config", "settings"),
    ("rl",),
    ("parallel", "data", "integrations"),
    ("models",),
    ("rewards", "observe", "plugins", "bridge"),
    ("rollout",),
    ("evaluation",),
    ("trainer", "report"),
    ("launch", "estimate", "compress", "doctor"),
    ("train", "sft", "eval", "probe_batch", "init", "export", "quickstart", "api", "cli", "__main__"),
)
"""Rooms, from the ground floor up. A room is a folder of the package, or a file at its top."""
BESIDE = tuple(f"megatron_dppo.{room}" for room in ("compress", "rewards.math", "report", "estimate"))
"""Packages that the trainer does not need."""
FIRST, LAST = f"{PACKAGE}.rl.types.Prompt", f"{PACKAGE}.models.actor.UpdateResult"
STEP = ("rl", "rewards", "rollout", "models", "parallel", "trainer", "train")
"""Rooms that a step's data pass."""
NO_STEP_DATA = re.compile(
    r"megatron_dppo\.(rewards\.math|rollout\.(servers|conversation|local_conversations|teachers)|parallel\.world|"
    r"models\.(shape|teacher_head|context|prefix_attention)|trainer\.(assemble|agreement|prompt_sampler)|rl\.census|"
    r"rl\.types\.RoutingShape)\b"
)
"""Modules and types of a run's parts and statistics, and of engines, conversations, teachers and layouts that this way
leaves out."""
DATA = re.compile(r"\b(dataclass|NamedTuple|TypedDict|Protocol)\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef
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


def docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    """Those of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node


def lines_with_code(source: str, tree: ast.Module) -> set[int]:
    """The numbers of the lines that are neither blank nor a comment nor part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in docstrings(tree):
        lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def carries_data(node: ast.stmt) -> bool:
    """Whether a definition is a type that can carry a step's data."""
    if isinstance(node, ast.ClassDef):
        words = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases]))
        return bool(DATA.search(words)) and any(isinstance(each, ast.AnnAssign) for each in node.body)
    return isinstance(node, ast.Assign) and re.match(r"(tuple|dict|Mapping)\[", ast.unparse(node.value)) is not None


class Names:
    """The top-level definitions of the rooms that a step passes, and what names in their files refer to."""

    def __init__(self, root: Path) -> None:
        files = {name: path for name, path in modules(root).items() if room(name) in STEP}
        self.trees = {
            name: ast.parse(path.read_text(encoding="utf-8"))
            for name, path in files.items()
            if not NO_STEP_DATA.match(name)
        }
        self.defined: dict[str, tuple[str, ast.stmt]] = {}
        self._known: dict[str, dict[str, str]] = {}
        for module, tree in self.trees.items():
            known = self._known[module] = {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            for node in tree.body:
                name = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "name", None)
                if name is not None:
                    name = name if isinstance(name, str) else ast.unparse(name)
                    known[name] = f"{module}.{name}"
                    self.defined[known[name]] = module, node
        self.types = {
            name for name, (_, node) in self.defined.items() if carries_data(node) and not NO_STEP_DATA.match(name)
        }

    def within(self, module: str, *nodes: ast.AST | None) -> set[str]:
        """Definitions that expressions of a module name; annotations in quotes as well."""
        known = self._known[module]
        words = {word for node in nodes if node is not None for word in re.findall(r"(\w+)(\.\w+)?", ast.unparse(node))}
        return {known[first] + rest for first, more in words if first in known for rest in ("", more)}

    def signature(self, module: str, function: Function) -> tuple[set[str], set[str]]:
        """The types that a function takes, and those that it returns."""
        given = [each.annotation for each in ast.walk(function.args) if isinstance(each, ast.arg)]
        return self.within(module, *given) & self.types, self.within(module, function.returns) & self.types


def types_on_the_way(root: Path = ROOT) -> set[str]:
    """The types that a prompt passes on its way to its gradient, by their whole names."""
    names, way = Names(root), networkx.DiGraph()
    way.add_nodes_from((FIRST, LAST))
    for owner in names.types:
        module, node = names.defined[owner]
        fields = [each.annotation for each in ast.walk(node) if isinstance(each, ast.AnnAssign)]
        for part in names.within(module, *(fields if isinstance(node, ast.ClassDef) else [node])) & names.types:
            way.add_edges_from([(owner, part), (part, owner)])
    handled: list[tuple[set[str], set[str]]] = []
    for module, tree in names.trees.items():
        owners = {each: node.name for node in tree.body if isinstance(node, ast.ClassDef) for each in node.body}
        for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
            takes, gives = names.signature(module, function)
            takes |= {f"{module}.{owners[function]}"} & names.types if function in owners else set()
            called = names.within(module, *(each.func for each in ast.walk(function) if isinstance(each, ast.Call)))
            gives |= called & names.types
            way.add_edges_from((one, other) for one in takes for other in gives)
            signatures = [names.signature(*names.defined[each]) for each in called
                          if each in names.defined and isinstance(names.defined[each][1], Function)]  # fmt: skip
            handled.append((takes | gives, set().union(*(each for pair in signatures for each in pair))))
    found = {FIRST, LAST, *(networkx.descendants(way, FIRST) & networkx.ancestors(way, LAST))}
    return found.union(*(touched | handed for touched, handed in handled if touched & found))


def measure(root: Path = ROOT) -> dict[str, float]:
    """The figures of the package within a checkout."""
    files = modules(root)
    sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    code = {name: lines_with_code(source, trees[name]) for name, source in sources.items()}
    lengths = [len(source.splitlines()) for source in sources.values()]
    said = [node.value.value for tree in trees.values() for node in docstrings(tree)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    pairs = set(imports(files))

    def code_lines(*without: str) -> int:
        return sum(len(code[name]) for name in files if not f"{name}.".startswith(tuple(f"{one}." for one in without)))

    return {
        "package_code_lines": code_lines(),
        "trainer_code_lines": code_lines(*BESIDE),
        "package_lines": sum(lengths),
        "benchmark_lines": sum(len(path.read_bytes().splitlines()) for path in (root / "benchmarks").glob("*.py")),
        "files": len(files),
        "median_file": statistics.median(lengths),
        "longest_file": max(lengths),
        "files_under_40_lines": sum(length < 40 for length in lengths),
        "circles": len(circles(pairs)),
        "upward_imports": len(upward(pairs)),
        "docstrings_beginning_of_or_what": sum(bool(re.match(r"\W*(?:Of|What)\b", text)) for text in said),
        "types_on_the_way": len(types_on_the_way(root)),
        "class_names_twice": sum(count > 1 for count in classes.values()),
    }


def main() -> None:
    options = arguments(
        __doc__, root=(ROOT, "a checkout"), types=(False, "print the types on the way to standard error")
    ).parse_args()
    pairs = set(imports(modules(options.root)))
    for importer, imported in upward(pairs):
        print(f"upward: {importer} imports {imported}", file=sys.stderr)
    for group in circles(pairs):
        print(f"circle: {' '.join(group)}", file=sys.stderr)
    if options.types:
        print("\n".join(sorted(types_on_the_way(options.root))), file=sys.stderr)
    finish(measure(options.root), options)


if __name__ == "__main__":
    main()
