"""An engine and workers that say what they are told, and ranks that are threads: a step without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from megatron_dppo.config import Config, LayoutConfig, LossConfig, RewardConfig, RolloutConfig, RunConfig
from megatron_dppo.data.prompts import PromptPool, SourcePool
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id
from megatron_dppo.parallel.world import World
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.workers import Scored
from megatron_dppo.rl.types import Completion, Prompt, Score, VersionSpan
from megatron_dppo.rollout.engine import Completions, GroupCallback, RolloutEngine, Sampling

T = TypeVar("T")
FAILING = f"{Path(__file__).parents[1] / 'rewards' / 'rewards_that_fail.py'}:compute_score"
LIMIT_S = 1.5
SAMPLES = 3
LIMIT_TOKENS = 20


@dataclass(frozen=True)
class Said:
    """One completion of a script. The text says what the reward function is to do with it."""

    text: str
    probability: float | Sequence[float] = 0.5
    """Of each token, the end of the turn included."""
    ended: bool = True
    versions: tuple[VersionSpan, ...] | None = None
    """None: all tokens by version 0."""
    given: Sequence[int] = ()
    """Places of tokens that the policy did not sample."""
    segments: Sequence[int] = ()
    """Of each token; empty: there are none."""
    weights: tuple[float, ...] = ()
    starts: tuple[int, ...] = ()


Script = Mapping[int, Sequence[Said]]
"""By prompt id."""


class ScriptedEngine(RolloutEngine[Completions]):
    """Completes each prompt as a script has it, and remembers what it was asked."""

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self._tokenizer, self._script = tokenizer, script
        self.asked: list[tuple[list[int], Sampling]] = []
        self.finished = 0

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Completions:
        self.asked.append(([prompt.id for prompt in prompts], sampling))
        return [tuple(map(self._complete, self._script[p.id][: sampling.samples])) for p in prompts]

    def finish(self, pending: Completions, look: GroupCallback | None = None) -> Completions:
        """All groups but the last can be looked at before the end."""
        self.finished += 1
        for place, group in enumerate(pending[:-1]):
            if look is not None:
                look([(place, group)])
        return pending

    def _complete(self, said: Said) -> Completion:
        tokens = self._tokenizer([said.text], add_special_tokens=False)["input_ids"][0]
        tokens = np.array(tokens + [end_token_id(self._tokenizer)] * said.ended, np.int32)
        logprobs = np.log(np.broadcast_to(said.probability, tokens.shape)).astype(np.float32)
        loss_mask = ~np.isin(np.arange(len(tokens)), said.given)
        versions = said.versions or (VersionSpan(0, len(tokens)),)
        return Completion(
            tokens,
            logprobs,
            loss_mask,
            versions,
            "stop" if said.ended else "length",
            segments=np.array(said.segments, np.int8) if said.segments else None,
            weights=said.weights,
            starts=said.starts,
        )


class ScriptedWorkers:
    """Scores "score 1", logs the depth of "score 1 depth 3", times out at "sleep" and raises at all else, where
    processes would cost more than they show."""

    thinking_tags = ()

    def begin(self, most_failures: int) -> ScriptedScoring:
        return ScriptedScoring(most_failures)


class ScriptedScoring:
    """All of it at the end."""

    def __init__(self, most_failures: int) -> None:
        self._most_failures = most_failures
        self._items: list[ScoreItem] = []

    def add(self, items: Sequence[ScoreItem]) -> None:
        self._items.extend(items)

    def advance(self) -> bool:
        return False

    def abandon(self) -> None:
        pass

    def finish(self) -> Scored:
        scores: list[Score | None] = [None] * len(self._items)
        timeouts, errors = 0, []
        for number, item in enumerate(self._items):
            match item.solution.split():
                case ["score", reward, *logged]:
                    metrics = {name: float(value) for name, value in zip(logged[::2], logged[1::2], strict=True)}
                    scores[number] = Score(float(reward), float(reward) >= 1.0, metrics=metrics)
                case ["sleep"]:
                    timeouts += 1
                case _:
                    errors.append(item.solution)
            if timeouts + len(errors) > self._most_failures:
                break
        return Scored(scores, timeouts, len(errors), list(dict.fromkeys(errors)))


class Meeting:
    """What ranks that are threads put on the table for one another."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30.0)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class ThreadWorld(World):
    """A rank that is a thread: the same exchanges without a process group."""

    def gather(self, value: Any) -> list[Any]:
        return self.control.gather(self.rank, value)

    def from_leader(self, make: Callable[[], T]) -> T:
        return self.gather(self.together(lambda: make() if self.leads else None))[0]

    def wait_for_all(self, what: str) -> None:
        self.control.gather(self.rank, None)


def world_of(size: int, rank: int, meeting: Meeting | None = None) -> World:
    """Ranks that are all data-parallel. One of one exchanges nothing."""
    make = World if meeting is None else ThreadWorld
    return make(
        rank=rank,
        size=size,
        layout=LayoutConfig(dp=size),
        tp_rank=0,
        pp_rank=0,
        cp_rank=0,
        dp_rank=rank,
        ep_rank=0,
        etp_rank=0,
        replica_of=tuple(range(size)),
        device=torch.device("cpu"),
        control=meeting,
        timeout_s=60.0,
    )


def as_ranks(size: int, claim: Callable[[World], T]) -> list[T]:
    """What ``claim`` returns on every rank of a world of threads."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: claim(world_of(size, rank, meeting)), range(size)))


def pool_of(size: int) -> PromptPool:
    """Prompts that differ in length."""
    prompts = [Prompt(i, np.arange(3 + i, dtype=np.int32), f"prompt {i}", "1", "here") for i in range(size)]
    return PromptPool([SourcePool(prompts)])


def collect_config(*, loss: str = "grpo", max_failures: float = 1.0, overlong_buffer: int | None = None) -> Config:
    return Config(
        run=RunConfig(seed=5),
        rollout=RolloutConfig(samples_per_prompt=SAMPLES, max_response_tokens=LIMIT_TOKENS, temperature=0.7),
        reward=RewardConfig(
            function=FAILING, timeout_s=LIMIT_S, max_failures=max_failures, overlong_buffer=overlong_buffer
        ),
        loss=LossConfig(name=loss),
    )
