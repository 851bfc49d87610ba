"""Gated delta networks in torch, for packs: the functions of flash-linear-attention, which needs a
GPU.

A gated delta network keeps a matrix S for each head (arXiv:2412.06464). A token first lets S decay
by exp(g). It then corrects the value under its key: S += β k (v − Sᵀ k)ᵀ. Last it reads by its
query: o = Sᵀ q. The corrections of a chunk of tokens are the solution of one triangular system.
Every segment begins with a chunk of its own. The n-th chunks of all segments are one batch, so that
a pack takes as many steps as its longest segment has chunks.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn import functional

CHUNK = 32
"""Tokens of a chunk."""


def l2norm(vectors: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    """Vectors of unit length along ``dim``."""
    return vectors * torch.rsqrt(vectors.square().sum(dim, keepdim=True) + eps)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """A convolution of each channel over the tokens of its segment up to now, and SiLU.

    Args:
        x: [1, T, channels].
        weight: [channels, taps], of which the last is the token's own.
        bias: none is supported.
        cu_seqlens: [S + 1], where segments start.

    Returns:
        [1, T, channels], and nothing.
    """
    assert bias is None
    place = torch.arange(x.shape[1]) - cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    out = x * weight[:, -1]
    for back in range(1, weight.shape[1]):
        earlier = functional.pad(x[:, :-back], (0, 0, back, 0)).masked_fill(
            (place < back)[:, None], 0.0
        )
        out = out + earlier * weight[:, -1 - back]
    return functional.silu(out), None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor,
    chunk: int = CHUNK,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of all tokens of a pack, and the states at the ends of its segments. Computes in fp32
    at least.

    Args:
        q, k: [1, T, heads, key size], of unit length.
        v: [1, T, heads, value size].
        g: [1, T, heads], logarithms of the decay, at most 0.
        beta: [1, T, heads].
        initial_state: [S, heads, key size, value size], at the beginnings of the segments; None:
            zero.
        cu_seqlens: [S + 1], where segments start.
        chunk: tokens of a chunk.

    Returns:
        [1, T, heads, value size], and [S, heads, key size, value size].
    """
    tokens, order, batches, place = _split_chunks(
        tuple(cu_seqlens.diff().tolist()), chunk, q.device
    )
    exact = torch.promote_types(q.dtype, torch.float32)

    def in_chunks(
        x: torch.Tensor,
    ) -> torch.Tensor:  # [chunks, heads, chunk, …]; past the end of a segment, zeros
        padded = functional.pad(x[0].to(exact).flatten(1), (0, 0, 0, 1)).index_select(0, tokens)
        return padded.view(-1, chunk, *x.shape[2:]).transpose(1, 2)

    (heads, key) = q.shape[2:]
    value = v.shape[-1]
    queries, keys, values, decay, rate = (in_chunks(x) for x in (q * key**-0.5, k, v, g, beta))
    total = decay.cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    writes = torch.cat([values, keys * total.exp().unsqueeze(-1)], dim=-1) * rate.unsqueeze(-1)
    system = (keys * rate.unsqueeze(-1)) @ keys.transpose(-1, -2) * between
    solved = torch.linalg.solve_triangular(system, writes, upper=False, unitriangular=True)
    new_values, read_before = solved.split([value, key], dim=-1)
    attention = queries @ keys.transpose(-1, -2) * between
    queries = queries * total.exp().unsqueeze(-1)
    keys = (keys * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    kept = total[..., -1, None, None].exp()

    if initial_state is None:
        initial_state = q.new_zeros(len(order), heads, key, value, dtype=exact)
    state = initial_state.to(exact)[order]
    outputs = []
    ends = []
    for first, last in pairwise(batches):
        now = slice(first, last)
        ends.append(state[last - first :])
        state = state[: last - first]
        written = new_values[now] - read_before[now] @ state
        outputs.append(queries[now] @ state + attention[now] @ written)
        state = state * kept[now] + keys[now] @ written
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, place).to(q.dtype)
    return out[None], torch.cat([state, *reversed(ends)])[order.argsort()]


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and states of one further token for each row.

    Args:
        q, k: [rows, heads, key size], of unit length.
        v: [rows, heads, value size].
        g, beta: [rows, heads].
        state: [rows, heads, key size, value size].
    """
    queries, keys, values = (
        (x.to(state.dtype) * scale).unsqueeze(-2)
        for x, scale in ((q, q.shape[-1] ** -0.5), (k, 1), (v, 1))
    )
    state = state * g.exp()[..., None, None].to(state.dtype)
    written = (values - keys @ state) * beta[..., None, None].to(state.dtype)
    state = state + keys.transpose(-1, -2) * written
    return (queries @ state).squeeze(-2).to(q.dtype), state


@lru_cache(maxsize=64)
def _split_chunks(
    lengths: tuple[int, ...], chunk: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
    """Chunks of the segments of a pack of T tokens: all first ones, then all second ones.

    Returns:
        The token in each place of the chunks, T where there is none; the segments, those with most
        chunks first; where the first, second, … chunks start; and the place of each token.
    """
    counts = -(-np.array(lengths) // chunk)
    order = np.argsort(-counts, kind="stable")
    starts = np.cumsum((0, *lengths))
    numbers, ranks = (np.arange(counts.max())[:, None] < counts[order]).nonzero()
    segments = order[ranks]
    tokens = starts[segments, None] + numbers[:, None] * chunk + np.arange(chunk)
    held = tokens < starts[segments + 1, None]
    tokens = np.where(held, tokens, starts[-1]).reshape(-1)
    place = np.empty(starts[-1], np.int64)
    (held_at,) = held.reshape(-1).nonzero()
    place[tokens[held_at]] = held_at
    batches = [0, *np.cumsum(np.bincount(numbers)).tolist()]
    on_device = [torch.from_numpy(indices).to(device) for indices in (tokens, order, place)]
    return on_device[0], on_device[1], batches, on_device[2]
