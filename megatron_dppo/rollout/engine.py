"""What a generating engine does for the trainer. ``local`` is one; servers behind HTTP are the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_dppo.rl.types import Completion, Prompt

Bucket = Mapping[str, torch.Tensor]
"""Some of the policy's tensors, by their Hugging Face names, whole (unsharded)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Log-probabilities are always those of the temperature-scaled distribution."""

    samples: int
    """Completions per prompt."""
    max_tokens: int
    temperature: float
    """0 is greedy; log-probabilities are then those at temperature 1."""
    stop_token_ids: tuple[int, ...]
    seed: int
    """Sampling of a completion is a function of (seed, prompt id, sample), where the engine can be seeded."""


class RolloutEngine(Protocol):
    """Token ids in, token ids out; text is never tokenised again."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[tuple[Completion, ...]]:
        """One tuple of ``sampling.samples`` completions per prompt, in the order of the prompts."""
        ...

    def pause(self) -> None:
        """Stop generating and release what stands in the way of an update of the weights."""
        ...

    def resume(self) -> None:
        """Generate again, with the weights of the last update."""
        ...

    def update_weights(self, stream: Iterable[Bucket], version: int) -> None:
        """Take every bucket of the stream; tokens generated afterwards carry ``version``.

        The stream must be consumed to its end, since producing it is collective.
        """
        ...

    def health(self) -> str | None:
        """None if the engine can generate, else what is wrong with it."""
        ...
