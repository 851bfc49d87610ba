"""Faults put in by hand: each patches a function of the trainer in the rehearsal's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_dppo.models import actor as actor_module
from megatron_dppo.models import policy_head
from megatron_dppo.trainer.learner import PolicyLoss

Function = Callable[..., Any]


def read_loss(plain: Function) -> Function:
    def compute_loss(*arguments: Any) -> Any:
        loss, sums = plain(*arguments)
        loss.item()
        return loss, sums

    return compute_loss


def multiply_in_float32(plain: Function) -> Function:
    def multiply(hidden: torch.Tensor, vocabulary: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(hidden.float(), vocabulary.float().t(), out=out)

    return multiply


def leave_advantages_on_host(plain: Function) -> Function:
    def place(*arguments: Any) -> Any:
        arrays = plain(*arguments)
        object.__setattr__(arrays, "advantage", torch.zeros(arrays.advantage.shape))
        return arrays

    return place


def keep_logprobs(plain: Function) -> Function:
    """Keep each pack's log-probabilities alive with their graph."""
    kept = []

    def compute_loss(loss: PolicyLoss, responses: Any) -> Any:
        kept.append(responses.logprobs)
        return plain(loss, responses)

    return compute_loss


FAULTS: dict[str, tuple[Any, str, Callable[[Function], Function]]] = {
    "item in the loss": (PolicyLoss, "__call__", read_loss),
    "float32 product": (policy_head, "logits_of", multiply_in_float32),
    "host tensor": (actor_module, "to_device", leave_advantages_on_host),
    "kept activation": (PolicyLoss, "__call__", keep_logprobs),
}
"""By name: where the function is, its name, and how it changes."""
