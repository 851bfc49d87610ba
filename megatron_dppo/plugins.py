"""A user's function by its name, ``module:function`` or ``file.py:function``, and its files.
Imports nothing heavy.

Reward functions written for slime import ``Sample`` from ``slime.utils.types``, and are given this
file's. Their files may also import ``post`` and ``GenerateState``, which slime's generate functions
use: they can be imported, not called. The modules of slime have no other names here, and an import
of one says so (``MISSING``).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from megatron_dppo.errors import UserError
from megatron_dppo.process.lifetime import end_fork

MISSING = "Of slime's own names only Sample is here: bring the rest along in files of yours"


class Arguments(SimpleNamespace):
    """slime's command line: those of its options that have a counterpart in a run here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"the function reads args.{name}, an option of slime's without counterpart here"
        )


class Status(Enum):
    """How a sample stands."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """A completion, as a reward function of slime's form gets it."""

    prompt: Any = None
    """As the policy reads it: slime renders prompts, too, before any function sees them."""
    response: str = ""
    label: Any = None
    """Text, or the object or list that the row has."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's extra columns."""
    reward: Any = None
    index: int | None = None
    group_index: int | None = None
    tokens: list[int] = field(default_factory=list)
    """Prompt and response."""
    response_length: int = 0
    """Tokens."""
    loss_mask: list[int] | None = None
    """Mask of the response: 1 for tokens that the policy sampled, 0 for those that it was given;
    None: all ones."""
    rollout_log_probs: list[float] | None = None
    """Log-probabilities of the response; not read if the mask is 0."""
    weight_versions: list[str] = field(default_factory=list)
    status: Status = Status.PENDING
    session_id: str | None = None
    Status = Status


def generate_only(*_: Any, **__: Any) -> Any:
    """Stand in for names that only slime's generate functions call."""
    raise NotImplementedError(
        "slime's generate functions do not run here: write the turns as rollout.conversation"
    )


NAMES: Mapping[str, Mapping[str, Any]] = {
    "slime": {},
    "slime.utils": {},
    "slime.utils.types": {"Sample": Sample},
    "slime.utils.http_utils": {"post": generate_only},
    "slime.rollout": {},
    "slime.rollout.sglang_rollout": {"GenerateState": generate_only},
}


@contextmanager
def install_slime_modules() -> Iterator[None]:
    """Have imports of slime's modules find those of the table, as long as a user's function is
    imported.

    Where slime is installed, its other modules are found too, and ``sys.modules`` is afterwards as
    it was before. Where it is not, the modules stay, for functions that import them when they are
    called.
    """
    before = _find_slime_modules()
    for name in before:
        del sys.modules[name]
    spec = importlib.util.find_spec("slime")
    folders = [
        folder
        for folder in (spec and spec.submodule_search_locations) or ()
        if Path(folder, "utils").is_dir()
    ]
    for name, values in NAMES.items():
        module = ModuleType(name, "In place of slime's own.")
        vars(module).update(values)
        module.__spec__ = ModuleSpec(name, None, is_package=not values)
        if not values:
            module.__path__ = [str(Path(folder, *name.split(".")[1:])) for folder in folders]
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    try:
        yield
    finally:
        if folders:
            for name in _find_slime_modules():
                del sys.modules[name]
            sys.modules.update(before)


def _find_slime_modules() -> dict[str, ModuleType]:
    return {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == "slime"
    }


FAILURES = Exception, SystemExit
"""Errors of a user's code. ``sys.exit`` in it has failed like any other call."""


def load_function(setting: str, spec: str) -> Callable[..., Any]:
    """The function that a setting names.

    Modules are looked for in the working directory too; a file can import its neighbours, and what
    functions written for slime import from it, whether slime is installed or not.

    Raises:
        UserError: if it cannot be found or imported, or is no function.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise UserError(
            setting, spec, "names no function", "Give module:function or file.py:function"
        )
    module = (
        _from_file(where, setting, spec)
        if where.endswith(".py")
        else _from_module(where, setting, spec)
    )
    # Modules that import what is asked of them only then (TRL's) have it in no dictionary.
    function = _import_plugin(lambda: getattr(module, name, None), setting, spec)
    if function is None:
        raise UserError(
            setting, spec, f"{where} has no function {name!r}", _describe_remedy(module, name)
        )
    if not callable(function):
        raise UserError(setting, spec, f"{name!r} is not a function", "Give a function")
    return function


def wrap_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's function with a limit: a process that the function forks ends where the
    function returns."""
    process = os.getpid()

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        finally:
            end_fork(process)

    return call


def find_source_file(spec: str | None) -> Path | None:
    """The file of the function that a setting names, found without importing anything; None if
    there is none."""
    where = (spec or "").rpartition(":")[0]
    if where.endswith(".py"):
        places = [Path(where)]
    else:
        modules = [Path(folder, *where.split(".")) for folder in ("", *sys.path)] if where else []
        places = [
            place
            for module in modules
            for place in (module.with_suffix(".py"), module / "__init__.py")
        ]
    return next((place for place in places if place.is_file()), None)


def get_source(function: Callable[..., Any]) -> str | None:
    """The text of a function, or of the class of an object that is called; None if Python does not
    have it, as of what is built in or was typed at a prompt."""
    while isinstance(function, functools.partial):
        function = function.func
    written = (
        function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    )
    try:
        return textwrap.dedent(inspect.getsource(written))
    except (OSError, SyntaxError, TypeError):
        return None


def _from_file(file: str, setting: str, spec: str) -> ModuleType:
    path = Path(file).resolve()
    if not path.is_file():
        raise UserError(
            setting, spec, f"there is no file {file}", f"Give a path that holds from {Path.cwd()}"
        )
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = importlib.util.spec_from_file_location(f"plugin_file_{path.stem}", path)
    assert found is not None and found.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    _import_plugin(functools.partial(found.loader.exec_module, module), setting, spec)
    return module


def _from_module(module: str, setting: str, spec: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))
    return _import_plugin(lambda: importlib.import_module(module), setting, spec)


def _import_plugin(load: Callable[[], Any], setting: str, spec: str) -> Any:
    try:
        with install_slime_modules():
            return wrap_function(load)()
    except FAILURES as error:
        of_slime = (
            isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "slime"
        )
        remedy = MISSING if of_slime else "Correct it, or install its dependencies"
        raise UserError(
            setting, spec, f"cannot be imported ({type(error).__name__}: {error})", remedy
        ) from error


def _describe_remedy(module: ModuleType, name: str) -> str:
    known = vars(module)
    functions = [
        name for name, value in known.items() if callable(value) and not name.startswith("_")
    ]
    functions += [name for name in known.get("__all__", ()) if name not in known]
    likely = get_close_matches(name, functions, 1)
    return (
        f"Perhaps {likely[0]!r} was meant"
        if likely
        else f"It has {', '.join(functions) or 'no functions'}"
    )
