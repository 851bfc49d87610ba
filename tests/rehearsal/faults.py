"""Faults put in by hand: each context manager patches the trainer's code in the rehearsal's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_dppo.models import actor as actor_module
from megatron_dppo.models import microbatch, policy_head
from megatron_dppo.trainer.learner import PolicyLoss


@contextmanager
def item_in_loss() -> Iterator[None]:
    """The loss reads its value for each pack."""
    plain = PolicyLoss.__call__

    def reading(self: PolicyLoss, responses: Any) -> Any:
        loss, sums = plain(self, responses)
        loss.item()
        return loss, sums

    with mock.patch.object(PolicyLoss, "__call__", reading):
        yield


@contextmanager
def float32_product() -> Iterator[None]:
    """The head multiplies in float32, without tensor cores."""

    def in_float32(hidden: torch.Tensor, vocabulary: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(hidden.float(), vocabulary.float().t(), out=out)

    with mock.patch.object(policy_head, "logits_of", in_float32):
        yield


@contextmanager
def host_tensor() -> Iterator[None]:
    """The advantages of a pack stay on the host."""
    plain = microbatch.to_device

    def forgetting(batch: Any, *more: Any) -> Any:
        arrays = plain(batch, *more)
        object.__setattr__(arrays, "advantage", torch.zeros(arrays.advantage.shape))
        return arrays

    with mock.patch.object(actor_module, "to_device", forgetting):
        yield


@contextmanager
def kept_activation() -> Iterator[None]:
    """Each pack's log-probabilities stay alive with their graph."""
    plain, kept = PolicyLoss.__call__, []

    def keeping(self: PolicyLoss, responses: Any) -> Any:
        kept.append(responses.logprobs)
        return plain(self, responses)

    with mock.patch.object(PolicyLoss, "__call__", keeping):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "item in the loss": item_in_loss,
    "float32 product": float32_product,
    "host tensor": host_tensor,
    "kept activation": kept_activation,
}
