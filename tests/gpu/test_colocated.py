"""What CUDA alone can show of servers on the trainer's GPU: handles to its memory, and memory that is given back."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from base64 import b64decode
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config import LayoutConfig, LossConfig, replace
from megatron_dppo.init import write_model
from megatron_dppo.rollout.servers.api import Manifest
from megatron_dppo.rollout.servers.handles import lay_out, shared
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.sglang import SglangApi
from megatron_dppo.rollout.servers.vllm import PLUGIN, VllmApi
from tests.gpu.test_te_on_gpu import over_nccl
from tests.ranks import RankPool
from tests.steps import build, config_for, held_by, plan_for, step_of_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA"),
]
URL = "http://127.0.0.1:1"
MIB = 2**20


def open_it(pipe: Connection) -> None:
    """A server's rank: opens one handle after another, copies what is there, and lets go of it."""
    sys.path.insert(0, str(PLUGIN))
    from torch.multiprocessing import reductions

    rebuild = reductions.rebuild_cuda_tensor

    def by_uuid(*arguments: Any) -> torch.Tensor:
        """As SGLang has it in the place of torch's own."""
        devices = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        return rebuild(*arguments[:6], devices.index(arguments[6]), *arguments[7:])

    while (order := pipe.recv()) is not None:
        kind, handle, size = order
        if kind == "sglang":
            reductions.rebuild_cuda_tensor = by_uuid
            flat = pickle.loads(b64decode(handle))["flattened_tensor"]
            reductions.rebuild_cuda_tensor = rebuild
        else:
            from megatron_dppo_vllm.memory import opened

            flat = opened(handle["words"], size, torch.device("cuda", 0))
        seen = flat.cpu()
        del flat
        pipe.send(seen.numpy().tobytes())


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_another_process_reads_each_bucket_and_its_memory_comes_back(kind: str) -> None:
    http, context = Http(), multiprocessing.get_context("spawn")
    api = SglangApi(URL, http) if kind == "sglang" else VllmApi(URL, http)
    pipe, theirs = context.Pipe()
    process = context.Process(target=open_it, args=(theirs,), daemon=True)
    process.start()
    try:
        before = torch.cuda.memory_allocated()
        for number in range(4):
            bucket = {"a": torch.full((1000, 300), float(number), device="cuda"), "b": torch.ones(7, device="cuda")}
            flat = lay_out(bucket, torch.device("cuda", 0))
            pipe.send((kind, api.handle(Manifest.of(bucket), shared(flat)), flat.numel()))
            assert pipe.poll(60.0)
            assert pipe.recv() == flat.cpu().numpy().tobytes()
            del bucket, flat
        pipe.send(None)
        process.join(30.0)
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() == before
    finally:
        process.kill()
        http.close()


def released(rank: int, size: int, path: Path) -> list[tuple[int, int]]:
    """Bytes that the process has of the device, before and after it gives some back, twice, with a step between."""
    over_nccl()
    config = config_for(path, LayoutConfig(dp=1), LossConfig(), 64, distributed=True)
    config = replace(config, model=replace(config.model, spec="torch"))
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    seen = []
    for step in range(2):
        plan = plan_for(world, config, metadata)
        learner.learn(plan, held_by(rank, metadata, groups), step=step + 1, version=0)
        before = torch.cuda.memory_reserved()
        policy.actor.release_memory()
        seen.append((before, torch.cuda.memory_reserved()))
    return seen


def test_gradients_and_caches_go_back_to_the_device(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "policy"
    write_model(path, hidden=512, layers=4, heads=8, kv_heads=4, head_dim=64, ffn=4096, vocab_size=2048)
    weights = (path / "model.safetensors").stat().st_size  # fp32, as gradients are
    [seen] = ranks.run(1, released, path)
    for before, after in seen:
        assert before - after >= weights, "the gradients, and what passes had"
        assert after <= 3 * weights + 64 * MIB, "weights and two moments"
    assert seen[1][1] <= seen[0][1] + 4 * MIB, "no step leaves more behind than the one before"
