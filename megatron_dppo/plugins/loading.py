"""A user's function by its name, ``module:function`` or ``file.py:function``, and its files. Imports nothing heavy."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from modulefinder import ModuleFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_dppo.errors import UserError
from megatron_dppo.plugins.slime import MISSING, standing_in_for_slime

FAILURES = Exception, SystemExit
"""Errors of a user's code. ``sys.exit`` in it has failed like any other call."""


def load_function(setting: str, spec: str) -> Callable[..., Any]:
    """The function that a setting names.

    Modules are looked for in the working directory too; a file can import its neighbours, and what functions
    written for slime import from it, whether slime is installed or not.

    Raises:
        UserError: if it cannot be found or imported, or is no function.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise UserError(setting, spec, "names no function", "Give module:function or file.py:function")
    module = _from_file(where, setting, spec) if where.endswith(".py") else _from_module(where, setting, spec)
    # Modules that import what is asked of them only then (TRL's) have it in no dictionary.
    function = _imported(lambda: getattr(module, name, None), setting, spec)
    if function is None:
        raise UserError(setting, spec, f"{where} has no function {name!r}", _remedy(module, name))
    if not callable(function):
        raise UserError(setting, spec, f"{name!r} is no function", "Give a function")
    return function


def file_of(spec: str | None) -> Path | None:
    """The file of the function that a setting names, found without importing anything; None if there is none."""
    where = (spec or "").rpartition(":")[0]
    if where.endswith(".py"):
        places = [Path(where)]
    else:
        modules = [Path(folder, *where.split(".")) for folder in ("", *sys.path)] if where else []
        places = [place for module in modules for place in (module.with_suffix(".py"), module / "__init__.py")]
    return next((place for place in places if place.is_file()), None)


def files_imported(file: Path) -> list[Path]:
    """A file of Python and the files of its folder that it imports, also by way of each other. Nothing is run.

    Of an installed package only the file itself: its folder holds all packages.
    """
    file = file.resolve()
    if {"site-packages", "dist-packages"} & {*file.parts}:
        return [file]
    root, names = file.parent, [file.stem]
    while (root / "__init__.py").is_file():  # of a package, whose modules import each other by dots
        root, names = root.parent, [root.name, *names]
    finder = ModuleFinder([str(root)])
    with suppress(
        OSError, SyntaxError, ValueError, RecursionError, ImportError
    ):  # an import fails as well, and says why
        finder.run_script(str(file)) if len(names) == 1 else finder.import_hook(".".join(names))
    found = {Path(place) for module in finder.modules.values() if (place := getattr(module, "__file__", None))}
    return [file, *sorted(other for other in found - {file} if other.is_relative_to(file.parent))]


def source_of(function: Callable[..., Any]) -> str | None:
    """The text of a function, or of the class of an object that is called; None if Python does not have it, as of what
    is built in or was typed at a prompt."""
    while isinstance(function, functools.partial):
        function = function.func
    written = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        return textwrap.dedent(inspect.getsource(written))
    except (OSError, SyntaxError, TypeError):
        return None


def _from_file(where: str, setting: str, spec: str) -> ModuleType:
    path = Path(where).resolve()
    if not path.is_file():
        raise UserError(setting, spec, f"there is no file {where}", f"Give a path that holds from {Path.cwd()}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = importlib.util.spec_from_file_location(f"plugin_file_{path.stem}", path)
    assert found is not None and found.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    _imported(functools.partial(found.loader.exec_module, module), setting, spec)
    return module


def _from_module(where: str, setting: str, spec: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))
    return _imported(lambda: importlib.import_module(where), setting, spec)


def _imported(load: Callable[[], Any], setting: str, spec: str) -> Any:
    try:
        with standing_in_for_slime():
            return load()
    except FAILURES as error:
        of_slime = isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "slime"
        remedy = MISSING if of_slime else "Mend it, or install what it needs"
        raise UserError(setting, spec, f"cannot be imported ({type(error).__name__}: {error})", remedy) from error


def _remedy(module: ModuleType, name: str) -> str:
    known = vars(module)
    functions = [name for name, value in known.items() if callable(value) and not name.startswith("_")]
    functions += [name for name in known.get("__all__", ()) if name not in known]
    likely = get_close_matches(name, functions, 1)
    return f"Perhaps {likely[0]!r} was meant" if likely else f"It has {', '.join(functions) or 'no functions'}"
