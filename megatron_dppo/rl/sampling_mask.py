"""Sampling masks: the token ids that top-k and top-p keep at each sampled token.

With ``rollout.top_k`` the policy is the softmax over the kept ids of a token. The engine samples
from that distribution, and reports the kept ids. The trainer normalises over the same ids, so that
the ratio of both probabilities is exact. The kept ids are constants of the gradient, and old
log-probabilities and the reference of the KL have the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

MAX_KEPT = 128
"""Most kept ids of a token, twice the largest ``rollout.top_k``: servers also keep ids whose logits
equal the last of the top k."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """Kept ids of L tokens.

        SamplingMask(counts=[2, 0, 1], token_ids=[5, 9, 2])

    keeps 5 and 9 at the first token, and 2 at the third. The policy did not sample the second
    token. The fields are arrays, not lists.
    """

    counts: NDArray[np.int32]
    """[L], number of kept ids; 0: the policy did not sample the token."""
    token_ids: NDArray[np.int32]
    """[Σ counts], kept ids, token by token."""

    @classmethod
    def from_lists(cls, kept: Sequence[Sequence[int]]) -> SamplingMask:
        """Build a mask from the kept ids of each token."""
        counts = np.array([len(ids) for ids in kept], np.int32)
        return cls(counts, np.fromiter(chain.from_iterable(kept), np.int32))

    def select(self, tokens: slice | NDArray[np.int64]) -> SamplingMask:
        """Return the mask of some tokens, given as a slice or as indices."""
        counts = self.counts[tokens]
        starts = np.cumsum(self.counts) - self.counts
        shifts = starts[tokens] - (np.cumsum(counts) - counts)
        places = np.arange(counts.sum()) + np.repeat(shifts, counts)
        return SamplingMask(counts, self.token_ids[places])

    def pad(self, targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the kept ids of each token, [L, largest count], padded with ``targets`` [L].

        Raises:
            ValueError: a token has no kept id.
        """
        if not self.counts.all():
            raise ValueError("a token to train on has no sampling mask, and other tokens have one")
        width = int(self.counts.max(initial=1))
        padded = np.repeat(targets[:, None], width, axis=1)
        padded[np.arange(width) < self.counts[:, None]] = self.token_ids
        return padded


def join_masks(
    masks: Sequence[SamplingMask | None],
    lengths: Sequence[int],
) -> SamplingMask | None:
    """Concatenate masks of ``lengths`` tokens. None: tokens without kept ids; all None: None."""
    if all(mask is None for mask in masks):
        return None
    nothing = np.zeros(0, np.int32)
    known = []
    for mask, length in zip(masks, lengths, strict=True):
        known.append(mask or SamplingMask(np.zeros(length, np.int32), nothing))
    return SamplingMask(
        np.concatenate([mask.counts for mask in known]),
        np.concatenate([mask.token_ids for mask in known]),
    )


def find_mask_error(
    mask: SamplingMask | None,
    token_ids: NDArray[np.int32],
    loss_mask: NDArray[np.bool_],
) -> tuple[str, str] | None:
    """Describe an error in the mask of a completion, and the remedy; None if valid, or if no token
    was sampled.

    Args:
        token_ids: [L], tokens of the completion.
        loss_mask: [L], True for sampled tokens.
    """
    if not loss_mask.any():
        return None
    remedy = "Return Completion.sampling_mask for every sampled token, or remove this setting"
    if mask is None or len(mask.counts) != len(token_ids) or not mask.counts[loss_mask].all():
        return "returned a completion without them", remedy
    if (largest := int(mask.counts.max(initial=0))) > MAX_KEPT:
        problem = f"kept {largest} ids at one token, where {MAX_KEPT} are the most: equal logits"
        return problem, "Lower it"
    rows = np.repeat(np.arange(len(token_ids)), mask.counts)
    found = rows[mask.token_ids == token_ids[rows]]
    if not np.isin(np.flatnonzero(loss_mask), found).all():
        return "returned a sampled token outside its kept ids", remedy
    return None
