"""Held-out problems: load prompts, generate answers, score answers, take majority votes.

Every rank requests and scores the answers to its own problems.
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
from megatron_dppo.data.prompts import load_prompts, make_prompts
from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.benchmarks import (
    BY_SOURCE,
    SETTING,
    EvalSource,
    list_sources,
    read_source_rows,
)
from megatron_dppo.evaluation.scores import (
    compute_mean,
    compute_pass_at_k,
    compute_problem_means,
    describe_correctness,
    list_powers,
)
from megatron_dppo.parallel.world import World
from megatron_dppo.rewards.functions import check_labels
from megatron_dppo.rewards.math.completion import (
    extract_marked_answer,
    extract_unmarked_answer,
    strip_thinking,
)
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.score import Score, collect_tracebacks
from megatron_dppo.rl.seeds import Purpose, derive_engine_seed
from megatron_dppo.rl.types import Completion, Floats, Group, Prompt
from megatron_dppo.rollout.collect import Collector
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.scoring import check_failures, find_failed_scores

MOST = 1 << 20
"""Problems per name with distinct ids."""
MOST_SOURCES = 50
"""Most data sources with accuracies; above, no source has one."""


@dataclass(frozen=True, slots=True)
class EvalProblem:
    name: str
    """Benchmark or file; "" for a single unnamed file."""
    number: int
    prompt: Prompt
    verifier: str
    """Reward function that judges the answers: a ``RewardConfig.spec``."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Scored completion."""

    text: str | None
    """Without special tokens; None if not requested."""
    extracted: str
    """Stated answer; empty without one."""
    score: Score | None
    """None if scoring failed."""
    tokens: int
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class EvalAnswers:
    """Answers to P problems, k each, in the order of the problems."""

    answers: Sequence[Sequence[Answer]]
    """[P][k]"""
    votes: Floats
    """[P], by ``compute_majority_vote``; NaN without scores."""
    failed: Sequence[Score]
    """Failed scores."""


def load_problems(config: Config, tokenizer: Tokenizer, *, max_positions: int) -> list[EvalProblem]:
    """Return a run's held-out problems by source, at most ``eval.problems`` per source.

    Args:
        max_positions: the policy's positions, for prompt and answer together.

    Raises:
        UserError: see ``list_sources`` and ``load_prompts``; also if a benchmark's prompt leaves no
            room for the longest answer.
    """
    if config.eval.problems == 0:
        return []
    return [
        problem
        for source in list_sources(config)
        for problem in _load(source, config, tokenizer, max_positions)
    ]


def group_indices(names: Iterable[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        found.setdefault(name, []).append(index)
    return found


def _load(
    source: EvalSource,
    config: Config,
    tokenizer: Tokenizer,
    max_positions: int,
) -> list[EvalProblem]:
    verifier = source.benchmark.verifier if source.benchmark else config.reward.spec
    named = source.setting == SETTING
    if source.file in GENERATORS:
        data = replace(config.data, eval=None, train=source.file, rollouts=None)
        prompts: Sequence[Prompt] = load_prompts(data, tokenizer, split="eval")
    elif named:
        prompts = _load_named(source, config, tokenizer, max_positions)
    else:
        prompts = load_prompts(replace(config.data, eval=source.file), tokenizer, split="eval")
    prompts = prompts[: config.eval.problems]
    check_labels(verifier, [(prompt.place, prompt.label) for prompt in prompts])
    # Use distinct ids across benchmarks, because the engine's seed depends on the id.
    first = zlib.crc32(source.name.encode()) * MOST if named else 0
    return [
        EvalProblem(source.name, i, dataclasses.replace(p, id=first + i), verifier)
        for i, p in enumerate(prompts)
    ]


def _load_named(
    source: EvalSource,
    config: Config,
    tokenizer: Tokenizer,
    max_positions: int,
) -> Sequence[Prompt]:
    rows, data = read_source_rows(source, config.data)
    prompts = make_prompts(rows, data, tokenizer)
    most = config.max_answer_tokens
    # Refuse an overlong prompt, because a score covers all problems.
    for row, prompt in zip(rows, prompts, strict=True):
        if len(prompt.token_ids) > (room := max_positions - most):
            problem = (
                f"leaves {room} of the policy's {max_positions} positions for a prompt, and "
                f"{row.place} has one"
            )
            setting = (
                f"{'eval' if config.eval.max_response_tokens else 'rollout'}.max_response_tokens"
            )
            raise UserError(
                setting, most, f"{problem} of {len(prompt.token_ids)} tokens", "Lower it"
            )
    return prompts


class Evaluator:
    """Generates answers with an engine and scores each with the problem's verifier.

    ``collectors`` are by verifier, the same verifiers on every rank.
    """

    def __init__(self, config: Config, world: World, collectors: Mapping[str, Collector]) -> None:
        self._config = config
        self._world = world
        self._collectors = collectors
        self._seed = derive_engine_seed(config.run.seed, 0, Purpose.EVALUATION)

    def generate_answers(
        self,
        problems: Sequence[EvalProblem],
        *,
        keep: int,
        total: int,
    ) -> EvalAnswers:
        """Answer every problem ``eval.samples`` times. Collective; all ranks return all answers.

        With a seedable engine, an answer depends only on the policy, ``run.seed``, the problem and
        the sample's number.

        Args:
            problems: the same on every rank.
            keep: number of first problems whose answers keep the texts.
            total: answers of the whole evaluation. After more than ``reward.max_failures``
                failures, further answers are not scored, and ``check_failures`` stops the
                evaluation.
        """
        settings = self._config.eval
        mine = range(self._world.rank, len(problems), self._world.size)
        indices: dict[str, list[int]] = {}
        prompts: dict[str, list[Prompt]] = {}
        for verifier in self._collectors:
            indices[verifier] = [i for i in mine if problems[i].verifier == verifier]
            prompts[verifier] = [problems[i].prompt for i in indices[verifier]]
        # Submit to all collectors before waiting, so that the engine always has requests.
        pending = {
            verifier: collector.submit(
                prompts[verifier],
                Sampling(
                    samples=settings.samples,
                    max_tokens=self._config.max_answer_tokens,
                    temperature=resolve_temperature(self._config),
                    stop_token_ids=collector.stop_token_ids,
                    seed=self._seed,
                    top_p=settings.top_p,
                    top_k=settings.top_k,
                ),
            )
            for verifier, collector in self._collectors.items()
        }
        votes_by_index: dict[int, tuple[list[Answer], float]] = {}
        failed: list[Score] = []
        for verifier, collector in self._collectors.items():
            groups = collector.collect_groups(prompts[verifier], pending[verifier], total=total)
            share = self._build_answers(indices[verifier], groups, keep)
            for rank_votes, rank_failed in self._world.gather((share, find_failed_scores(groups))):
                votes_by_index |= rank_votes
                failed += rank_failed
        in_order = [votes_by_index[index] for index in range(len(problems))]
        votes = np.array([vote for _, vote in in_order], np.float64)
        return EvalAnswers([answers for answers, _ in in_order], votes, failed)

    def _build_answers(
        self,
        indices: Sequence[int],
        groups: Sequence[Group],
        keep: int,
    ) -> dict[int, tuple[list[Answer], float]]:
        """Return answers and votes by problem index."""
        tags = self._config.reward.thinking_tags
        found: dict[int, tuple[list[Answer], float]] = {}
        for index, group in zip(indices, groups, strict=True):
            scored = zip(group.completions, group.texts, group.scores, strict=True)
            answers = []
            for completion, text, score in scored:
                usable = None if score.failure else score
                answers.append(_build_answer(completion, text, usable, group.prompt.text, tags))
            majority = compute_majority_vote(answers)
            # Every rank receives all answers, so drop texts that are not requested.
            if index >= keep:
                answers = [dataclasses.replace(answer, text=None) for answer in answers]
            found[index] = answers, majority
        return found


def compute_majority_vote(answers: Sequence[Answer]) -> float:
    """Return the probability that the most frequent answer is right.

    All right answers count as one, the label; wrong answers are equal if the texts are. Tied
    answers share the probability. Empty wrong answers have no vote.

    Returns:
        1, 0, or 1/m for a right answer among m tied answers; NaN without scores.
    """
    scored = [(answer.extracted, answer.score.correct) for answer in answers if answer.score]
    if not scored:
        return math.nan
    right = sum(correct for _, correct in scored)
    wrong = Counter(text for text, correct in scored if text and not correct)
    if right == 0 or right < max(wrong.values(), default=0):
        return 0.0
    return 1.0 / (1 + sum(count == right for count in wrong.values()))


def resolve_temperature(config: Config) -> float:
    """Return the temperature for held-out problems."""
    # Sample several answers, because greedy answers would all be equal.
    if config.eval.temperature is None:
        return config.rollout.temperature if config.eval.samples > 1 else 0.0
    return config.eval.temperature


def start_verifiers(
    config: Config,
    world: World,
    problems: Sequence[EvalProblem],
    to_close: ExitStack,
    known: Mapping[str, RewardWorkers],
) -> dict[str, RewardWorkers]:
    """Return workers for all verifiers; start workers missing in ``known``. Collective."""
    workers = {}
    for verifier in dict.fromkeys(problem.verifier for problem in problems):
        workers[verifier] = known.get(verifier) or to_close.enter_context(
            closing(RewardWorkers.from_config(config.reward, verifier))
        )
    # Wait after all have started, because each takes seconds.
    for each in workers.values():
        world.run_on_all_ranks(each.wait_ready)
    return workers


def _build_answer(
    completion: Completion,
    text: str,
    score: Score | None,
    prompt: str,
    tags: Sequence[str],
) -> Answer:
    visible = strip_thinking(text, prompt, tags)
    # A verifier may report the answer; else read the answer from the text, for votes.
    extracted = score.answer if score is not None else None
    if extracted is None:
        extracted = extract_marked_answer(visible)
    if extracted is None:
        extracted = extract_unmarked_answer(visible)
    return Answer(text, extracted, score, len(completion.token_ids), completion.finish_reason)


@dataclass(frozen=True, slots=True)
class ExampleAnswer:
    """Answer for people to read."""

    prompt: str
    answer: str
    label: str
    correct: bool


@dataclass(frozen=True, slots=True)
class EvalScores:
    """Scores of held-out problems."""

    metrics: dict[str, float]
    """``eval/…``. With several files, accuracies have files' names; ``eval/accuracy`` is the
    mean."""
    shown: tuple[ExampleAnswer, ...]
    notes: tuple[str, ...]
    problems: Mapping[str, int] = field(default_factory=dict)
    """Answered problems by name, for intervals."""


def evaluate(evaluator: Evaluator, problems: Sequence[EvalProblem], config: Config) -> EvalScores:
    """Answer and score every problem. Collective. Accuracies and rewards are means over scores.

    Raises:
        UserError: on every rank, if scoring failed for more than ``reward.max_failures`` of the
            answers.
    """
    total = config.eval.samples * len(problems)
    found = evaluator.generate_answers(problems, keep=config.eval.show, total=total)
    check_failures(config.reward, found.failed, total)
    answers = [answer for group in found.answers for answer in group]
    scores = [answer.score for answer in answers if answer.score]
    rewards = [score.reward for score in scores]
    metrics = {
        "eval/unscored": float(len(answers) - len(rewards)),
        "eval/response_len/mean": sum(answer.tokens for answer in answers) / max(len(answers), 1),
    }
    accuracies = []
    indices = group_indices(problem.name for problem in problems)
    for name, mine in indices.items():
        figures = _compute_metrics(name, [found.answers[i] for i in mine], found.votes[mine])
        if name:
            metrics |= {f"eval/{key}": value for key, value in figures.items()}
        else:
            metrics |= {
                f"eval/accuracy{key}": value
                for key, value in figures.items()
                if key.startswith("-")
            }
        accuracies += [figures[name]] if name in figures else []
    # A single data source would repeat the accuracy of the whole.
    groups = group_indices(problem.prompt.data_source for problem in problems)
    groups.pop("", None)
    for name, mine in groups.items() if 1 < len(groups) <= MOST_SOURCES else ():
        correct = [
            _get_correctness(answer)
            for index in mine
            for answer in found.answers[index]
            if answer.score
        ]
        metrics |= {f"eval/{BY_SOURCE}{name}": sum(correct) / len(correct)} if correct else {}
    # Without scored answers the accuracy is undefined, not 0.
    if accuracies:
        metrics["eval/accuracy"] = sum(accuracies) / len(accuracies)
        metrics["eval/reward"] = sum(rewards) / len(rewards)
    shown = [
        ExampleAnswer(
            problem.prompt.text,
            group[0].text or "",
            problem.prompt.label_text,
            _get_correctness(group[0]) == 1.0,
        )
        for problem, group in zip(problems[: config.eval.show], found.answers, strict=False)
    ]
    counts = {name: len(places) for name, places in indices.items()}
    notes = (*collect_tracebacks(found.failed), *describe_correctness(scores))
    return EvalScores(metrics, tuple(shown), notes, counts)


def _compute_metrics(
    name: str,
    groups: Sequence[Sequence[Answer]],
    votes: Floats,
) -> dict[str, float]:
    """Return metrics under slime's names; undefined metrics are left out."""
    rows = []
    for group in groups:
        rows.append([_get_correctness(answer) for answer in group])
    correct = np.array(rows, np.float64)
    samples = correct.shape[1]
    truncated = [answer.finish_reason == "length" for group in groups for answer in group]
    figures = {
        name: compute_mean(compute_problem_means(correct)),
        f"{name}/truncated_ratio": sum(truncated) / len(truncated),
    }
    if samples > 1:
        figures |= {
            f"{name}-pass@{k}": compute_mean(compute_pass_at_k(correct, k))
            for k in list_powers(samples)
            if k > 1
        }
        figures[f"{name}-maj@{samples}"] = compute_mean(votes)
    # NaN is the only value that differs from itself.
    return {key: value for key, value in figures.items() if value == value}


def _get_correctness(answer: Answer) -> float:
    return float("nan") if answer.score is None else float(answer.score.correct)
