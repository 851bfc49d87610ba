"""Values that the host reads of the device in a training step: ones for losses, even counts for experts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_dppo.config import LayoutConfig
from megatron_dppo.models import actor as actor_module
from megatron_dppo.models.microbatch import Microbatch
from megatron_dppo.rehearse.dispatch import RehearsalMode


@contextmanager
def known_reads(mode: RehearsalMode, layout: LayoutConfig, experts_per_token: int) -> Iterator[None]:
    """Answer reads of packs on their way through a policy; ``experts_per_token`` is 0 without experts."""
    to_device, tokens = actor_module.to_device, 0

    def note(batch: Microbatch, *more: Any) -> Any:
        nonlocal tokens
        tokens = len(batch.pack.token_ids) // layout.cp // (layout.tp if layout.sequence_parallel else 1)
        return to_device(batch, *more)

    def read(tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.is_floating_point():
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        return _even_counts(tensor, tokens * experts_per_token) if experts_per_token else None

    with mock.patch.object(actor_module, "to_device", note), mock.patch.object(mode, "read", read):
        yield


def _even_counts(tensor: torch.Tensor, routed: int) -> torch.Tensor | None:
    """Counts that a token dispatcher reads, if this rank sends ``routed`` copies and all experts get equally many."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__ == "MoEAlltoAllTokenDispatcher":
            return _count(owner, tensor, routed)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _count(dispatcher: Any, tensor: torch.Tensor, routed: int) -> torch.Tensor | None:
    local, ep, tp = dispatcher.num_local_experts, dispatcher.ep_size, dispatcher.tp_size
    counts = {
        "input_splits": routed // ep,
        "output_splits": routed // ep,
        "output_splits_tp": routed,
        "tokens_per_expert": routed * tp // local,
        "num_global_tokens_per_local_expert": routed // (ep * local),
    }
    named = next((count for name, count in counts.items() if getattr(dispatcher, name, None) is tensor), None)
    if named is None and tensor.shape == (local,):
        named = counts["tokens_per_expert"]
    return None if named is None else torch.full(tuple(tensor.shape), named, dtype=tensor.dtype)
