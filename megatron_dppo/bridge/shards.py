"""From Hugging Face's tensors to a rank's parameter and back, one entry of the mapping at a time. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from megatron_dppo.bridge.mapping import Entry, Piece, Split


class ReadSlice(Protocol):
    """Reads rows (axis 0) or columns (axis 1) ``start`` to ``stop`` of a Hugging Face tensor, and no more."""

    def __call__(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor: ...


def fill_parameter(entry: Entry, parameter: torch.Tensor, read: ReadSlice, tp_rank: int, tp: int) -> None:
    """Make ``parameter`` what rank ``tp_rank`` of ``tp`` holds, in its own dtype and on its own device.

    Args:
        parameter: of shape ``entry.shard_shape(tp)``; written in place.
    """
    for piece, part in _parts(entry, parameter, tp_rank, tp):
        if piece.name is None:
            part.zero_()
        else:
            part.copy_(read(piece.name, entry.axis, piece.start, piece.stop))


def fill_tensors(entry: Entry, shards: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """The way back: write what the tensor-parallel ranks hold of ``entry`` into whole Hugging Face tensors.

    Args:
        shards: the parameter of each rank, in the order of the ranks; for a replicated entry any one of them is enough.
        tensors: at least those of ``entry.tensors``, by name; written in place.
    """
    for tp_rank, shard in enumerate(shards):
        for piece, part in _parts(entry, shard, tp_rank, len(shards)):
            if piece.name is not None:
                tensors[piece.name].narrow(entry.axis, piece.start, piece.length).copy_(part)


def whole_tensors(entry: Entry, parameter: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The Hugging Face tensors of a parameter that is not split over ranks, by name.

    They are views of the parameter where a tensor lies in it in one piece and ``dtype`` is the parameter's own: all but
    queries, keys and values, which alternate.
    """
    sizes = entry.tensors
    tensors: dict[str, torch.Tensor] = {}
    for piece, part in _parts(entry, parameter, 0, 1):
        if piece.name is None:
            continue
        if part.shape == sizes[piece.name]:
            tensors[piece.name] = part.to(dtype)
            continue
        if piece.name not in tensors:
            tensors[piece.name] = parameter.new_empty(sizes[piece.name], dtype=dtype)
        tensors[piece.name].narrow(entry.axis, piece.start, piece.length).copy_(part)
    return tensors


def gathers(entry: Entry) -> bool:
    """Whether a rank has only a part of the entry, so that its tensors take an exchange with the other ranks."""
    return entry.row.split is not Split.REPLICATED


def _parts(entry: Entry, parameter: torch.Tensor, tp_rank: int, tp: int) -> Iterator[tuple[Piece, torch.Tensor]]:
    """The pieces of a rank's parameter, each with where it lies in the parameter."""
    offset = 0
    for piece in entry.pieces(tp_rank, tp):
        yield piece, parameter.narrow(entry.axis, offset, piece.length)
        offset += piece.length
