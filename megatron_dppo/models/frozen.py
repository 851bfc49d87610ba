"""Untrained models: the reference of the loss's KL term, and the teacher of a distillation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from megatron_dppo.models.actor import Policy
from megatron_dppo.models.lora import disable_adapters
from megatron_dppo.models.pinned import allocate_pinned_buffer, compute_offsets, view_slot
from megatron_dppo.models.teacher_head import TeacherHead
from megatron_dppo.rl.types import Bools, Pack


class Frozen(Policy):
    """Policy without training; if offloaded, the weights are on the host between passes."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._on_host: dict[torch.nn.Parameter, torch.Tensor] = {}

    def offload_weights(self, setting: str, value: object, remedy: str) -> None:
        """Move the loaded weights to the host; every later pass copies the weights to the device.

        Arguments and errors are as in :func:`pinned.allocate_pinned_buffer`.
        """
        parameters = list(self.parameters())
        offsets, size = compute_offsets(parameters)
        self._host = allocate_pinned_buffer(size, self.world.device, setting, value, remedy=remedy)
        for parameter, offset in zip(parameters, offsets, strict=True):
            slot = view_slot(self._host, offset, parameter)
            self._on_host[parameter] = parameter.data = slot.copy_(parameter.data)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        for parameter, waiting in self._on_host.items():
            parameter.data = waiting.to(self.world.device, non_blocking=True)
        try:
            yield
        finally:
            # Frozen weights never change: drop the device copy.
            for parameter, waiting in self._on_host.items():
                parameter.data = waiting


class Reference(Frozen):
    """Frozen policy of the loss's KL term."""

    def log_probabilities(self, packs: Sequence[Pack]) -> list[np.ndarray | None]:
        with self._on_device():
            return super().log_probabilities(packs)


class Teacher(Frozen):
    """Frozen model with the policy's vocabulary, as target of a distillation.

    The teacher has the policy's layout, so that every rank has both models' states of the same
    tokens.
    """

    @torch.no_grad()
    def compute_heads(
        self,
        packs: Sequence[Pack],
        teacher_masks: Sequence[Bools],
        direction: Literal["reverse", "forward"],
    ) -> list[TeacherHead | None]:
        """Return the teacher head of each pack on ranks of the last stage, else None.

        Collective over the replica. The output layer and the hidden states stay on the device until
        training. Memory of the states: per distilled target, one vector of the teacher's hidden
        size, in the teacher's dtype.

        Args:
            teacher_masks: [R] for each pack, targets distilled from this teacher.
        """
        places = {
            id(pack): self._select_rows(pack, mask)
            for pack, mask in zip(packs, teacher_masks, strict=True)
        }

        def collect(
            pack: Pack,
            arrays: dict[str, torch.Tensor],
            output: tuple[torch.Tensor, ...],
        ) -> Any:
            rows = places[id(pack)]
            return output[0].sum(), {"states": output[0] if rows is None else output[0][rows]}

        for module in self.modules:
            module.eval()
        with self._on_device():
            outputs = self._run_pass(packs, collect, forward_only=True, states=True)
            if not self.world.is_last_stage:
                return [None] * len(packs)
            weight = self.chunks[-1].output_weight().detach()
        return [
            TeacherHead(output["states"].to(weight.dtype), weight, direction, places[id(pack)])
            for pack, output in zip(packs, outputs, strict=True)
        ]

    def _select_rows(self, pack: Pack, teacher_mask: Bools) -> torch.Tensor | None:
        """Return the places of distilled targets among this rank's targets; None: all targets."""
        if teacher_mask.all():
            return None
        share = self._compute_share(pack)
        mine = torch.from_numpy(teacher_mask)
        return (mine if share is None else mine[share.mine]).nonzero()[:, 0].to(self.world.device)


class BasePolicy:
    """Policy with adapters off, as reference of the loss's KL term."""

    def __init__(self, policy: Policy) -> None:
        self._adapted = policy

    def log_probabilities(self, packs: Sequence[Pack]) -> list[np.ndarray | None]:
        """Compute :meth:`Policy.log_probabilities` without routing replay."""
        with disable_adapters(self._adapted.chunks):
            return self._adapted.log_probabilities([replace(pack, routing=None) for pack in packs])
