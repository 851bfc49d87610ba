"""Rows and columns are taken out of matrices that are larger than a buffer, which is all that is in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_dppo.bridge.chunks import BUFFER_BYTES
from megatron_dppo.bridge.convert import stored_chunks
from megatron_dppo.bridge.safetensors_files import read_header
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.job import cut_tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cut_is_an_index_into_the_whole_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    sizes = {"mlp.gate_proj": (1000, 512), "mlp.down_proj": (512, 1000), "self_attn.q_proj": (512, 512),
             "mlp.up_proj": (1000, 512), "input_layernorm": (512,)}  # fmt: skip
    names = {name: f"model.layers.1.{name}.weight" for name in sizes} | {"embed_tokens": "model.embed_tokens.weight"}
    sizes["embed_tokens"] = (131, 512)
    whole = {names[name]: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}
    save_file(whole, tmp_path / "model.safetensors")
    assert whole[names["mlp.gate_proj"]].nbytes > 3 * BUFFER_BYTES
    units = torch.randperm(1000, generator=generator)[:700].sort().values
    cut = Cut((1,), ((), tuple(units.tolist())))
    tensors = stored_chunks(read_header(tmp_path / "model.safetensors"))

    def read(name: str) -> torch.Tensor:
        data = b"".join(bytes(part) for part in cut_tensor(name, tensors, cut, dtype))
        return torch.frombuffer(bytearray(data), dtype=dtype)

    expected = {"mlp.gate_proj": (units, None), "mlp.up_proj": (units, None), "mlp.down_proj": (None, units),
                "self_attn.q_proj": (None, None), "input_layernorm": (None, None),
                "embed_tokens": (None, None)}  # fmt: skip
    for name, (rows, columns) in expected.items():
        kept = whole[names[name]]
        kept = kept if rows is None else kept[rows]
        kept = kept if columns is None else kept[:, columns]
        new = names[name].replace("layers.1", "layers.0")
        assert torch.equal(read(new), kept.flatten()), name
