"""Interface of a generating engine. ``local`` is one; servers behind HTTP are the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.config.rollout import BranchConfig
from megatron_dppo.rl.types import Completion, Prompt, RoutingShape

Bucket = Mapping[str, torch.Tensor]
"""Some of the policy's tensors, by their Hugging Face names, whole (unsharded)."""

Completions = list[tuple[Completion, ...]]
"""One tuple of completions per prompt, in the order of the prompts."""


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """A completion that was there, if only in part, as its prompt was broken off. One without a
    token is left out."""

    prompt: int
    """Its prompt's id."""
    slot: int
    """Its number among those of its prompt."""
    completion: Completion
    """One token at least."""
    ended: bool


GroupCallback = Callable[[Iterable[tuple[int, tuple[Completion, ...]]]], bool]
"""Takes groups that are complete while others are waited for, each with the place of its prompt,
and says whether it is still at work on them."""

Pending = TypeVar("Pending")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of a request, to the local engine or a server.

    ``Sampling(samples=8, max_tokens=64, temperature=1.0, stop_token_ids=(0,), seed=7)`` requests
    eight completions of each prompt, each of at most 64 tokens. Log-probabilities are those of the
    temperature-scaled distribution, unless ``top_p`` or ``top_k`` is set: no caller then
    reads them.
    """

    samples: int
    """Completions per prompt."""
    max_tokens: int
    temperature: float
    """0 is greedy; log-probabilities are then those at temperature 1."""
    stop_token_ids: tuple[int, ...]
    seed: int
    """Sampling of a completion is a function of (seed, prompt id, sample), where the engine can be
    seeded."""
    top_p: float | None = None
    """Least probability of the likeliest tokens that are sampled from; None: all are, as in
    training."""
    top_k: int | None = None
    """Number of the likeliest tokens that are sampled from; None: all are, as in training."""
    routing: RoutingShape | None = None
    """Shape of the routing that the engine reports; None: no routing."""
    branches: tuple[BranchConfig, ...] = ()
    """Where completions fork, level by level: the ``samples`` are then the leaves of a tree (see
    ``rollout/tree.py``). Empty: each is sampled by itself."""

    @property
    def needs_entropies(self) -> bool:
        """Whether forks need the entropy of each token's distribution."""
        return any(branch.entropy is not None for branch in self.branches)

    @property
    def truncation(self) -> dict[str, float]:
        """Truncation of the distribution, as SGLang and vLLM read it. Without it, a server's own
        defaults apply."""
        return {"top_p": self.top_p or 1.0, "top_k": self.top_k or -1, "min_p": 0.0}

    def derive_seed(self, *place: int) -> int:
        """A seed of 31 bits for one place of what is sampled: a prompt's id, a number of a
        completion, and so on."""
        text = "/".join(map(str, (self.seed, *place)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


class WeightSource(Protocol):
    """The actor's weights, as often as they are asked for: ``weight_stream`` with the actor bound
    to it, or ``adapter_stream`` for servers that are sent no more.

    Calling it and taking every bucket to the end is collective over the ranks of a replica.
    """

    def __call__(self, *, to: Consumers, bucket_mib: int = 64) -> Iterator[Bucket]: ...


class RolloutEngine(Protocol[Pending]):
    """Token ids in, token ids out; text is never tokenised again.

    Every rank has an engine, and all ranks call the same methods in the same order. Any method may
    be collective.
    """

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Pending:
        """Ask for ``sampling.samples`` completions of each of this rank's prompts (there may be
        none).

        Where servers generate it returns at once, and they go on while the trainer does something
        else.
        """
        ...

    def finish(self, pending: Pending, callback: GroupCallback | None = None) -> Completions:
        """Wait for what was begun. Collective: if it fails on one rank, it fails on all of them.

        Args:
            pending: what ``begin`` returned.
            callback: called in between, on this thread, by an engine that completes groups one by
                one. No group comes twice, and some may not come at all. It may not raise, and meets
                no other rank.
        """
        ...

    def interrupt(self, pending: Sequence[Pending]) -> list[list[PartialRollout]] | None:
        """Break off all that was begun and is not finished, and say how far it is: what a
        checkpoint is to hold of it. None: it cannot be broken off, and is to be finished.
        Collective."""
        return None

    def resume_partial(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        partial_rollouts: Sequence[PartialRollout],
    ) -> Pending:
        """Resume partial rollouts of this or another engine, as ``begin``. Restarting all of them
        is right, too; never restart only the unfinished ones."""
        return self.begin(prompts, sampling)

    def pause(self) -> None:
        """Stop generating and release what stands in the way of an update of the weights, or of
        training on the same GPUs. Nothing happens the second time. Collective."""
        ...

    def resume(self) -> None:
        """Generate again, with the weights of the last update. Collective."""
        ...

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Take the actor's weights; tokens generated afterwards carry ``version``. Collective.

        ``source`` may be kept, to bring a server that comes back up to the same weights, until the
        next update.
        """
        ...

    def health(self) -> str | None:
        """None if the engine can generate, else what is wrong with it."""
        ...

    def sample_each(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[str, Completions]:
        """Completions of the leader's prompts from every server there is, by its name; the same on
        every rank.

        For comparing each with the actor. Collective.
        """
        ...

    def take_events(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """Events since the last call: ``rollout/…`` and ``perf/…`` metrics, the same on every rank,
        and messages for the log. Collective."""
        ...

    def close(self) -> None:
        """End what the engine has started. Not collective, and it may be called twice."""
        ...
