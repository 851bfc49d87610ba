"""A user's function from ``module:function`` or ``file.py:function``. Imports no heavy package.

Reward functions for slime import ``Sample`` from ``slime.utils.types`` and get this file's class.
``post`` and ``GenerateState`` of slime's generate functions can be imported but not called. Other
slime names fail with ``MISSING``.
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
    """Options of slime with a counterpart here."""

    def __getattr__(self, name: str) -> Any:
        # Copy and pickle look for special methods, and expect a plain AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"the function reads args.{name}, an option of slime's without counterpart here"
        )


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """Completion for slime's reward functions."""

    # slime also renders prompts before calling functions.
    prompt: Any = None
    """Text as the policy reads the prompt."""
    response: str = ""
    label: Any = None
    """Text, or the row's object or list."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Extra columns."""
    reward: Any = None
    index: int | None = None
    group_index: int | None = None
    tokens: list[int] = field(default_factory=list)
    """Prompt and response."""
    response_length: int = 0
    loss_mask: list[int] | None = None
    """Response's mask: 1 for sampled tokens, 0 for given tokens; None: all ones."""
    rollout_log_probs: list[float] | None = None
    """Response's log-probabilities; ignored where the mask is 0."""
    weight_versions: list[str] = field(default_factory=list)
    status: Status = Status.PENDING
    session_id: str | None = None
    Status = Status


def generate_only(*_: Any, **__: Any) -> Any:
    """Raise for names of slime's generate functions."""
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
    """Resolve imports of slime's modules to ``NAMES`` during the import of a user's function.

    With slime installed, other slime modules still resolve, and ``sys.modules`` is restored.
    """
    # Without slime, the modules stay, for functions with imports inside.
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


# sys.exit in a user's function counts as a failed call.
FAILURES = Exception, SystemExit


def load_function(setting: str, spec: str) -> Callable[..., Any]:
    """Return the function named by a setting.

    Modules are also searched in the working directory. A file can import neighbouring files.

    Raises:
        UserError: if the function cannot be found or imported, or is not callable.
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
    # Use getattr: modules with lazy imports (TRL) do not have the name in __dict__.
    function = _import_plugin(lambda: getattr(module, name, None), setting, spec)
    if function is None:
        raise UserError(
            setting, spec, f"{where} has no function {name!r}", _describe_remedy(module, name)
        )
    if not callable(function):
        raise UserError(setting, spec, f"{name!r} is not a function", "Give a function")
    return function


def wrap_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a user's function."""
    process = os.getpid()

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        # A process forked by the function must not return into this program.
        finally:
            end_fork(process)

    return call


def find_source_file(spec: str | None) -> Path | None:
    """Return the file of a function without imports; None if missing."""
    where = (spec or "").rpartition(":")[0]
    if where.endswith(".py"):
        places = [Path(where)]
    else:
        folders = ("", *sys.path) if where else ()
        modules = [Path(folder, *where.split(".")) for folder in folders]
        places = []
        for module in modules:
            places += [module.with_suffix(".py"), module / "__init__.py"]
    return next((place for place in places if place.is_file()), None)


def get_source(function: Callable[..., Any]) -> str | None:
    """Return the source of a function, or of an object's class; None without source."""
    while isinstance(function, functools.partial):
        function = function.func
    written = (
        function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    )
    try:
        return textwrap.dedent(inspect.getsource(written))
    # Builtins and functions typed at a prompt have no source.
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
    # True for a file with the suffix .py.
    assert found is not None and found.loader is not None
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
