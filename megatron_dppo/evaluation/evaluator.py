"""Held-out problems: read as the policy is asked them, answered by an engine, scored, and put to the vote.

A training run's evaluations, ``evaluate``, and ``megatron-dppo eval`` do the same here. Every rank asks and scores its
own share.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megatron_dppo.config import Config, replace
from megatron_dppo.data.generators import GENERATORS
from megatron_dppo.data.prompts import load_prompts, prompts_of
from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.benchmarks import BY_SOURCE, SETTING, HeldOut, rows_of, sources
from megatron_dppo.evaluation.scores import mean, pass_at, per_problem_mean, powers_up_to
from megatron_dppo.parallel.world import World
from megatron_dppo.rewards.functions import check_labels
from megatron_dppo.rewards.math.completion import after_thoughts, said_answer, stated_answer
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.score import Score, tracebacks
from megatron_dppo.rl.seeds import Purpose, engine_seed
from megatron_dppo.rl.types import Completion, Floats, Group, Prompt
from megatron_dppo.rollout.collect import Collector
from megatron_dppo.rollout.conversation_functions import check_turns
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.scoring import check_failures, failed_scores

MOST = 1 << 20
"""Problems of one name that have ids of their own."""
MOST_SOURCES = 50
"""Data sources whose accuracies are metrics of their own; of more there are none."""


@dataclass(frozen=True, slots=True)
class EvalProblem:
    """One held-out problem."""

    name: str
    """The name of its benchmark or file; "" where a run has one file without a name."""
    number: int
    """Its number in that file, from 0."""
    prompt: Prompt
    verifier: str
    """The reward function that judges answers to it: a ``RewardConfig.spec``."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion of a problem, and its score."""

    text: str | None
    """Without special tokens; None where the caller did not ask for texts."""
    extracted: str
    """The answer that the text states; empty if it states none."""
    score: Score | None
    """None where scoring failed."""
    tokens: int
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class EvalAnswers:
    """Answers to P problems, k to each, in the problems' order."""

    answers: Sequence[Sequence[Answer]]
    """[P][k]"""
    votes: Floats
    """[P], ``vote``; not a number where no answer could be scored."""
    failed: Sequence[Score]
    """Scores of the answers that could not be scored."""


def held_out(config: Config, tokenizer: Tokenizer, *, max_positions: int) -> list[EvalProblem]:
    """All problems that a run holds out, source by source, at most ``eval.problems`` of each.

    Args:
        config: of the run.
        tokenizer: of the policy.
        max_positions: tokens that the policy was made for, prompt and answer together.

    Raises:
        UserError: as ``sources`` and ``load_prompts``; and for a benchmark's prompt that leaves an answer no room.
    """
    if config.eval.problems == 0:
        return []
    return [problem for source in sources(config) for problem in _load(source, config, tokenizer, max_positions)]


def indices_by(names: Iterable[str]) -> dict[str, list[int]]:
    """The indices at which each name stands, in the order of their first appearance."""
    found: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        found.setdefault(name, []).append(index)
    return found


def _load(source: HeldOut, config: Config, tokenizer: Tokenizer, max_positions: int) -> list[EvalProblem]:
    verifier = source.benchmark.verifier if source.benchmark else config.reward.spec
    named = source.setting == SETTING
    if source.file in GENERATORS:
        data = replace(config.data, eval=None, train=source.file, rollouts=None)
        prompts: Sequence[Prompt] = load_prompts(data, tokenizer, split="eval")
        check_turns(config, data, lambda: (prompt.extra for prompt in prompts))
    elif named:
        prompts = _named(source, config, tokenizer, max_positions)
    else:
        prompts = load_prompts(replace(config.data, eval=source.file), tokenizer, split="eval")
    prompts = prompts[: config.eval.problems]
    check_labels(verifier, [(prompt.place, prompt.label) for prompt in prompts])
    # The engine's seed depends on the id: problems of the same number in two benchmarks get different ones.
    first = zlib.crc32(source.name.encode()) * MOST if named else 0
    return [EvalProblem(source.name, i, dataclasses.replace(p, id=first + i), verifier) for i, p in enumerate(prompts)]


def _named(source: HeldOut, config: Config, tokenizer: Tokenizer, max_positions: int) -> Sequence[Prompt]:
    """Prompts of a file that ``eval.benchmarks`` names. None is ever left out: a score is of all problems."""
    rows, data = rows_of(source, config.data)
    prompts = prompts_of(rows, data, tokenizer)
    most = config.answer_tokens
    for row, prompt in zip(rows, prompts, strict=True):
        if len(prompt.token_ids) > (room := max_positions - most):
            problem = f"leaves {room} of the policy's {max_positions} positions for a prompt, and {row.place} has one"
            setting = f"{'eval' if config.eval.max_response_tokens else 'rollout'}.max_response_tokens"
            raise UserError(setting, most, f"{problem} of {len(prompt.token_ids)} tokens", "Lower it")
    return prompts


class Evaluator:
    """Has an engine answer problems, and each verifier's workers judge its own.

    Args:
        collectors: by verifier; the same verifiers on every rank.
    """

    def __init__(self, config: Config, world: World, collectors: Mapping[str, Collector]) -> None:
        self._config, self._world, self._collectors = config, world, collectors
        self._seed = engine_seed(config.run.seed, 0, Purpose.EVALUATION)

    def answer(self, problems: Sequence[EvalProblem], *, keep: int, of_all: int) -> EvalAnswers:
        """Answer every problem ``eval.samples`` times. Collective; every rank gets the same.

        Where the engine can be seeded, an answer depends on the policy, ``run.seed``, the problem and the sample's
        number, and on nothing else: every evaluation of a policy gives the same answers.

        Args:
            problems: to be asked, the same on every rank.
            keep: the number of problems, from the first one on, whose answers keep their texts.
            of_all: the number of answers of the whole evaluation. Once more of them failed than ``reward.max_failures``
                allows, the rest is left unscored, and ``check_failures`` will stop the evaluation.
        """
        settings = self._config.eval
        mine = range(self._world.rank, len(problems), self._world.size)
        indices = {v: [i for i in mine if problems[i].verifier == v] for v in self._collectors}
        prompts = {verifier: [problems[i].prompt for i in each] for verifier, each in indices.items()}
        asked = {
            verifier: collector.ask(
                prompts[verifier],
                Sampling(
                    samples=settings.samples,
                    max_tokens=self._config.answer_tokens,
                    temperature=temperature_of(self._config),
                    stop_token_ids=collector.stop_token_ids,
                    seed=self._seed,
                    top_p=settings.top_p,
                    top_k=settings.top_k,
                ),
            )
            for verifier, collector in self._collectors.items()
        }
        answered: dict[int, tuple[list[Answer], float]] = {}
        failed: list[Score] = []
        for verifier, collector in self._collectors.items():
            groups = collector.answers(prompts[verifier], asked[verifier], of_all=of_all)
            share = self._share(indices[verifier], groups, keep)
            for theirs, theirs_failed in self._world.gather((share, failed_scores(groups))):
                answered |= theirs
                failed += theirs_failed
        in_order = [answered[index] for index in range(len(problems))]
        votes = np.array([vote for _, vote in in_order], np.float64)
        return EvalAnswers([answers for answers, _ in in_order], votes, failed)

    def _share(
        self, indices: Sequence[int], groups: Sequence[Group], keep: int
    ) -> dict[int, tuple[list[Answer], float]]:
        """Answers to this rank's problems and their votes, by the problems' indices, for all ranks."""
        tags = self._config.reward.thinking_tags
        answers = [
            [
                _answer(completion, text, None if score.failure else score, group.prompt.text, tags)
                for completion, text, score in zip(group.completions, group.texts, group.scores, strict=True)
            ]
            for group in groups
        ]
        majority = [vote(of_problem) for of_problem in answers]
        for number, index in enumerate(indices):
            if index >= keep:
                answers[number] = [dataclasses.replace(answer, text=None) for answer in answers[number]]
        return dict(zip(indices, zip(answers, majority, strict=True), strict=True))


def vote(answers: Sequence[Answer]) -> float:
    """Return the chance that the most frequent answer is right. All right answers are one answer, the label's.

    Wrong answers are equal if their texts are. Equally frequent answers share the chance. Empty answers have no vote.

    Returns:
        1, 0, or 1/m if the right answer is one of m that are equally frequent; NaN if no answer could be scored.
    """
    scored = [(answer.extracted, answer.score.correct) for answer in answers if answer.score]
    if not scored:
        return math.nan
    right = sum(correct for _, correct in scored)
    wrong = Counter(text for text, correct in scored if text and not correct)
    if right == 0 or right < max(wrong.values(), default=0):
        return 0.0
    return 1.0 / (1 + sum(count == right for count in wrong.values()))


def temperature_of(config: Config) -> float:
    """The temperature for held-out problems. It is 0 for one sample only: several greedy answers are all the same."""
    if config.eval.temperature is None:
        return config.rollout.temperature if config.eval.samples > 1 else 0.0
    return config.eval.temperature


def open_verifiers(
    config: Config,
    world: World,
    problems: Sequence[EvalProblem],
    to_close: ExitStack,
    known: Mapping[str, RewardWorkers],
) -> dict[str, RewardWorkers]:
    """Workers of every verifier that the problems want, started where they are not ``known`` already. Collective."""
    workers = {
        verifier: known.get(verifier) or to_close.enter_context(closing(RewardWorkers.of(config.reward, verifier)))
        for verifier in dict.fromkeys(problem.verifier for problem in problems)
    }
    for each in workers.values():
        world.together(each.wait_ready)
    return workers


def _answer(completion: Completion, text: str, score: Score | None, prompt: str, tags: Sequence[str]) -> Answer:
    said = after_thoughts(text, prompt, tags)
    extracted = score.answer if score is not None else None
    if extracted is None:
        extracted = stated_answer(said)
    if extracted is None:
        extracted = said_answer(said)
    return Answer(text, extracted, score, len(completion.token_ids), completion.finish_reason)


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """One answer for people to read."""

    prompt: str
    answer: str
    label: str
    correct: bool


@dataclass(frozen=True, slots=True)
class HeldOutScores:
    """The scores of the answers to the held-out problems."""

    metrics: dict[str, float]
    """``eval/…``; of several files each one's accuracy under its name, and ``eval/accuracy`` is their mean."""
    shown: tuple[ShownAnswer, ...]
    notes: tuple[str, ...]
    """Notes for the log on how scoring failed."""
    problems: Mapping[str, int] = field(default_factory=dict)
    """How many were asked, by name. The interval of an accuracy depends on it."""


def evaluate(evaluator: Evaluator, problems: Sequence[EvalProblem], config: Config) -> HeldOutScores:
    """Answer every problem. Collective. Rates are over the answers that could be scored.

    Args:
        evaluator: of the run.
        problems: held out, those of one file after those of another.
        config: of the run: how often each is answered, and how many answers are returned for people to read.

    Raises:
        UserError: on every rank, if more than ``reward.max_failures`` of the answers could not be scored.
    """
    of_all = config.eval.samples * len(problems)
    found = evaluator.answer(problems, keep=config.eval.show, of_all=of_all)
    check_failures(config.reward, found.failed, of_all)
    answers = [answer for group in found.answers for answer in group]
    rewards = [answer.score.reward for answer in answers if answer.score]
    metrics = {
        "eval/unscored": float(len(answers) - len(rewards)),
        "eval/response_len/mean": sum(answer.tokens for answer in answers) / max(len(answers), 1),
    }
    accuracies = []
    indices = indices_by(problem.name for problem in problems)
    for name, mine in indices.items():
        figures = _figures(name, [found.answers[i] for i in mine], found.votes[mine])
        if name:
            metrics |= {f"eval/{key}": value for key, value in figures.items()}
        else:
            metrics |= {f"eval/accuracy{key}": value for key, value in figures.items() if key.startswith("-")}
        accuracies += [figures[name]] if name in figures else []
    groups = indices_by(problem.prompt.data_source for problem in problems)
    groups.pop("", None)
    for name, mine in groups.items() if 1 < len(groups) <= MOST_SOURCES else ():
        correct = [_is_right(answer) for index in mine for answer in found.answers[index] if answer.score]
        metrics |= {f"eval/{BY_SOURCE}{name}": sum(correct) / len(correct)} if correct else {}
    if accuracies:  # of nothing there is no accuracy, not even 0
        metrics["eval/accuracy"] = sum(accuracies) / len(accuracies)
        metrics["eval/reward"] = sum(rewards) / len(rewards)
    shown = [
        ShownAnswer(problem.prompt.text, group[0].text or "", problem.prompt.label_text, _is_right(group[0]) == 1.0)
        for problem, group in zip(problems[: config.eval.show], found.answers, strict=False)
    ]
    counts = {name: len(of) for name, of in indices.items()}
    return HeldOutScores(metrics, tuple(shown), tracebacks(found.failed), counts)


def _figures(name: str, groups: Sequence[Sequence[Answer]], votes: Floats) -> dict[str, float]:
    """The metrics of one file under slime's names; without those that have no value."""
    correct = np.array([[_is_right(answer) for answer in group] for group in groups], np.float64)
    samples = correct.shape[1]
    truncated = [answer.finish_reason == "length" for group in groups for answer in group]
    figures = {name: mean(per_problem_mean(correct)), f"{name}/truncated_ratio": sum(truncated) / len(truncated)}
    if samples > 1:
        figures |= {f"{name}-pass@{k}": mean(pass_at(correct, k)) for k in powers_up_to(samples) if k > 1}
        figures[f"{name}-maj@{samples}"] = mean(votes)
    return {key: value for key, value in figures.items() if value == value}


def _is_right(answer: Answer) -> float:
    """1 or 0, and not a number where scoring failed."""
    return float("nan") if answer.score is None else float(answer.score.correct)
