"""Attention over a pack whose segments share prefixes: each segment sees its ancestors and itself.

A softmax over several blocks of keys is combined from each block's softmax, weighted by the blocks'
log-sum-exps (as within FlashAttention, arXiv:2205.14135). Hence no keys are gathered or repeated:

- A segment's own keys are one block, under a causal mask.
- An ancestor's keys are another block, seen whole by all its descendants.
- In the backward pass, a kernel over one block computes that block's part of the gradient from the
  output and log-sum-exp of the whole softmax.

Blocks with disjoint queries form a *round*: first the segments themselves, then all ancestors of
the first generation, then of the second, and so on.

The kernels are the operations below torch's public FlashAttention, which returns no log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_dppo.models.context import compute_local_positions, gather_segments
from megatron_dppo.rl.types import Ints, Pack

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class AttentionRound:
    """Blocks with disjoint queries.

        AttentionRound(queries=[3, 4, 5, 6], keys=[0, 1, 2], query_starts=[0, 4], key_starts=[0, 3],
        causal=False, ...)

    has four tokens that see a prompt of three tokens. (Lists replace tensors.)
    """

    queries: torch.Tensor | None
    """[q] int64, rows of the queries, block after block; None: all rows, in order."""
    keys: torch.Tensor | None
    """[k] int64, rows of the keys, block after block; None: all rows, in order."""
    query_starts: torch.Tensor
    """[blocks + 1] int32, places in ``queries``."""
    key_starts: torch.Tensor
    """[blocks + 1] int32, places in ``keys``."""
    lengths: tuple[tuple[int, int], ...]
    """Numbers of queries and keys of each block."""
    causal: bool
    """Whether the n-th query of a block sees only the first n keys; queries and keys are then equal
    in number."""

    def to(self, device: torch.device) -> AttentionRound:
        tensors: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **tensors)

    def query_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.queries is None else tensor.index_select(0, self.queries)

    def key_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.keys is None else tensor.index_select(0, self.keys)


Read = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [q, heads, head_dim], keys and values [k, key-value heads, head_dim]; or gradients."""


def select_kernel(query: torch.Tensor) -> FlashOnGpu | FlashOnCpu:
    return FlashOnGpu() if query.device.type == "cuda" else FlashOnCpu()


class FlashOnGpu:
    """FlashAttention 2, in half precision; one call takes all blocks of a round."""

    def forward(
        self,
        read: Read,
        attention_round: AttentionRound,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs, [q, heads, head_dim], and log-sum-exps, [q, heads] fp32 (fp64 for fp64
        inputs)."""
        out, total, *_ = aten._flash_attention_forward(
            *read,
            *self._get_extents(attention_round),
            0.0,
            attention_round.causal,
            False,
            scale=scale,
        )
        return out, total.t()

    def backward(
        self,
        gradient: torch.Tensor,
        read: Read,
        out: torch.Tensor,
        total: torch.Tensor,
        attention_round: AttentionRound,
        scale: float,
    ) -> Read:
        """Return the gradients of ``read``; if ``out`` and ``total`` belong to a softmax over more
        keys, this round's part of that softmax's gradient."""
        # Required, although dropout is 0.
        undrawn = torch.empty(2, dtype=torch.uint64, device=out.device)
        gradients: Read = aten._flash_attention_backward(
            gradient.contiguous(),
            *read,
            out,
            total.t().contiguous(),
            *self._get_extents(attention_round),
            0.0,
            attention_round.causal,
            undrawn,
            undrawn,
            scale=scale,
        )
        return gradients

    def _get_extents(
        self, attention_round: AttentionRound
    ) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        queries, keys = zip(*attention_round.lengths, strict=True)
        return attention_round.query_starts, attention_round.key_starts, max(queries), max(keys)


class FlashOnCpu:
    """torch's FlashAttention for CPUs; one call takes one block, [1, heads, tokens, head_dim]."""

    def forward(
        self,
        read: Read,
        attention_round: AttentionRound,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attend = partial(aten._scaled_dot_product_flash_attention_for_cpu, scale=scale)
        parts = [
            attend(*block, 0.0, attention_round.causal)
            for block in self._split_blocks(attention_round, read[:1], read[1:])
        ]
        outs = [out[0].transpose(0, 1) for out, *_ in parts]
        totals = [total[0].t() for _, total, *_ in parts]
        return torch.cat(outs), torch.cat(totals)

    def backward(
        self,
        gradient: torch.Tensor,
        read: Read,
        out: torch.Tensor,
        total: torch.Tensor,
        attention_round: AttentionRound,
        scale: float,
    ) -> Read:
        attend = partial(aten._scaled_dot_product_flash_attention_for_cpu_backward, scale=scale)
        parts = [
            attend(gradient, query, key, value, out, total[..., 0], 0.0, attention_round.causal)
            for gradient, query, out, total, key, value in self._split_blocks(
                attention_round, (gradient, read[0], out, total[..., None]), read[1:]
            )
        ]
        queries = torch.cat([query[0].transpose(0, 1) for query, _, _ in parts])
        keys = torch.cat([key[0].transpose(0, 1) for _, key, _ in parts])
        values = torch.cat([value[0].transpose(0, 1) for _, _, value in parts])
        return queries, keys, values

    def _split_blocks(
        self,
        attention_round: AttentionRound,
        queries: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        query_lengths = [count for count, _ in attention_round.lengths]
        key_lengths = [count for _, count in attention_round.lengths]
        rows = [tensor.split(query_lengths) for tensor in queries]
        rows += [tensor.split(key_lengths) for tensor in keys]
        for block in zip(*rows, strict=True):
            yield tuple(part.transpose(0, 1)[None] for part in block)


def _build_round(
    blocks: Sequence[tuple[Ints, Ints]],
    queries: int,
    keys: int,
    *,
    causal: bool,
) -> AttentionRound:
    """Build a round from each block's query rows and key rows.

    Args:
        queries: number of query rows of the rank.
        keys: number of key rows of the pack.
    """
    query_rows = [rows for rows, _ in blocks]
    key_rows = [rows for _, rows in blocks]
    lengths = [(len(block_queries), len(block_keys)) for block_queries, block_keys in blocks]
    starts = np.cumsum([(0, 0), *lengths], axis=0).astype(np.int32)
    return AttentionRound(
        _make_index(np.concatenate(query_rows), queries),
        _make_index(np.concatenate(key_rows), keys),
        torch.from_numpy(starts[:, 0].copy()),
        torch.from_numpy(starts[:, 1].copy()),
        tuple(lengths),
        causal,
    )


def _make_index(rows: Ints, count: int) -> torch.Tensor | None:
    return None if np.array_equal(rows, np.arange(count)) else torch.from_numpy(rows)


def build_rounds(pack: Pack, rank: int = 0, size: int = 1) -> list[AttentionRound]:
    """Build the rounds of a pack with a tree, on the host; the first is causal and has every query.

    A context-parallel rank has two chunks of every segment. Each chunk sees itself, and the earlier
    part of the segment like an ancestor.

    Args:
        pack: pack with shared prefixes (``parents`` is set).
        rank: see :func:`context.compute_local_positions`.
        size: number of context-parallel ranks.
    """
    assert pack.parents is not None and pack.tokens is not None
    cu_seqlens = pack.cu_seqlens.astype(np.int64)
    lengths = np.diff(cu_seqlens)
    held = compute_local_positions(lengths.tolist(), rank, size).numpy()
    # This rank's rows of segment s are mine[s] to mine[s + 1].
    mine = np.concatenate([[0], np.cumsum(lengths // size)])
    own: list[tuple[Ints, Ints]] = []
    earlier: list[tuple[Ints, Ints]] = []
    for start, first, end in zip(
        cu_seqlens.tolist(), mine.tolist(), mine[1:].tolist(), strict=False
    ):
        for chunk in np.split(np.arange(first, end), 1 if size == 1 else 2):
            own.append((chunk, held[chunk]))
            if len(chunk) and held[chunk[0]] > start:
                earlier.append((chunk, np.arange(start, held[chunk[0]])))
    # The descendants of a segment come directly after the segment, as one range of rows.
    last = _find_last_descendants(pack.parents)
    generations: dict[int, list[tuple[Ints, Ints]]] = {}
    depth = np.zeros(len(lengths), np.int64)
    for segment, parent in enumerate(pack.parents.tolist()):
        depth[segment] = depth[parent] + 1 if parent >= 0 else 0
        if last[segment] > segment:
            seen_by = np.arange(mine[segment + 1], mine[last[segment] + 1])
            keys = cu_seqlens[segment] + np.arange(pack.tokens[segment])
            generations.setdefault(int(depth[segment]), []).append((seen_by, keys))
    rest = [earlier] if earlier else []
    rest += [generations[generation] for generation in sorted(generations)]
    counts = len(held), int(cu_seqlens[-1])
    return [
        _build_round(own, *counts, causal=True),
        *(_build_round(blocks, *counts, causal=False) for blocks in rest),
    ]


def _find_last_descendants(parents: Ints) -> list[int]:
    """Return each segment's last descendant, or the segment itself, [S]."""
    last = list(range(len(parents)))
    for segment in range(len(parents) - 1, -1, -1):
        if (parent := int(parents[segment])) >= 0:
            last[parent] = max(last[parent], last[segment])
    return last


@dataclass
class SharedPrefixes(PackedSeqParams):
    """Megatron's description of a pack, with the tree of its segments for attention.

    Positions run along paths of the tree, so that :func:`compute_tree_attention` applies rotary
    positions instead of Megatron.
    """

    rounds: Sequence[AttentionRound] = ()
    lengths: Sequence[int] = ()
    """Tokens of each padded segment, on the host."""
    frequencies: torch.Tensor | None = None
    """[t, 1, 1, head_dim], rotary angles of this rank's tokens."""


def build_shared_prefixes(pack: Pack, device: torch.device, rank: int, size: int) -> SharedPrefixes:
    """Describe a pack for a context-parallel rank; the model adds rotary angles."""
    starts = torch.as_tensor(pack.cu_seqlens, dtype=torch.int32)
    return SharedPrefixes(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=pack.max_seqlen,
        max_seqlen_kv=pack.max_seqlen,
        rounds=[each.to(device) for each in build_rounds(pack, rank, size)],
        lengths=np.diff(pack.cu_seqlens).tolist(),
    )


def compute_tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: SharedPrefixes,
    scale: float | None,
    ranks: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Attend from this rank's t tokens over a pack of T tokens.

    Collective over context-parallel ranks, which gather keys and values.

    Args:
        query: [t, heads, head_dim], without rotary positions.
        key: [t, key-value heads, head_dim], without rotary positions.
        value: like ``key``.
        scale: factor of the products of queries and keys; None: 1/√head_dim.
        ranks: context-parallel ranks; None: a single rank.

    Returns:
        [t, heads, head_dim].
    """
    rotate = partial(_apply_rotary_pos_emb_bshd, freqs=packed.frequencies, rotary_interleaved=False)
    query = rotate(query[:, None])[:, 0]
    key = rotate(key[:, None])[:, 0]
    if ranks is not None and ranks.size() > 1:
        key, value = torch.cat(
            gather_segments(torch.cat((key, value), dim=-1), packed.lengths, ranks)
        ).chunk(2, dim=-1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = _TreeAttention.apply(query, key, value, packed.rounds, scale)
    return out


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rounds: Sequence[AttentionRound],
        scale: float,
    ) -> torch.Tensor:
        kernel = select_kernel(query)
        own = rounds[0]
        out, total = kernel.forward((query, own.key_rows(key), own.key_rows(value)), own, scale)
        # Accumulate in the type of the log-sum-exps, because several rounds add to a row.
        out = out.to(total.dtype)
        for each in rounds[1:]:
            read = each.query_rows(query), each.key_rows(key), each.key_rows(value)
            part, more = kernel.forward(read, each, scale)
            before = each.query_rows(total)
            rows = slice(None) if each.queries is None else each.queries
            # Reweight both outputs by the fractions of the combined softmax.
            after = torch.logaddexp(before, more)
            out[rows] = (
                each.query_rows(out) * (before - after).exp()[..., None]
                + part * (more - after).exp()[..., None]
            )
            total[rows] = after
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.rounds = rounds
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        kernel = select_kernel(query)
        sums = [torch.zeros_like(tensor, dtype=total.dtype) for tensor in (query, key, value)]
        for each in ctx.rounds:
            read = each.query_rows(query), each.key_rows(key), each.key_rows(value)
            softmax = each.query_rows(out), each.query_rows(total)
            parts = kernel.backward(each.query_rows(gradient), read, *softmax, each, ctx.scale)
            # A token may be a query or key of several blocks.
            for total_gradient, rows, part in zip(
                sums, (each.queries, each.keys, each.keys), parts, strict=True
            ):
                if rows is None:
                    total_gradient += part
                else:
                    total_gradient.index_add_(0, rows, part.to(total_gradient.dtype))
        return *(total_gradient.to(query.dtype) for total_gradient in sums), None, None
