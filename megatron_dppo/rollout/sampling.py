"""Which token comes next: one uniform per (completion, position), through the inverse of the distribution function."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray


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
