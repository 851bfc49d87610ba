"""Completions of several sequences: of an agent that compacts its context, or of agents with
contexts of their own.

A completion has one reward, one advantage for all of its tokens (or one for each role) and one
draw: its sequences are trained on together, or not at all. Its arrays hold them one after the
other, and ``starts`` says where those after the first begin. Each of these begins with its whole
context, which the policy was given, and sees nothing before it:

    p p a a           a prompt of two tokens, and a completion  a a | c c c b  with ``starts`` (2,).
    The policy c c c b           has sampled three of its six tokens, and L = 3.

The loss is that of a completion of one sequence, over all sampled tokens: c and Z take L for the
whole completion. So a completion that is cut where its context goes on, such that the second
sequence repeats the first as its context, has the same gradient as before. Its cost, by which
pruning knows it, is more: the tokens of all of its sequences.

In a plan every sequence is a training sample, which goes into whichever pack it fits. The first
token of a further sequence stands in the place of a prompt, and the rest of its context in the
response.
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
    """The tokens of each sequence, of the first those after the prompt."""
    return list(
        map(slice, (0, *completion.starts), (*completion.starts, len(completion.token_ids)))
    )


def split_prompt_and_response(
    prompt: NDArray[np.int32], completion: Completion, number: int
) -> tuple[NDArray[np.int32], slice]:
    """A sequence as a prompt's tokens, and the completion's that follow them."""
    of = split_sequences(completion)[number]
    if number == 0:
        return prompt, of
    return completion.token_ids[of.start : of.start + 1], slice(of.start + 1, of.stop)


def strip_contexts(completion: Completion) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """All tokens but the contexts with which further sequences begin, which is what a verifier is
    shown, and their part of the loss mask."""
    first, *further = split_sequences(completion)
    shown = [
        first,
        *(slice(of.start + int(np.argmax(completion.loss_mask[of])), of.stop) for of in further),
    ]
    token_ids, loss_mask = (
        np.concatenate([of[s] for s in shown])
        for of in (completion.token_ids, completion.loss_mask)
    )
    return token_ids, loss_mask


def compute_longest_response(prompt: int, completion: Completion) -> int:
    """Length of the longest sequence beyond a prompt of ``prompt`` tokens, which a response's limit
    bounds."""
    first, *further = split_sequences(completion)
    return (
        max(first.stop, *(of.stop - of.start - prompt for of in further)) if further else first.stop
    )


def make_empty_lengths(completions: tuple[int, ...]) -> Ints:
    """The further sequences of completions of this shape that are one sequence each: none."""
    return np.zeros((*completions, 0), np.int64)


def compute_further_lengths(groups: Sequence[Sequence[Completion]], samples: int) -> Ints:
    """[Q, samples, S], as in StepMetadata."""
    most = max((len(completion.starts) for group in groups for completion in group), default=0)
    lengths = np.zeros((len(groups), samples, most), np.int64)
    for into, group in zip(lengths, groups, strict=True):
        for row, completion in zip(into, group, strict=False):
            row[: len(completion.starts)] = [
                of.stop - of.start for of in split_sequences(completion)[1:]
            ]
    return lengths


def pad_to_longest(parts: Sequence[Ints]) -> list[Ints]:
    """Arrays [q, G, s] with the S of the one that has most."""
    most = max(part.shape[2] for part in parts)
    return [np.pad(part, ((0, 0), (0, 0), (0, most - part.shape[2]))) for part in parts]


def sort_sequences(lengths: Ints, group: Ints, completion: Ints) -> tuple[Ints, Ints]:
    """Sort the sequences of K completions by (group, sequence, completion). Returns completion
    index and sequence index.

    The first ones of a group stand together, so that they can share their prompt.

    Args:
        lengths: [K, S], lengths of their further sequences.
        group, completion: [K], of each.
    """
    of, sequence = np.nonzero(np.column_stack([np.ones(len(lengths), np.int64), lengths]))
    order = np.lexsort((completion[of], sequence, group[of]))
    return of[order], sequence[order]


def find_sequence_error(prompt: int, completion: Completion, limit: int) -> str | None:
    """Describe an error in a completion of several sequences after ``prompt`` tokens; None if
    valid."""
    if not completion.starts:
        return None
    bounds = (0, *completion.starts, len(completion.token_ids))
    if any(end <= start for start, end in pairwise(bounds)):
        return f"returned sequences that begin at {completion.starts} in {bounds[-1]} tokens"
    for number, of in enumerate(split_sequences(completion)):
        sampled = completion.loss_mask[of]
        if not sampled.any():
            return f"returned a sequence {number} none of whose tokens the policy sampled"
        if number and sampled[0]:
            return f"returned a sequence {number} that does not begin with token ids, its context"
    if (longest := compute_longest_response(prompt, completion)) > limit:
        return (
            f"returned a sequence of {longest} tokens more than the prompt's, and {limit} may "
            "be more"
        )
    return None


def check_sequences(
    config: Config, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]
) -> None:
    """
    Raises:
        UserError: some are of several sequences, which are not what they have to be; or the run has
            a setting that knows one sequence.
    """
    several = 1
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            if problem := find_sequence_error(
                len(prompt.token_ids), completion, config.rollout.max_response_tokens
            ):
                made = config.rollout.engine_function  # conversations have been looked at
                remedy = (
                    "Mend the engine: megatron_dppo/rl/sequences.py says what such completions are"
                )
                raise UserError(
                    "rollout.engine_function", made, f"for prompt {prompt.id} it {problem}", remedy
                )
            several = max(several, len(split_sequences(completion)))
    if several > 1:
        check_settings(config, several)


def check_settings(config: Config, num_sequences: int) -> None:
    """
    Raises:
        UserError: a setting knows one sequence, and a completion has several.
    """
    loss = config.loss
    objective = resolve_objective(config.loss)
    problem = f"and a conversation came in {num_sequences} sequences"
    if objective.ratio == "sequence" or objective.surrogate == "geometric":
        remedy = "Set a loss of tokens, such as grpo, or have the conversation return one sequence"
        raise UserError(
            "loss.name", loss.name, f"takes a ratio over a whole sequence, {problem}", remedy
        )
    if objective.tis_level == "sequence":
        problem = f"weighs a whole sequence by its probability, {problem}"
        raise UserError("loss.tis_level", "sequence", problem, "Set loss.tis_level=token")
    if loss.replay_routing == "rollout":
        problem = (
            f"wants to know which experts made every token, {problem}, of which that is not kept"
        )
        raise UserError("loss.replay_routing", "rollout", problem, "Set loss.replay_routing=none")
