"""In which order prompts come. Every epoch is a full pass; where a run stands is four numbers and a short list."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.rl.seeds import Purpose, generator
from megatron_dppo.rl.types import Ints


class PromptOrder:
    """Windows of distinct prompt ids, epoch after epoch.

    The permutation of an epoch is a function of (seed, epoch) alone. A window that crosses the end of an epoch goes on
    in the next one; an id that it holds already is passed over there and opens the next window instead, so that no
    window holds a prompt twice and every epoch still visits every prompt exactly once.
    """

    def __init__(self, size: int, seed: int) -> None:
        """
        Args:
            size: prompts in the pool.
            seed: seed of the permutations (``run.seed``).
        """
        self._size, self._seed = size, seed
        self._epoch, self._position = 0, 0
        self._deferred: list[int] = []
        self._permutation = self._permute()

    def next_window(self, n: int, besides: Ints | None = None) -> Ints:
        """[n], the next prompt ids.

        Args:
            n: how many.
            besides: ids that the step holds already, none of which comes again; they are fewer by n than the pool.

        Raises:
            UserError: if the pool has fewer than n prompts.
        """
        if n > self._size:
            raise UserError(
                "rollout.prompts_per_step",
                n,
                f"is more than the {self._size} prompts of the pool, and a window holds no prompt twice",
                f"Lower it to {self._size} or less, or give more prompts",
            )
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
        return {
            "size": self._size,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "deferred": list(self._deferred),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            UserError: if it was taken from another pool or another seed.
        """
        for setting, key, ours in (("data.train", "size", self._size), ("run.seed", "seed", self._seed)):
            if state[key] != ours:
                raise UserError(
                    setting,
                    f"{ours} prompts" if key == "size" else ours,
                    f"the checkpoint was written with {state[key]}",
                    "Resume with the same data and seed, or start another run.dir",
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._deferred = list(state["deferred"])
        self._permutation = self._permute()

    def _next(self) -> int:
        if self._position == self._size:
            self._epoch, self._position = self._epoch + 1, 0
            self._permutation = self._permute()
        self._position += 1
        return int(self._permutation[self._position - 1])

    def _permute(self) -> Ints:
        return generator(self._seed, self._epoch, Purpose.ORDER).permutation(self._size)
