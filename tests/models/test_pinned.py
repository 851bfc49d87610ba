"""Pinned memory has the bytes that were asked for, and forks have it only if they shall read it."""

import faulthandler
import gc
import os
from unittest import mock

import pytest
import torch

from megatron_dppo.models.pinned import pinned_buffer

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
        buffer = pinned_buffer(1536, CUDA, "optimizer.offload", "true")
    assert list(runtime.registered.values()) == [1536]
    del buffer
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
