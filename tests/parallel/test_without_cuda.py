"""Patches that run Megatron on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dppo.config import LayoutConfig
from megatron_dppo.parallel import without_cuda
from tests.commands import Command
from tests.models.test_actor import configure, learned
from tests.ranks import RankPool

only_without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="machines with CUDA get no CPU patches"
)


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
        "with torch.device('meta'): assert torch.nn.Linear(2, 2).weight.is_meta and "
        "torch.zeros(1).is_meta"
    )
    command = Command(
        ["python", "-c", code], tmp_path / "log"
    )  # own process: torch caches its tensor factories
    assert command.exit_code() == 0, (tmp_path / "log").read_text()


FUSED = """
def multi_tensor_applier(*arguments, **options):
    raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

class FusedAdam:
    __init__ = multi_tensor_applier

FusedSGD, multi_tensor_l2norm, multi_tensor_scale = FusedAdam, multi_tensor_applier, multi_tensor_applier
"""
"""Apex without a GPU. Megatron-Core chooses Transformer Engine's functions in the same places."""
LEARN = """
import sys
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron_dppo.config import LayoutConfig
from tests.models.test_actor import configure, learned
assert clip_grads.multi_tensor_applier.__module__ == "apex.multi_tensor_apply"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(learned(0, 1, configure(sys.argv[1], LayoutConfig()))[0])
"""


@only_without_cuda
def test_fused_optimizers_without_a_gpu_change_no_step(
    ranks: RankPool, policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "apex").mkdir()
    for file in ("amp_C.py", "apex/multi_tensor_apply.py", "apex/optimizers.py"):
        (tmp_path / file).write_text(FUSED)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", LEARN, str(policy)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ((metrics, *_),) = ranks.run(1, learned, configure(policy, LayoutConfig()))
    assert done.stdout.splitlines()[-1] == str(metrics)
