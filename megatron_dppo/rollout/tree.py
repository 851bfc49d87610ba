"""Trees of completions while they grow: where paths fork, what continues from there, and which leaves they stand for.

A path is generated to its end, and its forks are cut out of it afterwards: the path itself is the first child, and the
other children are continuations of its beginning. Whether a path forks somewhere depends on the tokens before and on
nothing after, so that this has the law of a tree whose branches stop there and are continued as often as they have
children. The leaves of a group are numbered so that those below a branch stand together. A continuation is known by
its *slot*, the first leaf that it stands for: a path keeps its slot, and child j of a fork has the first slot of the
fork's j-th part. Both engines
grow trees by these functions; flat groups are trees without branches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config.rollout import BranchConfig
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.conversation import beginning, joined

Branches = Sequence[BranchConfig]
Entropies = NDArray[np.floating]
"""[L], nats, of the distribution that each token was drawn from; at least of those after the path's last fork."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Common start of some completions of a prompt: its tokens, and after a fork those before the fork.

    ``Prefix(prompt, slots=(4, 6), prefix=…, forks=(20,))`` is to be continued twice after 20 tokens of a response; the
    continuations are leaf 4 and leaf 6, and stand for those after them too, as long as they do not fork themselves.
    """

    prompt: Prompt
    slots: tuple[int, ...]
    """Slot of each continuation."""
    prefix: Completion | None = None
    """None at the prompt itself."""
    entropies: Entropies | None = None
    """Entropies of the prefix; None if no fork needs them."""
    forks: tuple[int, ...] = ()
    """Forks of the path, by level. The last one is the length of the prefix."""
    limit: int | None = None
    """Most tokens of each continuation; None: as many as are left of a response."""

    @property
    def length(self) -> int:
        """Tokens of the response that are there already."""
        return self.forks[-1] if self.forks else 0

    def room(self, max_tokens: int) -> int:
        """Tokens that a continuation may have, of responses of ``max_tokens``."""
        left = max_tokens - self.length
        return left if self.limit is None else min(left, self.limit)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt and prefix."""
        own = self.prompt.token_ids
        return own if self.prefix is None else np.concatenate([own, self.prefix.token_ids])


@dataclass(frozen=True, slots=True)
class TreePath:
    """One way through the tree, from the prompt to an end."""

    stem: Prefix
    """From which it was generated."""
    slot: int
    completion: Completion
    """The whole of it."""
    entropies: Entropies | None
    forks: tuple[int, ...]
    """After how many tokens it has forked, at each level; its length where it ended before."""

    @property
    def level(self) -> int:
        """Forks before it was generated."""
        return len(self.stem.forks)


def root_of(prompt: Prompt, samples: int, branches: Branches) -> Prefix:
    """The stem of all paths that begin at the prompt, for a group of so many leaves."""
    return Prefix(prompt, tuple(range(0, samples, leaves_below(branches, 0))))


def leaves_below(branches: Branches, level: int) -> int:
    """Leaves of a branch that has forked ``level`` times."""
    return math.prod(branch.children for branch in branches[level:])


def fork_positions(
    branches: Branches, length: int, entropies: Entropies | None, before: Sequence[int] = ()
) -> tuple[int, ...]:
    """After how many of its tokens a path forks, at each level; ``length`` where it has ended before it could.

    Args:
        branches: the levels.
        length: L of the path.
        entropies: see :data:`Entropies`.
        before: positions of the first levels, which the path has in common with the one that it was cut out of.
    """
    forks = list(before)
    for branch in branches[len(forks) :]:
        first = forks[-1] + 1 if forks else 1  # a branch has one token at least
        if branch.at is not None:
            position = max(branch.at, first)
        else:
            assert branch.entropy is not None and entropies is not None, "a branch names either way to fork"
            above = np.flatnonzero(entropies[first:] > branch.entropy)
            position = first + int(above[0]) if len(above) else length
        forks.append(min(position, length))
    return tuple(forks)


def grown(stem: Prefix, slot: int, part: Completion, entropies: Entropies | None, branches: Branches) -> TreePath:
    """The path that a stem and a continuation of it make.

    Args:
        stem: from which the continuation was generated.
        slot: the stem's slot that it is for.
        part: the tokens after the stem.
        entropies: of these tokens; None where they are not asked for.
        branches: the levels of the tree.
    """
    whole = part if stem.prefix is None else joined([stem.prefix, part])
    if entropies is not None and stem.entropies is not None:
        entropies = np.concatenate([stem.entropies, entropies])
    forks = fork_positions(branches, len(whole.token_ids), entropies, stem.forks)
    return TreePath(stem, slot, whole, entropies, forks)


def forks_of(path: TreePath, branches: Branches) -> list[Prefix]:
    """Stems to continue after the forks of a path, at all levels; its own part after each fork exists."""
    stems = []
    for level in range(path.level, len(branches)):
        position = path.forks[level]
        if position == len(path.completion.token_ids):
            break
        width = leaves_below(branches, level + 1)
        slots = tuple(path.slot + child * width for child in range(1, branches[level].children))
        stems.append(
            Prefix(
                path.stem.prompt,
                slots,
                # All tokens of a prefix have been read: the path went on after them.
                prefix=beginning(path.completion, position, len(path.stem.prompt.token_ids) + position),
                entropies=None if path.entropies is None else path.entropies[:position],
                forks=path.forks[: level + 1],
            )
        )
    return stems


def leaves_of(paths: Iterable[TreePath], branches: Branches) -> tuple[Completion, ...]:
    """The group: all leaves of a tree, in order, each with the path that ends there or has ended before."""
    if not branches:
        return tuple(path.completion for path in sorted(paths, key=lambda path: path.slot))
    leaves: dict[int, Completion] = {}
    for path in sorted(paths, key=lambda path: path.level):  # a child takes its leaves from the path that it left
        below, ends = leaves_below(branches, path.level), (*path.forks, len(path.completion.token_ids))
        segments = np.repeat(np.arange(len(ends), dtype=np.int8), np.diff(ends, prepend=0))
        leaf = replace(path.completion, segments=segments)
        leaves |= dict.fromkeys(range(path.slot, path.slot + below), leaf)
    return tuple(leaves[slot] for slot in sorted(leaves))


def unique_tokens(group: Sequence[Completion], branches: Branches) -> int:
    """Tokens of a group that the policy sampled, those that its leaves share counted once."""
    if not branches:
        return sum(int(completion.loss_mask.sum()) for completion in group)
    total = 0
    for slot, leaf in enumerate(group):
        level = next(level for level in range(len(branches) + 1) if slot % leaves_below(branches, level) == 0)
        total += int(np.count_nonzero(np.asarray(leaf.segments) >= level))
    return total
