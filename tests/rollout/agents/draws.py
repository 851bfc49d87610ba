"""Turns of a completion, to compare with draws that were logged outside the endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_dppo.rl.sequences import split_sequences
from megatron_dppo.rl.types import Completion, Prompt


class Draw(NamedTuple):
    """A turn of the policy; equal to another draw if every bit is."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: bytes
    versions: tuple[int, ...]


def make_draw(context: list[int], turn: Completion) -> Draw:
    versions = tuple(turn.versions.tolist())
    return Draw(tuple(context), tuple(turn.token_ids.tolist()), turn.logprobs.tobytes(), versions)


def list_draws(prompt: Prompt, completion: Completion) -> Iterator[Draw]:
    """Yield the runs of trained tokens, each after the tokens before. Turns need context between."""
    for number, span in enumerate(split_sequences(completion)):
        before = [] if number else prompt.token_ids.tolist()
        mask = completion.loss_mask[span].tolist()
        tokens = completion.token_ids[span].tolist()
        place = 0
        while True in mask[place:]:
            first = mask.index(True, place)
            place = mask.index(False, first) if False in mask[first:] else len(mask)
            own = slice(span.start + first, span.start + place)
            yield Draw(
                (*before, *tokens[:first]),
                tuple(tokens[first:place]),
                completion.logprobs[own].tobytes(),
                tuple(completion.versions[own].tolist()),
            )
