"""Kernels of attention over stretches: some queries, and the keys that they see, with the log-sum-exp of the softmax.

torch's own FlashAttention does it on a CPU, and on a GPU in half precision for all stretches at once. torch's public
function tells no log-sum-exp, so the operations behind it are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Round:
    """Stretches whose queries are all different.

        Round(queries=[3, 4, 5, 6], keys=[0, 1, 2], query_starts=[0, 4], key_starts=[0, 3], causal=False, ...)

    are four tokens that see a prompt of three. The lists stand for tensors on the policy's device.
    """

    queries: torch.Tensor | None
    """[q] int64, rows of the tokens that look, one stretch after the other; None: all of them, in order."""
    keys: torch.Tensor | None
    """[k] int64, rows of the tokens that are seen, likewise."""
    query_starts: torch.Tensor
    """[stretches + 1] int32, places in ``queries``."""
    key_starts: torch.Tensor
    """[stretches + 1] int32, places in ``keys``."""
    lengths: tuple[tuple[int, int], ...]
    """Numbers of queries and keys of each stretch."""
    causal: bool
    """Whether the n-th query of a stretch sees its first n keys only. It has as many queries as keys then."""

    def to(self, device: torch.device) -> Round:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = value.to(device, non_blocking=True)
        return Round(**values)

    def query_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.queries is None else tensor.index_select(0, self.queries)

    def key_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.keys is None else tensor.index_select(0, self.keys)


Read = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q queries [q, heads, head_dim], and k keys and k values [k, key-value heads, head_dim]; or their gradients."""


class Kernel(Protocol):
    """Attention of a round over its rows of ``read``."""

    def forward(self, read: Read, over: Round, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention outputs, [q, heads, head_dim], and log-sum-exps, [q, heads] fp32 (fp64 of fp64)."""
        ...

    def backward(
        self, gradient: torch.Tensor, read: Read, out: torch.Tensor, total: torch.Tensor, over: Round, scale: float
    ) -> Read:
        """The gradients of ``read``: the share of these stretches in that of a softmax over more keys, if ``out`` and
        ``total`` are what came of all of them."""
        ...


def kernel_for(query: torch.Tensor) -> Kernel:
    if query.device.type != "cuda":
        return OneByOne(FlashOnCpu())
    return FlashOnGpu() if query.dtype in (torch.bfloat16, torch.float16) else OneByOne(Written())


class FlashOnGpu:
    """FlashAttention 2, all stretches in one call."""

    def forward(self, read: Read, over: Round, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        out, total, *_ = aten._flash_attention_forward(*read, *self._where(over), 0.0, over.causal, False, scale=scale)
        return out, total.t()

    def backward(
        self, gradient: torch.Tensor, read: Read, out: torch.Tensor, total: torch.Tensor, over: Round, scale: float
    ) -> Read:
        undrawn = torch.empty(2, dtype=torch.uint64, device=out.device)  # the seed of a dropout that there is not
        gradients: Read = aten._flash_attention_backward(
            gradient.contiguous(),
            *read,
            out,
            total.t().contiguous(),
            *self._where(over),
            0.0,
            over.causal,
            undrawn,
            undrawn,
            scale=scale,
        )
        return gradients

    def _where(self, over: Round) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        queries, keys = zip(*over.lengths, strict=True)
        return over.query_starts, over.key_starts, max(queries), max(keys)


class OneByOne:
    """A kernel for one stretch, [1, heads, tokens, head_dim], called for each of them."""

    def __init__(self, kernel: FlashOnCpu | Written) -> None:
        self._kernel = kernel

    def forward(self, read: Read, over: Round, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            self._kernel.forward(*stretch, causal=over.causal, scale=scale)
            for stretch in self._each(over, read[:1], read[1:])
        ]
        outs, totals = zip(*parts, strict=True)
        return torch.cat([out[0].transpose(0, 1) for out in outs]), torch.cat([total[0].t() for total in totals])

    def backward(
        self, gradient: torch.Tensor, read: Read, out: torch.Tensor, total: torch.Tensor, over: Round, scale: float
    ) -> Read:
        parts = [
            self._kernel.backward(*stretch, causal=over.causal, scale=scale)
            for stretch in self._each(over, (gradient, read[0], out, total[..., None]), read[1:])
        ]
        queries, keys, values = (
            torch.cat([part[0].transpose(0, 1) for part in of_stretches]) for of_stretches in zip(*parts, strict=True)
        )
        return queries, keys, values

    def _each(
        self, over: Round, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        lengths = [list(of) for of in zip(*over.lengths, strict=True)]
        rows = [tensor.split(lengths[0]) for tensor in queries] + [tensor.split(lengths[1]) for tensor in keys]
        for stretch in zip(*rows, strict=True):
            yield tuple(part.transpose(0, 1)[None] for part in stretch)


class FlashOnCpu:
    def forward(self, *stretch: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        both: tuple[torch.Tensor, torch.Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
            *stretch, 0.0, causal, scale=scale
        )
        return both

    def backward(self, *stretch: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, ...]:
        gradient, query, out, total, key, value = stretch
        gradients: tuple[torch.Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, total[..., 0], 0.0, causal, scale=scale
        )
        return gradients


class Written:
    """Written out, with all products of queries and keys in memory: for dtypes that no fused kernel has on a GPU."""

    def forward(self, *stretch: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = stretch
        products = self._products(query, key, causal, scale)
        total = products.logsumexp(dim=-1)
        return torch.exp(products - total[..., None]) @ self._repeated(value, query), total

    def backward(self, *stretch: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, ...]:
        gradient, query, out, total, key, value = stretch
        weights = torch.exp(self._products(query, key, causal, scale) - total)
        of_weights = gradient @ self._repeated(value, query).transpose(-1, -2)
        of_products = weights * (of_weights - (gradient * out).sum(dim=-1, keepdim=True)) * scale
        repeated = of_products.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ gradient
        of_key, of_value = (part.unflatten(1, (key.shape[1], -1)).sum(dim=2) for part in repeated)
        return of_products @ self._repeated(key, query), of_key, of_value

    def _products(self, query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
        products = query @ self._repeated(key, query).transpose(-1, -2) * scale
        if not causal:
            return products
        later = torch.ones(products.shape[-2:], dtype=torch.bool, device=products.device).triu(1)
        return products.masked_fill(later, float("-inf"))

    def _repeated(self, of_keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """For each head that shares a key-value head."""
        return of_keys.repeat_interleave(query.shape[1] // of_keys.shape[1], dim=1)
