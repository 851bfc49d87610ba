"""Pending prompts at servers, with the parts of completions already received."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.engine import Completions, GroupCallback, PartialRollout, Sampling
from megatron_dppo.rollout.servers.client import ServerClient
from megatron_dppo.rollout.tree import Entropies, TreePath, list_leaves, make_root
from megatron_dppo.rollout.turns import merge_parts

POLL_INTERVAL_S = 0.05
"""Seconds between two checks for complete groups, while other groups are pending."""


@dataclass(slots=True, eq=False)
class PartialCompletion:
    """Completion with the tokens already received."""

    prefix: TreePath
    """Start of the completion, shared with further completions."""
    slot: int
    """Slot, among the prefix's slots."""
    parts: list[Completion] = field(default_factory=list)
    """Continuations from servers, in order."""
    entropies: list[Entropies] = field(default_factory=list)
    """Entropies of the parts, if requested."""
    server: ServerClient | None = None
    """Server of the last part, or without parts, the server whose cache holds the prefix."""
    ended: bool = False

    @property
    def token_ids(self) -> list[int]:
        """Tokens of prompt and response."""
        parts = (token for part in self.parts for token in part.token_ids.tolist())
        return [*self.prefix.token_ids.tolist(), *parts]

    @property
    def length(self) -> int:
        """Number of response tokens."""
        return self.prefix.length + sum(len(part.token_ids) for part in self.parts)

    @property
    def is_unstarted(self) -> bool:
        """Whether no token follows the prefix."""
        return self.length == self.prefix.length

    def make_path(self) -> TreePath:
        entropies = np.concatenate(self.entropies) if self.entropies else None
        return self.prefix.extend(self.slot, self.parts, entropies)


class RequestBatch:
    """Pending prompts of a rank. The main thread waits for the batch and reads the progress."""

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
        """Oldest version allowed to generate further tokens."""
        known = {(partial.prompt, partial.slot): partial for partial in partial_rollouts}
        self.samples = [self._make_samples(prompt, known) for prompt in prompts]
        """Completions of each prompt."""
        self.broken_off = False
        """Whether no further requests are allowed."""
        self.paths: list[list[TreePath]] = [[] for _ in prompts]
        """Ended paths of each prompt."""
        self.finished = 0
        self.progressed = time.monotonic()
        """Monotonic time of the last finished prompt or path."""
        self.error: Exception | None = None
        """Error that ends the batch."""
        self._over = threading.Event()
        self._complete: deque[int] = deque()
        """Indices of finished prompts for ``take_complete``."""

    @property
    def is_done(self) -> bool:
        """Whether the batch is finished or has failed."""
        return self._over.is_set()

    @property
    def unfinished_count(self) -> int:
        return len(self.prompts) - self.finished

    def wait(self, seconds: float) -> None:
        """Wait until the batch is done, at most ``seconds`` seconds."""
        self._over.wait(seconds)

    def collect_partial(self) -> list[PartialRollout]:
        """Return the partial rollouts of a batch without forks."""
        rollouts = []
        for sample in chain.from_iterable(self.samples):
            if not sample.is_unstarted:
                prompt = sample.prefix.prompt.id
                merged = merge_parts(sample.parts)
                rollouts.append(PartialRollout(prompt, sample.slot, merged, sample.ended))
        return rollouts

    def _make_samples(
        self,
        prompt: Prompt,
        known: Mapping[tuple[int, int], PartialRollout],
    ) -> list[PartialCompletion]:
        """Make a prompt's completions; ``known``: partial rollouts by prompt id and slot."""
        root = make_root(prompt, self.sampling.samples, self.sampling.branches)
        samples = []
        for slot in root.slots:
            sample = PartialCompletion(root, slot)
            if partial := known.get((prompt.id, slot)):
                sample.parts = [partial.completion]
                sample.ended = partial.ended
            samples.append(sample)
        return samples

    def build_groups(self) -> Completions:
        return [list_leaves(paths, self.sampling.branches) for paths in self.paths]

    def take_complete(self) -> Iterator[tuple[int, tuple[Completion, ...]]]:
        """Yield newly completed groups, each with the index of the prompt."""
        # The HTTP thread may append during the loop.
        while self._complete:
            index = self._complete.popleft()
            yield index, list_leaves(self.paths[index], self.sampling.branches)

    def finish_prompt(self, index: int) -> None:
        self.finished += 1
        self._complete.append(index)

    def add_ended(
        self,
        index: int,
        samples: Sequence[PartialCompletion],
    ) -> list[list[PartialCompletion]]:
        """Record ended samples of a prompt; ``samples`` may be empty.

        Returns:
            For each fork of the ended samples, the samples that continue, with the same tokens.
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
        # Keep the first error.
        self.error = self.error or error
        self._over.set()


def group_by_prefix(samples: Sequence[PartialCompletion]) -> list[Sequence[PartialCompletion]]:
    """Group samples by request: samples without tokens after the prefix share a request."""
    fresh = [sample for sample in samples if sample.is_unstarted]
    started = [[sample] for sample in samples if not sample.is_unstarted]
    return [fresh, *started] if fresh else [*started]


def wait(batch: RequestBatch, seconds: float, callback: GroupCallback | None) -> None:
    """Wait until batch and callback are done, at most ``seconds`` seconds."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0.0:
        batch.wait(left_s if callback is None else min(left_s, POLL_INTERVAL_S))
        busy = callback is not None and callback(batch.take_complete())
        if batch.is_done and not busy:
            return
        # A done batch no longer blocks in ``batch.wait``.
        if batch.is_done:
            time.sleep(min(left_s, POLL_INTERVAL_S))
