"""Rows and columns are selected from matrices that are larger than a buffer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_dppo.bridge.chunks import BUFFER_BYTES
from megatron_dppo.bridge.safetensors_files import read_header
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.write import read_cut_tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cut_tensor_is_an_index_into_the_larger_tensor(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(5)
    sizes = {
        "model.embed_tokens.weight": (131, 512),
        "model.layers.1.input_layernorm.weight": (512,),
        "model.layers.1.self_attn.o_proj.weight": (512, 512),
        "model.layers.1.mlp.gate_proj.weight": (1000, 512),
        "model.layers.1.mlp.up_proj.weight": (1000, 512),
        "model.layers.1.mlp.down_proj.weight": (512, 1000),
    }
    larger = {
        name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()
    }
    save_file(larger, tmp_path / "model.safetensors")
    assert larger["model.layers.1.mlp.gate_proj.weight"].nbytes > 3 * BUFFER_BYTES
    tensors = read_header(tmp_path / "model.safetensors")
    units = torch.randperm(1000, generator=generator)[:700].sort().values
    cut = Cut((1,), ((), tuple(units.tolist())), zero_attention=(1,))
    for name, tensor in larger.items():
        smaller = name.replace("layers.1", "layers.0")
        found = read_cut_tensor(smaller, tensors, cut, dtype)
        if "o_proj" in name:
            tensor = torch.zeros_like(tensor)
        elif "down_proj" in name:
            tensor = tensor[:, units]
        elif "mlp" in name:
            tensor = tensor[units]
        assert torch.equal(found, tensor), name
