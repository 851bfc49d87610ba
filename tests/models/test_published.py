"""The published models: what their tables say against transformers and Megatron, without memory for a single weight."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from megatron_dppo.bridge.load import bind
from megatron_dppo.bridge.mapping import entries, expected_tensors, parameters, redundant_tensors
from megatron_dppo.config import LayoutConfig, ModelConfig
from megatron_dppo.models.policy import build_policy
from megatron_dppo.models.shape import read_shape
from megatron_dppo.parallel.layout import stage_layers
from megatron_dppo.parallel.without_cuda import install
from megatron_dppo.parallel.world import World
from tests.ranks import RankPool


@dataclass(frozen=True)
class Published:
    """One model: the sizes in its config.json, and what its card says of it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    billions: str
    """Parameters by the model card."""
    architecture: str = "Qwen3ForCausalLM"
    more: dict[str, Any] = field(default_factory=lambda: {"head_dim": 128})
    layout: LayoutConfig = field(default_factory=lambda: LayoutConfig(tp=8, pp=4))
    """A layout that divides it."""

    def write(self, path: Path) -> Path:
        model_type = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2"}.get(self.architecture, "qwen3_moe")
        config = {
            "architectures": [self.architecture],
            "model_type": model_type,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.ffn,
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            **self.more,
        }
        (path / "config.json").write_text(json.dumps(config))
        return path


TIED = {"head_dim": 128, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
MODELS = {
    "Qwen3-0.6B": Published(28, 1024, 16, 8, 3072, "0.6", more=TIED),
    "Qwen3-1.7B": Published(28, 2048, 16, 8, 6144, "1.7", more=TIED),
    "Qwen3-4B": Published(36, 2560, 32, 8, 9728, "4.0", more=TIED),
    "Qwen3-8B": Published(36, 4096, 32, 8, 12_288, "8.2"),
    "Qwen3-14B": Published(40, 5120, 40, 8, 17_408, "14.8"),
    "Qwen3-32B": Published(64, 5120, 64, 8, 25_600, "32.8"),
    "Qwen3-30B-A3B": Published(
        *(48, 2048, 32, 4, 6144, "30.5", "Qwen3MoeForCausalLM"),
        more={"head_dim": 128, **EXPERTS},
        layout=LayoutConfig(tp=4, pp=8, sequence_parallel=True),
    ),
    "Qwen2.5-7B": Published(
        *(28, 3584, 28, 4, 18_944, "7.6", "Qwen2ForCausalLM"), more={"vocab_size": 152_064}, layout=LayoutConfig(tp=4)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_table_expects_the_tensors_that_transformers_writes(name: str, tmp_path: Path) -> None:
    shape = read_shape(MODELS[name].write(tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    written = {n: tuple(t.shape) for n, t in revert_weight_conversion(model, model.state_dict()).items()}
    assert written == expected_tensors(shape) | redundant_tensors(shape)
    assert parameters(shape) == model.num_parameters()
    assert f"{parameters(shape) / 1e9:.1f}" == MODELS[name].billions


def bind_without_memory(rank: int, size: int, path: Path, layout: LayoutConfig, stage: int) -> int:
    """How many entries the table has for a stage of a world whose other ranks are not there, all of them bound."""
    dist.destroy_process_group()
    install()
    shape, ranks, nowhere = read_shape(path), layout.tp * layout.pp, torch.device("meta")
    dist.init_process_group("fake", store=FakeStore(), rank=stage * layout.tp, world_size=ranks)
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    with ExitStack() as stack:
        stack.enter_context(patch("torch.cuda.current_device", lambda: nowhere))  # where Megatron puts its weights
        stack.enter_context(nowhere)
        model = build_policy(shape, ModelConfig(path=str(path), spec="torch"), layout, temperature=1.0)
    world = World(
        rank=stage * layout.tp,
        size=ranks,
        layout=layout,
        tp_rank=0,
        pp_rank=stage,
        cp_rank=0,
        dp_rank=0,
        ep_rank=0,
        etp_rank=0,
        replica_of=(0,) * ranks,
        device=nowhere,
        control=None,
        timeout_s=60.0,
    )
    bound = bind(model, world)
    real = [name for chunk in model for name, parameter in chunk.named_parameters() if not parameter.is_meta]
    assert not real, real
    return len(bound)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_megatrons_has_one_row_of_the_table_and_its_shape(
    ranks: RankPool, name: str, tmp_path: Path
) -> None:
    layout, shape = MODELS[name].layout, read_shape(MODELS[name].write(tmp_path))
    for stage in {0, layout.pp - 1}:
        (bound,) = ranks.run(1, bind_without_memory, tmp_path, layout, stage)
        assert bound == len(list(entries(shape, stage_layers(shape.num_layers, stage, layout))))
