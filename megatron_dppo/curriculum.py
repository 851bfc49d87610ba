"""Which prompts a step considers, and what is remembered of them. The leader's, and part of every checkpoint."""

from __future__ import annotations

from typing import Any

from megatron_dppo.config import Config
from megatron_dppo.data.order import PromptOrder
from megatron_dppo.errors import UserError
from megatron_dppo.rl.advantages import advantages
from megatron_dppo.rl.hosts import host_for
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.pruning.schedule import scheduled_keep
from megatron_dppo.rl.seeds import Purpose, generator
from megatron_dppo.rl.select import select
from megatron_dppo.rl.types import Selection, StepMetadata


class Curriculum:
    """The data order and the pruning history. History holds earlier visits only: it learns of a step after its plan."""

    def __init__(self, config: Config, pool_size: int) -> None:
        """
        Raises:
            UserError: if a window would need more prompts than the pool has.
        """
        if config.rollout.prompts_per_step > pool_size:
            raise UserError(
                "rollout.prompts_per_step",
                config.rollout.prompts_per_step,
                f"is more than the {pool_size} prompts of the pool, and a window holds no prompt twice",
                f"Lower it to {pool_size} or less, or give more prompts",
            )
        self._config = config
        self._normalised = host_for(config.loss).normalise
        self._order = PromptOrder(pool_size, config.run.seed)
        self._history = PromptHistory(config.pruning.prompts.decay)

    def select(self, step: int) -> Selection:
        """Draw the prompts of a step from the next window of candidates."""
        pruning = self._config.pruning.prompts
        return select(
            self._order.next_window(self._config.rollout.prompts_per_step),
            self._history,
            pruning,
            group_size=self._config.rollout.samples_per_prompt,
            normalised=self._normalised,
            keep=scheduled_keep(pruning.keep, pruning.schedule, step, self._config.run.steps),
            rng=generator(self._config.run.seed, step, Purpose.PROMPTS),
        )

    def remember(self, metadata: StepMetadata) -> None:
        """Learn from a step's full groups, once nothing of that step is left to be drawn."""
        values = advantages(metadata.rewards, normalise=self._normalised)
        self._history.update(metadata.prompt_ids, metadata.rewards, values)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; floats survive exactly."""
        return {"order": self._order.state_dict(), "history": self._history.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order.load_state_dict(state["order"])
        self._history.load_state_dict(state["history"])
