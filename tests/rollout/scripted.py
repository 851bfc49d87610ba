"""An engine and workers that follow a script, and ranks that are threads: a step without
processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from megatron_dppo.config import Config, LayoutConfig
from megatron_dppo.data.prompts import PromptPool, SourcePool
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id
from megatron_dppo.parallel.world import World
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rl.score import Score, count_failures
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.engine import Completions, GroupCallback, RolloutEngine, Sampling
from megatron_dppo.settings import load_config

T = TypeVar("T")
FAILING = f"{Path(__file__).parents[1] / 'rewards' / 'rewards_that_fail.py'}:compute_score"
LIMIT_S = 1.5
SAMPLES = 3
LIMIT_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Said:
    """One completion of a script. The text is an order to the reward function."""

    text: str
    probability: float | Sequence[float] = 0.5
    """Probability of each token, the end of the turn included."""
    ended: bool = True
    versions: np.ndarray | None = None
    """None: all tokens by version 0."""
    given: Sequence[int] = ()
    """Places of tokens that the policy did not sample."""
    segments: Sequence[int] = ()
    """Segment of each token; empty: none."""
    starts: tuple[int, ...] = ()


Script = Mapping[int, Sequence[Said]]
"""By prompt id."""


def said(*texts: str) -> list[Said]:
    return list(map(Said, texts))


def completion_of(token_ids: Sequence[int]) -> Completion:
    """Return a completion of certain tokens, all by version 0."""
    ids = np.array(token_ids, np.int32)
    nothing, sampled = np.zeros(len(ids), np.float32), np.ones(len(ids), bool)
    return Completion(ids, nothing, sampled, np.zeros(len(ids), np.int32), "stop")


class ScriptedEngine(RolloutEngine[Completions]):
    """Completes each prompt by a script, and remembers the requests."""

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self._tokenizer, self._script = tokenizer, script
        self.asked: list[tuple[list[int], Sampling]] = []
        self.finished = 0

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Completions:
        self.asked.append(([prompt.id for prompt in prompts], sampling))
        return [tuple(map(self._complete, self._script[p.id][: sampling.samples])) for p in prompts]

    def finish(self, pending: Completions, callback: GroupCallback | None = None) -> Completions:
        """Show all groups but the last before the end."""
        self.finished += 1
        for place, group in enumerate(pending[:-1]):
            if callback is not None:
                callback([(place, group)])
        return pending

    def _complete(self, said: Said) -> Completion:
        tokens = self._tokenizer([said.text], add_special_tokens=False)["input_ids"][0]
        tokens = np.array(tokens + [end_token_id(self._tokenizer)] * said.ended, np.int32)
        logprobs = np.log(np.broadcast_to(said.probability, tokens.shape)).astype(np.float32)
        return Completion(
            tokens,
            logprobs,
            ~np.isin(np.arange(len(tokens)), said.given),
            np.zeros(len(tokens), np.int32) if said.versions is None else said.versions,
            "stop" if said.ended else "length",
            segments=np.array(said.segments, np.int8) if said.segments else None,
            starts=said.starts,
        )


class ScriptedWorkers:
    """Score ``score 1``, log the depth of ``score 1 depth 3``, give the reward of a role for
    ``score 1 =critic 3``, time out at ``sleep`` and fail at any other text, all in this process and
    at the end."""

    thinking_tags: Sequence[str] = ()

    def begin(self, max_failures: int) -> ScriptedWorkers:
        self._most_failures = max_failures
        self._items: list[ScoreItem] = []
        return self

    def add(self, items: Sequence[ScoreItem]) -> None:
        self._items.extend(items)

    def step(self) -> bool:
        return False

    def cancel(self) -> None:
        pass

    def finish(self) -> list[Score]:
        scores, told = [Score.from_failure("unscored")] * len(self._items), set()
        for number, item in enumerate(self._items):
            match item.solution.split():
                case ["score", reward, *named]:
                    values = dict(zip(named[::2], map(float, named[1::2]), strict=True))
                    metrics = {name: value for name, value in values.items() if name[0] != "="}
                    roles = {name[1:]: value for name, value in values.items() if name[0] == "="}
                    right = float(reward) >= 1.0
                    scores[number] = Score(float(reward), right, roles=roles, metrics=metrics)
                case ["sleep"]:
                    scores[number] = Score.from_failure("timeout")
                case _:
                    scores[number] = Score.from_failure(
                        "error", "" if item.solution in told else item.solution
                    )
                    told.add(item.solution)
            if sum(count_failures(scores)) > self._most_failures:
                break
        return scores


class Meeting:
    """Exchange of values between ranks that are threads."""

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

    def broadcast(self, make: Callable[[], T]) -> T:
        return self.gather(self.run_on_all_ranks(lambda: make() if self.is_rank0 else None))[0]

    def barrier(self, description: str) -> None:
        self.control.gather(self.rank, None)


def world_of(size: int, rank: int, meeting: Meeting | None = None) -> World:
    """Return a rank of ``size`` data-parallel ranks. A single rank exchanges nothing."""
    make = World if meeting is None else ThreadWorld
    ranks = dict.fromkeys(("tp_rank", "pp_rank", "cp_rank", "ep_rank", "etp_rank"), 0)
    return make(
        rank=rank,
        size=size,
        layout=LayoutConfig(dp=size),
        dp_rank=rank,
        **ranks,
        replica_of=tuple(range(size)),
        device=torch.device("cpu"),
        control=meeting,
        timeout_s=60.0,
    )


def as_ranks(size: int, claim: Callable[[World], T]) -> list[T]:
    """Return the results of ``claim`` on every rank of a world of threads."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: claim(world_of(size, rank, meeting)), range(size)))


def pool_of(size: int) -> PromptPool:
    """Return prompts that differ in length."""
    prompts = [
        Prompt(i, np.arange(3 + i, dtype=np.int32), f"prompt {i}", "1", "here") for i in range(size)
    ]
    return PromptPool([SourcePool(prompts)])


def collect_config(*overrides: str, max_failures: float = 1.0) -> Config:
    settings = f"""
    run.seed=5 rollout.samples_per_prompt={SAMPLES} rollout.max_response_tokens={LIMIT_TOKENS} rollout.temperature=0.7
    reward.function={FAILING} reward.timeout_s={LIMIT_S} reward.max_failures={max_failures}
    """
    return load_config(None, [*settings.split(), *overrides])
