"""Modules of a transformer layer: torch's own operations for any device, or Transformer Engine's
kernels.

Both specifications write the same checkpoint keys: Megatron's key map gives torch's separate norms
the names of Transformer Engine's norms, fused into the following linear layer
(``linear_qkv.layer_norm_weight``). The norm before experts is always separate, because the router
also reads the norm's output.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.nn import functional

from megatron_dppo.config import Config, LayoutConfig, ModelConfig, replace
from megatron_dppo.errors import UserError, install_command
from megatron_dppo.models.context import compute_local_positions, gather_segments
from megatron_dppo.models.prefix_attention import SharedPrefixes, compute_tree_attention
from megatron_dppo.models.shape import PolicyShape

Spec = Literal["torch", "te"]


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def choose_spec(model: ModelConfig) -> Spec:
    """Return the specification that ``model.spec`` selects on this machine.

    With ``auto``, fp32 selects torch's specification: Transformer Engine has no fused attention in
    fp32, and the unfused attention pads every segment of a pack to the longest segment.

    Raises:
        UserError: ``model.spec`` is ``te``, but Transformer Engine or CUDA is missing.
    """
    missing = [] if torch.cuda.is_available() else ["CUDA"]
    if not has_transformer_engine():
        missing.append("Transformer Engine")
    if model.spec == "auto":
        return "torch" if missing or model.dtype == "fp32" else "te"
    if model.spec == "te" and missing:
        problem = f"this machine has no {' and no '.join(missing)}"
        remedy = (
            "set it to torch or auto, or install Transformer Engine beside CUDA: "
            f"{install_command('gpu')}"
        )
        raise UserError("model.spec", "te", problem, remedy)
    return model.spec


def check_attention(
    shape: PolicyShape,
    model: ModelConfig,
    layout: LayoutConfig,
    *,
    training: bool,
) -> None:
    """Check for fused attention over packs if the policy has Transformer Engine's layers.

    Raises:
        UserError: Transformer Engine has no attention, or only unfused attention, which pads each
            segment of a pack to the longest segment.
    """
    if choose_spec(model) != "te":
        return
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    parameters = utils.AttentionParams(
        qkv_dtype=model.torch_dtype,
        qkv_layout="thd_thd_thd",
        num_heads=shape.heads // layout.tp,
        num_gqa_groups=shape.kv_heads // layout.tp,
        head_dim_qk=shape.head_dim,
        head_dim_v=shape.head_dim,
        attn_mask_type="padding_causal",
        window_size=(-1, 0),
        # With a shape here, flash-attn would be excluded.
        core_attention_bias_shape=None,
        core_attention_bias_requires_grad=False,
        context_parallel=layout.cp > 1,
        deterministic=model.deterministic,
        is_training=training,
        fp8_meta={},
    )
    # Ask the library, because the GPUs and head sizes supported by cuDNN differ by version.
    flash, _, fused, *_ = utils.get_attention_backend(parameters)
    if not flash and not fused:
        heads = f"heads of {shape.head_dim}" + (", with layout.cp above 1" if layout.cp > 1 else "")
        problem = (
            "Transformer Engine has no fused attention over packs on "
            f"{torch.cuda.get_device_name()}, for {heads}"
        )
        remedy = (
            "install flash-attn (pip install --no-build-isolation flash-attn), or set "
            "model.spec=torch"
        )
        raise UserError("model.spec", model.spec, problem, remedy)


def choose_sharing(config: Config, shape: PolicyShape) -> Config:
    """Return the configuration with ``pack.share_prefixes`` resolved.

    Raises:
        UserError: ``pack.share_prefixes`` is ``on``, but attention over shared prefixes on a GPU
            does not support fp32.
    """
    # On a GPU, FlashAttention requires half precision.
    unsupported = config.model.dtype == "fp32" and torch.cuda.is_available()
    if config.pack.share_prefixes == "on" and unsupported:
        problem = "requires half precision on a GPU, and model.dtype is fp32"
        raise UserError(
            "pack.share_prefixes", "on", problem, "set model.dtype=bf16, or pack.share_prefixes=off"
        )
    # A gated delta network would have to start each completion from the prompt's last state.
    shares = choose_spec(config.model) != "te" and not shape.hybrid and not unsupported
    if config.pack.share_prefixes != "auto" or shares:
        return config
    return replace(config, pack=replace(config.pack, share_prefixes="off"))


def build_layer_spec(
    spec: Spec,
    config: TransformerConfig,
    vp_stage: int | None,
    *,
    with_adapters: bool = False,
) -> TransformerBlockSubmodules | ModuleSpec:
    """Build the layers of this rank's virtual stage, for :class:`GPTModel`.

    Args:
        with_adapters: whether linear layers get adapters, which need normed inputs: no norm is
            fused.
    """
    kind = {"num_experts": config.num_moe_experts, "qk_layernorm": config.qk_layernorm}
    hybrid = config.linear_attention_freq is not None
    if spec == "te":
        layer = get_gpt_layer_with_transformer_engine_spec(
            moe_grouped_gemm=config.moe_grouped_gemm, **kind
        )
        layer.submodules.self_attention.submodules.core_attention = _make_te_attention()
        layer = _split_norms(layer, config) if with_adapters else layer
        return _build_hybrid_layers(layer, config, vp_stage) if hybrid else layer
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", **kind)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.num_moe_experts:
        # The norm before experts keeps its own key.
        del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SegmentAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if hybrid:
        return _build_hybrid_layers(layer, config, vp_stage)
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def _build_hybrid_layers(
    layer: Any,
    config: TransformerConfig,
    vp_stage: int | None,
) -> TransformerBlockSubmodules:
    """Build copies of ``layer``, only every ``linear_attention_freq``-th with its attention."""
    from megatron_dppo.models.delta_net import with_delta_net

    kinds = {True: layer, False: with_delta_net(layer)}
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first + 1, first + 1 + get_num_layers_to_build(config, vp_stage=vp_stage))
    layers = [kinds[number % config.linear_attention_freq == 0] for number in numbers]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def build_family_settings(shape: PolicyShape) -> dict[str, Any]:
    """Return Megatron's settings for a family and its gated delta networks."""
    if not shape.hybrid:
        return dict(shape.family.megatron)
    return {
        **shape.family.megatron,
        "linear_attention_freq": shape.attention_interval,
        "linear_num_key_heads": shape.delta_keys,
        "linear_num_value_heads": shape.delta_values,
        "linear_key_head_dim": shape.delta_key_dim,
        "linear_value_head_dim": shape.delta_value_dim,
        "linear_conv_kernel_dim": shape.delta_taps,
    }


def _make_te_attention() -> type[torch.nn.Module]:
    """Return Transformer Engine's attention, with our attention over shared prefixes."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    # Transformer Engine's attention returns no log-sum-exp.
    class Attention(TEDotProductAttention):
        def __init__(
            self,
            *arguments: Any,
            pg_collection: ProcessGroupCollection,
            **settings: Any,
        ) -> None:
            super().__init__(*arguments, pg_collection=pg_collection, **settings)
            self._ranks = pg_collection.cp

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *arguments: Any,
            packed_seq_params: PackedSeqParams | None = None,
            **settings: Any,
        ) -> torch.Tensor:
            if isinstance(packed_seq_params, SharedPrefixes):
                return compute_tree_attention(
                    query, key, value, packed_seq_params, None, self._ranks
                )
            out: torch.Tensor = super().forward(
                query, key, value, *arguments, packed_seq_params=packed_seq_params, **settings
            )
            return out

    return Attention


def _split_norms(layer: Any, config: TransformerConfig) -> ModuleSpec:
    """Make each norm of a Transformer Engine layer a separate module; checkpoints keep fused
    names."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    parts = layer.submodules
    parts.input_layernorm = TENorm
    parts.self_attention.submodules.linear_qkv = TEColumnParallelLinear
    parts.sharded_state_dict_keys_map |= {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_"
    }
    if not config.num_moe_experts:
        parts.pre_mlp_layernorm = TENorm
        mlp = parts.mlp
        # A ModuleSpec before Megatron 0.17, a partial from there on.
        of_mlp = mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]
        of_mlp.linear_fc1 = TEColumnParallelLinear
        parts.sharded_state_dict_keys_map |= {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    return layer


def add_to_main_gradients(model: torch.nn.Module) -> None:
    """Let Transformer Engine's layers compute gradients directly into DDP's fp32 gradients.

    Called once DDP has wrapped the model; no effect on torch's layers. Frozen weights are skipped:
    DDP keeps no gradient.
    """
    # Megatron's own setting, ``gradient_accumulation_fusion``, would also require Apex, because of
    # an output layer that computes no product here.
    for layer in model.modules():
        trained = any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
        if trained and hasattr(layer, "fuse_wgrad_accumulation"):
            layer.fuse_wgrad_accumulation = True  # type: ignore[assignment]


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension.

    Megatron's wrapper of torch's norm refuses sequence parallelism, because the wrapper does not
    mark the weight: each tensor-parallel rank has only its own tokens, and Megatron sums the
    gradients of marked weights only.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self._zero_centred = config.layernorm_zero_centered_gamma
        # Returns the CPU without CUDA, see parallel/without_cuda.py.
        here = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=here)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._zero_centred:
            weight = 1.0 + self.weight.float()
            normed = functional.rms_norm(hidden.float(), weight.shape, weight, self.eps)
            return normed.to(hidden.dtype)
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class SegmentAttention(torch.nn.Module):
    """Causal attention within each segment of a pack; context-parallel ranks gather keys and
    values.

    Time of forward and backward on one core, for 37 segments of 25 to 300 tokens:

    - one call per segment, split from the pack: 12 ms;
    - segments padded into batches of similar lengths: 17 ms;
    - segments sliced instead of split: 18 ms (the backward pass writes the whole pack each time);
    - one call under a block-diagonal mask: 205 ms.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None,
        softmax_scale: float | None,
        pg_collection: ProcessGroupCollection | None,
    ) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._ranks = pg_collection.cp if pg_collection is not None else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        /,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend over a pack.

        Args:
            query: [T / cp, heads on this rank, head_dim].
            key: [T / cp, key-value heads on this rank, head_dim].
            value: like ``key``.
            packed_seq_params: starts of the segments in the whole pack.

        Returns:
            [T / cp, heads on this rank, head_dim].
        """
        if packed_seq_params is None:
            raise ValueError(
                "attention is over packs: pass packed_seq_params, for a single sequence too"
            )
        if isinstance(packed_seq_params, SharedPrefixes):
            return compute_tree_attention(
                query, key, value, packed_seq_params, self._scale, self._ranks
            )
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        if self._ranks is not None and self._ranks.size() > 1:
            return self._compute_gathered_attention(
                query, torch.cat((key, value), dim=-1), lengths, self._ranks
            )
        parts = [tensor.split(lengths) for tensor in (query, key, value)]
        attended = [
            self._compute_attention(*segment, is_causal=True)
            for segment in zip(*parts, strict=True)
        ]
        return torch.cat(attended)

    def _compute_gathered_attention(
        self,
        query: torch.Tensor,
        keys_values: torch.Tensor,
        lengths: list[int],
        ranks: dist.ProcessGroup,
    ) -> torch.Tensor:
        queries = query.split([length // ranks.size() for length in lengths])
        attended = []
        for length, q, segment in zip(
            lengths, queries, gather_segments(keys_values, lengths, ranks), strict=True
        ):
            position = compute_local_positions([length], ranks.rank(), ranks.size()).to(q.device)
            mask = position[:, None] >= torch.arange(length, device=q.device)
            attended.append(self._compute_attention(q, *segment.chunk(2, dim=-1), attn_mask=mask))
        return torch.cat(attended)

    def _compute_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **mask: Any,
    ) -> torch.Tensor:
        """Attend over one segment; inputs and result are [tokens, heads, head_dim]."""
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        out = functional.scaled_dot_product_attention(
            q, k, v, scale=self._scale, enable_gqa=grouped, **mask
        )
        return out[0].transpose(0, 1)
