"""Scoring of groups during rollout: a verifier does not wait for a step's longest completion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import RewardConfig
from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.workers import ON_THE_CLOCK, RewardWorkers
from megatron_dppo.rl.score import Score, collect_tracebacks, count_failures
from megatron_dppo.rl.sequences import strip_contexts
from megatron_dppo.rl.types import Completion, Group, Prompt
from megatron_dppo.rollout.engine import Completions


class GroupScoring:
    """Scoring of one rank's groups, in the order of arrival.

    Args:
        workers: reward workers, used exclusively until ``finish`` returns.
        prompts: P prompts.
        max_failures: failures before the remaining completions are left unscored.
    """

    def __init__(
        self,
        workers: RewardWorkers,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        max_failures: int,
    ) -> None:
        self._scoring = workers.begin(max_failures)
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._tags = frozenset(workers.thinking_tags)
        self._texts: dict[int, list[str]] = {}
        """Texts by index of the prompt, in the order of scoring."""
        self._failure: Exception | None = None

    def process_groups(self, groups: Iterable[tuple[int, tuple[Completion, ...]]]) -> bool:
        """Add complete groups, and continue the scoring without waiting; return whether work
        remains."""
        # ``finish`` raises failures, because all ranks must reach the same collective calls.
        if self._failure is not None:
            return False
        try:
            for place, group in groups:
                self._add(place, group)
            return self._scoring.step()
        except Exception as error:
            self._failure = error
            return False

    def finish(self, completions: Completions) -> list[Group]:
        """Score the remaining groups; return P groups with rewards.

        Args:
            completions: completions of P prompts, including the groups of ``process_groups``.

        Raises:
            UserError: see :meth:`RewardWorkers.score`.
        """
        if self._failure is not None:
            raise self._failure
        for place, group in enumerate(completions):
            if place not in self._texts:
                self._add(place, group)
        # Scores arrive in the order of ``_texts``.
        given = iter(self._scoring.finish())
        scores: dict[int, tuple[Score, ...]] = {}
        for place in self._texts:
            scores[place] = tuple(each.score or next(given) for each in completions[place])
        return [
            build_group(prompt, group, scores[place], self._texts[place])
            for place, (prompt, group) in enumerate(zip(self._prompts, completions, strict=True))
        ]

    def cancel(self) -> None:
        """Cancel the scoring."""
        self._scoring.cancel()

    def _decode(self, token_ids: Sequence[NDArray[np.int32]]) -> list[str]:
        """Decode texts without special tokens, except the thinking tags."""
        special = {
            token.content: id_
            for id_, token in self._tokenizer.added_tokens_decoder.items()
            if token.special
        }
        if not special.keys() & self._tags:
            return self._tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        # ``skip_special_tokens`` would also remove the tags.
        left_out = [special[content] for content in special.keys() - self._tags]
        return self._tokenizer.batch_decode([ids[~np.isin(ids, left_out)] for ids in token_ids])

    def _add(self, index: int, group: Sequence[Completion]) -> None:
        # Only the turns of the response are part of the text.
        shown = [strip_contexts(completion) for completion in group]
        texts = self._decode([token_ids for token_ids, _ in shown])
        self._texts[index] = texts
        policy = self._tokenizer.name_or_path
        items = []
        for text, (token_ids, loss_mask), completion in zip(texts, shown, group, strict=True):
            if completion.score is not None:
                continue
            made = token_ids.tolist(), loss_mask.tolist(), completion.finish_reason, policy
            items.append(ScoreItem.from_prompt(self._prompts[index], text, *made))
        self._scoring.add(items)


def build_group(
    prompt: Prompt,
    completions: tuple[Completion, ...],
    scores: tuple[Score, ...],
    texts: Sequence[str] = (),
) -> Group:
    """Build a group with the verifier's rewards."""
    return Group(
        prompt, completions, np.array([score.reward for score in scores]), scores, tuple(texts)
    )


def find_failed_scores(groups: Iterable[Group]) -> list[Score]:
    """Return the scores of all completions with a failed scoring."""
    return [score for group in groups for score in group.scores if score.failure]


def check_failures(reward: RewardConfig, failed: Sequence[Score], total: int) -> None:
    """Stop the run if the fraction of failed scores among ``total`` completions exceeds
    ``reward.max_failures``.

    Raises:
        UserError: if the fraction is exceeded, with the first traceback; on every rank if every
            rank passes the same ``failed``.
    """
    timeouts, errors = count_failures(failed)
    if timeouts + errors <= reward.max_failures * total:
        return
    first = next(iter(collect_tracebacks(failed)), "")
    limits = (
        f"{reward.timeout_s:g} s of processor time or {ON_THE_CLOCK * reward.timeout_s:g} s "
        "on the clock"
    )
    problem = (
        f"{timeouts + errors} of {total} completions could not be scored ({timeouts} took more "
        f"than {limits}, {errors} failed), more than reward.max_failures = {reward.max_failures:g} "
        "allows" + (f"; the first failure:\n{first}" if first else "")
    )
    remedy = "Correct the function, or raise reward.timeout_s or reward.max_failures"
    raise UserError("reward.function", reward.spec, problem, remedy)
