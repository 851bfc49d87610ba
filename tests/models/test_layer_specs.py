"""Both layer specifications: which one is taken, the same checkpoint keys, attention within segments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_dppo.config import LayoutConfig, ModelConfig, OptimizerConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models import layer_specs
from megatron_dppo.models.actor import Actor
from megatron_dppo.models.layer_specs import SegmentAttention, choose_spec
from megatron_dppo.models.policy import packed_sequence
from megatron_dppo.models.shape import read_shape
from megatron_dppo.parallel.world import initialize
from tests.bridge.directories import Sizes, write_qwen2, write_qwen3, write_qwen3_moe
from tests.bridge.record_te import making
from tests.models.test_logits import LENGTHS, build, pack, targets_of
from tests.policies import write_policy
from tests.ranks import RankPool

LAYER = "decoder.layers."
SHARED_KEYS = {
    "embedding.word_embeddings.weight",
    LAYER + "self_attention.linear_qkv.layer_norm_weight",
    LAYER + "self_attention.linear_qkv.weight",
    LAYER + "self_attention.linear_proj.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
}
QK_NORM_KEYS = {LAYER + "self_attention.q_layernorm.weight", LAYER + "self_attention.k_layernorm.weight"}
MLP_KEYS = {
    LAYER + "mlp.linear_fc1.layer_norm_weight",
    LAYER + "mlp.linear_fc1.weight",
    LAYER + "mlp.linear_fc2.weight",
}
EXPERT_KEYS = {
    LAYER + "pre_mlp_layernorm.weight",
    LAYER + "mlp.router.weight",
    LAYER + "mlp.experts.experts.linear_fc1.weight",
    LAYER + "mlp.experts.experts.linear_fc2.weight",
}
FUSED_KEYS: dict[str, set[str]] = {
    "plain": SHARED_KEYS | QK_NORM_KEYS | MLP_KEYS,
    "biases": SHARED_KEYS | MLP_KEYS | {LAYER + "self_attention.linear_qkv.bias"},
    "experts": SHARED_KEYS | QK_NORM_KEYS | EXPERT_KEYS,
}
"""As Transformer Engine's layers name them, in a checkpoint."""
WRITERS: dict[str, Callable[[Path, Sizes], object]] = {
    "plain": write_qwen3,
    "biases": write_qwen2,
    "experts": write_qwen3_moe,
}

needs_transformer_engine = pytest.mark.skipif(
    not (torch.cuda.is_available() and layer_specs.transformer_engine_installed()),
    reason="the te specification runs on CUDA with Transformer Engine, and this machine lacks one of them",
)


def test_auto_takes_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, installed, expected in ((True, True, "te"), (True, False, "torch"), (False, True, "torch")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(layer_specs, "transformer_engine_installed", lambda installed=installed: installed)
        assert choose_spec(ModelConfig(dtype="bf16")) == expected
        assert choose_spec(ModelConfig(dtype="fp32")) == "torch"
        assert choose_spec(ModelConfig(dtype="bf16", spec="torch")) == "torch"


def test_te_without_transformer_engine_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_specs, "transformer_engine_installed", lambda: False)
    with pytest.raises(UserError, match="no Transformer Engine") as caught:
        choose_spec(ModelConfig(spec="te"))
    assert caught.value.setting == "model.spec"


def test_attention_stays_within_segments_and_looks_back_only() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths, heads, groups, width = (4, 1, 9, 2), 6, 2, 8
    total = sum(lengths)
    query = torch.randn(total, heads, width, generator=generator, requires_grad=True)
    key, value = (torch.randn(total, groups, width, generator=generator, requires_grad=True) for _ in range(2))
    attention = SegmentAttention(None, 1, None, "self", None, None, None)
    packed = packed_sequence(np.cumsum((0, *lengths), dtype=np.int32), max(lengths), torch.device("cpu"))
    ours = attention(query, key, value, None, packed_seq_params=packed)

    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (segment[:, None] == segment) & torch.ones(total, total, dtype=torch.bool).tril()
    keys, values = (tensor.repeat_interleave(heads // groups, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) / width**0.5
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(dim=-1), values)
    torch.testing.assert_close(ours, expected)
    seed = torch.randn(ours.shape, generator=generator)
    for a, b in zip(
        *(torch.autograd.grad((o * seed).sum(), (query, key, value)) for o in (ours, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def checkpoint_keys(rank: int, size: int, path: Path, spec: str) -> tuple[set[str], set[str], list[str]]:
    """Keys of tensors and of anything else, and what a load of the model's own tensors alone would miss."""
    policy, _ = build(path, LayoutConfig(), spec=spec)
    state = policy.sharded_state_dict()
    tensors = {value.key for value in state.values() if isinstance(value, ShardedTensor | ShardedTensorFactory)}
    loaded = {name: value.data for name, value in state.items()}
    return tensors, {value.key for value in state.values()} - tensors, policy.load_state_dict(loaded).missing_keys


@pytest.mark.parametrize("family", WRITERS)
def test_checkpoint_keys_are_the_fused_ones(ranks: RankPool, tmp_path: Path, family: str) -> None:
    WRITERS[family](tmp_path, Sizes())
    [(tensors, others, missing)] = ranks.run(1, checkpoint_keys, tmp_path, "torch")
    assert tensors == FUSED_KEYS[family]
    assert not others and not missing


@pytest.mark.gpu
@needs_transformer_engine
@pytest.mark.parametrize("family", WRITERS)
def test_checkpoint_keys_of_te_are_those_of_torch(ranks: RankPool, tmp_path: Path, family: str) -> None:
    WRITERS[family](tmp_path, Sizes())
    [(tensors, others, missing)] = ranks.run(1, checkpoint_keys, tmp_path, "te")
    assert tensors == FUSED_KEYS[family]
    assert not others and not missing


def logprobs_of(rank: int, size: int, path: Path, spec: str, dtype: str) -> np.ndarray:
    policy, world = build(path, LayoutConfig(), spec=spec, dtype=dtype)
    ids, positions, packed = pack(LENGTHS, policy.shape.vocab_size)
    everywhere, targets = torch.arange(ids.shape[1]), targets_of(ids, policy.shape.vocab_size)
    here = world.device
    starts = packed.cu_seqlens_q.numpy()
    with torch.no_grad():
        packed = packed_sequence(starts, max(LENGTHS), here)
        output = policy(ids.to(here), positions.to(here), packed, everywhere.to(here), targets.to(here))
    return output[0].cpu().numpy()


@pytest.mark.gpu
@needs_transformer_engine
def test_te_scores_equal_those_of_torch(ranks: RankPool, tmp_path: Path) -> None:
    path = write_policy(tmp_path)
    [torch_scores] = ranks.run(1, logprobs_of, path, "torch", "bf16")
    [te_scores] = ranks.run(1, logprobs_of, path, "te", "bf16")
    np.testing.assert_allclose(te_scores, torch_scores, atol=0.1)


def made_of_te(
    rank: int, size: int, path: Path, layout: LayoutConfig
) -> tuple[list[bool], set[torch.dtype], list[int]]:
    """Of an actor's layers, which are never run: which matrices they add to gradients in their own products, the
    gradients' types, and how many ranks share each layer's attention."""
    world = initialize(layout, seed=1, timeout_s=60.0)
    with making("te"):
        model = ModelConfig(path=str(path), spec="te", dtype="bf16")
        arguments = (read_shape(path), model, layout, OptimizerConfig(overlap=True), world)
        actor = Actor(*arguments, temperature=1.0, load=lambda bare: None)
    linear = [module for module in actor.chunks[0].modules() if type(module).__name__.endswith("Linear")]
    attention = [layer.self_attention.core_attention for layer in actor.chunks[0].decoder.layers]
    return (
        [module.fuse_wgrad_accumulation for module in linear if module is not actor.chunks[0].output_layer],
        {parameter.main_grad.dtype for parameter in actor.parameters()},
        [module.cp_group.size() for module in attention if module.cp_group is not None],
    )


@pytest.mark.skipif(not layer_specs.transformer_engine_installed(), reason="Transformer Engine is not installed")
@pytest.mark.parametrize("family", WRITERS)
def test_layers_of_te_share_attention_and_add_to_fp32_gradients(ranks: RankPool, tmp_path: Path, family: str) -> None:
    WRITERS[family](tmp_path, Sizes())
    for fused, dtypes, shared_by in ranks.run(2, made_of_te, tmp_path, LayoutConfig(cp=2, dp=1)):
        assert fused and all(fused)
        assert dtypes == {torch.float32}
        assert shared_by == [2] * len(shared_by) != []


def backward_without_responses(rank: int, size: int, path: Path, layout: LayoutConfig) -> bool:
    policy, _ = build(path, layout)
    ids, positions, packed = pack(LENGTHS, policy.shape.vocab_size)
    nothing = torch.zeros(0, dtype=torch.int64)
    logprobs, *_ = policy(ids, positions, packed, nothing, nothing)
    logprobs.sum().backward()
    return any(bool(parameter.grad.any()) for parameter in policy.parameters())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_pack_of_padding_alone_has_a_gradient_of_zero(
    ranks: RankPool, tmp_path: Path, sequence_parallel: bool
) -> None:
    layout = LayoutConfig(tp=2, sequence_parallel=sequence_parallel)
    assert ranks.run(2, backward_without_responses, write_policy(tmp_path), layout) == [False, False]
