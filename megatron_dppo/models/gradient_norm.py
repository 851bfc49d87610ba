"""The norm of a gradient over all parameters of all ranks, left on the device: the host reads it with other values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.clip_grads import l2_norm_impl, multi_tensor_applier


def gradient_squares(optimizer: Any, device: torch.device) -> torch.Tensor:
    """Squares of the gradient's norm, fp32 on the device, to be summed. Collective.

    This is ``get_grad_norm`` of Megatron-Core without its host wait. Parameters that ranks share count once.

    Args:
        optimizer: from ``get_megatron_optimizer``, after ``prepare_grads``.
        device: of the gradients.

    Returns:
        [1], or [n] if the n chained optimizers sum over different groups of ranks.
    """
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    one_group = len(parts) == 1 or optimizer.grads_states_parallel_group_is_shared()
    squares = []
    for some in [parts] if one_group else [[part] for part in parts]:
        gradients = [gradient for part in some for gradient in _counted_once(part)]
        square = torch.zeros(1, device=device)
        if gradients:
            overflow = torch.zeros(1, dtype=torch.int, device=device)
            norm, _ = multi_tensor_applier(l2_norm_impl, overflow, [gradients], False)
            square = norm**2.0
        dist.all_reduce(square, group=some[0].get_grad_stats_parallel_group())
        squares.append(square)
    return torch.cat(squares)


def _counted_once(part: Any) -> list[torch.Tensor]:
    """Gradients of one optimizer, without copies of those that another rank counts."""
    newer = getattr(part, "get_grads_for_grad_norm", None)  # its name from megatron-core 0.19 on
    return newer() if newer else part.get_main_grads_for_grad_norm()
