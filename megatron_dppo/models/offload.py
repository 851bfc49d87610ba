"""The optimizer's state in the host's memory, but for the optimizer step.

Megatron's own offload moves tensor by tensor through memory that CUDA has to stage: each copy waits for the one before.
Here one pinned buffer holds all of a rank's state for the whole run; copies are queued on the current stream, and
waited for once. Between steps the state's tensors are slots of that buffer, so that a checkpoint reads and writes them
where they lie; their storage on the device is gone.
"""

from __future__ import annotations

import itertools
import mmap
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_dppo.errors import UserError
from megatron_dppo.parallel.adam_state import optimizer_parts

ALIGNMENT = 512
"""Bytes: slots begin where the blocks of CUDA's allocator do."""
PORTABLE = 1
"""``cudaHostRegisterPortable``."""


class OffloadedState:
    """What a Megatron optimizer, chained or not, knows of its parameters: fp32 master weights and Adam's moments.

    Tensors stay the objects that they are, since Megatron refers to them from several places; only their data moves.

    Args:
        optimizer: what ``get_megatron_optimizer`` returned, with Adam's state in it.
        weights: of the policy. A master weight that is a view of one (in fp32) stays on the device with it.
        device: where steps are made.
    """

    def __init__(self, optimizer: Any, weights: Iterable[torch.nn.Parameter], device: torch.device) -> None:
        self._optimizers: list[torch.optim.Optimizer] = [part.optimizer for part in optimizer_parts(optimizer)]
        self._weights, self._device = list(weights), device
        *self._offsets, size = itertools.accumulate(map(_room, self._tensors()), initial=0)
        self._host = _host_buffer(size, device)

    def leave_device(self) -> None:
        """Move all of it to the host; what is there already stays. Its memory on the device is free afterwards."""
        for tensor, offset in zip(self._tensors(), self._offsets, strict=True):
            slot = self._host[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if tensor.data_ptr() != slot.data_ptr():
                slot.copy_(tensor.data, non_blocking=True)
                tensor.data = slot
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # a checkpoint may read it from now on

    def return_to_device(self) -> None:
        """Move all of it to the device. What is queued on the current stream next finds it there."""
        for tensor in self._tensors():
            tensor.data = tensor.data.to(self._device, non_blocking=True, copy=True)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """In one order always. Torch's Adam may put other tensors in the place of the moments when it loads."""
        weights = {weight.untyped_storage().data_ptr() for weight in self._weights}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for master in group["params"]:
                    if master.untyped_storage().data_ptr() not in weights:
                        yield master
                    state = optimizer.state[master]
                    # The count of steps, which torch's Adam keeps as a tensor, has no dimension, and is on the host.
                    yield from (value for _, value in sorted(state.items()) if torch.is_tensor(value) and value.ndim)


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _host_buffer(size: int, device: torch.device) -> torch.Tensor:
    """[size] bytes on the host, which the device can read and write while the host does something else.

    Registered with CUDA rather than got from torch's allocator of pinned memory, which takes the next power of two: up
    to twice as much. No forked process inherits it: the device would go on writing into what the writer of a checkpoint
    reads, or the kernel would copy all of it at the fork. Megatron copies before the fork what a checkpoint takes of
    it, since a slot is a part of a larger tensor.
    """
    memory = mmap.mmap(-1, max(size, ALIGNMENT), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cuda":
        cudart = torch.cuda.cudart()
        if error := int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), PORTABLE)):
            raise UserError(
                "optimizer.offload",
                "true",
                f"the host could not pin {size / 2**30:.1f} GiB for the optimizer's state (CUDA error {error})",
                "Give the job more of the host's memory (of every rank on a node together), or set "
                "optimizer.offload=false",
            )
        weakref.finalize(buffer, cudart.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return buffer
