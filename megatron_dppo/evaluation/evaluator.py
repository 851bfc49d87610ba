"""Asking problems, scoring the answers and counting them: the same for a training run's evaluations and for ``eval``.

Every rank asks and scores its own share. What all ranks then know of an answer is small, but for texts that are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_dppo.config import Config
from megatron_dppo.evaluation.problems import Problem
from megatron_dppo.evaluation.vote import Pair, votes
from megatron_dppo.parallel.world import World
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.math.completion import said_answer, stated_answer
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.seeds import Purpose, engine_seed
from megatron_dppo.rl.types import Completion, Floats, Score
from megatron_dppo.rollout.collect import Answers, Collector, Failures

MATH = "math"
"""The verifier that can also tell whether two answers without their texts are the same."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion, and what became of it."""

    text: str | None
    """Special tokens left out; None where nobody wanted it."""
    extracted: str
    """What it states as its answer; empty if nothing."""
    score: Score | None
    """None where scoring failed."""
    tokens: int
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Answered:
    """Answers to P problems, k to each, in the problems' order; the same on every rank."""

    answers: Sequence[Sequence[Answer]]
    """[P][k]"""
    votes: Floats
    """[P], ``vote``; not a number where no answer could be scored."""
    timeouts: int
    errors: int
    tracebacks: tuple[str, ...]
    """One for each kind of error that was never reported before."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank tells the others of its share."""

    answers: Mapping[int, Sequence[Answer]]
    """By the problem's place among all."""
    votes: Mapping[int, float]
    timeouts: int
    errors: int
    tracebacks: tuple[str, ...]


class Evaluator:
    """Has an engine answer problems, and each verifier's workers judge its own.

    Args:
        collectors: by verifier; the same verifiers on every rank.
    """

    def __init__(self, config: Config, world: World, collectors: Mapping[str, Collector]) -> None:
        self._config, self._world, self._collectors = config, world, collectors
        self._seed = engine_seed(config.run.seed, 0, Purpose.EVALUATION)

    def answer(self, problems: Sequence[Problem], *, keep: int, of_all: int) -> Answered:
        """Answer every problem ``eval.samples`` times. Collective.

        Where the engine can be seeded, an answer is a function of ``run.seed``, its problem and its number: the same in
        every evaluation of a policy, and not drawn anew from one policy to the next.

        Args:
            problems: to be asked, the same on every rank.
            keep: of so many problems, from the first one on, the texts of the answers are kept.
            of_all: answers of the whole evaluation. Past the failures that ``reward.max_failures`` allows among those,
                the rest is left unscored: :meth:`check_failures` is then about to stop it.
        """
        samples, temperature = self._config.eval.samples, temperature_of(self._config)
        mine = range(self._world.rank, len(problems), self._world.size)
        places = {v: [i for i in mine if problems[i].verifier == v] for v in self._collectors}
        asked = {
            verifier: collector.ask(
                [problems[i].prompt for i in places[verifier]],
                samples=samples,
                temperature=temperature,
                seed=self._seed,
            )
            for verifier, collector in self._collectors.items()
        }
        parts: list[_Part] = []
        for verifier, collector in self._collectors.items():
            answers = collector.answers(asked[verifier], of_all=of_all)
            parts += self._world.gather(self._part(places[verifier], answers, verifier, keep))
        given = {i: answers for part in parts for i, answers in part.answers.items()}
        voted = {i: share for part in parts for i, share in part.votes.items()}
        order = range(len(problems))
        return Answered(
            answers=[given[i] for i in order],
            votes=np.array([voted[i] for i in order], np.float64),
            timeouts=sum(part.timeouts for part in parts),
            errors=sum(part.errors for part in parts),
            tracebacks=tuple(dict.fromkeys(text for part in parts for text in part.tracebacks)),
        )

    def check_failures(self, found: Sequence[Failures], of_all: int) -> None:
        """
        Raises:
            UserError: on every rank, if more than ``reward.max_failures`` of all answers could not be scored.
        """
        next(iter(self._collectors.values())).check_failures(found, of_all)

    def _part(self, places: Sequence[int], answers: Answers, verifier: str, keep: int) -> _Part:
        groups = {
            place: [
                _answer(completion, text, score)
                for completion, text, score in zip(completions, texts, scores, strict=True)
            ]
            for place, completions, texts, scores in zip(
                places, answers.completions, answers.texts, answers.scores, strict=True
            )
        }
        shares = self._vote(list(groups.values()), verifier)
        told = {
            place: group if place < keep else [_without_text(answer) for answer in group]
            for place, group in groups.items()
        }
        return _Part(told, dict(zip(groups, shares, strict=True)), answers.timeouts, answers.errors, answers.tracebacks)

    def _vote(self, groups: Sequence[Sequence[Answer]], verifier: str) -> list[float]:
        scored = [[answer for answer in group if answer.score is not None] for group in groups]
        right = [[bool(answer.score and answer.score.correct) for answer in group] for group in scored]

        def same(pairs: Sequence[Pair]) -> list[bool]:
            if verifier != MATH:  # of another function nobody knows what it makes of an answer without its text
                return [False] * len(pairs)
            items = [ScoreItem("", f"\\boxed{{{second}}}", first) for first, second in pairs]
            return [bool(score and score.correct) for score in self._collectors[verifier].workers.score(items).scores]

        shares = votes(
            [
                (sum(verdicts), [a.extracted for a, verdict in zip(group, verdicts, strict=True) if not verdict])
                for group, verdicts in zip(scored, right, strict=True)
            ],
            same,
        )
        return [share if group else float("nan") for share, group in zip(shares, scored, strict=True)]


def temperature_of(config: Config) -> float:
    """What held-out problems are answered at: several greedy answers would be one."""
    if config.eval.temperature is None:
        return config.rollout.temperature if config.eval.samples > 1 else 0.0
    return config.eval.temperature


def open_verifiers(
    config: Config, world: World, problems: Sequence[Problem], to_close: ExitStack, known: Mapping[str, RewardWorkers]
) -> dict[str, RewardWorkers]:
    """Workers of every verifier that the problems want, started where they are not ``known`` already. Collective."""
    reward = config.reward
    workers = {}
    for verifier in dict.fromkeys(problem.verifier for problem in problems):
        workers[verifier] = known.get(verifier) or to_close.enter_context(
            closing(
                RewardWorkers(
                    verifier, workers=reward.workers, timeout_s=reward.timeout_s, memory_mib=reward.memory_mib
                )
            )
        )
    for each in workers.values():
        world.together(each.wait_ready)
    return workers


def _answer(completion: Completion, text: str, score: Score | None) -> Answer:
    extracted = score.answer if score is not None and score.answer is not None else None
    if extracted is None:
        stated = stated_answer(text)
        extracted = said_answer(text) if stated is None else stated
    return Answer(text, extracted, score, len(completion.token_ids), completion.finish_reason)


def _without_text(answer: Answer) -> Answer:
    return Answer(None, answer.extracted, answer.score, answer.tokens, answer.finish_reason)
