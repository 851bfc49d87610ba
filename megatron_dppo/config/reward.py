"""Settings of reward functions, their weighted sums, and the scoring processes."""

from __future__ import annotations

import json
from typing import Annotated

from annotated_types import Le
from pydantic import field_validator

from megatron_dppo.config.types import Count, Positive, Seconds, Section, Share, check_unique


class WeightedReward(Section):
    function: str
    """In a form that ``reward.function`` accepts."""
    weight: float = 1.0
    """Factor of the scores in the sum; 0: the scores are only a metric."""
    name: str | None = None
    """Name of the scores' metric ``reward/NAME``; null: the function's name without module or
    file."""

    @property
    def metric(self) -> str:
        return self.function.rpartition(":")[2] if self.name is None else self.name


RESERVED = ("timeouts", "errors")
"""Metrics under ``reward/`` that count failures of any reward function."""


class RewardConfig(Section):
    function: str | tuple[WeightedReward, ...] = "math"
    """``math``, ``exact``, ``reasoning_gym`` (the tasks' own verifiers), ``agent`` and
    ``verifiers`` (the reward that rollout.agent returns), or a function with the signature of
    verl, slime or TRL as ``module:function`` or ``file.py:function``. Several functions give a
    weighted sum:
    ``[{function: exact}, {function: my.py:brevity, weight: 0.2}]``. The first function that scores
    a completion decides if it is correct."""
    timeout_s: Seconds = 10.0
    """Longest processor time for scoring one completion, in seconds; ten times this value on the
    clock, for functions that wait or have other processes compute. Past either limit the worker is
    killed and the group leaves the step."""
    workers: Annotated[Positive, Le(1024)] = 1
    """Worker processes on each rank that generates."""
    concurrency: Positive = 32
    """Completions that a worker process awaits at once, if the reward function is written ``async
    def``, such as a function that sends requests to a judge by HTTP. The time limits apply to each
    completion: a late completion is cancelled, and the rest continues. 1: one completion after
    another, as with functions that are not async. Functions of a whole group get one group after
    another."""
    memory_mib: Positive = 4096
    """Memory for scoring, beyond the reward function's imports, in MiB. Past this limit the scoring
    of a completion fails."""
    thinking_tags: tuple[str, ...] = ("<think>", "</think>")
    """Opening and closing tag of the policy's thoughts. ``math`` and ``exact`` read the answer
    after the last closing tag. Thoughts without an end have no answer, and reward 0, even if the
    chat template opens them in the prompt. []: read the whole completion."""
    max_failures: Share = 0.1
    """Fraction of a step's completions that may fail in scoring (hang, raise, NaN) before the run
    stops."""
    overlong_buffer: Count | None = None
    """DAPO's soft penalty: in this number of tokens before the response limit, the reward falls
    linearly by up to 1; null: the objective's value (dapo a fifth of the limit, grpo no
    penalty)."""

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the reward functions."""
        if isinstance(self.function, str):
            return (self.function,)
        return tuple(each.function for each in self.function)

    @property
    def spec(self) -> str:
        """``function`` as text. Several functions are a JSON list of [metric, function, weight]."""
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
            if not names:
                raise ValueError("is empty")
            if reserved := set(names) & set(RESERVED):
                raise ValueError(f"names a metric {min(reserved)}, which counts failures")
        return function

    @field_validator("thinking_tags")
    @classmethod
    def _validate_tag_pair(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        if tags and (len(tags) != 2 or not all(tags) or tags[0] == tags[1]):
            raise ValueError("is not two different tags, the opening and the closing one")
        return tags
