"""A run whose policy has collapsed is stopped, and the checkpoint of its best step stays.

A learning rate that is too high can take a policy to where no answer is right any more. Then every
group has equal rewards, nothing has a gradient, and no later step brings the policy back; but
checkpoints go on to be written, and the good ones leave to make room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_dppo.config import RunConfig
from megatron_dppo.errors import UserError


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The checkpoint with the highest held-out accuracy so far; of equal ones the first."""

    accuracy: float
    step: int

    def __str__(self) -> str:
        return f"the best held-out accuracy was {100 * self.accuracy:.1f}%, after step {self.step}"


class CollapseGuard:
    """Counts steps in a row without a gradient, and knows the best checkpoint. The same on every
    rank."""

    def __init__(self, config: RunConfig) -> None:
        self._most = config.max_idle_steps
        self._keeps = config.keep_best
        self._idle = 0
        self._reward = float("nan")
        self._accuracy: float | None = None
        self.best: BestCheckpoint | None = None

    def record_step(self, *, updated: bool, reward: float) -> None:
        """After a step: whether it changed the weights, and its mean reward."""
        self._idle = 0 if updated else self._idle + 1
        self._reward = reward
        if updated:
            self._accuracy = None

    def record_evaluation(self, accuracy: float | None) -> None:
        """After an evaluation of the weights as they are."""
        self._accuracy = accuracy

    def update_best(self, step: int) -> int | None:
        """The step whose checkpoint must stay when that of ``step`` is written; None if there is no
        such."""
        if (
            self._keeps
            and self._accuracy is not None
            and (self.best is None or self._accuracy > self.best.accuracy)
        ):
            self.best = BestCheckpoint(self._accuracy, step)
        return self.best.step if self.best else None

    @property
    def is_collapsed(self) -> bool:
        """Whether the run is to end: ``run.max_idle_steps`` in a row had nothing to train on."""
        return 0 < self._most <= self._idle

    def build_error(self) -> UserError:
        """Error that ends the run, once it is saved."""
        problem = (
            f"no completion of the last {self._idle} steps had a gradient: the rewards of each "
            "group were equal, its "
            "completions masked (loss.mask_truncated), or all its tokens clipped. The mean reward "
            "was "
            f"{self._reward:.3g} at last. The policy has collapsed, or nothing is left to learn. "
            "The run is saved"
        )
        remedy = "Start another run with a lower optimizer.lr or with other prompts; 0 goes on"
        if self.best:
            remedy += f". {str(self.best).capitalize()}, and its checkpoint stays"
        return UserError("run.max_idle_steps", self._most, problem, remedy)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"best": asdict(self.best) if self.best else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict``."""
        if best := state["best"]:
            self.best = BestCheckpoint(**best)
