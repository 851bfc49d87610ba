"""Prompts that servers are at work on, and their completions so far."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.conversation import merge_parts
from megatron_dppo.rollout.engine import Completions, GroupCallback, PartialRollout, Sampling
from megatron_dppo.rollout.servers.client import ServerClient
from megatron_dppo.rollout.tree import Entropies, TreePath, list_leaves, make_root

POLL_INTERVAL_S = 0.05
"""How often groups that are complete are looked at, while others are waited for."""


@dataclass(slots=True, eq=False)
class PartialCompletion:
    """A completion of which some tokens are there."""

    prefix: TreePath
    """Start of the completion, which other completions share."""
    slot: int
    """Slot of the completion, among the prefix's slots."""
    parts: list[Completion] = field(default_factory=list)
    """Continuations from servers, in order."""
    entropies: list[Entropies] = field(default_factory=list)
    """Entropies of the parts, if requested."""
    server: ServerClient | None = None
    """Server of the last part, or before any part the server whose cache holds the prefix; None: no
    server."""
    ended: bool = False

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the prompt and of the response so far."""
        parts = (token for part in self.parts for token in part.token_ids.tolist())
        return [*self.prefix.token_ids.tolist(), *parts]

    @property
    def length(self) -> int:
        """Tokens of the response."""
        return self.prefix.length + sum(len(part.token_ids) for part in self.parts)

    @property
    def is_unstarted(self) -> bool:
        """Whether no token follows the prefix."""
        return self.length == self.prefix.length

    def make_path(self) -> TreePath:
        entropies = np.concatenate(self.entropies) if self.entropies else None
        return self.prefix.extend(self.slot, self.parts, entropies)


class RequestBatch:
    """Prompts under way. The main thread waits for it, and reads how far it is."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        min_version: int,
        number: int,
        partial_rollouts: Sequence[PartialRollout] = (),
    ) -> None:
        self.prompts = prompts
        self.sampling = sampling
        self.number = number
        self.oldest = min_version
        """Version before which no token may be made from now on."""
        known = {(one.prompt, one.slot): one for one in partial_rollouts}
        self.samples = [self._make_samples(prompt, known) for prompt in prompts]
        """Completions that begin with each prompt."""
        self.broken_off = False
        """Whether no more of it is to be asked."""
        self.paths: list[list[TreePath]] = [[] for _ in prompts]
        """Those of each prompt that have ended."""
        self.finished = 0
        self.progressed = time.monotonic()
        """When the last prompt was finished, or a path of it."""
        self.error: Exception | None = None
        """Why it will never be finished."""
        self._over = threading.Event()
        self._complete: deque[int] = deque()
        """Prompts that are finished, and were not taken yet."""

    @property
    def is_done(self) -> bool:
        """Whether it is finished or has failed."""
        return self._over.is_set()

    @property
    def unfinished_count(self) -> int:
        return len(self.prompts) - self.finished

    def wait(self, seconds: float) -> None:
        """Until it is finished or has failed, for so long at most."""
        self._over.wait(seconds)

    def collect_partial(self) -> list[PartialRollout]:
        """How far it is, where nothing forks."""
        begun = [one for each in self.samples for one in each if not one.is_unstarted]
        return [
            PartialRollout(one.prefix.prompt.id, one.slot, merge_parts(one.parts), one.ended)
            for one in begun
        ]

    def _make_samples(
        self, prompt: Prompt, known: Mapping[tuple[int, int], PartialRollout]
    ) -> list[PartialCompletion]:
        """Completions that begin with a prompt. ``known`` has partial ones by prompt and slot."""
        root = make_root(prompt, self.sampling.samples, self.sampling.branches)
        so_far = [(slot, known.get((prompt.id, slot))) for slot in root.slots]
        return [
            PartialCompletion(root, slot, [one.completion], ended=one.ended)
            if one
            else PartialCompletion(root, slot)
            for slot, one in so_far
        ]

    def build_groups(self) -> Completions:
        return [list_leaves(paths, self.sampling.branches) for paths in self.paths]

    def take_complete(self) -> Iterator[tuple[int, tuple[Completion, ...]]]:
        """Groups that were completed since the last call, each with the place of its prompt."""
        while self._complete:
            index = self._complete.popleft()
            yield index, list_leaves(self.paths[index], self.sampling.branches)

    def finish_prompt(self, index: int) -> None:
        self.finished += 1
        self._complete.append(index)

    def add_ended(
        self, index: int, samples: Sequence[PartialCompletion]
    ) -> list[list[PartialCompletion]]:
        """Samples of a prompt have ended, or none of them.

        Returns:
            what is to be continued after their forks: for each fork, samples that have the same
            tokens so far.
        """
        continued = []
        for sample in samples:
            self.progressed = time.monotonic()
            self.paths[index].append(path := sample.make_path())
            for prefix in path.fork(self.sampling.branches):
                continued.append(
                    [PartialCompletion(prefix, slot, server=sample.server) for slot in prefix.slots]
                )
        return continued

    def finish(self, error: Exception | None) -> None:
        self.error = self.error or error
        self._over.set()


def group_by_prefix(samples: Sequence[PartialCompletion]) -> list[Sequence[PartialCompletion]]:
    """Return samples by request: one for all samples without tokens after the prefix, and one for
    each other sample."""
    fresh = [sample for sample in samples if sample.is_unstarted]
    return [
        *([fresh] if fresh else []),
        *([sample] for sample in samples if not sample.is_unstarted),
    ]


def wait(batch: RequestBatch, seconds: float, callback: GroupCallback | None) -> None:
    """Until a batch is over and nobody is at work on its groups, for so long at most."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0.0:
        batch.wait(left_s if callback is None else min(left_s, POLL_INTERVAL_S))
        busy = callback is not None and callback(batch.take_complete())
        if batch.is_done and not busy:
            return
        if batch.is_done:
            time.sleep(min(left_s, POLL_INTERVAL_S))
