"""What is written is torch's own distributed checkpoint, under the keys and shapes of the mapping."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_dppo.bridge import torch_dist
from megatron_dppo.bridge.mapping import entries
from megatron_dppo.bridge.stored_policy import StoredPolicy
from megatron_dppo.bridge.torch_dist import METADATA, plan_checkpoint, write_metadata, write_parameter
from megatron_dppo.models.shape import PolicyShape
from tests.bridge.conversions import to_megatron, weights
from tests.bridge.directories import Sizes, write_qwen2, write_qwen3, write_qwen3_moe


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [write_qwen3, write_qwen2, write_qwen3_moe])
def test_torch_reads_every_key_of_the_mapping(tmp_path: Path, write: Callable[..., PolicyShape]) -> None:
    shape = write(tmp_path / "source", Sizes(), dtype=torch.bfloat16)
    assert to_megatron(tmp_path / "source", tmp_path / "megatron") == 0
    stored = [part for entry in entries(shape) for part in entry.stored]
    state = {part.key: torch.full(part.stored_shape, torch.nan).bfloat16() for part in stored}
    reader = dcp.FileSystemReader(tmp_path / "megatron/release")
    assert reader.read_metadata().state_dict_metadata.keys() == state.keys()
    dcp.load(state, storage_reader=reader, no_dist=True)
    tensors = weights(tmp_path / "source")
    attention, queries = "decoder.layers.self_attention.", shape.heads // shape.kv_heads * shape.head_dim
    for layer in range(shape.num_layers):
        name = f"model.layers.{layer}.self_attn."
        assert torch.equal(state[attention + "linear_proj.weight"][layer], tensors[name + "o_proj.weight"])
        groups = state[attention + "linear_qkv.weight"][layer].view(shape.kv_heads, -1, shape.hidden)
        assert torch.equal(groups[:, :queries].flatten(0, 1), tensors[name + "q_proj.weight"])
    embedding = state["embedding.word_embeddings.weight"]
    assert torch.equal(embedding[:131], tensors["model.embed_tokens.weight"])
    assert not embedding[131:].any()
    assert not any(tensor.isnan().any() for tensor in state.values())


def test_a_parameter_lies_there_as_torch_saves_it(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "source", Sizes())
    assert to_megatron(tmp_path / "source", tmp_path / "megatron") == 0
    folder = tmp_path / "megatron/release"
    for index, place in dcp.FileSystemReader(folder).read_metadata().storage_data.items():
        data = (folder / place.relative_path).read_bytes()[place.offset :][: place.length]
        tensor = torch.load(io.BytesIO(data), weights_only=True)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        saved = io.BytesIO()
        torch.save(tensor, saved)
        assert len(saved.getbuffer()) == place.length, index


def test_files_are_bounded_and_end_where_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_dist, "FILE_BYTES", 20_000)
    shape = write_qwen3(tmp_path / "source", Sizes())
    assert to_megatron(tmp_path / "source", tmp_path / "megatron") == 0
    plan = plan_checkpoint(shape, torch.float32)
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "megatron/release").glob("*.distcp")}
    assert sizes == plan.files
    assert len(sizes) >= 4
    held = [stored.relative_path for stored in plan.storage.values()]
    assert all(size <= 20_000 or held.count(name) == 1 for name, size in sizes.items())


def test_a_parameter_of_another_size_is_refused(tmp_path: Path) -> None:
    shape = write_qwen3(tmp_path / "source", Sizes())
    plan = plan_checkpoint(shape, torch.float32)
    part = next(iter(plan.storage))
    with pytest.raises(ValueError, match=r"word_embeddings.weight has 8 bytes instead of 24576"):
        write_parameter(tmp_path, plan, part, [memoryview(bytes(8))])


def test_a_checkpoint_that_lacks_a_layers_parameter_is_refused(tmp_path: Path) -> None:
    shape = write_qwen3(tmp_path / "source", Sizes())
    assert to_megatron(tmp_path / "source", tmp_path / "megatron") == 0
    plan = plan_checkpoint(shape, torch.float32)
    part = next(part for part in plan.storage if part.entry.layer == 1)
    del plan.storage[part]
    (tmp_path / "megatron/release" / METADATA).unlink()
    write_metadata(tmp_path / "megatron/release", plan, dict.fromkeys(plan.storage, 0))
    with pytest.raises(Exception, match=r"linear_qkv.layer_norm_weight of layer 1 is there in part only"):
        StoredPolicy(tmp_path / "megatron/release", shape, "CKPT")
