"""Reward functions: lookup by name, checks of the data, scores from results, built-in verifiers.

Scoring processes import this file, which therefore imports no torch or NumPy.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import product
from typing import Any

from megatron_dppo.data.rows import as_text, is_blank
from megatron_dppo.errors import UserError
from megatron_dppo.plugins import load_function
from megatron_dppo.rewards.adapters import (
    GroupScorer,
    Logged,
    NotScoredError,
    RewardFunction,
    RewardSignatureError,
    ScoreItem,
    Scorer,
    adapt_reward_function,
    find_required_columns,
    reads_messages,
    run_awaitable,
)
from megatron_dppo.rewards.math.completion import (
    THINKING_TAGS,
    extract_marked_answer,
    strip_thinking,
)
from megatron_dppo.rl.numbers import as_number, as_truth, is_right
from megatron_dppo.rl.score import Score

SETTING = "reward.function"
BUILTIN = {
    "math": "megatron_dppo.rewards.math.verdict:math_verdict",
    "exact": "megatron_dppo.rewards.functions:exact_score",
    "reasoning_gym": "megatron_dppo.rewards.functions:reasoning_gym_score",
    "agent": "megatron_dppo.rewards.functions:agent_score",
    "verifiers": "megatron_dppo.rewards.functions:agent_score",
}
TEXT_VERIFIERS = ("math", "exact")
"""Verifiers that compare an answer with the label, as text or as mathematics."""
RESULT_KEYS = ("score", "acc", "pred", "by", "roles")
"""Keys of a returned mapping that are no metrics."""
LARGEST = 1e9
"""Largest absolute value of a reward. Squares of far larger rewards would overflow in advantages
and gradients."""


class InvalidScoreError(ValueError):
    """A reward function returned an invalid result."""

    def __init__(self, kind: str, value: object) -> None:
        """
        Args:
            kind: description of the problem without the value, to group errors.
            value: result of the reward function.
        """
        self.kind = kind
        super().__init__(f"the reward function returned {kind}: {value!r:.200}")


def parse_spec(spec: str) -> list[tuple[str, str, float]]:
    """Return metric, name and weight of each function in ``RewardConfig.spec``; a single function
    has no metric."""
    return [(*each,) for each in json.loads(spec)] if spec.startswith('[["') else [("", spec, 1.0)]


def resolve(spec: str, thinking_tags: Sequence[str] = THINKING_TAGS) -> Scorer | GroupScorer:
    """Return the scorer for ``reward.function``: ``math``, ``exact``, ``module:function`` or
    ``file.py:function``.

    - Several functions give one scorer of the weighted sum.
    - Modules are also searched in the working directory. A file can import its neighbours.

    Args:
        spec: ``RewardConfig.spec``.
        thinking_tags: ``reward.thinking_tags``, for ``math`` and ``exact``.

    Raises:
        UserError: a function cannot be found, imported or called in a supported form.
    """
    parts = parse_spec(spec)
    # A metric's name marks a list of functions.
    if parts[0][0]:
        scorers = [resolve(function, thinking_tags) for _, function, _ in parts]
        return _combine_scorers(parts, scorers)
    if spec not in BUILTIN and not all(spec.rpartition(":")):
        likely = get_close_matches(spec, BUILTIN, 1)
        if spec.endswith(".py"):
            raise UserError(
                SETTING, spec, "names a file, and no function in it", f"Write {spec}:function"
            )
        forms = f"{likely[0]!r} (perhaps meant)" if likely else ", ".join(BUILTIN)
        raise UserError(
            SETTING, spec, "names no reward", f"Give {forms}, module:function or file.py:function"
        )
    function = load_function(SETTING, BUILTIN.get(spec, spec))
    if spec in TEXT_VERIFIERS:
        return _make_text_scorer(function, thinking_tags)
    try:
        return adapt_reward_function(function)
    except RewardSignatureError as error:
        remedy = (
            "Give it verl's four parameters, or slime's (args, sample), or TRL's "
            "(completions, **columns)"
        )
        raise UserError(SETTING, spec, str(error), remedy) from error


def check_labels(spec: str, labels: Iterable[tuple[str, object]]) -> None:
    """Check, before generation, that built-in verifiers can read these labels.

    Args:
        spec: ``RewardConfig.spec``.
        labels: pairs of place (file and row) and label.

    Raises:
        UserError: names the first row with an unfit label.
    """
    of_text = [function for _, function, _ in parse_spec(spec) if function in TEXT_VERIFIERS]
    for (place, label), spec in product(labels, of_text):
        try:
            text = get_label_text(label)
        except ValueError as error:
            problem = f"compares answers with text, and the label of {place} is {error}"
            raise UserError(
                SETTING, spec, problem, "Write it as one text, or give a function that reads it"
            ) from error
        marked = text.rpartition("#")[2] if spec == "exact" else extract_marked_answer(text) or text
        if is_blank(marked):
            problem = f"compares answers with labels, and {place} has an empty one"
            raise UserError(
                SETTING, spec, problem, "Remove the row, or set data.label_key to another column"
            )


def check_columns(spec: str, rows: Sequence[tuple[str, Mapping[str, object]]]) -> None:
    """Check, before generation, that rows have the columns required by functions of TRL's form.

    Args:
        spec: ``RewardConfig.spec``.
        rows: pairs of place (file and number) and columns as passed to the function.

    Raises:
        UserError: names the first row that lacks a column.
    """
    for _, name, _ in parse_spec(spec):
        wanted = [] if name in BUILTIN else find_required_columns(load_function(SETTING, name))
        for place, columns in rows if wanted else ():
            if lacking := next((each for each in wanted if each not in columns), None):
                has = f"{place} does not have (it has {', '.join(columns)})"
                problem = f"is called with the column {lacking!r}, which {has}"
                remedy = "Add the column, or give the parameter a default or another name"
                raise UserError(SETTING, name, problem, remedy)


def check_completion_form(spec: str, example: ScoreItem) -> None:
    """Check, before generation, that a function of TRL's form does not read a text as messages.

    Only functions whose source has ``["content"]`` are called, with a made-up completion.

    Args:
        spec: ``RewardConfig.spec``.
        example: completion of a prompt that is text.

    Raises:
        UserError: the function reads ``completion[0]["content"]``.
    """
    for _, name, _ in parse_spec(spec):
        if name in BUILTIN or not reads_messages(load_function(SETTING, name)):
            continue
        scorer = resolve(name)
        if isinstance(scorer, GroupScorer):
            continue
        try:
            run_awaitable(scorer(example))
        except (IndexError, TypeError) as error:
            if not str(error).startswith("string ind"):
                continue
            problem = f"reads completions as messages, and the prompt of {example.place} is text"
            remedy = (
                'Write completion in place of completion[0]["content"], or make the prompt a list '
                "of messages"
            )
            raise UserError(SETTING, name, problem, remedy) from error
        # Other failures are the function's own, and are counted during the run.
        except Exception:
            continue


def get_label_text(label: object) -> str:
    """Return a label, or the only element of a list, as text.

    Raises:
        ValueError: the label has no single text. The message describes the label.
    """
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    if isinstance(label, list):
        raise ValueError(f"a list of {len(label)}: one answer of several parts, or several answers")
    return as_text(label)


def _make_text_scorer(function: RewardFunction, tags: Sequence[str]) -> Scorer:
    def compare(item: ScoreItem) -> Any:
        label = get_label_text(item.label)
        return function(
            item.data_source, item.solution, label, prompt=item.rendered, thinking_tags=tags
        )

    return compare


def read_score(returned: object) -> Score:
    """Read a function's result. Metrics are the finite logged metrics and further numbers of a
    returned mapping.

    Raises:
        InvalidScoreError: see ``parse_reward`` and ``parse_role_rewards``.
    """
    if isinstance(returned, Score):
        return returned
    returned, logged = returned if isinstance(returned, Logged) else (returned, {})
    found = {**logged, **(returned if isinstance(returned, Mapping) else {})}
    # A logged metric may have the name of a result key.
    numbers = {
        str(name): as_number(value)
        for name, value in found.items()
        if name not in RESULT_KEYS or name in logged
    }
    metrics = {
        name: number
        for name, number in numbers.items()
        if number is not None and math.isfinite(number)
    }
    return Score(
        *parse_reward(returned), *parse_details(returned), parse_role_rewards(returned), metrics
    )


def _combine_scorers(
    parts: Sequence[tuple[str, str, float]], scorers: Sequence[Scorer | GroupScorer]
) -> Scorer | GroupScorer:
    """Return a scorer of the weighted sum of rewards. As in TRL, the sum leaves out functions that
    return None."""
    of_one = [scorer for scorer in scorers if not isinstance(scorer, GroupScorer)]
    if len(of_one) < len(scorers):

        def score_group(items: Sequence[ScoreItem]) -> list[Score]:
            results: list[list[Any]] = []
            for scorer in scorers:
                if isinstance(scorer, GroupScorer):
                    results.append(scorer(items))
                else:
                    results.append([_score_or_error(scorer, item) for item in items])
            return [_sum(parts, each) for each in zip(*results, strict=True)]

        return GroupScorer(score_group)
    if any(inspect.iscoroutinefunction(scorer) for scorer in of_one):

        async def sum_scorer(item: ScoreItem) -> Score:
            results: list[object] = []
            # Await in sequence, because only steps of this task count as processor time.
            for scorer in of_one:
                try:
                    returned = scorer(item)
                    results.append(await returned if inspect.isawaitable(returned) else returned)
                except NotScoredError as error:
                    results.append(error)
            return _sum(parts, results)

        return sum_scorer
    return lambda item: _sum(parts, [_score_or_error(scorer, item) for scorer in of_one])


def _score_or_error(scorer: Scorer, item: ScoreItem) -> object:
    try:
        return run_awaitable(scorer(item))
    except NotScoredError as error:
        return error


def _sum(parts: Sequence[tuple[str, str, float]], results: Sequence[object]) -> Score:
    """Sum the results, without results that are a NotScoredError."""
    scored: list[tuple[str, float, Score]] = []
    for (metric, function, weight), result in zip(parts, results, strict=True):
        if not isinstance(result, NotScoredError):
            try:
                scored.append((metric, weight, read_score(result)))
            except InvalidScoreError as error:
                raise InvalidScoreError(f"{error.kind} ({function})", result) from error
    if not scored:
        raise NotScoredError(
            "every reward function returned None: none of them scores this completion"
        )

    def sum_role(role: str) -> float:
        # A function without a reward for the role gives the whole conversation's reward.
        return sum(weight * each.roles.get(role, each.reward) for _, weight, each in scored)

    named = {role: None for *_, each in scored for role in each.roles}
    roles = {role: sum_role(role) for role in named}
    metrics = {name: value for *_, each in scored for name, value in each.metrics.items()}
    metrics |= {metric: each.reward for metric, _, each in scored}
    reward = _validate_reward(sum(weight * each.reward for _, weight, each in scored), metrics)
    # The first function that scores a completion decides if the completion is correct.
    return replace(scored[0][2], reward=reward, roles=roles, metrics=metrics)


def parse_reward(returned: object) -> tuple[float, bool]:
    """Return the reward, and whether the completion is correct: ``acc`` if present, else whether
    the reward is 1 or more.

    Raises:
        InvalidScoreError: the reward (the result, or ``score`` of a mapping) is not a number within
            ±``LARGEST``, or ``acc`` is not true, false, 1 or 0.
    """
    score = returned
    accuracy = None
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise InvalidScoreError("a mapping without 'score'", returned)
        score = returned["score"]
        accuracy = returned.get("acc")
    reward = _validate_reward(score, returned)
    if accuracy is None:
        return reward, is_right(reward)
    if (correct := as_truth(accuracy)) is None:
        raise InvalidScoreError("an 'acc' that is neither true nor false", returned)
    return reward, correct


def parse_role_rewards(returned: object) -> dict[str, float]:
    """Return the rewards of roles: ``roles`` of a returned mapping, else {}.

    Raises:
        InvalidScoreError: ``roles`` is no mapping, or a reward no number within ±``LARGEST``.
    """
    roles = returned.get("roles", {}) if isinstance(returned, Mapping) else {}
    if not isinstance(roles, Mapping):
        raise InvalidScoreError(f"a {type(roles).__name__} for roles", returned)
    return {str(role): _validate_reward(reward, returned) for role, reward in roles.items()}


def _validate_reward(score: object, returned: object) -> float:
    if (reward := as_number(score)) is None:
        raise InvalidScoreError(f"a {type(score).__name__} for a score", returned)
    if not math.isfinite(reward):
        raise InvalidScoreError("a score that is not finite", returned)
    if abs(reward) > LARGEST:
        raise InvalidScoreError(f"a score beyond ±{LARGEST:g}", returned)
    return reward


def parse_details(returned: object) -> tuple[str | None, tuple[str, ...]]:
    """Return the function's reading of the answer (``pred`` of a mapping, verl's name, else None),
    and the equivalences needed (``by``, else empty)."""
    if not isinstance(returned, Mapping):
        return None, ()
    answer = returned.get("pred")
    by = returned.get("by")
    text = None if answer is None else str(answer)
    equivalences = tuple(map(str, by)) if isinstance(by, tuple | list) else ()
    return text, equivalences


def exact_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    *,
    prompt: str = "",
    thinking_tags: Sequence[str] = THINKING_TAGS,
) -> float:
    """Return 1 if the text after the thoughts and the last number sign, if any, is the label, else
    0."""
    solution_str = strip_thinking(solution_str, prompt, thinking_tags)
    return float(solution_str.rpartition("#")[2].strip() == ground_truth.rpartition("#")[2].strip())


def agent_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """Refuse a completion that ``rollout.agent`` has not scored."""
    raise ValueError("rollout.agent returned no reward, and reward.function leaves it to the agent")


@functools.cache
def _load_verifier(task: str, settings: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym.factory import create_dataset

    return create_dataset(task, size=1, seed=0, **json.loads(settings)).score_answer


def reasoning_gym_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
) -> dict[str, object]:
    """Return the task verifier's score of the last ``<answer>…</answer>``; without this tag, of the
    whole text.

    Only a score of 1 is correct: verifiers give a fraction for an answer that is close or has the
    wrong form.

    Raises:
        KeyError: the prompt is not from reasoning-gym.
    """
    from reasoning_gym.utils import extract_answer

    entry = extra_info["entry"]
    settings = json.dumps(extra_info["settings"], sort_keys=True)
    verify = _load_verifier(data_source.partition("/")[2], settings)
    answer = extract_answer(solution_str)
    answer = solution_str.strip() if answer is None else answer
    # A verifier raises for an answer that it cannot read: such an answer is wrong.
    try:
        score = float(verify(answer, entry))
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        SyntaxError,
        TypeError,
        ValueError,
    ):
        score = 0.0
    return {"score": score, "acc": is_right(score), "pred": answer}
