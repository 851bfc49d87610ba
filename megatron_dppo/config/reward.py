"""Reward functions, their sum, and the processes that they run in."""

from __future__ import annotations

import json
from typing import Annotated

from annotated_types import Le
from pydantic import field_validator

from megatron_dppo.config.types import Count, Positive, Seconds, Section, Share, check_unique


class WeightedReward(Section):
    function: str
    """As ``reward.function`` names it."""
    weight: float = 1.0
    """Factor of its scores in the sum; 0: its scores are a metric alone."""
    name: str | None = None
    """The metric of its scores is ``reward/NAME``; null: the function's name without its module or
    file."""

    @property
    def metric(self) -> str:
        return self.function.rpartition(":")[2] if self.name is None else self.name


RESERVED = ("timeouts", "errors")
"""Names of metrics under ``reward/`` that count failures of any reward function."""


class RewardConfig(Section):
    function: str | tuple[WeightedReward, ...] = "math"
    """``math``, ``exact``, ``reasoning_gym`` (its tasks' own verifiers), ``verifiers`` (its
    environment's rubric), or a function with verl's, slime's or TRL's signature as
    ``module:function`` or ``file.py:function``. Or several of these, whose weighted sum is the
    reward: ``[{function: exact}, {function: my.py:brevity, weight: 0.2}]``; the first one that
    scores a completion judges whether it is correct."""
    timeout_s: Seconds = 10.0
    """Seconds of processor time for scoring one completion, and ten times as many on the clock, for
    functions that wait or have other processes compute; past either the worker is killed and the
    group leaves the step."""
    workers: Annotated[Positive, Le(1024)] = 1
    """Worker processes per rank that generates."""
    concurrency: Positive = 32
    """Completions that a worker process awaits at once, if the reward function is written ``async
    def``, as one that asks a judge by HTTP. The time limits hold for each; one that waits for too
    long is cancelled, and the others go on. 1: one after another, as other functions are called.
    Functions of a whole group get one group after another."""
    memory_mib: Positive = 4096
    """Memory of scoring beyond the reward function's imports, in MiB; past it the completion
    fails."""
    thinking_tags: tuple[str, ...] = ("<think>", "</think>")
    """The opening and the closing tag of the policy's thoughts. ``math`` and ``exact`` read the
    answer after the last closing tag. Thoughts without an end leave no answer, and reward 0, also
    if the chat template opens them in the prompt. []: the answer is read from the whole
    completion."""
    max_failures: Share = 0.1
    """Share of a step's completions whose scoring may fail (hang, raise, NaN) before the run
    stops."""
    overlong_buffer: Count | None = None
    """DAPO's soft penalty: over this many tokens up to the response limit the reward falls linearly
    by up to 1; null: the objective's (dapo a fifth of the limit, grpo none)."""

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of its functions."""
        return (
            (self.function,)
            if isinstance(self.function, str)
            else tuple(each.function for each in self.function)
        )

    @property
    def spec(self) -> str:
        """``function`` as text; of several functions a JSON list of [metric, function, weight]."""
        if isinstance(self.function, str):
            return self.function
        return json.dumps([(each.metric, each.function, each.weight) for each in self.function])

    @field_validator("function")
    @classmethod
    def _validate_metric_names(
        cls, function: str | tuple[WeightedReward, ...]
    ) -> str | tuple[WeightedReward, ...]:
        if not isinstance(function, str):
            names = check_unique(tuple(each.metric for each in function))
            if not names or (reserved := set(names) & set(RESERVED)):
                raise ValueError(
                    f"names a metric {min(reserved)}, which counts failures"
                    if names
                    else "is empty"
                )
        return function

    @field_validator("thinking_tags")
    @classmethod
    def _validate_tag_pair(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        if tags and (len(tags) != 2 or not all(tags) or tags[0] == tags[1]):
            raise ValueError("is not two different tags, the opening and the closing one")
        return tags
