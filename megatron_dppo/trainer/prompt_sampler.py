"""Select the prompts of each step, in a reproducible order, and keep their reward history.

Only rank 0 has the sampler. Its state is part of every checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from megatron_dppo.config import Config
from megatron_dppo.data.prompts import Pool, PromptPool
from megatron_dppo.errors import UserError
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.pruning.draw import compute_completion_terms
from megatron_dppo.rl.pruning.forecast import Outcomes, PromptFeatures, PromptForecast
from megatron_dppo.rl.pruning.prompt_rules import select
from megatron_dppo.rl.pruning.schedule import (
    compute_resample_size,
    compute_window_size,
    find_nonzero_variance_groups,
    scheduled_keep,
    uses_resampling,
)
from megatron_dppo.rl.seeds import Purpose, make_generator
from megatron_dppo.rl.types import Ints, Selection, StepMetadata

INFLATION_KEPT = 0.9
"""Weight of all earlier steps in the moving average of the variance inflation."""


class SourceOrder:
    """Prompts of one source, epoch after epoch."""

    def __init__(self, number: int, first: int, size: int, seed: int) -> None:
        """
        Args:
            number: number of the source.
            first: id of the source's first prompt; ids are consecutive.
            size: number of prompts.
            seed: seed of the permutations.
        """
        self._number = number
        self._first = first
        self._size = size
        self._seed = seed
        self.set_position(0, 0)

    def set_position(self, epoch: int, position: int) -> None:
        """Move to the state after ``epoch`` epochs and ``position`` prompts of the next epoch."""
        self.epoch = epoch
        self.position = position
        # The permutation depends only on seed, epoch and source, so that a resume needs two
        # numbers.
        draw = make_generator(self._seed, epoch, Purpose.ORDER, self._number)
        self._permutation = draw.permutation(self._size)

    @property
    def draw_count(self) -> int:
        """Number of prompts drawn."""
        return self.epoch * self._size + self.position

    def next(self) -> int:
        """Return the id of the next prompt."""
        if self.position == self._size:
            self.set_position(self.epoch + 1, 0)
        self.position += 1
        return self._first + int(self._permutation[self.position - 1])


class PromptOrder:
    """Windows of distinct prompt ids, epoch after epoch.

    - A window may cross the end of an epoch. An id that is already in the window is then deferred
      to the start of the next window.
    - No window contains a prompt twice, and every epoch contains every prompt once.
    """

    def __init__(self, sizes: Sequence[int], seed: int, weights: Sequence[float] = (1.0,)) -> None:
        """
        Args:
            sizes: number of prompts of each source.
            seed: ``run.seed``.
            weights: fractions of the sources, up to a common factor.
        """
        self._size = sum(sizes)
        self._shares = [weight / sum(weights) for weight in weights]
        firsts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
        self._sources = [
            SourceOrder(number, firsts[number], size, seed) for number, size in enumerate(sizes)
        ]
        self._deferred: list[int] = []

    def next_window(self, n: int, excluded: Ints | None = None) -> Ints:
        """Return the next prompt ids, [n].

        Args:
            n: number of prompts.
            excluded: ids that are already in the step; at most the size of the pool minus n.

        Raises:
            UserError: if the pool has fewer than n prompts.
        """
        if n > self._size:
            problem = (
                f"is more than the {self._size} prompts of the pool, and a window holds no "
                "prompt twice"
            )
            remedy = f"Lower it to {self._size} or less, or give more prompts"
            raise UserError("rollout.prompts_per_step", n, problem, remedy)
        seen = set() if excluded is None else set(excluded.tolist())
        window: list[int] = []
        waiting = deque(self._deferred)
        self._deferred = []
        while waiting or len(window) < n:
            prompt = waiting.popleft() if waiting else self._next()
            if prompt in seen or len(window) == n:
                self._deferred.append(prompt)
            else:
                seen.add(prompt)
                window.append(prompt)
        return np.array(window, np.int64)

    def state_dict(self) -> dict[str, Any]:
        first, *others = [(source.epoch, source.position) for source in self._sources]
        return {
            "size": self._size,
            "epoch": first[0],
            "position": first[1],
            "others": others,
            "deferred": list(self._deferred),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``.

        Raises:
            UserError: if the number of prompts has changed.
        """
        # ``resume.py`` compares settings and files, but generators may give a different number of
        # prompts.
        if (before := state["size"]) != self._size:
            problem = f"the checkpoint was written with {before} prompts"
            remedy = "Resume with the same data, or start another run.dir"
            raise UserError("data.train", f"{self._size} prompts", problem, remedy)
        places = [(state["epoch"], state["position"]), *state.get("others", ())]
        for source, place in zip(self._sources, places, strict=True):
            source.set_position(*place)
        self._deferred = list(state["deferred"])

    def _next(self) -> int:
        drawn = sum(source.draw_count for source in self._sources)
        # The next prompt is from the source that lags most behind its fraction of all drawn
        # prompts.
        lags = [
            share * (drawn + 1) - source.draw_count
            for share, source in zip(self._shares, self._sources, strict=True)
        ]
        return self._sources[lags.index(max(lags))].next()


def make_order(pool: Pool[Any], seed: int) -> PromptOrder:
    return PromptOrder(
        [len(s.items) for s in pool.sources], seed, [source.weight for source in pool.sources]
    )


def check_shares(pool: Pool[Any], window: int, setting: str = "rollout.prompts_per_step") -> None:
    """Check that each source has enough prompts for its fraction of a window.

    Args:
        window: largest number of prompts of a step.
        setting: setting of the number of prompts.

    Raises:
        UserError: if a source is too small.
    """
    total = sum(source.weight for source in pool.sources)
    for number, source in enumerate(pool.sources):
        wanted = math.ceil(window * source.weight / total)
        if wanted > len(source.items):
            problem = (
                f"takes {wanted} prompts of {window} from a source that has {len(source.items)}"
            )
            remedy = f"Lower its weight or {setting}, or give it more prompts"
            raise UserError(f"data.train[{number}].weight", f"{source.weight:g}", problem, remedy)


def find_widest_window(pool: Pool[Any]) -> int:
    """Return the size of the largest window for which every source has enough prompts."""
    total = sum(source.weight for source in pool.sources)
    return min(int(len(source.items) * total / source.weight) for source in pool.sources)


class PromptSampler:
    """Data order and reward history of the prompts."""

    def __init__(self, config: Config, pool: PromptPool) -> None:
        """
        Args:
            config: configuration of the run.
            pool: pool of prompts; only features of the prompts are read, never a label.

        Raises:
            UserError: if a window needs more prompts than the pool, or a source, has.
        """
        pool_size = len(pool)
        if (widest := compute_window_size(config)) > pool_size:
            grown = ""
            if config.pruning.target_noise:
                grown = f"makes windows of {widest} with pruning.target_noise, which "
            problem = (
                f"{grown}is more than the {pool_size} prompts of the pool, and a window "
                "holds no prompt twice"
            )
            remedy = "Lower it, or give more prompts"
            raise UserError(
                "rollout.prompts_per_step", config.rollout.prompts_per_step, problem, remedy
            )
        check_shares(pool, widest)
        self._config = config
        self._pool_size = pool_size
        self._widest = find_widest_window(pool)
        self._objective = resolve_objective(config.loss)
        self._order = make_order(pool, config.run.seed)
        taught = config.loss.distillation_coef > 0.0
        self.history = PromptForecast(
            PromptFeatures(pool),
            self._objective.advantage,
            has_teacher=taught,
            entropy_coef=config.loss.entropy.coef,
        )
        self._inflation = 1.0

    def select(self, step: int) -> Selection:
        """Draw the prompts of a step from the next window of candidates."""
        return self._draw(step, self._order.next_window(self._compute_window_size()))

    def _compute_window_size(self) -> int:
        """Return N of the next step."""
        # With ``pruning.target_noise`` N may grow up to the widest window of the pool.
        return min(compute_window_size(self._config, self._inflation), self._widest)

    def select_round(self, step: int, selected: StepMetadata, rounds: int) -> Selection | None:
        """Draw further prompts for a step that needs more groups of non-zero reward variance.

        Args:
            step: index of the step, from 0.
            selected: metadata of the step's earlier rounds.
            rounds: number of earlier rounds.

        Returns:
            None if the step has enough groups, if the pool or ``pruning.max_rounds`` is exhausted,
            or if the pruning rule has no rounds.
        """
        pruning = self._config.pruning
        known = selected.prompt_ids
        if not uses_resampling(pruning) or rounds >= pruning.max_rounds:
            return None
        wanted = compute_resample_size(
            self._compute_window_size(),
            len(find_nonzero_variance_groups(selected, self._config)),
            round(selected.window),
        )
        count = min(wanted, self._pool_size - len(known))
        if count == 0:
            return None
        return self._draw(step, self._order.next_window(count, excluded=known), attempt=rounds)

    def _draw(self, step: int, window: Ints, attempt: int = 0) -> Selection:
        pruning = self._config.pruning.prompts
        return select(
            window,
            self.history,
            pruning,
            group_size=self._config.rollout.samples_per_prompt,
            keep=scheduled_keep(pruning.keep, pruning.schedule, step, self._config.run.steps),
            rng=make_generator(self._config.run.seed, step, Purpose.PROMPTS, attempt),
            longest_first=self._config.rollout.longest_first,
        )

    def update_history(self, metadata: StepMetadata, inflation: float = 1.0) -> dict[str, float]:
        """Update the reward history with a step's full groups, after all draws of the step.

        Args:
            metadata: metadata of the step.
            inflation: estimated factor of the step's variance due to pruning.

        Returns:
            Predictor metrics.
        """
        self._inflation += (1.0 - INFLATION_KEPT) * (inflation - self._inflation)
        known, *_ = compute_completion_terms(metadata, self._config, self._objective)
        terms = known.score * metadata.prompt_inclusion[:, None]
        equal = np.ones(len(metadata.prompt_ids), np.bool_)
        equal[find_nonzero_variance_groups(metadata, self._config)] = False
        return self.history.evaluate_and_update(
            Outcomes(
                prompt_ids=metadata.prompt_ids,
                rewards=metadata.rewards,
                advantages=known.advantage,
                squares=(terms**2).sum(axis=1),
                tokens=np.maximum(metadata.sampled_lengths.mean(axis=1), 1.0),
                equal=equal,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able; floats are restored exactly."""
        return {
            "order": self._order.state_dict(),
            "history": self.history.state_dict(),
            "inflation": self._inflation,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order.load_state_dict(state["order"])
        self.history.load_state_dict(state["history"])
        self._inflation = float(state["inflation"])
