"""The key-value cache of the local engine: storage made once, rows that come and go, a prompt's keys copied for each of
its samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Departure:
    """Rows leave a batch: the last of those that stay move into the places of those that go.

    Only as many rows are copied as leave, so that it pays at once, even for a single row.
    """

    vacant: torch.Tensor
    """[moves], places below ``remaining`` whose rows leave."""
    movers: torch.Tensor
    """[moves], places from ``remaining`` on whose rows stay."""
    remaining: int

    @classmethod
    def of(cls, leaves: torch.Tensor) -> Departure:
        """The departure of the rows where ``leaves`` ([rows], bool) is true."""
        remaining = leaves.shape[0] - int(leaves.sum())
        vacant = leaves[:remaining].nonzero()[:, 0]
        return cls(vacant, (~leaves[remaining:]).nonzero()[:, 0] + remaining, remaining)

    def apply(self, rows: torch.Tensor) -> None:
        """Move rows of ``rows`` ([rows, …], overwritten), of which the first ``remaining`` are left."""
        if len(self.vacant):
            rows[self.vacant] = rows[self.movers]


class RolloutCache:
    """Keys and values that a batch's rows have read, from position 0 of each row.

    Args:
        layers: of the model.
        rows: most rows at a time.
        heads: of keys and values.
        capacity: positions of a row.
        size: of a head.
        like: a tensor of the device and type of keys and values.
    """

    def __init__(self, layers: int, rows: int, heads: int, capacity: int, size: int, *, like: torch.Tensor) -> None:
        # Zeros: what a row has not read is masked, and a mask does not hide what is no number.
        self._stored = like.new_zeros(layers, 2, rows, heads, capacity, size)

    def layer(self, index: int, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer for ``rows`` rows from ``first`` on: views, [rows, heads, capacity, size]."""
        keys, values = self._stored[index, :, first : first + rows]
        return keys, values

    def copy(self, sources: torch.Tensor, first: int, width: int) -> None:
        """Let the rows from ``first`` on begin with the first ``width`` positions of the rows ``sources`` ([rows])."""
        span = slice(first, first + len(sources))
        self._stored[:, :, span, :, :width] = self._stored[:, :, sources, :, :width]

    def depart(self, departure: Departure, width: int) -> None:
        """Let rows leave, of which none has read more than ``width`` positions."""
        if len(departure.vacant):
            moved = self._stored[:, :, departure.movers, :, :width]
            self._stored[:, :, departure.vacant, :, :width] = moved
