"""A converted checkpoint is torch's own distributed checkpoint, under the keys and shapes of the
mapping."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_dppo.bridge.mapping import list_entries
from megatron_dppo.bridge.stored_policy import StoredPolicy
from megatron_dppo.bridge.torch_dist import METADATA, plan_checkpoint, write_metadata
from megatron_dppo.models.shape import PolicyShape
from tests.bridge.conversions import to_megatron, weights
from tests.bridge.directories import Sizes, write_qwen2, write_qwen3, write_qwen3_moe


def convert(
    folder: Path,
    write: Callable[..., PolicyShape] = write_qwen3,
    dtype: torch.dtype = torch.float32,
) -> tuple[PolicyShape, Path]:
    """Convert a random policy. Returns its shape and the checkpoint."""
    shape = write(folder / "source", Sizes(), dtype=dtype)
    assert to_megatron(folder / "source", folder / "megatron") == 0
    return shape, folder / "megatron/release"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [write_qwen2, write_qwen3_moe], ids=["Qwen2.5", "Qwen3-MoE"])
def test_torch_reads_every_key_of_the_mapping(
    tmp_path: Path, write: Callable[..., PolicyShape]
) -> None:
    shape, release = convert(tmp_path, write, torch.bfloat16)
    stored = [part for entry in list_entries(shape) for part in entry.stored_rows]
    state = {part.key: torch.full(part.stored_shape, torch.nan).bfloat16() for part in stored}
    reader = dcp.FileSystemReader(release)
    assert reader.read_metadata().state_dict_metadata.keys() == state.keys()
    dcp.load(state, storage_reader=reader, no_dist=True)
    tensors = weights(tmp_path / "source")
    for layer in range(shape.num_layers):
        norm = state["decoder.layers.self_attention.linear_qkv.layer_norm_weight"][layer]
        assert torch.equal(norm, tensors[f"model.layers.{layer}.input_layernorm.weight"])
    embedding = state["embedding.word_embeddings.weight"]
    assert torch.equal(embedding[:131], tensors["model.embed_tokens.weight"])
    assert not embedding[131:].any()
    assert not any(tensor.isnan().any() for tensor in state.values())


def test_a_parameter_in_part_is_refused(tmp_path: Path) -> None:
    shape, release = convert(tmp_path)
    plan = plan_checkpoint(shape, torch.float32)
    part = next(part for part in plan.places if part.entry.layer == 1)
    del plan.places[part]
    (release / METADATA).unlink()
    write_metadata(release, plan, {})
    with pytest.raises(
        Exception, match=r"linear_qkv.layer_norm_weight of layer 1 is there in part only"
    ):
        StoredPolicy(release, shape, "CKPT")
