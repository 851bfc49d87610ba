"""Gradient norm without a host wait, and Adam state kept on the device or offloaded to the host.

Adam creates its state lazily, but the distributed optimizer can describe and load only existing
state for a checkpoint: the state is created before the first step and restored in place.

Megatron's own offload copies tensor by tensor through memory staged by CUDA, with a wait for each
tensor. Here one pinned buffer holds a rank's whole state during the run, with one wait for all
copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dppo.models.pinned import allocate_pinned_buffer, compute_offsets, view_slot


def compute_gradient_squares(optimizer: Any, device: torch.device) -> torch.Tensor:
    """Return squared gradient norms, fp32 on the device; the caller adds the entries. Collective.

    Equals Megatron-Core's ``get_grad_norm`` without the host wait. Parameters shared by several
    ranks count once.

    Args:
        optimizer: result of ``get_megatron_optimizer``, after ``prepare_grads``.

    Returns:
        [1], or [n] if the n chained optimizers sum over different groups of ranks.
    """
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    one_group = len(parts) == 1 or optimizer.grads_states_parallel_group_is_shared()
    squares = []
    for chained in [parts] if one_group else [[part] for part in parts]:
        gradients = [gradient for part in chained for gradient in _get_norm_gradients(part)]
        square = torch.zeros(1, device=device)
        if gradients:
            overflow = torch.zeros(1, dtype=torch.int, device=device)
            # Through the module, because without_cuda replaces these functions.
            norm, _ = clip_grads.multi_tensor_applier(
                clip_grads.l2_norm_impl, overflow, [gradients], False
            )
            square = norm**2.0
        dist.all_reduce(square, group=chained[0].get_grad_stats_parallel_group())
        squares.append(square)
    return torch.cat(squares)


def _get_norm_gradients(part: Any) -> list[torch.Tensor]:
    """Return the gradients of one optimizer, without copies counted by another rank."""
    # megatron-core 0.19 renames the method.
    newer = getattr(part, "get_grads_for_grad_norm", None)
    return newer() if newer else part.get_main_grads_for_grad_norm()


def prepare_adam_state(optimizer: Any) -> None:
    """Create the Adam state of a Megatron optimizer before its first step; keep existing state.

    Required before ``sharded_state_dict`` of an optimizer without a step. Otherwise Megatron
    creates the state from ``torch.empty``, which is right only if a checkpoint is then read into
    the state.
    """
    for part in list_optimizers(optimizer):
        inner = part.optimizer
        if isinstance(part, DistributedOptimizer):
            _find_mixed_types(part)
        part.init_state_fn(inner, part.config)
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            _restore_in_place(inner)
            continue
        for state in inner.state.values():
            state.setdefault("step", torch.zeros((), dtype=torch.float32))


def _find_mixed_types(part: Any) -> None:
    # Megatron puts a group's fp32 parameters before the bf16 parameters, but looks up all
    # parameters in the order of the buffers. Without corrected places, a checkpoint of a policy of
    # both types would hold the state of other parameters.
    for group, of_types in enumerate(
        zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
    ):
        for order, parameter in enumerate(itertools.chain(*of_types)):
            part.model_param_group_index_map[parameter] = group, order


def list_optimizers(optimizer: Any) -> list[Any]:
    """List the chained optimizers of this rank, for dense parameters and for experts, if any."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in parts if part.optimizer is not None]


def _restore_in_place(inner: torch.optim.Optimizer) -> None:
    """Make a fused Adam copy loaded state into its existing state."""
    # ``load_state_dict`` of Transformer Engine allocates the whole state again beside the old
    # tensors, whenever Megatron describes or loads a checkpoint: 30 GiB for a 4B policy.
    kept: dict[torch.Tensor, Any] = {}

    def before(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
        with torch.no_grad():
            for parameter, tensors in _iter_states(optimizer, loaded):
                # Torch's Adam counts steps for each parameter.
                if "step" in tensors:
                    step = int(tensors.pop("step"))
                    for group in loaded["param_groups"]:
                        group["step"] = step
                for name, tensor in tensors.items():
                    if tensor is not optimizer.state[parameter][name]:
                        optimizer.state[parameter][name].copy_(tensor)
        # Empty the caller's own dictionary, because ``load_state_dict`` allocates its tensors.
        loaded["state"].clear()
        kept.update(optimizer.state)

    def after(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.update(kept)
        kept.clear()

    inner.register_load_state_dict_pre_hook(before)
    inner.register_load_state_dict_post_hook(after)


def _iter_states(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    numbers = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        yield parameter, state_dict["state"].get(number, {})


class OffloadedState:
    """State of a Megatron optimizer: fp32 master weights and Adam's moments.

    Only a tensor's data moves. The tensor objects stay, because Megatron refers to them from
    several places.

    Args:
        optimizer: result of ``get_megatron_optimizer``, with Adam's state.
        weights: weights of the policy. An fp32 master weight that is a view of a policy weight
            stays on the device.
        device: device of the optimizer step.
    """

    def __init__(
        self,
        optimizer: Any,
        weights: Iterable[torch.nn.Parameter],
        device: torch.device,
    ) -> None:
        self._optimizers: list[torch.optim.Optimizer] = [
            part.optimizer for part in list_optimizers(optimizer)
        ]
        self._weights = list(weights)
        self._device = device
        self._offsets, size = compute_offsets(self._tensors())
        # Not visible to forked processes, because the device would keep writing into memory that
        # a checkpoint's writer reads. Before the fork Megatron copies the slots of a checkpoint,
        # since a slot is a part of a larger tensor.
        self._host = allocate_pinned_buffer(
            size, device, "optimizer.offload", "true", remedy="set optimizer.offload=false"
        )

    def offload(self) -> None:
        """Move the whole state to the host and free its memory on the device. Idempotent."""
        # Queue all copies on the current stream, and wait once at the end.
        for tensor, offset in zip(self._tensors(), self._offsets, strict=True):
            slot = view_slot(self._host, offset, tensor)
            if tensor.data_ptr() != slot.data_ptr():
                slot.copy_(tensor.data, non_blocking=True)
                # The device keeps no storage: a checkpoint reads and writes the slot in place.
                tensor.data = slot
        # A checkpoint may read the buffer right after this call.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def onload(self) -> None:
        """Move the whole state to the device, for later work on the current stream."""
        for tensor in self._tensors():
            tensor.data = tensor.data.to(self._device, non_blocking=True, copy=True)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors to move, always in the same order."""
        # Read the state at each call, because loading may replace the moments of torch's Adam.
        weights = {weight.untyped_storage().data_ptr() for weight in self._weights}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for master in group["params"]:
                    if master.untyped_storage().data_ptr() not in weights:
                        yield master
                    state = optimizer.state[master]
                    # Torch's Adam keeps the step count as a 0-d tensor on the host.
                    yield from (
                        value
                        for _, value in sorted(state.items())
                        if torch.is_tensor(value) and value.ndim
                    )
