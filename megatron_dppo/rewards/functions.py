"""Which verifier a run uses, and what counts as an answer of it. Runs in the scoring processes: no torch, no NumPy."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_dppo.errors import UserError
from megatron_dppo.rewards.adapters import RewardFunction, UnfitFunctionError, adapted

SETTING = "reward.function"
BUILTIN = {"math": "megatron_dppo.rewards.mathematics:math_score", "exact": "megatron_dppo.rewards.exact:exact_score"}


class InvalidScoreError(ValueError):
    """A reward function returned something that is no finite number."""

    def __init__(self, kind: str, value: object) -> None:
        """
        Args:
            kind: what is wrong, without the value, so that errors of one kind can be told apart from another's.
            value: what was returned.
        """
        self.kind = kind
        super().__init__(f"the reward function returned {kind}: {value!r:.200}")


def resolve(spec: str) -> RewardFunction:
    """The function that ``reward.function`` names: ``math``, ``exact``, ``module:function`` or ``file.py:function``.

    Modules are looked for in the working directory too; a file can import its neighbours. What is returned has verl's
    signature, whichever trainer the function was written for (:func:`~megatron_dppo.rewards.adapters.adapted`).

    Raises:
        UserError: if it cannot be found, imported or called so.
    """
    where, colon, name = BUILTIN.get(spec, spec).rpartition(":")
    if not colon or not where or not name:
        likely = get_close_matches(spec, BUILTIN, 1)
        forms = f"{likely[0]!r} (perhaps meant)" if likely else "math, exact"
        raise UserError(SETTING, spec, "names no reward", f"Give {forms}, module:function or file.py:function")
    module = _from_file(where, spec) if where.endswith(".py") else _from_module(where, spec)
    function = vars(module).get(name)
    if function is None:
        raise UserError(SETTING, spec, f"{where} has no function {name!r}", _remedy(module, name))
    if not callable(function):
        raise UserError(SETTING, spec, f"{name!r} is no function", "Give a function that returns a score")
    try:
        function = adapted(function)
    except UnfitFunctionError as error:
        raise UserError(SETTING, spec, str(error), "Give a function of one completion") from error
    _check_signature(function, spec)
    return function


def to_score(returned: object) -> tuple[float, bool]:
    """The reward, and whether the completion is correct: ``acc`` where there is one, else a score of 1 or more.

    Raises:
        InvalidScoreError: for anything but a finite number, or a mapping with one under ``score``.
    """
    accuracy: object = None
    score = returned
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise InvalidScoreError("a mapping without 'score'", returned)
        score, accuracy = returned["score"], returned.get("acc")
    if not isinstance(score, numbers.Real):
        raise InvalidScoreError(f"a {type(score).__name__} for a score", returned)
    reward = float(score)
    if not math.isfinite(reward):
        raise InvalidScoreError("a score that is not finite", returned)
    return reward, reward >= 1.0 if accuracy is None else bool(accuracy)


def _from_file(where: str, spec: str) -> ModuleType:
    path = Path(where).resolve()
    if not path.is_file():
        raise UserError(SETTING, spec, f"there is no file {where}", f"Give a path that holds from {Path.cwd()}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert found is not None and found.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    _imported(functools.partial(found.loader.exec_module, module), spec)
    return module


def _from_module(where: str, spec: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))
    return _imported(lambda: importlib.import_module(where), spec)


def _imported(load: Callable[[], Any], spec: str) -> Any:
    try:
        return load()
    except Exception as error:
        raise UserError(
            SETTING, spec, f"cannot be imported ({type(error).__name__}: {error})", "Mend it, or install what it needs"
        ) from error


def _remedy(module: ModuleType, name: str) -> str:
    functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    likely = get_close_matches(name, functions, 1)
    return f"Perhaps {likely[0]!r} was meant" if likely else f"It has {', '.join(functions) or 'no functions'}"


def _check_signature(function: RewardFunction, spec: str) -> None:
    try:
        inspect.signature(function).bind("data_source", "solution_str", "ground_truth", extra_info={})
    except TypeError as error:
        raise UserError(
            SETTING,
            spec,
            f"cannot be called with (data_source, solution_str, ground_truth, extra_info) ({error})",
            "Give it these four parameters, or slime's (args, sample), or TRL's (completions, **columns)",
        ) from error
    except ValueError:  # a callable without a signature, such as one written in C
        return
