"""The frozen policy that the loss's KL term compares with, and where its weights wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_dppo.models.actor import Policy
from megatron_dppo.rl.types import Pack


class Reference(Policy):
    """A policy that is never updated. Between its passes its weights may wait in the host's memory."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._on_host: dict[torch.nn.Parameter, torch.Tensor] = {}

    def leave_device(self) -> None:
        """Move the weights to the host, from where every later pass fetches them. Called once they are loaded."""
        for parameter in self.module.parameters():
            waiting = torch.empty_like(parameter, device="cpu", pin_memory=self.world.device.type == "cuda")
            self._on_host[parameter] = parameter.data = waiting.copy_(parameter.data)

    def log_probabilities(self, packs: Sequence[Pack]) -> list[np.ndarray | None]:
        for parameter, waiting in self._on_host.items():
            parameter.data = waiting.to(self.world.device, non_blocking=True)
        try:
            return super().log_probabilities(packs)
        finally:
            for parameter, waiting in self._on_host.items():
                parameter.data = waiting
