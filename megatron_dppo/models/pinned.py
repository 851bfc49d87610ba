"""Pinned host memory of exactly the bytes that are asked for: copies between it and a device need
no staging.

Torch's allocator of pinned memory rounds each block up to the next power of two, and keeps it until
the process ends.
"""

from __future__ import annotations

import itertools
import mmap
import weakref
from collections.abc import Iterable

import torch

from megatron_dppo.errors import UserError

ALIGNMENT = 512
"""Bytes: slots begin where the blocks of CUDA's allocator do."""
PORTABLE = 1
"""``cudaHostRegisterPortable``."""


def compute_offsets(tensors: Iterable[torch.Tensor]) -> tuple[list[int], int]:
    """Bytes at which each tensor begins in a buffer for all of them, and the buffer's size in
    bytes."""
    rooms = (-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
    *offsets, size = itertools.accumulate(rooms, initial=0)
    return offsets, size


def view_slot(buffer: torch.Tensor, offset: int, tensor: torch.Tensor) -> torch.Tensor:
    """The view of a buffer, from ``offset`` bytes on, with the shape and type of a tensor."""
    return buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def allocate_pinned_buffer(
    size: int, device: torch.device, setting: str, value: object, *, remedy: str = ""
) -> torch.Tensor:
    """Make [size] bytes, registered with CUDA if the device is one of CUDA's. The registration ends
    with the tensor.

    Forked processes do not have the memory, because the kernel would copy all of it at the fork.
    Slots do not keep the registration: the caller keeps the buffer as long as its slots.

    Args:
        setting, value: that the error names.
        remedy: what else to do, besides giving more memory.

    Raises:
        UserError: the host cannot pin so much.
    """
    memory = mmap.mmap(-1, max(size, ALIGNMENT), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cuda":
        cudart = torch.cuda.cudart()
        if error := int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), PORTABLE)):
            problem = f"the host could not pin {size / 2**30:.1f} GiB (CUDA error {error})"
            more = "Give the job more of the host's memory (of every rank on a node together)"
            raise UserError(setting, value, problem, f"{more}, or {remedy}" if remedy else more)
        weakref.finalize(buffer, cudart.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return buffer
