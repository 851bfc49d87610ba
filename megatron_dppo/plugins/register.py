"""Functions that a script registers by a decorator, and names in its settings.

    from megatron_dppo.api import load_config, register, train

    @register.reward
    def right(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str == ground_truth)

    train(load_config("configs/quickstart.yaml", reward={"function": "right"}))

A function is known by its own name, in this process; another of that name takes its place, as where a cell of a
notebook is run again. Callbacks have no setting: each is called with the row of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megatron_dppo.errors import UserError
from megatron_dppo.rewards.functions import BUILTIN

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
SETTINGS: Mapping[str, str] = {
    "reward": "reward.function",
    "objective": "loss.objective",
    "prompt_rule": "pruning.prompts.function",
    "completion_rule": "pruning.completions.function",
    "conversation": "rollout.conversation",
    "engine": "rollout.engine_function",
}
"""What a run can be given as a function, and the setting that names it."""
registered: dict[str, dict[str, Function]] = {kind: {} for kind in (*SETTINGS, "callback")}
"""Kind -> name -> function."""


def reward(function: F) -> F:
    """For ``reward.function``: scores completions.

    Raises:
        UserError: a built-in one is called so.
    """
    if (name := getattr(function, "__name__", None)) in BUILTIN:
        raise UserError("reward.function", name, "is a reward of the project's own", "Call the function otherwise")
    return _kept("reward", function)


def objective(function: F) -> F:
    """For ``loss.objective``: from :class:`~megatron_dppo.rl.losses.Tokens` to what is maximised."""
    return _kept("objective", function)


def prompt_rule(function: F) -> F:
    """For ``pruning.prompts.function``: from :class:`~megatron_dppo.rl.pruning.prompt_rules.PromptCandidates` and
    ``keep`` to inclusion probabilities."""
    return _kept("prompt_rule", function)


def completion_rule(function: F) -> F:
    """For ``pruning.completions.function``: from
    :class:`~megatron_dppo.rl.pruning.completion_rules.CompletionCandidates` and ``keep`` to inclusion probabilities."""
    return _kept("completion_rule", function)


def conversation(function: F) -> F:
    """For ``rollout.conversation``: has a conversation with the policy for each completion."""
    return _kept("conversation", function)


def engine(function: F) -> F:
    """For ``rollout.engine_function``: a class of engines, or what makes one."""
    return _kept("engine", function)


def callback(function: F) -> F:
    """Called with the row of every step as it is written, in the process that calls ``train``."""
    return _kept("callback", function)


def _kept(kind: str, function: F) -> F:
    if not hasattr(function, "__name__"):
        problem, remedy = "has no name that a setting could give", "Define it with def, or hand it to train()"
        raise UserError(f"register.{kind}", function, problem, remedy)
    registered[kind][function.__name__] = function
    return function
