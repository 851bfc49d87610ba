"""Print the types that a prompt passes on its way to its gradient, and their number.

    python tools/types_on_the_way.py [ROOT]

The annotations of a run with the local engine decide. Types are dataclasses, named tuples, typed
dicts, protocols with fields, and named tuple or dict types. The steps between types are:

- a function leads from each type of its arguments to each type that it returns or builds;
- a field leads from its type to its owner, and from its owner to its type.

A type counts if such steps lead from ``Prompt`` over the type to ``UpdateResult``. So do the types
that a function on the way takes, builds, or passes to a function that it calls.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_dppo"
FIRST = f"{PACKAGE}.rl.types.Prompt"
LAST = f"{PACKAGE}.models.actor.UpdateResult"
STEP = ("rl", "rewards", "rollout", "models", "parallel", "trainer", "train")
"""Packages that a step's data pass."""
NO_STEP_DATA = re.compile(
    r"megatron_dppo\.(rewards\.math|rollout\.(servers|agents|turns|conversation|local_conversations|teachers)|parallel\.world|"
    r"models\.(shape|teacher_head|context|prefix_attention)|trainer\.(assemble|agreement|prompt_sampler)|rl\.census|"
    r"rl\.types\.RoutingShape)\b"
)
"""Excluded: modules and types of a run's parts and statistics; of servers, conversations, teachers
and layouts."""
DATA = re.compile(r"\b(dataclass|NamedTuple|TypedDict|Protocol)\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_modules(root: Path) -> dict[str, Path]:
    """Return the files of the packages of a step, by module name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        name = ".".join(parts)
        if len(parts) > 1 and parts[1] in STEP and not NO_STEP_DATA.match(name):
            found[name] = path
    return found


def is_data_type(node: ast.stmt) -> bool:
    """Return whether a definition is a type that can carry a step's data."""
    if isinstance(node, ast.ClassDef):
        words = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases]))
        return bool(DATA.search(words)) and any(
            isinstance(each, ast.AnnAssign) for each in node.body
        )
    return (
        isinstance(node, ast.Assign)
        and re.match(r"(tuple|dict|Mapping)\[", ast.unparse(node.value)) is not None
    )


class Names:
    """Top-level definitions of the modules of a step, and the meaning of names in these modules."""

    def __init__(self, root: Path) -> None:
        self.trees = {
            name: ast.parse(path.read_text(encoding="utf-8"))
            for name, path in find_modules(root).items()
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
                name = (
                    ast.unparse(node.targets[0])
                    if isinstance(node, ast.Assign)
                    else getattr(node, "name", None)
                )
                if name is not None:
                    known[name] = f"{module}.{name}"
                    self.defined[known[name]] = module, node
        self.types = {
            name
            for name, (_, node) in self.defined.items()
            if is_data_type(node) and not NO_STEP_DATA.match(name)
        }

    def find_names(self, module: str, *nodes: ast.AST | None) -> set[str]:
        """Return the definitions that a module's expressions name, also within quoted
        annotations."""
        known = self._known[module]
        words = {
            word
            for node in nodes
            if node is not None
            for word in re.findall(r"(\w+)(\.\w+)?", ast.unparse(node))
        }
        return {
            known[first] + rest for first, more in words if first in known for rest in ("", more)
        }

    def read_signature(self, module: str, function: Function) -> tuple[set[str], set[str]]:
        """Return the types that a function takes, and the types that it returns."""
        arguments = [
            each.annotation for each in ast.walk(function.args) if isinstance(each, ast.arg)
        ]
        taken = self.find_names(module, *arguments) & self.types
        return taken, self.find_names(module, function.returns) & self.types


def find_reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    """Return the start and all nodes reachable from the start."""
    found = {start}
    pending = [start]
    while pending:
        new = edges.get(pending.pop(), set()) - found
        found |= new
        pending += new
    return found


def find_types(root: Path) -> set[str]:
    """Return the whole names of the types that a prompt passes on its way to its gradient."""
    names = Names(root)
    edges: set[tuple[str, str]] = set()
    for owner in names.types:
        module, node = names.defined[owner]
        fields = [each.annotation for each in ast.walk(node) if isinstance(each, ast.AnnAssign)]
        typed = fields if isinstance(node, ast.ClassDef) else [node]
        parts = names.find_names(module, *typed) & names.types
        edges |= {edge for part in parts for edge in ((owner, part), (part, owner))}
    handled: list[tuple[set[str], set[str]]] = []
    for module, tree in names.trees.items():
        owners = {
            each: node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            for each in node.body
        }
        for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
            takes, gives = names.read_signature(module, function)
            # A method also takes its own type.
            if function in owners:
                takes |= {f"{module}.{owners[function]}"} & names.types
            called = names.find_names(
                module, *(each.func for each in ast.walk(function) if isinstance(each, ast.Call))
            )
            gives |= called & names.types
            edges |= {(one, other) for one in takes for other in gives}
            # Types that a called function takes or returns.
            passed: set[str] = set()
            for each in called & names.defined.keys():
                owner, definition = names.defined[each]
                if isinstance(definition, Function):
                    passed = passed.union(*names.read_signature(owner, definition))
            handled.append((takes | gives, passed))
    # A type is on the way if reachable forwards from the first and backwards from the last type.
    after = defaultdict(set)
    before = defaultdict(set)
    for one, other in edges:
        after[one].add(other)
        before[other].add(one)
    found = {LAST, FIRST, *(find_reachable(FIRST, after) & find_reachable(LAST, before))}
    return found.union(*(touched | passed for touched, passed in handled if touched & found))


def main() -> None:
    types = find_types(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    print(*sorted(types), f"{len(types)} types", sep="\n")


if __name__ == "__main__":
    main()
