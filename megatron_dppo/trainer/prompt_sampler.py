"""Which prompts a step considers, in which order they come, and what is remembered of them.

Only the leader has it, and it is part of every checkpoint.
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
from megatron_dppo.rl.objectives import objective_for
from megatron_dppo.rl.pruning.draw import completion_terms
from megatron_dppo.rl.pruning.forecast import Outcomes, PromptFeatures, PromptForecast
from megatron_dppo.rl.pruning.prompt_rules import select
from megatron_dppo.rl.pruning.schedule import in_rounds, mixed, next_round, scheduled_keep, window_size
from megatron_dppo.rl.seeds import Purpose, generator
from megatron_dppo.rl.types import Ints, Selection, StepMetadata

INFLATION_KEPT = 0.9
"""Weight that earlier steps keep in the mean of the variance inflation, from one step to the next."""


class SourceOrder:
    """The prompts of one source, epoch after epoch. The permutation of an epoch is a function of (seed, epoch) and the
    source's number alone."""

    def __init__(self, number: int, first: int, size: int, seed: int) -> None:
        """
        Args:
            number: of the source.
            first: id of its first prompt; ids are consecutive from here.
            size: prompts that it has.
            seed: seed of the permutations.
        """
        self._number, self._first, self._size, self._seed = number, first, size, seed
        self.go_to(0, 0)

    def go_to(self, epoch: int, position: int) -> None:
        """As if so many epochs, and so many prompts of the next one, had been drawn."""
        self.epoch, self.position = epoch, position
        draw = generator(self._seed, epoch, Purpose.ORDER, self._number)
        self._permutation = draw.permutation(self._size)

    @property
    def drawn(self) -> int:
        """How many prompts."""
        return self.epoch * self._size + self.position

    def next(self) -> int:
        """The next prompt's id."""
        if self.position == self._size:
            self.go_to(self.epoch + 1, 0)
        self.position += 1
        return self._first + int(self._permutation[self.position - 1])


class PromptOrder:
    """Windows of distinct prompt ids, epoch after epoch. Its state is two numbers for each source and a short list.

    The next prompt is of the source that lags most behind its share of all that were drawn. A window that crosses the
    end of an epoch goes on in the next one; an id that it holds already is passed over there and opens the next window
    instead, so that no window holds a prompt twice and every epoch still visits every prompt exactly once.
    """

    def __init__(self, sizes: Sequence[int], seed: int, weights: Sequence[float] = (1.0,)) -> None:
        """
        Args:
            sizes: prompts of each source.
            seed: seed of the permutations (``run.seed``).
            weights: the sources' shares, up to a factor.
        """
        self._size = sum(sizes)
        self._shares = [weight / sum(weights) for weight in weights]
        firsts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
        self._sources = [SourceOrder(number, firsts[number], size, seed) for number, size in enumerate(sizes)]
        self._deferred: list[int] = []

    def next_window(self, n: int, besides: Ints | None = None) -> Ints:
        """[n], the next prompt ids.

        Args:
            n: how many.
            besides: ids that the step holds already, none of which comes again; they are fewer by n than the pool.

        Raises:
            UserError: if the pool has fewer than n prompts.
        """
        if n > self._size:
            problem = f"is more than the {self._size} prompts of the pool, and a window holds no prompt twice"
            remedy = f"Lower it to {self._size} or less, or give more prompts"
            raise UserError("rollout.prompts_per_step", n, problem, remedy)
        seen = set() if besides is None else set(besides.tolist())
        window: list[int] = []
        waiting, self._deferred = deque(self._deferred), []
        while waiting or len(window) < n:
            prompt = waiting.popleft() if waiting else self._next()
            if prompt in seen or len(window) == n:
                self._deferred.append(prompt)
            else:
                seen.add(prompt)
                window.append(prompt)
        return np.array(window, np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands; JSON-able."""
        first, *others = [(source.epoch, source.position) for source in self._sources]
        where = {"epoch": first[0], "position": first[1], "others": others, "deferred": list(self._deferred)}
        return {"size": self._size, **where}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            UserError: if it was taken from another number of prompts. Settings and files are compared before, see
                ``resume.py``.
        """
        if (before := state["size"]) != self._size:  # as generators may give, with the same settings
            problem, remedy = f"the checkpoint was written with {before} prompts", "Resume with the same data"
            raise UserError("data.train", f"{self._size} prompts", problem, f"{remedy}, or start another run.dir")
        places = [(state["epoch"], state["position"]), *state.get("others", ())]
        for source, place in zip(self._sources, places, strict=True):
            source.go_to(*place)
        self._deferred = list(state["deferred"])

    def _next(self) -> int:
        drawn = sum(source.drawn for source in self._sources)
        lags = [share * (drawn + 1) - source.drawn for share, source in zip(self._shares, self._sources, strict=True)]
        return self._sources[lags.index(max(lags))].next()


def order_of(pool: Pool[Any], seed: int) -> PromptOrder:
    """The order in which a pool is gone through."""
    return PromptOrder([len(s.items) for s in pool.sources], seed, [source.weight for source in pool.sources])


def check_shares(pool: Pool[Any], window: int, setting: str = "rollout.prompts_per_step") -> None:
    """
    Args:
        pool: of a run.
        window: the most prompts of a step.
        setting: that says how many these are.

    Raises:
        UserError: if a source is too small for its share of a window of so many prompts.
    """
    total = sum(source.weight for source in pool.sources)
    for number, source in enumerate(pool.sources):
        wanted = math.ceil(window * source.weight / total)
        if wanted > len(source.items):
            problem = f"takes {wanted} prompts of {window} from a source that has {len(source.items)}"
            remedy = f"Lower its weight or {setting}, or give it more prompts"
            raise UserError(f"data.train[{number}].weight", f"{source.weight:g}", problem, remedy)


def widest_window(pool: Pool[Any]) -> int:
    """The most prompts of a window in which each source of the pool has its share."""
    total = sum(source.weight for source in pool.sources)
    return min(int(len(source.items) * total / source.weight) for source in pool.sources)


class PromptSampler:
    """The data order and the prompts' reward history. It learns of a step after the step's plan is made."""

    def __init__(self, config: Config, pool: PromptPool) -> None:
        """
        Args:
            config: of the run.
            pool: of its prompts the features are read, and never a label.

        Raises:
            UserError: if a window would need more prompts than the pool has, or one of its sources.
        """
        pool_size = len(pool)
        if (widest := window_size(config)) > pool_size:
            grown = f"makes windows of {widest} with pruning.noise, which " if config.pruning.noise else ""
            problem = f"{grown}is more than the {pool_size} prompts of the pool, and a window holds no prompt twice"
            remedy = "Lower it, or give more prompts"
            raise UserError("rollout.prompts_per_step", config.rollout.prompts_per_step, problem, remedy)
        check_shares(pool, widest)
        self._config, self._pool_size, self._widest = config, pool_size, widest_window(pool)
        self._objective = objective_for(config.loss)
        self._order = order_of(pool, config.run.seed)
        taught = config.loss.distillation_coef > 0.0
        self.history = PromptForecast(PromptFeatures(pool), self._objective.advantage, taught=taught)
        self._inflation = 1.0

    def select(self, step: int) -> Selection:
        """Draw the prompts of a step from the next window of candidates."""
        return self._draw(step, self._order.next_window(self._window()))

    def _window(self) -> int:
        """N of the next step. ``pruning.noise`` lets it grow as far as the pool suffices."""
        return min(window_size(self._config, self._inflation), self._widest)

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
        wanted = next_round(self._window(), len(mixed(so_far)), round(so_far.window))
        count = min(wanted, self._pool_size - len(known))
        if count == 0:
            return None
        return self._draw(step, self._order.next_window(count, besides=known), again=rounds)

    def _draw(self, step: int, window: Ints, again: int = 0) -> Selection:
        pruning = self._config.pruning.prompts
        return select(
            window,
            self.history,
            pruning,
            group_size=self._config.rollout.samples_per_prompt,
            keep=scheduled_keep(pruning.keep, pruning.schedule, step, self._config.run.steps),
            rng=generator(self._config.run.seed, step, Purpose.PROMPTS, again),
            longest_first=self._config.rollout.longest_first,
        )

    def remember(self, metadata: StepMetadata, inflation: float = 1.0) -> dict[str, float]:
        """Learn from a step's full groups, after all draws of the step. Return metrics of the predictions.

        Args:
            metadata: of the step.
            inflation: by how much pruning multiplied the step's variance, as it is estimated.
        """
        self._inflation += (1.0 - INFLATION_KEPT) * (inflation - self._inflation)
        known, *_ = completion_terms(metadata, self._config, self._objective)
        terms = known.score * metadata.prompt_inclusion[:, None]
        return self.history.judge_and_learn(
            Outcomes(
                prompt_ids=metadata.prompt_ids,
                rewards=metadata.rewards,
                advantages=known.advantage,
                squares=(terms**2).sum(axis=1),
                tokens=np.maximum(metadata.sampled_lengths.mean(axis=1), 1.0),
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; floats survive exactly."""
        return {"order": self._order.state_dict(), "history": self.history.state_dict(), "inflation": self._inflation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order.load_state_dict(state["order"])
        self.history.load_state_dict(state["history"])
        self._inflation = float(state["inflation"])
