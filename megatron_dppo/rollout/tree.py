"""Trees of completions while an engine generates them: prefixes to continue, forks of paths, leaves
of a group.

A path is generated to its end, and its forks are found afterwards. The path is the first child of
each fork; further children continue the prefix before the fork. Whether a path forks depends only
on the tokens before the fork, so that each leaf has the distribution of a completion without a
tree.

The leaves below a branch have consecutive numbers. The *slot* of a path is the number of its first
leaf. All engines generate trees with these functions. A flat group is a tree without branches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config.rollout import BranchConfig
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.turns import merge_parts, truncate_completion

Branches = Sequence[BranchConfig]
Entropies = NDArray[np.floating]
"""[L], nats, at each token."""
NO_TOKENS = merge_parts([])


@dataclass(frozen=True, slots=True)
class TreePath:
    """A path from the root of a tree: a prefix to continue, or an ended path.

        TreePath(prompt, slots=(2, 4), completion=…, forks=(20,))

    is a prefix of 20 tokens, if forks have 3 and then 2 children. The path of the leaves 0 and 1
    has ended. The continuations of the prefix are the paths of the leaves 2 and 3, and 4 and 5.
    """

    prompt: Prompt
    slots: tuple[int, ...]
    """Slot of each continuation; of an ended path, its own slot alone."""
    completion: Completion = NO_TOKENS
    """All tokens after the prompt."""
    entropies: Entropies | None = None
    """None if no fork needs entropies."""
    forks: tuple[int, ...] = ()
    """Tokens of the response before each fork of the prefix."""
    limit: int | None = None
    """Most tokens of a continuation; None: up to the limit of a response."""

    @property
    def length(self) -> int:
        """Number of tokens of the completion."""
        return len(self.completion.token_ids)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Tokens of prompt and completion."""
        return np.concatenate([self.prompt.token_ids, self.completion.token_ids])

    def max_new_tokens(self, max_tokens: int) -> int:
        """Return the most tokens of a continuation, for responses of ``max_tokens``."""
        left = max_tokens - self.length
        return left if self.limit is None else min(left, self.limit)

    def extend(
        self,
        slot: int,
        parts: Iterable[Completion],
        entropies: Entropies | None,
    ) -> TreePath:
        """Return the path of an ended continuation, with its tokens and entropies in order."""
        if entropies is not None and self.entropies is not None:
            entropies = np.concatenate([self.entropies, entropies])
        return replace(
            self,
            slots=(slot,),
            completion=merge_parts([self.completion, *parts]),
            entropies=entropies,
        )

    def find_forks(self, branches: Branches) -> tuple[int, ...]:
        """Return the position of the fork at each level; ``length`` for levels not reached."""
        forks = list(self.forks)
        for branch in branches[len(forks) :]:
            # A branch has at least one token.
            first = forks[-1] + 1 if forks else 1
            if branch.at is not None:
                position = max(branch.at, first)
            else:
                assert branch.entropy is not None and self.entropies is not None, (
                    "a branch names either way to fork"
                )
                above = np.flatnonzero(self.entropies[first:] > branch.entropy)
                position = first + int(above[0]) if len(above) else self.length
            forks.append(min(position, self.length))
        return tuple(forks)

    def fork(self, branches: Branches) -> list[TreePath]:
        """Return the prefix at each new fork of an ended path, to continue as further children."""
        prefixes = []
        forks = self.find_forks(branches)
        for level in range(len(self.forks), len(branches)):
            position = forks[level]
            if position == self.length:
                break
            width = count_leaves(branches, level + 1)
            prefix = replace(
                self,
                slots=tuple(
                    self.slots[0] + child * width for child in range(1, branches[level].children)
                ),
                # The engine has read the whole prefix, because the path has tokens after the fork.
                completion=truncate_completion(
                    self.completion, position, len(self.prompt.token_ids) + position
                ),
                entropies=None if self.entropies is None else self.entropies[:position],
                forks=forks[: level + 1],
            )
            prefixes.append(prefix)
        return prefixes


def make_root(prompt: Prompt, samples: int, branches: Branches) -> TreePath:
    """Return the root of a tree with ``samples`` leaves."""
    return TreePath(prompt, tuple(range(0, samples, count_leaves(branches, 0))))


def count_leaves(branches: Branches, level: int) -> int:
    """Return the leaves below a branch after ``level`` forks."""
    return math.prod(branch.children for branch in branches[level:])


def list_leaves(paths: Iterable[TreePath], branches: Branches) -> tuple[Completion, ...]:
    """Return the leaves of a tree in order. A path that ends before a fork gives several equal
    leaves."""
    leaves: dict[int, Completion] = {}
    # Paths with more forks come later, and replace leaves of the path that they continue.
    for path in sorted(paths, key=lambda path: len(path.forks)):
        completion = path.completion
        slot = path.slots[0]
        if branches:
            ends = (*path.find_forks(branches), path.length)
            segments = np.repeat(np.arange(len(ends), dtype=np.int8), np.diff(ends, prepend=0))
            completion = replace(completion, segments=segments)
        leaves |= dict.fromkeys(
            range(slot, slot + count_leaves(branches, len(path.forks))), completion
        )
    return tuple(leaves[slot] for slot in sorted(leaves))


def count_unique_tokens(group: Sequence[Completion], branches: Branches) -> list[int]:
    """Count each completion's sampled tokens, without tokens shared with earlier completions."""
    counts = []
    for slot, leaf in enumerate(group):
        level = next(
            level for level in range(len(branches) + 1) if slot % count_leaves(branches, level) == 0
        )
        # The previous leaf shares the segments before this level.
        own = np.asarray(leaf.segments) >= level if level else leaf.loss_mask
        counts.append(int(np.count_nonzero(own)))
    return counts
