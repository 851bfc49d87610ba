"""Rows and columns are taken out of matrices that are larger than a buffer, which is all that is in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_dppo.bridge.chunks import BUFFER_BYTES
from megatron_dppo.bridge.convert import stored_chunks
from megatron_dppo.bridge.safetensors_files import read_header
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.job import cut_tensor
from megatron_dppo.models.shape import PUBLISHED

SHAPE = replace(PUBLISHED["qwen3-0.6b"], num_layers=2, hidden=512, ffn=1000, kv_heads=4, heads=8, head_dim=64)


@pytest.mark.parametrize(("dtype", "narrow"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)])
def test_a_cut_is_an_index_into_the_whole_tensor(tmp_path: Path, dtype: torch.dtype, narrow: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    sizes = {"mlp.gate_proj": (1000, 512), "mlp.down_proj": (512, 1000), "self_attn.q_proj": (512, 512),
             "self_attn.v_proj": (256, 512), "self_attn.o_proj": (512, 512), "self_attn.k_norm": (64,),
             "input_layernorm": (512,), "mlp.gate": (6, 512), "mlp.experts.3.up_proj": (1000, 512)}  # fmt: skip
    names = {name: f"model.layers.1.{name}.weight" for name in sizes} | {"embed_tokens": "model.embed_tokens.weight"}
    sizes["embed_tokens"] = (131, 512)
    whole = {names[name]: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}
    save_file(whole, tmp_path / "model.safetensors")
    assert whole[names["mlp.gate_proj"]].nbytes > 3 * BUFFER_BYTES
    units = torch.randperm(1000, generator=generator)[:700].sort().values
    stream = torch.randperm(512, generator=generator)[:300].sort().values
    experts = torch.tensor([0, 3, 4])
    of_layers = [((), tuple(kept)) for kept in (units.tolist(), (0, 3), experts.tolist())]
    cut = Cut((1,), *of_layers, channels=tuple(stream.tolist()) if narrow else None)
    channels = stream if narrow else None
    tensors = stored_chunks(read_header(tmp_path / "model.safetensors"))

    def read(name: str) -> torch.Tensor:
        data = b"".join(bytes(part) for part in cut_tensor(name, tensors, SHAPE, cut, dtype))
        return torch.frombuffer(bytearray(data), dtype=dtype)

    queries = torch.tensor([*range(128), *range(384, 512)])
    keys = torch.tensor([*range(64), *range(192, 256)])
    expected = {"mlp.gate_proj": (units, channels), "mlp.down_proj": (channels, units),
                "self_attn.q_proj": (queries, channels), "self_attn.v_proj": (keys, channels),
                "self_attn.o_proj": (channels, queries), "self_attn.k_norm": (None, None),
                "input_layernorm": (channels, None), "mlp.gate": (experts, channels),
                "mlp.experts.3.up_proj": (units, channels), "embed_tokens": (None, channels)}  # fmt: skip
    for name, (rows, columns) in expected.items():
        kept = whole[names[name]]
        kept = kept if rows is None else kept[rows]
        kept = kept if columns is None else kept[:, columns]
        new = names[name].replace("layers.1", "layers.0").replace("experts.3", "experts.1")
        assert torch.equal(read(new), kept.flatten()), name
