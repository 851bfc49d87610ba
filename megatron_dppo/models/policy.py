"""Policy on Megatron-Core's GPTModel, with a head that scores response tokens without logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import is_te_min_version
from numpy.typing import NDArray
from torch.nn import functional

from megatron_dppo.config import HEAD_CHUNK_MIB, LayoutConfig, ModelConfig
from megatron_dppo.models.context import PackShare, compute_share, gather_responses
from megatron_dppo.models.layer_specs import (
    Spec,
    build_family_settings,
    build_layer_spec,
    choose_spec,
)
from megatron_dppo.models.lora import NAME, add_adapters
from megatron_dppo.models.policy_head import HeadOutput, score_responses
from megatron_dppo.models.prefix_attention import SharedPrefixes
from megatron_dppo.models.shape import PolicyShape, check_layout, check_megatron, padded_vocab
from megatron_dppo.models.teacher_head import TeacherHead, compute_divergence

NOTHING_BETWEEN: dict[str, Any] = (
    {"pad_between_seqs": False}
    if "pad_between_seqs" in PackedSeqParams.__dataclass_fields__
    else {}
)
"""Arguments from megatron-core 0.19 on that exclude padding between segments. Otherwise each layer
compares the starts of segments and of padded segments on the host, if both are given."""


def build_policy(
    shape: PolicyShape,
    model: ModelConfig,
    layout: LayoutConfig,
    *,
    temperature: float,
) -> list[PolicyModel]:
    """Build this rank's part of the policy, a chunk for each virtual stage, in the groups of
    :func:`parallel.world.initialize`.

    All weights except the norms' are zero until loaded: random weights would depend on the layout.
    With ``model.lora`` the adapters are zero, too, and the only parameters with gradients.

    Raises:
        UserError: the layout cannot cut the shape, or ``model.spec`` is not available on this
            machine.
    """
    check_layout(shape, layout)
    check_megatron(shape)
    config = transformer_config(shape, model, layout)
    stages = range(layout.vpp) if layout.vpp > 1 else [None]
    chunks = [
        PolicyModel(shape, config, model, temperature=temperature, vp_stage=stage)
        for stage in stages
    ]
    for chunk in chunks:
        _mark_experts(chunk)
        _release_dispatched(chunk)
        if model.lora.rank:
            add_adapters(chunk, shape, model.lora, config)
    return chunks


def _mark_experts(chunk: PolicyModel) -> None:
    """Mark the expert parameters: gradients are summed only over ranks with the same experts."""
    # Before 0.17 Megatron marks expert parameters only if ep > 1, and otherwise silently sums over
    # the wrong ranks if etp differs from tp. Marks in every layout also give an optimizer's state
    # the same names in every layout.
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False


def _release_dispatched(chunk: PolicyModel) -> None:
    """Free a pack's data in each layer's token dispatcher once the experts' outputs are combined.

    Megatron keeps the routing probabilities until the layer's next pass, and with them the autograd
    graph of a recomputed layer: input and gradient, gigabytes in 48 layers.
    """

    def combine(
        dispatcher: Any,
        combined: Callable[[torch.Tensor], torch.Tensor],
        outputs: torch.Tensor,
    ) -> torch.Tensor:
        made = combined(outputs)
        dispatcher.probs = None
        dispatcher.routing_map = None
        dispatcher.reversed_local_input_permutation_mapping = None
        return made

    for module in chunk.modules():
        if isinstance(module, MoELayer):
            dispatcher: Any = module.token_dispatcher
            dispatcher.combine_postprocess = partial(
                combine, dispatcher, dispatcher.combine_postprocess
            )


def transformer_config(
    shape: PolicyShape,
    model: ModelConfig,
    layout: LayoutConfig,
) -> TransformerConfig:
    """Build Megatron's configuration, with the CUDA or Transformer Engine kernels present."""
    spec = choose_spec(model)
    cuda = torch.cuda.is_available()
    dtype = model.torch_dtype
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        # Gradients are sums: the plan has divided each loss, so that no division by microbatches or
        # replicas may follow.
        calculate_per_token_loss=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Zero until weights are loaded. Initialisation must stay on, because it also marks
        # parameters as sharded over the tensor-parallel ranks; without that mark the gradient norm
        # counts the shard of one rank only.
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        embedding_init_method=torch.nn.init.zeros_,
        # Gloo has no batched sends. With two interleaved stages, each has the same neighbour on
        # both sides, and a batch confuses their messages.
        batch_p2p_comm=cuda and not (layout.vpp > 1 and layout.pp == 2),
        # True would wait for the whole device, to avoid a bug of an older torch.
        batch_p2p_sync=False,
        # Every pack of a minibatch has the same length, so that stages need not exchange shapes.
        variable_seq_lengths=False,
        deallocate_pipeline_outputs=True,
        apply_rope_fusion=spec == "te",
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        masked_softmax_fusion=False,
        # layer_specs.add_to_main_gradients accumulates gradients instead.
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        # In deterministic mode torch's embedding sums gradients in order.
        deterministic_mode=spec == "torch" or model.deterministic,
        **build_family_settings(shape),
        **_build_recompute_settings(shape, model),
        **(_build_expert_settings(shape, spec) if shape.experts else {}),
    )


def _build_recompute_settings(shape: PolicyShape, model: ModelConfig) -> dict[str, Any]:
    match model.recompute:
        case "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        case "selective":
            return {
                "recompute_granularity": "selective",
                "recompute_modules": ["moe" if shape.experts else "mlp"],
            }
        case "none":
            return {}


def _build_expert_settings(shape: PolicyShape, spec: Spec) -> dict[str, Any]:
    """Return Megatron's expert settings: no token is dropped, and no balancing loss is added."""
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.ffn,
        "moe_shared_expert_intermediate_size": shape.shared_ffn or None,
        # A softmax over the chosen experts equals the renormalised softmax over all experts.
        "moe_router_pre_softmax": not shape.renormalises_experts,
        # In bf16 the logits of two experts may tie, and the choice would be arbitrary.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": spec == "te",
        "moe_permute_fusion": spec == "te",
        "moe_router_fusion": spec == "te" and is_te_min_version("2.7.0"),
    }


def build_packed_sequence(
    cu_seqlens: NDArray[np.int32],
    max_seqlen: int,
    device: torch.device,
    *,
    device_cu_seqlens: torch.Tensor | None = None,
) -> PackedSeqParams:
    """Build Megatron's description of a pack of S segments.

    Args:
        cu_seqlens: [S + 1], starts of the segments, then the pack's number of tokens T.
        max_seqlen: tokens of the longest segment.
        device_cu_seqlens: ``cu_seqlens`` on ``device``, int32, if already there.

    Raises:
        ValueError: ``max_seqlen`` is wrong. For ``max_seqlen`` = T, Megatron would silently run
            rotary positions across segments, and the logits would hardly change.
    """
    longest = int(np.diff(cu_seqlens).max())
    if max_seqlen != longest:
        raise ValueError(
            f"max_seqlen is {max_seqlen}, but the longest segment has {longest} tokens"
        )
    starts = (
        torch.as_tensor(cu_seqlens, dtype=torch.int32, device=device)
        if device_cu_seqlens is None
        else device_cu_seqlens
    )
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **NOTHING_BETWEEN,
    )


class OutputWeight(ColumnParallelLinear):
    """Output layer that holds its weight and returns hidden states; the policy head multiplies.

    Still called in the forward pass, because DDP waits in a hook for a gathered weight.
    """

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        return input_, None


class PolicyModel(GPTModel):
    """A (virtual) pipeline stage's part of the policy, over packs in THD form."""

    def __init__(
        self,
        shape: PolicyShape,
        config: TransformerConfig,
        model: ModelConfig,
        *,
        temperature: float,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(
            config,
            build_layer_spec(
                choose_spec(model), config, vp_stage, with_adapters=model.lora.rank > 0
            ),
            vocab_size=padded_vocab(shape.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=False, vp_stage=vp_stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=False, vp_stage=vp_stage
            ),
            vp_stage=vp_stage,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_percent=shape.rotary_fraction,
            rotary_base=shape.rope_theta,
        )
        if shape.rope_scaling is not None:
            self.rotary_pos_emb.inv_freq = shape.rope_scaling.scale(self.rotary_pos_emb.inv_freq)
        self.shape = shape
        self.temperature = temperature
        self.head_chunk_mib = model.head_chunk_mib
        self.lora = model.lora
        self.register_load_state_dict_post_hook(_filter_missing_keys)

    def setup_embeddings_and_output_layer(self) -> None:
        """Replace the output layer; called by Megatron once all layers exist."""
        if self.post_process:
            shares_embedding = self.pre_process and self.share_embeddings_and_output_weights
            self.output_layer = OutputWeight(
                self.config.hidden_size,
                self.vocab_size,
                config=self.config,
                init_method=self.config.init_method,
                bias=False,
                skip_weight_param_allocation=shares_embedding,
                tp_group=self.pg_collection.tp,
            )
        super().setup_embeddings_and_output_layer()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        packed_seq_params: PackedSeqParams,
        predictors: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        kept_ids: torch.Tensor | None = None,
        share: PackShare | None = None,
        teachers: tuple[TeacherHead, ...] = (),
        states: bool = False,
    ) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """Run this stage on a pack, or with context parallelism on this rank's share of the pack.

        Args:
            input_ids: [1, T] int64.
            position_ids: [1, T] int64, from 0 in every segment, or along the paths of a tree.
            packed_seq_params: result of :func:`build_packed_sequence` or
                :func:`prefix_attention.build_shared_prefixes`.
            predictors: [R] int64, positions whose next token is a response token; last stage only.
            targets: [R] int64, the tokens after ``predictors``; last stage only.
            kept_ids: [R, K] int64, as in :func:`policy_head.score_responses`; last stage only.
            share: result of :func:`context.compute_share`; ignored without context parallelism. A
                missing share is computed here, with a wait on the host.
            teachers: teachers of the divergence, at the predictors scored by this rank; empty: no
                divergence.
            states: return the predictors' hidden states and score no token.

        Returns:
            Last stage: the present fields of :class:`HeadOutput`, each [R], in a plain tuple; with
            ``states``, the final hidden states of the predictors scored by this rank, [r, h].
            Other stages: hidden states, [T / cp, 1, h], with sequence parallelism
            [T / (cp · tp), 1, h].
        """
        if self.pg_collection.cp.size() > 1:
            share = (share or self._compute_share(packed_seq_params, predictors)).to(
                input_ids.device
            )
            input_ids = input_ids[:, share.held]
            position_ids = position_ids[:, share.held]
        else:
            share = None
        hidden = self._compute_hidden(input_ids, position_ids, packed_seq_params)
        if not self.post_process:
            return hidden
        if predictors is None or targets is None:
            raise ValueError(
                "the last pipeline stage scores responses: pass predictors and targets"
            )
        mine = self._gather_hidden(hidden[0], predictors if share is None else share.predictors)
        if states:
            return (mine,)
        # Plain tuples, because Megatron's mixed-precision wrapper keeps no other type.
        if share is None:
            return self._score(mine, targets, kept_ids, teachers).present
        kept_ids = None if kept_ids is None else kept_ids[share.mine]
        part = self._score(mine, targets[share.mine], kept_ids, teachers)
        return gather_responses(part, share.mine, len(targets), self.pg_collection.cp).present

    def _compute_share(self, packed: PackedSeqParams, predictors: torch.Tensor | None) -> PackShare:
        group = self.pg_collection.cp
        nothing = torch.empty(0, dtype=torch.int64)
        positions = nothing if predictors is None else predictors.cpu()
        return compute_share(
            packed.cu_seqlens_q.diff().tolist(), positions, group.rank(), group.size()
        )

    def _compute_hidden(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        packed: PackedSeqParams,
    ) -> torch.Tensor:
        # Transformer Engine needs the starts of padded segments under context parallelism; the
        # padding counts as part of its segment, so that both starts are the same.
        if self.pg_collection.cp.size() > 1:
            starts = packed.cu_seqlens_q
            packed = replace(packed, cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts)
        along_paths = isinstance(packed, SharedPrefixes)
        if along_paths:
            angles = self.rotary_pos_emb(packed.max_seqlen_q, packed_seq=True)
            packed = replace(packed, frequencies=angles.index_select(0, position_ids[0]))
        self.position_embedding_type = "none" if along_paths else "rope"
        return super().forward(input_ids, position_ids, None, packed_seq_params=packed)

    def _score(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        kept_ids: torch.Tensor | None,
        teachers: tuple[TeacherHead, ...],
    ) -> HeadOutput:
        weight = self.output_weight()
        head: dict[str, Any] = {
            "vocab_size": self.shape.vocab_size,
            "temperature": self.temperature,
            "tp_group": self.pg_collection.tp,
            "chunk_mib": self.head_chunk_mib or HEAD_CHUNK_MIB[hidden.device.type],
        }
        scores = score_responses(hidden, weight, targets, kept_ids=kept_ids, **head)
        if not teachers:
            return scores
        return scores._replace(divergence=compute_divergence(teachers, hidden, weight, **head))

    def _gather_hidden(self, hidden: torch.Tensor, predictors: torch.Tensor) -> torch.Tensor:
        """Return the predictors' hidden states, [R, h], on every tensor-parallel rank; the backward
        pass sums gradients over these ranks."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=group).index_select(
                0, predictors
            )
        return copy_to_tensor_model_parallel_region(hidden.index_select(0, predictors), group=group)

    def output_weight(self) -> torch.Tensor:
        """Return this rank's rows of the output layer, [V_local, h]; on the last stage only."""
        if self.shape.tied:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    @torch.no_grad()
    def compute_logits(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        packed: PackedSeqParams,
    ) -> torch.Tensor:
        """Return logits at temperature 1, [T, vocab_size] fp32, on every rank of the last stage.

        For tests and for comparisons of converted models. Needs a single pipeline stage, or the
        input of the last stage set.
        """
        held = self._compute_share(packed, None).held.to(input_ids.device)
        hidden = self._compute_hidden(input_ids[:, held], position_ids[:, held], packed)[0]
        hidden = self._gather_hidden(hidden, torch.arange(len(held), device=held.device))
        local = hidden.float() @ self.output_weight().float().t()
        padded = gather_from_tensor_model_parallel_region(local, group=self.pg_collection.tp)
        logits = padded[:, : self.shape.vocab_size].contiguous()
        logits = gather_from_sequence_parallel_region(logits, group=self.pg_collection.cp)
        held = gather_from_sequence_parallel_region(held, group=self.pg_collection.cp)
        return logits[held.argsort()]

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return Megatron's sharded state without adapters and without extra state."""
        # Extra state (scales of 8-bit training) is empty, but exists in different layers for
        # Transformer Engine and torch, and would tie a checkpoint to one spec.
        state = super().sharded_state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not _is_excluded(name)}


def _is_excluded(key: str) -> bool:
    return "_extra_state" in key or f".{NAME}." in key


def _filter_missing_keys(module: torch.nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [
        key for key in incompatible.missing_keys if not _is_excluded(key)
    ]
