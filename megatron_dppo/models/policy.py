"""A policy on Megatron-Core's GPTModel, with a head that scores response tokens instead of
returning logits."""

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
"""From megatron-core 0.19 on Transformer Engine can be told that no padding lies between segments.
If it is not told, each layer compares on the host where segments start and where padded ones do, if
it is given both."""


def build_policy(
    shape: PolicyShape, model: ModelConfig, layout: LayoutConfig, *, temperature: float
) -> list[PolicyModel]:
    """This rank's part of the policy, a chunk for each virtual stage, in
    :func:`parallel.world.initialize`'s groups.

    All weights but the norms' are zero until they are loaded: nothing is drawn, since every run
    starts from a directory, and drawing would depend on the layout. With ``model.lora`` the
    adapters are zero, too, and the only parameters that need a gradient.

    Raises:
        UserError: if the shape cannot be cut as the layout says, or ``model.spec`` is not to be had
            here.
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
    """Tell Megatron which gradients to sum over the ranks that have the same experts, instead of
    all replicas.

    Before 0.17 it marks them only where ep > 1, and then sums them over the wrong ranks, in
    silence, where etp is not tp. With the mark everywhere an optimizer's state goes by the same
    names in every layout, too.
    """
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False


def _release_dispatched(chunk: PolicyModel) -> None:
    """Free what each layer's token dispatcher holds of a pack once the experts' outputs are
    combined.

    Megatron keeps the routing probabilities until the layer's next pass, and by them the autograd
    graph of a recomputed layer: its input and the gradient of that, gigabytes in 48 layers.
    """

    def combine(
        dispatcher: Any, combined: Callable[[torch.Tensor], torch.Tensor], outputs: torch.Tensor
    ) -> torch.Tensor:
        made = combined(outputs)
        dispatcher.probs = dispatcher.routing_map = (
            dispatcher.reversed_local_input_permutation_mapping
        ) = None
        return made

    for module in chunk.modules():
        if isinstance(module, MoELayer):
            dispatcher: Any = module.token_dispatcher
            dispatcher.combine_postprocess = partial(
                combine, dispatcher, dispatcher.combine_postprocess
            )


def transformer_config(
    shape: PolicyShape, model: ModelConfig, layout: LayoutConfig
) -> TransformerConfig:
    """Megatron's configuration of a policy. Kernels that need CUDA or Transformer Engine are on
    where these are."""
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
        # Gradients are sums: nothing divides by microbatches or replicas, the plan has divided once
        # and for all.
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
        # Zeros, until weights are loaded. Initialisation itself stays on: it also marks parameters
        # as sharded over the tensor-parallel ranks, without which the gradient's norm counts one
        # rank's shard only.
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        embedding_init_method=torch.nn.init.zeros_,
        # Every pack of a minibatch has the same length, so stages need not exchange shapes. Gloo
        # has no batched sends. With two interleaved stages, each of which has the other on both
        # sides, a batch confuses their messages.
        batch_p2p_comm=cuda and not (layout.vpp > 1 and layout.pp == 2),
        # The bug of an older torch for which Megatron waits for the whole device.
        batch_p2p_sync=False,
        variable_seq_lengths=False,
        deallocate_pipeline_outputs=True,
        apply_rope_fusion=spec == "te",
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,  # see layer_specs.add_to_main_gradients
        persist_layer_norm=False,
        deterministic_mode=spec == "torch"
        or model.deterministic,  # torch's embedding then sums in order
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
    """Megatron's settings for experts. No token is dropped, and nothing is added to the loss to
    spread them."""
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.ffn,
        "moe_shared_expert_intermediate_size": shape.shared_ffn or None,
        # Softmax over a token's experts alone is softmax over all of them, divided by the sum of
        # the chosen.
        "moe_router_pre_softmax": not shape.renormalises_experts,
        # In bf16 the logits of two experts may tie, and which one is chosen is chance.
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
    """Megatron's description of a pack of S segments.

    Args:
        cu_seqlens: [S + 1], where segments start; ends with the pack's tokens T.
        max_seqlen: the longest segment.
        device: where the model runs.
        device_cu_seqlens: the starts as they are on that device already, int32.

    Raises:
        ValueError: if ``max_seqlen`` is not the longest segment. Where it equals T, Megatron does
            not reset rotary positions, in silence, and logits hardly show it.
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
    """The output layer as a holder of its weight: it passes hidden states on, and the policy head
    does the product.

    It is still called in the forward pass, so that the hooks on it fire (DDP waits there for a
    gathered weight).
    """

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        return input_, None


class PolicyModel(GPTModel):
    """The share of the policy of one pipeline stage, or of one of its virtual stages, over packs in
    THD form."""

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
        """Called by Megatron once the layers stand: put the holder of the weight in the output
        layer's place."""
        if self.post_process:
            self.output_layer = OutputWeight(
                self.config.hidden_size,
                self.vocab_size,
                config=self.config,
                init_method=self.config.init_method,
                bias=False,
                skip_weight_param_allocation=self.pre_process
                and self.share_embeddings_and_output_weights,
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
        share: PackShare | None = None,
        teachers: tuple[TeacherHead, ...] = (),
        states: bool = False,
    ) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """Run this stage on a pack, of which a context-parallel rank takes its share.

        Args:
            input_ids: [1, T] int64.
            position_ids: [1, T] int64, from 0 in every segment, or along the paths of a tree.
            packed_seq_params: from :func:`build_packed_sequence`, or
                :func:`prefix_attention.build_shared_prefixes`.
            predictors: [R] int64, positions whose next token is a response token; read by the last
                stage only.
            targets: [R] int64, those next tokens; read by the last stage only.
            share: from :func:`context.compute_share`, what this rank takes. Without context
                parallelism it is everything, and this is not read. With it, what is not passed is
                worked out here, for which the host has to wait.
            teachers: what the divergence is taken from, at the predictors that this rank scores;
                none: none is.
            states: whether nothing is scored, and the predictors' hidden states are asked for
                instead.

        Returns:
            On the last stage the fields of :class:`HeadOutput` that were asked for, each [R], as a
            plain tuple (Megatron's mixed-precision wrapper keeps no other kind), or with ``states``
            the final hidden states of the predictors that this rank would score, [r, h], alone;
            elsewhere hidden states, [T, 1, h], T / cp / tp of them under context and sequence
            parallelism.
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
        if share is None:
            return self._score(mine, targets, teachers).present
        part = self._score(mine, targets[share.mine], teachers)
        return gather_responses(part, share.mine, len(targets), self.pg_collection.cp).present

    def _compute_share(self, packed: PackedSeqParams, predictors: torch.Tensor | None) -> PackShare:
        group = self.pg_collection.cp
        nothing = torch.empty(0, dtype=torch.int64)
        asked = nothing if predictors is None else predictors.cpu()
        return compute_share(packed.cu_seqlens_q.diff().tolist(), asked, group.rank(), group.size())

    def _compute_hidden(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        if (
            self.pg_collection.cp.size() > 1
        ):  # Transformer Engine then asks where padded segments start: at the same
            starts = packed.cu_seqlens_q
            packed = replace(packed, cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts)
        along_paths = isinstance(packed, SharedPrefixes)
        if along_paths:
            angles = self.rotary_pos_emb(packed.max_seqlen_q, packed_seq=True)
            packed = replace(packed, frequencies=angles.index_select(0, position_ids[0]))
        self.position_embedding_type = "none" if along_paths else "rope"
        return super().forward(input_ids, position_ids, None, packed_seq_params=packed)

    def _score(
        self, hidden: torch.Tensor, targets: torch.Tensor, teachers: tuple[TeacherHead, ...]
    ) -> HeadOutput:
        weight = self.output_weight()
        head: dict[str, Any] = {
            "vocab_size": self.shape.vocab_size,
            "temperature": self.temperature,
            "tp_group": self.pg_collection.tp,
            "chunk_mib": self.head_chunk_mib or HEAD_CHUNK_MIB[hidden.device.type],
        }
        scores = score_responses(hidden, weight, targets, **head)
        if not teachers:
            return scores
        return scores._replace(divergence=compute_divergence(teachers, hidden, weight, **head))

    def _gather_hidden(self, hidden: torch.Tensor, predictors: torch.Tensor) -> torch.Tensor:
        """The predictors' hidden states, [R, h], on every rank; gradients are summed over the ranks
        on the way back."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=group).index_select(
                0, predictors
            )
        return copy_to_tensor_model_parallel_region(hidden.index_select(0, predictors), group=group)

    def output_weight(self) -> torch.Tensor:
        """[V_local, h], this rank's rows of the output layer; on the last stage only."""
        return (
            self.shared_embedding_or_output_weight()
            if self.shape.tied
            else self.output_layer.weight
        )

    @torch.no_grad()
    def compute_logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        """[T, vocab_size] fp32, at temperature 1, on every rank of the last stage: what the head
        never makes.

        For tests and for checking a converted model against another's logits; needs a single
        pipeline stage, or the input of the last one set.
        """
        held = self._compute_share(packed, None).held.to(input_ids.device)
        hidden = self._compute_hidden(input_ids[:, held], position_ids[:, held], packed)[0]
        hidden = self._gather_hidden(hidden, torch.arange(len(held), device=held.device))
        local = hidden.float() @ self.output_weight().float().t()
        whole = gather_from_tensor_model_parallel_region(local, group=self.pg_collection.tp)[
            :, : self.shape.vocab_size
        ]
        whole, held = (
            gather_from_sequence_parallel_region(part.contiguous(), group=self.pg_collection.cp)
            for part in (whole, held)
        )
        return whole[held.argsort()]

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Megatron's, of the policy without its adapters, and without the extra state of linear
        layers.

        That holds the scales of 8-bit training, here nothing; Transformer Engine has it on other
        layers than torch does, and a checkpoint of the one would not load into the other.
        """
        state = super().sharded_state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not _is_excluded(name)}


def _is_excluded(key: str) -> bool:
    """Whether a checkpoint omits a chunk's key."""
    return "_extra_state" in key or f".{NAME}." in key


def _filter_missing_keys(module: torch.nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [
        key for key in incompatible.missing_keys if not _is_excluded(key)
    ]
