"""Pinned memory has the bytes that were asked for, and forks have it only if they shall read it."""

import faulthandler
import gc
import os
from unittest import mock

import torch

from megatron_dppo.models.pinned import allocate_pinned_buffer

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


def test_memory_is_registered_only_while_it_is_used() -> None:
    runtime = Runtime()
    with mock.patch.object(torch.cuda, "cudart", lambda: runtime):
        buffer = allocate_pinned_buffer(1536, CUDA, "optimizer.offload", "true")
    assert list(runtime.registered.values()) == [1536]
    del buffer
    gc.collect()
    assert runtime.registered == {}


def test_a_forked_process_does_not_have_the_memory() -> None:
    buffer = allocate_pinned_buffer(4096, CPU, "optimizer.offload", "true")
    buffer.fill_(7)
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # of a death that is wanted
        os._exit(int(buffer.sum().item()))
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
