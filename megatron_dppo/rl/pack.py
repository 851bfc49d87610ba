"""From training samples to a pack: the arrays of one microbatch in THD form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.types import Bools, Floats, Ints, Pack, Routing, unknown_expert


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A kept completion with its tokens, on the rank that trains on it.

        TrainingSample(prompt_ids=[12, 4], response_ids=[6, 6, 2], engine_logprobs=[-0.7, 0, -0.1],
                       loss_mask=[True, False, True], ...)

    is a response of three tokens to a prompt of two, and two of the three are trained on. The lists stand for arrays.
    """

    prompt_ids: NDArray[np.int32]
    """[P], at least one."""
    response_ids: NDArray[np.int32]
    """[L]"""
    engine_logprobs: NDArray[np.float32]
    """[L], not read where ``loss_mask`` is False."""
    loss_mask: Bools
    """[L], True for the tokens that are trained on."""
    advantage: float
    scale: float
    version: int
    """The oldest weights that made any of the response."""
    routing: Routing | None = None
    """Of the first tokens of prompt and response, in the layers of this rank's stage."""
    forks: tuple[int, ...] = ()
    """After how many tokens of the response its path in a tree forks, ascending."""
    branch_advantage: tuple[float, ...] = ()
    """Of the tokens from each fork to the next, or to the end; ``advantage`` is that of those before."""

    def advantages(self, steps: Ints) -> Floats:
        """Of the response's tokens at ``steps``."""
        return np.array([self.advantage, *self.branch_advantage])[np.searchsorted(self.forks, steps, side="right")]


def build_pack(samples: Sequence[TrainingSample], capacity: int, pad_id: int, align: int) -> Pack:
    """Lay samples back to back, each padded to a multiple of ``align``; what is left is one last segment of padding.

    That segment repeats the pack's tokens, or counts up to ``pad_id`` in a pack without any. In a mixture equal tokens
    would all go to the same few experts, whose ranks might not have the memory for them.

    The token at position P − 1 + t of a segment predicts response token t, so that scoring needs no shifted labels. A
    token that the policy did not sample is read, and has no predictor. A pack without samples is all padding.

    Raises:
        ValueError: the samples need more than ``capacity`` tokens.
    """
    prompts = np.array([len(sample.prompt_ids) for sample in samples], dtype=np.int64)
    responses = np.array([len(sample.response_ids) for sample in samples], dtype=np.int64)
    segments = -(-(prompts + responses) // align) * align
    used = int(segments.sum())
    if used > capacity:
        raise ValueError(f"samples of {used} tokens do not fit into a pack of {capacity}")
    if used < capacity:
        segments = np.append(segments, capacity - used)
    starts = np.concatenate([[0], np.cumsum(segments)])

    token_ids = np.full(capacity, pad_id, dtype=np.int64)
    for sample, start in zip(samples, starts.tolist(), strict=False):
        tokens = np.concatenate([sample.prompt_ids, sample.response_ids])
        token_ids[start : start + len(tokens)] = tokens
    token_ids[used:] = np.resize(token_ids[:used] if used else np.arange(pad_id + 1), capacity - used)
    sampled = [np.flatnonzero(sample.loss_mask) for sample in samples]
    owner = np.repeat(np.arange(len(samples)), [len(steps) for steps in sampled])
    predictors = starts[owner] + prompts[owner] - 1 + np.concatenate([np.empty(0, np.int64), *sampled])
    return Pack(
        token_ids=token_ids,
        position_ids=np.arange(capacity) - np.repeat(starts[:-1], segments),
        cu_seqlens=starts.astype(np.int32),
        max_seqlen=int(segments.max(initial=0)),
        predictors=predictors,
        targets=token_ids[predictors + 1],
        sample=owner,
        advantage=np.concatenate(
            [np.zeros(0), *(sample.advantages(steps) for sample, steps in zip(samples, sampled, strict=True))]
        ),
        scale=np.array([sample.scale for sample in samples], dtype=np.float64)[owner],
        engine_logprobs=np.concatenate(
            [
                np.zeros(0, np.float32),
                *(sample.engine_logprobs[steps] for sample, steps in zip(samples, sampled, strict=True)),
            ]
        ),
        versions=np.array([sample.version for sample in samples], dtype=np.int64)[owner],
        routing=_routing([sample.routing for sample in samples], starts, capacity),
    )


def _routing(of_samples: Sequence[Routing | None], starts: Ints, capacity: int) -> Routing | None:
    """[T, layers, k], from that of each sample; None where no sample has any."""
    known = [(table, start) for table, start in zip(of_samples, starts.tolist(), strict=False) if table is not None]
    if not known:
        return None
    like = known[0][0]
    routing = np.full((capacity, *like.shape[1:]), unknown_expert(like.dtype), like.dtype)
    for table, start in known:
        routing[start : start + len(table)] = table
    return routing
