"""Reward functions written for other trainers, called as those call them. The function's signature
says whose it is.

========  ===================================================================
================================== written   signature
told by ========  ===================================================================
================================== verl      ``compute_score(data_source, solution_str,
ground_truth, extra_info)``  anything else slime     ``async custom_rm(args, sample)``
``args`` first, or ``sample`` second slime     ``async group_rm(args, samples)``
the same, and the second's name TRL       ``reward(completions, **columns)``
``completions`` or ``prompts`` ========
===================================================================
==================================

verl calls by keyword, and so do we: parameters stand in any order, with or without defaults, behind
a star, or in ``**kwargs``. slime calls by position, TRL by keyword. Scoring processes call a
:class:`Scorer`. slime's ``group_rm``, which is called with all completions of a prompt at once,
becomes a :class:`GroupScorer`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_dppo.plugins import Arguments, Sample
from megatron_dppo.rl.numbers import as_number

if TYPE_CHECKING:
    from megatron_dppo.rl.types import Label, Prompt  # imports NumPy

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
PROMPT = "prompt"
"""The column that TRL hands over as ``prompts``, whatever a row calls it."""
LABELS = ("label", "ground_truth", "answer", "solution")
"""TRL users' names of the column of the reference answer: each is the label, unless the row has one
of that name."""
GROUP_NAMES = ("samples", "group", "batch")
"""slime's names for the samples of a group."""
TRAINER_ARGUMENTS = ("trainer_state", "environments")
"""TRL's further arguments, which a process that scores completions lacks."""


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """One completion to be scored."""

    data_source: str
    """The row's column of that name."""
    solution: str
    """The decoded response."""
    label: Label
    """Text, or the object or list that the row has."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """The row's extra columns."""
    asked: object = None
    """The prompt as the row has it: text, or chat messages."""
    rendered: str = ""
    """The prompt as the policy read it."""
    place: str = ""
    """File and row, for complaints."""
    token_ids: Sequence[int] = ()
    """Tokens of the response, as the engine made them."""
    loss_mask: Sequence[bool] = ()
    """Which of them the policy sampled; empty: all."""
    finish_reason: str = "stop"
    """``length``: the response was cut off."""
    policy: str = ""
    """The folder of its tokenizer."""

    @classmethod
    def from_prompt(
        cls,
        prompt: Prompt,
        solution: str,
        token_ids: Sequence[int],
        loss_mask: Sequence[bool] = (),
        finish_reason: str = "stop",
        policy: str = "",
    ) -> ScoreItem:
        """A completion of a prompt."""
        asked = prompt.asked, prompt.text, prompt.place
        row = prompt.data_source, solution, prompt.label, prompt.extra
        return cls(*row, *asked, token_ids, loss_mask, finish_reason, policy)


RewardFunction = Callable[..., Any]
"""As somebody has written it."""
Scorer = Callable[[ScoreItem], Any]
"""Calls a reward function of any form with one completion, and returns the function's result. If
the function is written ``async def``, so is its scorer: a process can await several completions at
once."""


@dataclass(frozen=True, slots=True)
class GroupScorer:
    """A reward function that sees all completions of a prompt at once."""

    function: Callable[[Sequence[ScoreItem]], Any]
    """Returns the scores in the order of the completions."""

    def __call__(self, items: Sequence[ScoreItem]) -> list[Any]:
        """The function's results for ``items``, the completions of one prompt.

        Raises:
            GroupScoresError: it did not return one score for each.
        """
        returned = self.function(items)
        if not isinstance(returned, Iterable) or isinstance(returned, str | Mapping):
            raise GroupScoresError(f"a {type(returned).__name__}, not a list of scores", len(items))
        if len(scores := list(returned)) != len(items):
            raise GroupScoresError(f"{len(scores)} scores", len(items))
        return scores


class GroupScoresError(ValueError):
    """A function of groups did not return one score for each completion."""

    def __init__(self, returned: str, expected: int) -> None:
        super().__init__(
            f"the reward function returned {returned} for a group of {expected} completions"
        )


class Logged(NamedTuple):
    """The result of a function that has logged metrics of a completion."""

    returned: Any
    metrics: Mapping[str, float]


class NotScoredError(ValueError):
    """A function of TRL's form returned None: it says that the completion is not its to score."""


class RewardSignatureError(TypeError):
    """A function cannot be called as any of the trainers would; the message says why."""


def adapt_reward_function(function: RewardFunction) -> Scorer | GroupScorer:
    """Scorer that calls ``function`` as the trainer that it was written for would.

    Raises:
        UnfitFunctionError: for one of TRL's form that needs the trainer's state, and for one that
            none of the three could call.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable without a signature, such as one written in C
        return _from_verl(function)
    named = [
        p.name
        for p in signature.parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if "completions" in named or "prompts" in named:
        return _from_trl(function, signature.parameters)
    if len(named) > 1 and (named[0] == "args" or named[1] in ("sample", "samples")):
        if named[1].endswith(GROUP_NAMES):
            _check(signature, "(args, samples), as slime does", Arguments(), [Sample()])
            return GroupScorer(
                lambda items: run_awaitable(
                    function(Arguments(), [_to_sample(item) for item in items])
                )
            )
        _check(signature, "(args, sample), as slime does", Arguments(), Sample())
        return _make_scorer(function, lambda item: function(Arguments(), _to_sample(item)))
    _check(signature, f"({', '.join(VERL)}), each by its name, as verl does", **dict.fromkeys(VERL))
    return _from_verl(function)


def _check(signature: inspect.Signature, call: str, *by_position: Any, **by_keyword: Any) -> None:
    try:
        signature.bind(*by_position, **by_keyword)
    except TypeError as error:
        raise RewardSignatureError(f"cannot be called with {call} ({error})") from error


def _make_scorer(function: RewardFunction, call: Callable[[ScoreItem], Any]) -> Scorer:
    """Scorer by ``call``, which calls ``function``."""

    async def scorer(item: ScoreItem) -> Any:
        return await call(item)

    if any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))):  # noqa: B004
        return scorer
    return lambda item: run_awaitable(call(item))


def _from_verl(function: RewardFunction) -> Scorer:
    def call(item: ScoreItem) -> Any:
        values = (item.data_source, item.solution, item.label, dict(item.extra))
        return function(**dict(zip(VERL, values, strict=True)))

    return _make_scorer(function, call)


def _to_sample(item: ScoreItem) -> Sample:
    return Sample(
        prompt=item.rendered,
        response=item.solution,
        label=item.label,
        metadata=dict(item.extra),
        response_length=len(item.token_ids),
    )


def _from_trl(function: RewardFunction, parameters: Mapping[str, inspect.Parameter]) -> Scorer:
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in TRAINER_ARGUMENTS:
        if name in parameters and parameters[name].default is inspect.Parameter.empty:
            raise RewardSignatureError(
                f"needs {name!r}; completions are scored apart from the trainer"
            )

    def call(item: ScoreItem) -> Any:
        row = (
            dict.fromkeys(LABELS, item.label) | {"data_source": item.data_source} | dict(item.extra)
        )
        row.pop(PROMPT, None)
        # As in TRL: a prompt of chat messages has completions of chat messages, a prompt of text
        # has text.
        chat = isinstance(item.asked, list)
        given: dict[str, Any] = {name: [value] for name, value in row.items()}
        given["prompts"] = [item.asked]
        given["completions"] = [
            [{"role": "assistant", "content": item.solution}] if chat else item.solution
        ]
        given["completion_ids"] = [list(item.token_ids)]
        logged: dict[str, list[float]] = {}

        def log_metric(name: str, value: Any) -> None:
            logged.setdefault(str(name), []).append(
                math.nan if (number := as_number(value)) is None else number
            )

        given |= {"log_extra": _ignore_extra, "log_metric": log_metric}
        returned = function(
            **{name: value for name, value in given.items() if takes_all or name in parameters}
        )
        return (
            _unwrap_async(returned, logged)
            if inspect.isawaitable(returned)
            else _unwrap_result(returned, logged)
        )

    return _make_scorer(function, call)


def _unwrap_result(returned: Any, logged: Mapping[str, Sequence[float]]) -> Any:
    (reward,) = returned
    if reward is None:
        raise NotScoredError("the reward function returned None: it does not score this completion")
    return (
        Logged(reward, {name: sum(values) / len(values) for name, values in logged.items()})
        if logged
        else reward
    )


async def _unwrap_async(awaitable: Awaitable[Any], logged: Mapping[str, Sequence[float]]) -> Any:
    return _unwrap_result(await awaitable, logged)


def find_required_columns(function: RewardFunction) -> list[str]:
    """Columns that a function of TRL's form cannot do without, besides those that every completion
    has."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    if not {"completions", "prompts"} & parameters.keys():
        return []
    known = {
        "prompts",
        "completions",
        "completion_ids",
        "log_extra",
        "log_metric",
        "data_source",
        *LABELS,
    }
    needed = [
        p
        for p in parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return [p.name for p in needed if p.name not in known]


def _ignore_extra(*_: Any, **__: Any) -> None:
    """In place of TRL's function for columns of a function's own."""


def run_awaitable(returned: Any) -> Any:
    """Return a value, or the result of an awaitable, in an event loop of its own."""
    return asyncio.run(_wait_result(returned)) if inspect.isawaitable(returned) else returned


async def _wait_result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
