"""The optimizer beyond Megatron's own: the gradient's norm without a host wait, and Adam's state on
device or host.

Adam creates its state lazily. The distributed optimizer can neither describe it for a checkpoint
nor load it before it exists. So it is made before the first step and restored where it lies.

Megatron's own offload moves tensor by tensor through memory that CUDA has to stage: each copy waits
for the one before. Here one pinned buffer holds all of a rank's state for the whole run. Copies are
queued on the current stream, and waited for once. Between steps the state's tensors are slots of
that buffer, so that a checkpoint reads and writes them where they lie. Their storage on the device
is gone.
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
    """Squares of the gradient's norm, fp32 on the device, to be summed. Collective.

    This is ``get_grad_norm`` of Megatron-Core without its host wait. Parameters that ranks share
    count once.

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
        gradients = [gradient for part in some for gradient in _get_norm_gradients(part)]
        square = torch.zeros(1, device=device)
        if gradients:
            overflow = torch.zeros(1, dtype=torch.int, device=device)
            # Through the module, because without_cuda replaces these functions.
            norm, _ = clip_grads.multi_tensor_applier(
                clip_grads.l2_norm_impl, overflow, [gradients], False
            )
            square = norm**2.0
        dist.all_reduce(square, group=some[0].get_grad_stats_parallel_group())
        squares.append(square)
    return torch.cat(squares)


def _get_norm_gradients(part: Any) -> list[torch.Tensor]:
    """Gradients of one optimizer, without copies of those that another rank counts."""
    newer = getattr(part, "get_grads_for_grad_norm", None)  # its name from megatron-core 0.19 on
    return newer() if newer else part.get_main_grads_for_grad_norm()


def prepare_adam_state(optimizer: Any) -> None:
    """Create the Adam state of a Megatron optimizer now instead of in its first step; existing
    state stays.

    Call this before ``sharded_state_dict`` on an optimizer that may not have stepped. Without it
    Megatron makes the state when it loads, from ``torch.empty``. That is right only where a
    checkpoint is then read into it.

    Args:
        optimizer: what ``get_megatron_optimizer`` returned.
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
    """Tell where in its group each parameter is. Within a group Megatron puts fp32 parameters
    before those in bf16, and looks for all of them in the buffers' order: in a policy of both types
    a checkpoint would have others' state."""
    for group, of_types in enumerate(
        zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
    ):
        for order, parameter in enumerate(itertools.chain(*of_types)):
            part.model_param_group_index_map[parameter] = group, order


def list_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of which Megatron made one: dense parameters and experts have one each, where
    a rank has any."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in parts if part.optimizer is not None]


def _restore_in_place(inner: torch.optim.Optimizer) -> None:
    """Have a fused Adam copy what it loads into the state that it has.

    Transformer Engine's ``load_state_dict`` makes new tensors for all of it while the old ones are
    still there: of a 4B policy's moments that is another 30 GiB, each time that Megatron describes
    or loads a checkpoint.
    """
    kept: dict[torch.Tensor, Any] = {}

    def before(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
        with torch.no_grad():
            for parameter, tensors in _iterate_states(optimizer, loaded):
                if "step" in tensors:  # of torch's Adam, which counts for each parameter
                    step = int(tensors.pop("step"))
                    for group in loaded["param_groups"]:
                        group["step"] = step
                for name, tensor in tensors.items():
                    if tensor is not optimizer.state[parameter][name]:
                        optimizer.state[parameter][name].copy_(tensor)
        loaded[
            "state"
            # The same object as the caller's, who then finds nothing left to make tensors for.
        ].clear()
        kept.update(optimizer.state)

    def after(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.update(kept)
        kept.clear()

    inner.register_load_state_dict_pre_hook(before)
    inner.register_load_state_dict_post_hook(after)


def _iterate_states(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    numbers = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        yield parameter, state_dict["state"].get(number, {})


class OffloadedState:
    """State of a Megatron optimizer, chained or not: fp32 master weights and Adam's moments.

    Tensors stay the objects that they are, since Megatron refers to them from several places; only
    their data moves.

    Args:
        optimizer: what ``get_megatron_optimizer`` returned, with Adam's state in it.
        weights: of the policy. A master weight that is a view of one (in fp32) stays on the device
            with it.
        device: where steps are made.
    """

    def __init__(
        self, optimizer: Any, weights: Iterable[torch.nn.Parameter], device: torch.device
    ) -> None:
        self._optimizers: list[torch.optim.Optimizer] = [
            part.optimizer for part in list_optimizers(optimizer)
        ]
        self._weights = list(weights)
        self._device = device
        self._offsets, size = compute_offsets(self._tensors())
        # No forked process has it: the device would go on writing into what the writer of a
        # checkpoint reads. Megatron copies before the fork what a checkpoint takes of it, since a
        # slot is a part of a larger tensor.
        self._host = allocate_pinned_buffer(
            size, device, "optimizer.offload", "true", remedy="set optimizer.offload=false"
        )

    def offload(self) -> None:
        """Move all of it to the host; what is there already stays. Its memory on the device is free
        afterwards."""
        for tensor, offset in zip(self._tensors(), self._offsets, strict=True):
            slot = view_slot(self._host, offset, tensor)
            if tensor.data_ptr() != slot.data_ptr():
                slot.copy_(tensor.data, non_blocking=True)
                tensor.data = slot
        if self._device.type == "cuda":
            torch.cuda.current_stream(
                self._device
            ).synchronize()  # a checkpoint may read it from now on

    def onload(self) -> None:
        """Move all of it to the device. What is queued on the current stream next finds it
        there."""
        for tensor in self._tensors():
            tensor.data = tensor.data.to(self._device, non_blocking=True, copy=True)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """In one order always. Torch's Adam may put other tensors in the place of the moments when
        it loads."""
        weights = {weight.untyped_storage().data_ptr() for weight in self._weights}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for master in group["params"]:
                    if master.untyped_storage().data_ptr() not in weights:
                        yield master
                    state = optimizer.state[master]
                    # The count of steps, which torch's Adam keeps as a tensor, has no dimension,
                    # and is on the host.
                    yield from (
                        value
                        for _, value in sorted(state.items())
                        if torch.is_tensor(value) and value.ndim
                    )
