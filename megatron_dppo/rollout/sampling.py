"""Which token the local engine takes: one uniform number for each completion and position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.tree import Stem


def uniforms_of(stems: Sequence[Stem], sampling: Sampling, width: int) -> NDArray[np.float64]:
    """[rows, width], of the continuations of each stem in turn; 0 past their ends and for greedy decoding.

    A token's uniform is that of its leaf and its place in the response, also where its path began after a fork.
    """
    uniforms = np.zeros((sum(len(stem.slots) for stem in stems), width))
    if sampling.temperature == 0:
        return uniforms
    each = [(stem, slot) for stem in stems for slot in stem.slots]
    for row, (stem, slot) in zip(uniforms, each, strict=True):
        room = stem.room(sampling.max_tokens)
        row[:room] = completion_uniforms(sampling.seed, stem.prompt.id, slot, stem.length + room)[stem.length :]
    return uniforms


def completion_uniforms(seed: int, prompt_id: int, sample: int, count: int) -> NDArray[np.float64]:
    """Uniforms in [0, 1) for the first ``count`` positions of one completion.

    They are Philox's stream under a key hashed from the three numbers, so that a completion's luck depends neither on
    the batch it is decoded in nor on what was generated before. A longer row begins with the shorter one.

    Returns:
        [count]
    """
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(count)


def draw_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row.

    Args:
        logits: [rows, vocabulary]
        uniforms: [rows], fp64 in [0, 1); not read at temperature 0.
        temperature: 0 takes the likeliest token, and then gives log-probabilities at temperature 1.

    Returns:
        [rows] int64 tokens, and [rows] fp32 log-probabilities of them under the temperature-scaled distribution.
    """
    logits = logits.float()
    logprobs = torch.log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)
    if temperature > 0:
        # fp32 would lose the far tokens of a vocabulary of 150,000 in the rounding of the sum.
        cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        tokens = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
        # Out of range only where logits are not numbers, which the caller reports once the batch has ended.
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    else:
        tokens = logits.argmax(dim=-1, keepdim=True)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def entropies_of(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[rows] fp32, nats, of the distributions that :func:`draw_tokens` draws from; logits are [rows, vocabulary]."""
    logits = logits.float()
    return torch.special.entr(torch.softmax(logits / temperature if temperature > 0 else logits, dim=-1)).sum(dim=-1)
