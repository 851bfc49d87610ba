"""Pinned memory has the bytes that were asked for, and forks have it only if they shall read it."""

from __future__ import annotations

import faulthandler
import gc
import os
from unittest import mock

import pytest
import torch

from megatron_dppo.models.pinned import offsets_of, pinned_buffer, slot_of

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Runtime:
    """Takes down what is registered with CUDA."""

    def __init__(self) -> None:
        self.registered = dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.registered[address]


def test_no_more_is_registered_than_was_asked_for_and_only_while_it_is_used() -> None:
    runtime = Runtime()
    tensors = [torch.zeros(5, 3), torch.zeros(300, dtype=torch.bfloat16)]
    offsets, size = offsets_of(tensors)
    assert (offsets, size) == ([0, 512], 512 + 1024)
    with mock.patch.object(torch.cuda, "cudart", lambda: runtime):
        buffer = pinned_buffer(size, CUDA, "optimizer.offload", "true")
    assert list(runtime.registered.values()) == [size]
    slots = [slot_of(buffer, offset, tensor) for offset, tensor in zip(offsets, tensors, strict=True)]
    assert [(slot.shape, slot.dtype) for slot in slots] == [(tensor.shape, tensor.dtype) for tensor in tensors]
    del buffer, slots
    gc.collect()
    assert runtime.registered == {}


@pytest.mark.parametrize("shared", [False, True])
def test_a_fork_has_only_memory_that_is_shared_with_it(shared: bool) -> None:
    buffer = pinned_buffer(4096, CPU, "run.dir", "x", shared=shared)
    buffer.fill_(7)
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # of a death that is wanted
        os._exit(0 if buffer.sum().item() == 7 * 4096 else 1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) is not shared
    assert not shared or os.waitstatus_to_exitcode(status) == 0
