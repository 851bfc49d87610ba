"""The key-value cache of the local engine: storage made once, a prompt's keys stored for each of its samples, rows that
leave. Hugging Face's own dynamic cache copies all of itself at every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer


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

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` ([rows, …], overwritten) without those that left: a view of its first ``remaining`` rows."""
        if len(self.vacant):
            rows[self.vacant] = rows[self.movers]
        return rows[: self.remaining]


class RolloutLayer(DynamicLayer):
    """One layer's keys and values, [rows, heads, capacity, head size]; the first ``length`` positions are filled.

    The first update is the prefill of the prompts: it is stored ``samples`` times over.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, samples: int, capacity: int) -> None:
        super().__init__()
        self.samples, self.capacity, self.length = samples, capacity, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads, _, size = key_states.shape
        self.keys = key_states.new_empty(rows * self.samples, heads, self.capacity, size)
        self.values = value_states.new_empty(rows * self.samples, heads, self.capacity, size)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, self.length = self.length, self.length + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys[:, :, : self.length] = key_states.repeat_interleave(self.samples, dim=0)
            self.values[:, :, : self.length] = value_states.repeat_interleave(self.samples, dim=0)
            return key_states, value_states
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def depart(self, departure: Departure) -> None:
        departure.apply(self.keys[:, :, : self.length])
        departure.apply(self.values[:, :, : self.length])
        self.keys, self.values = self.keys[: departure.remaining], self.values[: departure.remaining]

    def get_seq_length(self) -> int:
        return self.length


class RolloutCache(Cache):
    """What Qwen3's forward writes keys and values into while a batch of completions is decoded.

    Args:
        layers: layers of the model.
        samples: completions per prompt; the batch grows by this factor after the prefill.
        capacity: positions of the longest row, prompt and completion.
    """

    def __init__(self, layers: int, samples: int, capacity: int) -> None:
        self._layers = [RolloutLayer(samples, capacity) for _ in range(layers)]
        super().__init__(layers=list(self._layers))

    def depart(self, departure: Departure) -> None:
        """Let rows leave, in every layer."""
        for layer in self._layers:
            layer.depart(departure)
