"""Patches that run Megatron on a CPU."""

import pytest
import torch

from megatron_dppo.parallel import without_cuda
from tests.commands import Command

only_without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="machines with CUDA get no CPU patches")


@only_without_cuda
def test_second_install_changes_nothing():
    without_cuda.install()
    zeros, tensor_type = torch.zeros, torch.Tensor.type
    without_cuda.install()
    assert torch.zeros is zeros and torch.Tensor.type is tensor_type
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64


@only_without_cuda
def test_meta_device_allocates_no_memory(tmp_path):
    code = (
        "import torch; from megatron_dppo.parallel import without_cuda; without_cuda.install()\n"
        "with torch.device('meta'): assert torch.nn.Linear(2, 2).weight.is_meta and torch.zeros(1).is_meta"
    )
    command = Command(["python", "-c", code], tmp_path / "log")  # own process: torch caches its tensor factories
    assert command.exit_code() == 0, (tmp_path / "log").read_text()
