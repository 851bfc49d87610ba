"""Interface of rollout engines: the local engine, and servers behind HTTP."""

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
"""Hugging Face name to whole (unsharded) tensor."""

Completions = list[tuple[Completion, ...]]
"""Tuple of completions of each prompt, in the order of the prompts."""


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """Completion of an interrupted prompt, partial or complete; never without a token."""

    prompt: int
    """Prompt id."""
    slot: int
    """Index of the completion for the prompt."""
    completion: Completion
    """At least one token."""
    ended: bool


GroupCallback = Callable[[Iterable[tuple[int, tuple[Completion, ...]]]], bool]
"""Group-complete callback: receives complete groups, each with the index of the prompt, while
further groups are pending; returns whether work on the groups remains."""

Pending = TypeVar("Pending")
"""Engine's own type."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of a request to the local engine or a server.

    Log-probabilities belong to the temperature-scaled distribution, over the kept ids if
    ``sampling_mask`` is set. Otherwise no caller reads log-probabilities of a truncated
    distribution.
    """

    samples: int
    """Completions per prompt."""
    max_tokens: int
    temperature: float
    """0: greedy, with log-probabilities at temperature 1."""
    stop_token_ids: tuple[int, ...]
    seed: int
    """(seed, prompt id, sample) determines a completion's sampling, if the engine supports
    seeds."""
    top_p: float | None = None
    """Least total probability of the likeliest tokens, for nucleus sampling; None: all
    tokens."""
    top_k: int | None = None
    """Number of the likeliest tokens; None: all tokens."""
    sampling_mask: bool = False
    """Whether completions have a :class:`SamplingMask`, with the tokens that ``top_k`` and
    ``top_p`` keep."""
    routing: RoutingShape | None = None
    """Shape of the reported routing; None: no routing."""
    branches: tuple[BranchConfig, ...] = ()
    """Forks, level by level: the ``samples`` are the leaves of a tree (see ``rollout/tree.py``).
    Empty: independent completions."""

    @property
    def needs_entropies(self) -> bool:
        """True if forks need the entropy of each token's distribution."""
        return any(branch.entropy is not None for branch in self.branches)

    @property
    def truncation(self) -> dict[str, float]:
        """Truncation of the distribution, under SGLang's and vLLM's names."""
        # Always send all three settings, because a server's own defaults apply otherwise.
        return {"top_p": self.top_p or 1.0, "top_k": self.top_k or -1, "min_p": 0.0}

    def derive_seed(self, *place: int) -> int:
        """Derive a 31-bit seed for a sample's indices: prompt id, completion number, and so on."""
        # Not ``hash``, because each process would salt the hash of a text differently.
        text = "/".join(map(str, (self.seed, *place)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


class WeightSource(Protocol):
    """Repeatable source of the actor's weights: ``weight_stream`` with a bound actor, or
    ``adapter_stream`` if servers receive only the adapter.

    Iteration up to the last bucket is collective over the ranks of a replica.
    """

    def __call__(self, *, to: Consumers, bucket_mib: int = 64) -> Iterator[Bucket]: ...


class RolloutEngine(Protocol[Pending]):
    """Generator of completions.

    - Input and output are token ids; text is never tokenised again.
    - Every rank has an engine, and all ranks call the same methods in the same order.
    - Any method may be collective, except ``health`` and ``close``.
    """

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Pending:
        """Request ``sampling.samples`` completions of each of this rank's prompts.

        ``prompts`` may be empty. An engine with servers returns at once, and generation overlaps
        with other work of the trainer.
        """
        ...

    def finish(self, pending: Pending, callback: GroupCallback | None = None) -> Completions:
        """Wait for pending rollouts. Collective: a failure on one rank fails all ranks.

        An engine that completes groups one by one calls ``callback`` in between, on this thread.

        - No group is passed twice, and some groups may never be passed.
        - ``callback`` must not raise, and is not collective.
        """
        ...

    def interrupt(self, pending: Sequence[Pending]) -> list[list[PartialRollout]] | None:
        """Interrupt all pending rollouts for a checkpoint. Collective.

        Returns:
            None if unsupported: the caller must finish the rollouts.
        """
        return None

    def resume_partial(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        partial_rollouts: Sequence[PartialRollout],
    ) -> Pending:
        """Resume partial rollouts of this or another engine, like ``begin``.

        An engine may restart all rollouts, but never only the unfinished rollouts.
        """
        # Restarting only unfinished rollouts would prefer short completions, because the long
        # completions are drawn twice.
        return self.begin(prompts, sampling)

    def pause(self) -> None:
        """Stop generating, and release resources needed by a weight update, or by training on the
        same GPUs. Idempotent. Collective."""
        ...

    def resume(self) -> None:
        """Generate again, with the weights of the last update. Collective."""
        ...

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Load the actor's weights; later tokens carry ``version``. Collective.

        The engine may keep ``source`` until the next update, to load the same weights into a
        returning server.
        """
        ...

    def health(self) -> str | None:
        """Return the problem of an engine unable to generate; None: the engine can generate."""
        ...

    def sample_each(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[str, Completions]:
        """Return completions of rank 0's prompts by server, the same on every rank.

        Used to compare each server with the actor. Collective.
        """
        ...

    def take_events(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return and clear recent ``rollout/…`` and ``perf/…`` metrics, the same on every rank, and
        messages for the log. Collective."""
        ...

    def close(self) -> None:
        """Stop all processes and requests. Idempotent; not collective."""
        ...
