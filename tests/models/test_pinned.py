"""Pinned memory has the bytes that were asked for, and forks have it only if they shall read it."""

from __future__ import annotations

import faulthandler
import gc
import os
from unittest import mock

import pytest
import torch

from megatron_dppo.errors import UserError
from megatron_dppo.models.pinned import offsets_of, pinned_buffer, slot_of

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Runtime:
    """Takes down what is registered with CUDA."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.registered = error, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.registered[address] = size
        return self.error

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


def test_memory_that_cannot_be_pinned_is_an_error_that_names_the_setting() -> None:
    with (
        mock.patch.object(torch.cuda, "cudart", lambda: Runtime(error=2)),
        pytest.raises(UserError, match=r"model.reference_on_host = true: .* pin 0.0 GiB .*CUDA error 2.* or set it"),
    ):
        pinned_buffer(4096, CUDA, "model.reference_on_host", "true", remedy="set it to false")


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
