"""Matrix products with fp32 results, whatever the type of the weights, and no fp32 copy of the weights.

A product of bf16 matrices comes out as bf16: a logit of 20 is then off by up to 0.06, and so is its log-probability.
CUDA's kernels can hand out the fp32 sums they compute anyway. Elsewhere a few rows of the weights at a time are
converted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK = 1 << 22
"""Weights converted at a time: 16 MiB of fp32."""


def logits(hidden: torch.Tensor, vocabulary: torch.Tensor, out: torch.Tensor) -> None:
    """``out = hidden · vocabularyᵀ``: [c, h] and [v, h], both of one type, to [c, v] fp32."""
    if _fused(vocabulary):
        torch.mm(hidden, vocabulary.t(), out_dtype=torch.float32, out=out)
        return
    wide = hidden.float()
    for rows, block in _converted(vocabulary):
        torch.mm(wide, block.t(), out=out[:, rows])


def slope_type(weight: torch.Tensor) -> torch.dtype:
    """The type in which the two products below take ``slope``."""
    return weight.dtype if _fused(weight) else torch.float32


def back_to_hidden(slope: torch.Tensor, vocabulary: torch.Tensor, out: torch.Tensor) -> None:
    """``out = slope · vocabulary``: [c, v] and [v, h] to [c, h] of the vocabulary's type."""
    if _fused(vocabulary):
        torch.mm(slope, vocabulary, out=out)
        return
    total = slope.new_zeros((slope.shape[0], vocabulary.shape[1]))
    for rows, block in _converted(vocabulary):
        total.addmm_(slope[:, rows], block)
    out.copy_(total)


def add_back_to_vocabulary(total: torch.Tensor, slope: torch.Tensor, hidden: torch.Tensor) -> None:
    """``total += slopeᵀ · hidden``: [c, v] and [c, h], added to [v, h] fp32 in place."""
    if _fused(hidden):
        torch.addmm(total, slope.t(), hidden, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(slope.t(), hidden.float())


def _fused(operand: torch.Tensor) -> bool:
    return operand.is_cuda and operand.dtype != torch.float32


def _converted(vocabulary: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows of [v, h] as fp32, in blocks; as they are, in one block, if they are fp32 already."""
    size = len(vocabulary) if vocabulary.dtype == torch.float32 else max(1, _BLOCK // vocabulary.shape[1])
    for start in range(0, len(vocabulary), size):
        rows = slice(start, min(start + size, len(vocabulary)))
        yield rows, vocabulary[rows].float()
