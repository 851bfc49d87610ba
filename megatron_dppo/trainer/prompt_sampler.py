"""Which prompts a step considers, and what is remembered of them. The leader's, and part of every checkpoint."""

from __future__ import annotations

from typing import Any

from megatron_dppo.config import Config
from megatron_dppo.data.order import PromptOrder
from megatron_dppo.errors import UserError
from megatron_dppo.rl.objectives import advantages, objective_for
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.pruning.prompt_rules import select
from megatron_dppo.rl.pruning.schedule import in_rounds, mixed, next_round, scheduled_keep, window_size
from megatron_dppo.rl.seeds import Purpose, generator
from megatron_dppo.rl.types import Ints, Selection, StepMetadata


class PromptSampler:
    """The data order and the pruning history. History holds earlier visits only: it learns of a step after its plan."""

    def __init__(self, config: Config, pool_size: int) -> None:
        """
        Raises:
            UserError: if a window would need more prompts than the pool has.
        """
        ramp = round(config.pruning.completions.schedule.ramp * config.run.steps)
        if (widest := max(window_size(config, step) for step in (0, ramp))) > pool_size:
            grown = f"makes windows of {widest} with pruning.refill, which" if config.pruning.refill != "none" else ""
            raise UserError(
                "rollout.prompts_per_step",
                config.rollout.prompts_per_step,
                f"{grown} is more than the {pool_size} prompts of the pool, and a window holds no prompt twice".strip(),
                "Lower it, or give more prompts",
            )
        self._config, self._pool_size = config, pool_size
        self._normalised = objective_for(config.loss).normalise
        self._order = PromptOrder(pool_size, config.run.seed)
        self._history = PromptHistory(config.pruning.prompts.decay)

    def select(self, step: int) -> Selection:
        """Draw the prompts of a step from the next window of candidates."""
        return self._draw(step, self._order.next_window(window_size(self._config, step)))

    def select_more(self, step: int, so_far: StepMetadata, rounds: int) -> Selection | None:
        """Draw further prompts of a step that is to have as many groups of mixed reward as its window has prompts; None
        where it has them, or the pool or ``pruning.max_rounds`` is exhausted.

        Args:
            step: counted from 0.
            so_far: what its earlier rounds have given.
            rounds: how many these were.
        """
        pruning, known = self._config.pruning, so_far.prompt_ids
        if not in_rounds(pruning) or rounds >= pruning.max_rounds:
            return None
        wanted = next_round(window_size(self._config, step), len(mixed(so_far)), round(so_far.window))
        count = min(wanted, self._pool_size - len(known))
        if count == 0:
            return None
        return self._draw(step, self._order.next_window(count, besides=known), again=rounds)

    def _draw(self, step: int, window: Ints, again: int = 0) -> Selection:
        pruning = self._config.pruning.prompts
        return select(
            window,
            self._history,
            pruning,
            group_size=self._config.rollout.samples_per_prompt,
            normalised=self._normalised,
            keep=scheduled_keep(pruning.keep, pruning.schedule, step, self._config.run.steps),
            rng=generator(self._config.run.seed, step, Purpose.PROMPTS, again),
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
