"""Load offline rollouts: another policy's completions, log-probabilities and rewards.

Each row of ``data.rollouts`` is a prompt with a group of completions::

    {"prompt": "2+3=", "completions": [
        {"token_ids": [9, 2], "logprobs": [-0.1, -0.2], "reward": 1.0},
        {"text": "6<|im_end|>", "logprobs": [-1.5, -0.1], "reward": 0.0}]}

- ``text`` is tokenised unchanged.
- ``logprobs`` has a value per token.
- ``loss_mask``, optional: false for tokens that the policy did not sample.
- ``correct``, optional: by default true for a reward of 1 or more.
- ``finish_reason``, optional: ``stop`` or ``length``; by default ``stop`` if the last token ends a
  response.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import Config
from megatron_dppo.data.prompts import PromptPool, load_offline_prompts
from megatron_dppo.data.rows import Row
from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.rl.numbers import as_logprobs, as_mask, as_number, as_truth, is_right
from megatron_dppo.rl.score import Score
from megatron_dppo.rl.types import Bools, Completion, Ints

OFFLINE = -1
"""Weight version of tokens from outside this run."""
LARGEST_REWARD = 1e9
"""Largest absolute reward, as for reward functions."""


@dataclass(frozen=True, slots=True)
class OfflineGroup:
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]


class _InvalidCompletionError(ValueError):
    """Predicate, to follow the completion's number, and remedy."""


def is_on_rank(rank: int, ranks: int, prompt_ids: Ints) -> Bools:
    """Return [n], True if a prompt's whole group is on the rank."""
    held: Bools = prompt_ids % ranks == rank
    return held


def load_offline(
    config: Config,
    tokenizer: Tokenizer,
    vocab_size: int,
    stops: Sequence[int],
    *,
    rank: int,
    ranks: int,
) -> tuple[PromptPool, dict[int, OfflineGroup]]:
    """Load the prompts of ``data.rollouts``, and the groups of a rank by prompt id.

    Args:
        config: settings: file, completions per prompt, maximum tokens of a completion.
        tokenizer: the policy's.
        vocab_size: vocabulary size of the policy.
        stops: tokens that end a response.

    Raises:
        UserError: an error of ``load_prompts``, or the first invalid row of this rank.
    """

    samples = config.rollout.samples_per_prompt
    limit = config.rollout.max_response_tokens

    def parse_group(row: Row) -> OfflineGroup:
        listed = row.values.get("completions")
        if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
            remedy = (
                'Give a list like [{"token_ids": [5, 2], "logprobs": [-0.7, -0.1], "reward": 1.0}]'
            )
            raise row.make_error("has no list of objects in column 'completions'", remedy)
        if len(listed) != samples:
            problem = f"has {len(listed)} completions, and rollout.samples_per_prompt = {samples}"
            raise row.make_error(
                problem,
                "Give every prompt as many, and set rollout.samples_per_prompt to their number",
            )
        made = [
            _parse_completion(row, i, each, tokenizer, limit, vocab_size, stops)
            for i, each in enumerate(listed, 1)
        ]
        completions = tuple(completion for completion, _ in made)
        scores = tuple(score for _, score in made)
        return OfflineGroup(completions, scores)

    # Every rank has all prompts, but parses only the rank's own groups.
    pool, rows = load_offline_prompts(config.data, tokenizer)
    mine = np.flatnonzero(is_on_rank(rank, ranks, np.arange(len(pool)))).tolist()
    return pool, {prompt: parse_group(rows[prompt]) for prompt in mine}


def _parse_completion(
    row: Row,
    number: int,
    fields: Mapping[str, Any],
    tokenizer: Tokenizer,
    limit: int,
    vocab_size: int,
    stops: Sequence[int],
) -> tuple[Completion, Score]:
    try:
        tokens = _parse_tokens(fields, tokenizer, vocab_size)
        if len(tokens) > limit:
            raise _InvalidCompletionError(
                f"has {len(tokens)} tokens, over rollout.max_response_tokens = {limit}",
                "Raise the limit",
            )
        sampled = np.ones(len(tokens), bool)
        if fields.get("loss_mask") is not None:
            sampled = _parse_mask(_parse_numbers(fields, "loss_mask", tokens))
        if not sampled.any():
            raise _InvalidCompletionError(
                "has a loss_mask without a token that the policy sampled", "Leave the row out"
            )
        logprobs = _parse_logprobs(_parse_numbers(fields, "logprobs", tokens), sampled)
        reason = fields.get("finish_reason") or ("stop" if tokens[-1] in stops else "length")
        if reason not in ("stop", "length"):
            raise _InvalidCompletionError(
                f"has the finish_reason {reason!r:.60}", "Write stop or length, or leave it out"
            )
        score = _parse_score(fields)
    except _InvalidCompletionError as error:
        raise row.make_error(
            f"has a completion {number} that {error.args[0]}", error.args[1]
        ) from error

    versions = np.full(len(tokens), OFFLINE, np.int32)
    end = cast(Literal["stop", "length"], reason)
    return Completion(np.array(tokens, np.int32), logprobs, sampled, versions, end), score


def _parse_tokens(fields: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    tokens = fields.get("token_ids")
    text = fields.get("text")
    if (tokens is None) == (text is None):
        raise _InvalidCompletionError(
            "requires exactly one of token_ids and text", "Give one of the two"
        )
    if tokens is None:
        if not isinstance(text, str):
            raise _InvalidCompletionError(
                f"has a {type(text).__name__} for its text", "Give a string"
            )
        # The text may contain special tokens, such as the end of turn, and is tokenised unchanged.
        tokens = tokenizer([text], add_special_tokens=False)["input_ids"][0]
    if not isinstance(tokens, list) or not tokens:
        raise _InvalidCompletionError(
            "has no tokens", "Give at least the token that ended it, or leave the row out"
        )
    # Exclude booleans and floats, because JSON's true equals 1.
    if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        problem = f"has token_ids that are none of the policy's {vocab_size}"
        raise _InvalidCompletionError(problem, "Give token ids of model.path's tokenizer")
    return tokens


def _parse_numbers(fields: Mapping[str, Any], key: str, tokens: Sequence[int]) -> list[Any]:
    values = fields.get(key)
    if not isinstance(values, list) or not all(
        isinstance(value, numbers.Real | Decimal) for value in values
    ):
        raise _InvalidCompletionError(
            f"has no list of numbers under {key!r}", "Give one for each token"
        )
    if len(values) != len(tokens):
        raise _InvalidCompletionError(
            f"has {len(values)} {key} for {len(tokens)} tokens", "Give one for each token"
        )
    return values


def _parse_mask(values: list[Any]) -> Bools:
    try:
        return as_mask(values)
    except ValueError as error:
        raise _InvalidCompletionError(
            f"has {error}", "Give true for each token that the policy sampled"
        ) from error


def _parse_logprobs(values: list[Any], sampled: Bools) -> NDArray[np.float32]:
    try:
        return as_logprobs(values, sampled)
    except ValueError as error:
        remedy = "Give natural logarithms of probabilities, at rollout.temperature"
        raise _InvalidCompletionError(f"has {error}", remedy) from error


def _parse_score(fields: Mapping[str, Any]) -> Score:
    reward = as_number(fields.get("reward"))
    correct = fields.get("correct")
    # The negated comparison refuses NaN, too.
    if reward is None or not abs(reward) <= LARGEST_REWARD:
        raise _InvalidCompletionError(
            f"has the reward {fields.get('reward')!r:.60}",
            f"Give a number within ±{LARGEST_REWARD:g}",
        )
    right = is_right(reward) if correct is None else as_truth(correct)
    if right is None:
        raise _InvalidCompletionError(
            f"has {correct!r:.60} under 'correct'", "Give true or false, or leave it out"
        )
    return Score(reward, right)
