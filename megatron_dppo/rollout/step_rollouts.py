"""The rollouts of one step, from the prompts that were drawn to the groups that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dppo.config import Config
from megatron_dppo.rl.sequences import check_settings
from megatron_dppo.rl.types import Group, Prompt, Selection, StepMetadata
from megatron_dppo.rollout.engine import PartialRollout


@dataclass(frozen=True, slots=True)
class CompleteRollouts:
    """A step's complete rollouts, seen from one rank."""

    held: dict[int, Group]
    """The groups whose tokens this rank has, by row of ``metadata``."""
    metadata: StepMetadata
    """Metadata of all ranks."""
    metrics: dict[str, float]
    """``rollout/…`` and ``reward/…``, the same on every rank."""
    notes: tuple[str, ...]


@dataclass(slots=True)
class StepRollouts:
    """Rollouts of a step, seen from one rank.

        StepRollouts(Selection(...), step=4)

    is *selected*: its prompts are drawn, and nothing is asked for. With ``partial`` it was broken off, with
    ``requested`` the engine is at work on it, and with ``complete`` it is ready to be trained on.
    """

    selection: Selection
    """Selection of all ranks."""
    step: int
    """The step that trains on them."""
    partial: list[PartialRollout] | None = None
    """How far this rank's prompts were when they were broken off."""
    prompts: Sequence[Prompt] = ()
    """This rank's, once they are requested."""
    requested: Any = None
    """The engine's own word for what it is at work on; None: nothing."""
    complete: CompleteRollouts | None = None

    @property
    def under_way(self) -> bool:
        """Whether they are requested, and not complete."""
        return self.requested is not None

    def restart(self) -> None:
        """Forget all but the prompts."""
        self.partial = self.requested = self.complete = None

    def finish(self, complete: CompleteRollouts) -> None:
        """Replace the request, whose completions are in ``complete``."""
        self.partial, self.requested, self.complete = None, None, complete

    def fit(self, config: Config, *, oldest: int, routed: bool) -> bool:
        """Whether a run with these settings may go on with this rank's share.

        Args:
            config: of the run. It may ask for other groups, roles, trees or teachers than the one that wrote them.
            oldest: version before which no token may have been made.
            routed: whether the routing of tokens is asked for.

        Raises:
            UserError: a setting knows one sequence, and a completion has several.
        """
        if self.complete is not None:
            return self._complete_fits(self.complete, config, oldest, routed)
        limit = config.rollout.max_response_tokens
        return all(
            len(one.completion.token_ids) < limit + one.ended
            and one.completion.oldest_version >= oldest
            and (one.completion.routing is not None or not one.ended) >= routed  # the rest's tells of all before it
            for one in self.partial or ()
        )

    @staticmethod
    def _complete_fits(rollouts: CompleteRollouts, config: Config, oldest: int, routed: bool) -> bool:
        known, rollout, teaching = rollouts.metadata, config.rollout, config.loss.distillation
        if (several := known.further_lengths.shape[2]) > 0:
            check_settings(config, 1 + several)
        if known.segments.shape[1:] != (rollout.samples_per_prompt, rollout.segments):
            return False
        if known.versions.min(initial=np.iinfo(np.int64).max) < oldest:
            return False
        for row, group in rollouts.held.items():
            source = group.prompt.data_source
            if known.teacher[row] != teaching.model_of(source):
                return False
            for completion in group.completions:
                if bool(completion.weights) != bool(rollout.tree.branches):
                    return False
                if (completion.teacher_logprobs is not None) != teaching.served(source):
                    return False
                if routed and completion.routing is None:
                    return False
        return True
