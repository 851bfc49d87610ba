"""Completions of several sequences, from agents that compact a context or have separate contexts.

A completion has one reward, one advantage for all tokens (or one per role) and one draw for all its
sequences. Arrays concatenate the sequences, and ``starts`` has the starts after the first. Each
further sequence begins with its whole context, which was input to the policy, and does not attend
to earlier sequences:

    p p a a    prompt of two tokens p, completion  a a | c c c b  with ``starts`` (2,)
    c c c b    the policy sampled three of the six tokens: a, a and b; L = 3

- The loss is as for one sequence: c and Z use the sampled tokens L of the whole completion. A
  completion that is split, with the first sequence repeated as the second's context, therefore has
  the same gradient as the unsplit completion.
- The cost in pruning rules is higher: the tokens of all sequences.
- The first sequence is empty if no turn follows the prompt, as with an agent that writes a context
  of its own: ``starts`` then begins with 0, and the first sequence has no training sample.
- In a plan, every sequence is a training sample, in any pack with room. The first token of a
  further sequence replaces the prompt, and the rest of the context is part of the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.types import Completion, Ints, Prompt


def split_sequences(completion: Completion) -> list[slice]:
    """Return the slice of each sequence in a completion's tokens, without the prompt."""
    ends = (*completion.starts, len(completion.token_ids))
    return list(map(slice, (0, *completion.starts), ends))


def split_prompt_and_response(
    prompt: NDArray[np.int32],
    completion: Completion,
    number: int,
) -> tuple[NDArray[np.int32], slice]:
    """Return the prompt tokens of a sequence, and the slice of the completion that follows."""
    span = split_sequences(completion)[number]
    if number == 0:
        return prompt, span
    response = span.start + 1
    return completion.token_ids[span.start : response], slice(response, span.stop)


def strip_contexts(completion: Completion) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return tokens and loss mask for a verifier, without contexts of further sequences."""
    first, *further = split_sequences(completion)
    shown = [first]
    for span in further:
        # The context ends at the first sampled token.
        context = int(np.argmax(completion.loss_mask[span]))
        shown.append(slice(span.start + context, span.stop))
    token_ids = np.concatenate([completion.token_ids[span] for span in shown])
    loss_mask = np.concatenate([completion.loss_mask[span] for span in shown])
    return token_ids, loss_mask


def compute_longest_response(prompt: int, completion: Completion) -> int:
    """Return the largest excess of a sequence over ``prompt`` tokens, which the response limit
    bounds."""
    first, *further = split_sequences(completion)
    return max([first.stop, *(span.stop - span.start - prompt for span in further)])


def make_empty_lengths(completions: tuple[int, ...]) -> Ints:
    """Return ``further_lengths`` [Q, G, 0] for completions of one sequence."""
    return np.zeros((*completions, 0), np.int64)


def compute_further_lengths(groups: Sequence[Sequence[Completion]], samples: int) -> Ints:
    """Return ``further_lengths`` [Q, samples, S], as in StepMetadata."""
    most = max((len(completion.starts) for group in groups for completion in group), default=0)
    lengths = np.zeros((len(groups), samples, most), np.int64)
    for into, group in zip(lengths, groups, strict=True):
        # Not strict, because a group may have fewer than ``samples`` completions.
        for row, completion in zip(into, group, strict=False):
            spans = split_sequences(completion)[1:]
            row[: len(spans)] = [span.stop - span.start for span in spans]
    return lengths


def pad_to_longest(parts: Sequence[Ints]) -> list[Ints]:
    """Pad arrays [q, G, s] to the largest s."""
    most = max(part.shape[2] for part in parts)
    return [np.pad(part, ((0, 0), (0, 0), (0, most - part.shape[2]))) for part in parts]


def sort_sequences(lengths: Ints, group: Ints, completion: Ints) -> tuple[Ints, Ints]:
    """Sort the sequences of K completions by (group, sequence, completion), without empty ones.

    Args:
        lengths: [K, 1 + S], lengths of the first and of further sequences.
        group: [K].
        completion: [K].

    Returns:
        For each sequence: index of the completion in [0, K), and index of the sequence.
    """
    # First sequences of a group are adjacent, so that a pack can share the prompt.
    rows, sequence = np.nonzero(lengths)
    order = np.lexsort((completion[rows], sequence, group[rows]))
    return rows[order], sequence[order]


def find_sequence_error(prompt: int, completion: Completion, limit: int) -> str | None:
    """Describe an error in a completion of several sequences; None if valid."""
    if not completion.starts:
        return None
    bounds = (0, *completion.starts, len(completion.token_ids))
    if completion.starts[0] < 0 or any(end <= start for start, end in pairwise(bounds[1:])):
        return f"returned sequences that begin at {completion.starts} in {bounds[-1]} tokens"
    for number, span in enumerate(split_sequences(completion)):
        sampled = completion.loss_mask[span]
        if not sampled.any() and span.stop:
            return f"returned a sequence {number} none of whose tokens the policy sampled"
        if number and sampled[0]:
            return f"returned a sequence {number} that does not begin with token ids, its context"
    if (longest := compute_longest_response(prompt, completion)) > limit:
        return (
            f"returned a sequence {longest} tokens longer than the prompt, and the limit is {limit}"
        )
    return None


def check_sequences(
    config: Config,
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Completion]],
) -> None:
    """Check all completions of several sequences.

    Raises:
        UserError: a completion of several sequences is not valid, or a setting of the run supports
            one sequence only.
    """
    limit = config.rollout.max_response_tokens
    most = 1
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            error = find_sequence_error(len(prompt.token_ids), completion, limit)
            if error is not None:
                # The engine made the completion, because conversations were checked before.
                engine = config.rollout.engine_function
                problem = f"for prompt {prompt.id} it {error}"
                remedy = "Correct it: megatron_dppo/rl/sequences.py defines valid completions"
                raise UserError("rollout.engine_function", engine, problem, remedy)
            most = max(most, len(split_sequences(completion)))
    if most > 1:
        check_settings(config, most)


def check_settings(config: Config, num_sequences: int) -> None:
    """Check settings for completions of ``num_sequences`` sequences.

    Raises:
        UserError: a setting supports one sequence only.
    """
    loss = config.loss
    objective = resolve_objective(config.loss)
    problem = f"and a conversation has {num_sequences} sequences"
    if objective.ratio == "sequence" or objective.surrogate == "geometric":
        remedy = "Set a loss of tokens, such as grpo, or have the conversation return one sequence"
        raise UserError(
            "loss.name", loss.name, f"takes a ratio over a whole sequence, {problem}", remedy
        )
    if (level := objective.tis_level) != "token":
        problem = f"weighs tokens by the probability of a {level}, {problem}"
        raise UserError("loss.tis_level", level, problem, "Set loss.tis_level=token")
    if loss.replay_routing == "rollout":
        problem = (
            f"requires the experts of every token, {problem}, for which experts are not recorded"
        )
        raise UserError("loss.replay_routing", "rollout", problem, "Set loss.replay_routing=none")
