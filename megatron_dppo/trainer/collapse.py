"""Stop a run after a collapse of the policy, and keep the checkpoint of the best step.

A learning rate that is too high can move a policy to a state without any correct answers. Every
group then has equal rewards, the gradient is zero, and no later step recovers the policy, but
further checkpoints would replace the good ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_dppo.config import RunConfig
from megatron_dppo.errors import UserError


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The checkpoint with the highest held-out accuracy; the first of equals."""

    accuracy: float
    step: int

    def __str__(self) -> str:
        return f"the best held-out accuracy was {100 * self.accuracy:.1f}%, after step {self.step}"


class CollapseGuard:
    """Count consecutive steps without a gradient, and track the best checkpoint. The same on every
    rank."""

    def __init__(self, config: RunConfig) -> None:
        self._most = config.max_idle_steps
        self._keeps = config.keep_best
        self._idle = 0
        self._reward = float("nan")
        self._accuracy: float | None = None
        self.best: BestCheckpoint | None = None

    def record_step(self, *, updated: bool, reward: float) -> None:
        """Record the mean reward of a step, and whether it changed the weights."""
        self._idle = 0 if updated else self._idle + 1
        self._reward = reward
        # The accuracy of older weights does not apply to the new weights.
        if updated:
            self._accuracy = None

    def record_evaluation(self, accuracy: float | None) -> None:
        self._accuracy = accuracy

    def update_best(self, step: int) -> int | None:
        """Return the step whose checkpoint must be kept beside ``step``; ``None`` without a best
        step."""
        if (
            self._keeps
            and self._accuracy is not None
            and (self.best is None or self._accuracy > self.best.accuracy)
        ):
            self.best = BestCheckpoint(self._accuracy, step)
        return self.best.step if self.best else None

    @property
    def is_collapsed(self) -> bool:
        """Whether to stop the run: ``run.max_idle_steps`` consecutive steps without a gradient."""
        return 0 < self._most <= self._idle

    def build_error(self) -> UserError:
        """Return the error that ends the run after the final save."""
        problem = (
            f"no completion of the last {self._idle} steps had a gradient: the rewards of each "
            "group were equal, its completions masked (loss.mask_truncated), or all its tokens "
            f"clipped. The mean reward was {self._reward:.3g} at last. The policy has collapsed, "
            "or nothing is left to learn. The run is saved"
        )
        remedy = (
            "Start another run with a lower optimizer.lr or with other prompts; 0 disables this "
            "stop"
        )
        if self.best:
            remedy += f". {str(self.best).capitalize()}, and its checkpoint is kept"
        return UserError("run.max_idle_steps", self._most, problem, remedy)

    def state_dict(self) -> dict[str, Any]:
        return {"best": asdict(self.best) if self.best else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if best := state["best"]:
            self.best = BestCheckpoint(**best)
