"""Pinned host memory of exact size, for copies between host and device without staging.

Torch's own allocator rounds each block up to a power of two, and never frees a block.
"""

from __future__ import annotations

import itertools
import mmap
import weakref
from collections.abc import Iterable

import torch

from megatron_dppo.errors import UserError

ALIGNMENT = 512
"""Alignment of slots in bytes, as of blocks in CUDA's allocator."""
PORTABLE = 1
"""``cudaHostRegisterPortable``."""


def compute_offsets(tensors: Iterable[torch.Tensor]) -> tuple[list[int], int]:
    """Return each tensor's offset in a shared buffer, and the buffer's size, in bytes."""
    rooms = (-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
    *offsets, size = itertools.accumulate(rooms, initial=0)
    return offsets, size


def view_slot(buffer: torch.Tensor, offset: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a buffer at ``offset`` bytes, with the shape and type of ``tensor``."""
    return buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def allocate_pinned_buffer(
    size: int,
    device: torch.device,
    setting: str,
    value: object,
    *,
    remedy: str = "",
) -> torch.Tensor:
    """Allocate [size] bytes, registered with CUDA if ``device`` is a CUDA device.

    The caller must keep the buffer while a slot is in use: a slot does not keep the registration.

    Args:
        setting: setting named in the error.
        value: value of ``setting``.
        remedy: alternative to more memory.

    Raises:
        UserError: the host cannot pin ``size`` bytes.
    """
    memory = mmap.mmap(-1, max(size, ALIGNMENT), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Forked processes do not get the memory, because a fork would copy all bytes.
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
