"""Patches that run Megatron on a CPU, and the resume of torch's Adam inside Megatron's distributed optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_dppo.config import LayoutConfig
from megatron_dppo.models.optimizer import prepare_adam_state
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.parallel import without_cuda
from megatron_dppo.trainer.shard_writer import ShardWriter
from tests.commands import Command
from tests.models.test_logits import LENGTHS, build, pack, targets_of
from tests.policies import write_policy
from tests.ranks import RankPool

only_without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="machines with CUDA get no CPU patches")


@only_without_cuda
def test_a_second_install_changes_nothing() -> None:
    without_cuda.install()
    zeros, tensor_type = torch.zeros, torch.Tensor.type
    without_cuda.install()
    assert torch.zeros is zeros and torch.Tensor.type is tensor_type
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64


@only_without_cuda
def test_the_meta_device_still_allocates_no_memory(tmp_path: Path) -> None:
    code = (
        "import torch; from megatron_dppo.parallel import without_cuda; without_cuda.install()\n"
        "with torch.device('meta'): assert torch.nn.Linear(2, 2).weight.is_meta and torch.zeros(1).is_meta"
    )
    command = Command(["python", "-c", code], tmp_path / "log")  # own process: torch caches its tensor factories
    assert command.exit_code() == 0, (tmp_path / "log").read_text()


class Trainer:
    """Train a policy on one fixed pack of sequences, with Megatron's DDP and distributed optimizer."""

    def __init__(self, path: Path, layout: LayoutConfig) -> None:
        self.policy: PolicyModel = build(path, layout)[0]
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.ddp = DistributedDataParallel(self.policy.config, ddp_config, self.policy)
        adam_config = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.01, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(adam_config, [self.ddp])
        prepare_adam_state(self.optimizer)

    def step(self) -> float:
        vocab = self.policy.shape.vocab_size
        ids, positions, packed = pack(LENGTHS, vocab)
        arguments = {"predictors": torch.arange(ids.shape[1]), "targets": targets_of(ids, vocab)}
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        logprobs, *_ = self.ddp(ids, positions, packed_seq_params=packed, **arguments)
        loss = -logprobs.mean()
        loss.backward()
        finalize_model_grads([self.ddp], None)
        self.optimizer.step()
        return float(loss)

    def sharded_state(self, sharding: str, loading: bool) -> dict[str, Any]:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {"distrib_optim_sharding_type": sharding, "dp_cp_group": group}
        state: dict[str, Any] = {"model": self.policy.sharded_state_dict(metadata=metadata)}
        optimizer = self.optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=metadata)
        return {**state, "optimizer": optimizer}


def train_and_resume(rank: int, size: int, path: Path, folder: Path, sharding: str) -> tuple[list[float], list[float]]:
    """Losses of the three steps after a checkpoint, first without a resume, then resumed from the checkpoint."""
    layout = LayoutConfig(dp=size)
    trainer = Trainer(path, layout)
    for _ in range(2):
        trainer.step()
    ShardWriter(trainer.sharded_state(sharding, loading=False), folder, background=False).finish()
    uninterrupted = [trainer.step() for _ in range(3)]
    trainer = Trainer(path, layout)
    state = dist_checkpointing.load(trainer.sharded_state(sharding, loading=True), str(folder))
    trainer.policy.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    return uninterrupted, [trainer.step() for _ in range(3)]


@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
def test_a_resumed_run_has_bit_identical_losses(ranks: RankPool, tmp_path: Path, sharding: str) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for uninterrupted, resumed in ranks.run(2, train_and_resume, write_policy(tmp_path), folder, sharding):
        assert resumed == uninterrupted
        assert len(set(uninterrupted)) == 3, "each step changes the loss"
