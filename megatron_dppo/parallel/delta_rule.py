"""Gated delta networks in torch, for packs: flash-linear-attention's functions without a GPU.

A gated delta network keeps a matrix S for each head (arXiv:2412.06464). For each token:

- S decays by exp(g).
- The value under the token's key is corrected: S += β k (v − Sᵀ k)ᵀ.
- The token's query reads the output: o = Sᵀ q.

Every segment begins with a new chunk. The n-th chunks of all segments are one batch, so that a pack
takes the steps of its longest segment.
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
    """Scale vectors to unit length along ``dim``."""
    return vectors * torch.rsqrt(vectors.square().sum(dim, keepdim=True) + eps)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Convolve each channel over its segment's tokens up to the current token, and apply SiLU.

    Args:
        x: [1, T, channels].
        weight: [channels, taps]; the last tap belongs to the current token.
        bias: unsupported, must be None.
        cu_seqlens: [S + 1], starts of the segments.
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
    """Return the outputs of all tokens of a pack, and the states at the ends of its segments.

    Args:
        q: [1, T, heads, key size], of unit length.
        k: like q.
        v: [1, T, heads, value size].
        g: [1, T, heads], logarithms of the decay, at most 0.
        beta: [1, T, heads].
        initial_state: [S, heads, key size, value size], at the starts of the segments; None: zero.
        cu_seqlens: [S + 1], starts of the segments.
        chunk: tokens of a chunk.

    Returns:
        [1, T, heads, value size], and [S, heads, key size, value size].
    """
    tokens, order, batches, place = _split_chunks(
        tuple(cu_seqlens.diff().tolist()), chunk, q.device
    )
    # fp32 or higher, also for bf16 inputs.
    exact = torch.promote_types(q.dtype, torch.float32)

    def in_chunks(x: torch.Tensor) -> torch.Tensor:
        """Return [chunks, heads, chunk, …], with zeros past the end of a segment."""
        padded = functional.pad(x[0].to(exact).flatten(1), (0, 0, 0, 1)).index_select(0, tokens)
        return padded.view(-1, chunk, *x.shape[2:]).transpose(1, 2)

    heads, key = q.shape[2:]
    value = v.shape[-1]
    queries, keys, values, decay, rate = (in_chunks(x) for x in (q * key**-0.5, k, v, g, beta))
    total = decay.cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    # Decay from an earlier to a later token of a chunk; 0 from a later to an earlier token.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    writes = torch.cat([values, keys * total.exp().unsqueeze(-1)], dim=-1) * rate.unsqueeze(-1)
    # The corrections of a chunk's tokens (arXiv:2412.06464) solve one triangular system.
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
    # Segments are in descending order of chunks, so that ending segments drop out at ``state``'s
    # end.
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
    """Return outputs and states after one further token for each row.

    Args:
        q: [rows, heads, key size], of unit length.
        k: like q.
        v: [rows, heads, value size].
        g: [rows, heads], logarithms of the decay.
        beta: [rows, heads].
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
    lengths: tuple[int, ...],
    chunk: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
    """List the chunks of a pack: the first chunks of all segments, then the second chunks, and so
    on.

    Returns:
        - the token in each place of the chunks, T in places without a token;
        - the segments, in descending order of chunks;
        - the starts of the first, second, … chunks;
        - the place of each token.
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
