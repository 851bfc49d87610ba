"""The description of a family of models, as a file in ``models/families`` gives it. Needs no torch.

A family lists the parameters of a layer. Each is a row: its names in Megatron, its Hugging Face
tensors, and how ranks share it. The rows that families have in common are here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar


class Split(StrEnum):
    """How a parameter is cut over the tensor-parallel ranks."""

    REPLICATED = "every rank has it whole"
    COLUMN = (
        "output features (dimension 0) of each tensor in equal parts, a rank's parts "
        "stacked: "
        "gate, then up"
    )
    ROW = "input features (dimension 1) in equal parts"
    VOCABULARY = (
        "tokens (dimension 0) in equal parts, after padding with zeros to what the layout divides"
    )
    QKV = (
        "query groups in equal parts; within a part, each group's queries, then its key, then "
        "its value"
    )
    GATED_QKV = (
        "as QKV, with the gates of a group's queries behind these; in the tensor each "
        "gate "
        "is behind its query"
    )
    SECTIONS = "each section of the tensors' output features in equal parts, a rank's parts stacked"


REPLICATED, COLUMN, ROW, VOCABULARY, QKV, GATED_QKV, SECTIONS = Split


@dataclass(frozen=True, slots=True, eq=False)
class ParameterMapping:
    """A Megatron parameter and its Hugging Face tensors. In the names ``{layer}`` is counted over
    all stages, ``{expert}`` over all ranks; ``{body}`` is the family's."""

    split: Split
    megatron: tuple[str, ...]
    """The parameter's name. Where it differs between layer specifications there are two: that of
    the specification with norms of their own, and that of Transformer Engine's, which fuses a norm
    into the linear layer after it."""
    tensors: tuple[str, ...]
    """Hugging Face's names, in the order of stacking."""
    is_copy: bool = False
    """Whether another mapping has these tensors too. Such a parameter is loaded, and never
    streamed."""
    lora_rank: int = 0
    """Rank of the adapter whose matrix A or B this is; 0: a parameter of the policy."""
    layers: str = ""
    """Kind of the layers that have it, by config.json's ``layer_types``; empty: all layers."""
    sections: tuple[tuple[int, str, str], ...] = ()
    """Of ``SECTIONS``: number of the tensor, name in Megatron's distributed format, and kind of its
    dimension."""
    exact: bool = False
    """Whether it is fp32 in every policy and file."""
    fused: str = ""
    """The tensor of files in which those of all experts lie one after another; empty: files have
    each by itself."""

    @property
    def key(self) -> str:
        """The parameter's name in Megatron's distributed format, the same for both specifications:
        Transformer Engine's. Experts are a leading dimension there, and no part of the name."""
        return self.megatron[-1].replace(".local_experts.{expert}", ".experts")

    @property
    def modules(self) -> tuple[str, ...]:
        """Hugging Face's modules of the tensors: ``q_proj``, ``k_proj``, ``v_proj``."""
        return tuple(name.split(".")[-2] for name in self.tensors)

    @property
    def is_expert(self) -> bool:
        """Whether a layer has the parameter once for each expert."""
        return "{expert}" in self.tensors[0]


def layer_row(split: Split, megatron: str, *tensors: str, **more: Any) -> ParameterMapping:
    """A parameter of every layer. If it has two names in Megatron, ``|`` is between them."""
    names = tuple("decoder.layers.{layer}." + name for name in megatron.split(" | "))
    return ParameterMapping(
        split, names, tuple("model.{body}layers.{layer}." + name for name in tensors), **more
    )


_INPUT_NORM = "input_layernorm.weight | self_attention.linear_qkv.layer_norm_weight"
_MLP_NORM = "pre_mlp_layernorm.weight | mlp.linear_fc1.layer_norm_weight"
_EXPERT = "mlp.experts.{expert}."
_EXPERT_FC1 = (
    "mlp.experts.linear_fc1.weight{expert} | mlp.experts.local_experts.{expert}.linear_fc1.weight"
)
_EXPERT_FC2 = (
    "mlp.experts.linear_fc2.weight{expert} | mlp.experts.local_experts.{expert}.linear_fc2.weight"
)

ATTENTION = (
    layer_row(REPLICATED, _INPUT_NORM, "input_layernorm.weight"),
    layer_row(
        QKV, "self_attention.linear_qkv.weight", *(f"self_attn.{x}_proj.weight" for x in "qkv")
    ),
    layer_row(ROW, "self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
QK_NORMS = (
    layer_row(REPLICATED, "self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    layer_row(REPLICATED, "self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
QKV_BIASES = (
    layer_row(QKV, "self_attention.linear_qkv.bias", *(f"self_attn.{x}_proj.bias" for x in "qkv")),
)
MLP = (
    layer_row(REPLICATED, _MLP_NORM, "post_attention_layernorm.weight"),
    layer_row(COLUMN, "mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    layer_row(ROW, "mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
EXPERTS = (
    layer_row(REPLICATED, "pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    layer_row(REPLICATED, "mlp.router.weight", "mlp.gate.weight"),
    layer_row(COLUMN, _EXPERT_FC1, _EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
    layer_row(ROW, _EXPERT_FC2, _EXPERT + "down_proj.weight"),
)
DIMENSIONS = {
    "embed_tokens": ("vocabulary", "hidden"),
    "lm_head": ("vocabulary", "hidden"),
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"),
    "q_norm": ("head",),
    "k_norm": ("head",),
    "gate_proj": ("feed_forward", "hidden"),
    "up_proj": ("feed_forward", "hidden"),
    "down_proj": ("hidden", "feed_forward"),
    "gate": ("experts", "hidden"),
}
"""Dimensions of the weight of a Hugging Face module, outputs first; its bias has the outputs. A
norm that is not in the table has ``hidden``. A module's name may have that of the module around it
before it."""


def tensor_dimensions(
    name: str, known: Mapping[str, tuple[str, ...]] = DIMENSIONS
) -> tuple[str, ...]:
    """Kind of each dimension of a policy's Hugging Face tensor.

        tensor_dimensions("model.layers.5.self_attn.o_proj.weight") == ("hidden", "queries")

    Besides these two: vocabulary, keys, head, feed_forward, experts.
    """
    *around, module, kind = name.split(".")
    dimensions = known.get(".".join((*around[-1:], module))) or known.get(module, ("hidden",))
    return dimensions[:1] if kind == "bias" else dimensions


@dataclass(frozen=True)
class RopeScaling:
    """Scaled rotary positions. Subclasses have numbers as fields, under config.json's names."""

    rope_type: ClassVar[str]

    def scale(self, frequencies: Any) -> Any:
        """Scale ``frequencies``, an array of radians per token."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """A family of decoders with grouped-query attention, SwiGLU or experts of it, RMSNorm, and
    rotary positions."""

    architecture: str
    """Its class in transformers, as config.json names it: ``Qwen3ForCausalLM``."""
    model_type: str
    """Its short name in config.json, by which ``init --family`` and the documentation call it:
    ``qwen3``."""
    rows: tuple[ParameterMapping, ...]
    """The parameters of a layer."""
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of Megatron's ``TransformerConfig``."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """config.json's names of fields of ``PolicyShape``, where they are not those of
    :data:`shape.KEYS`. ``|`` is between an earlier and a later name."""
    optional: tuple[str, ...] = ()
    """Sizes that config.json may leave out, and that transformers then derives: ``head_dim``,
    ``num_key_value_heads``."""
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings of config.json with their supported values. The first is the default, and ``init``
    writes it."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Settings whose default in transformers is another value, for a config.json that leaves them
    out."""
    rope_scalings: tuple[type[RopeScaling], ...] = ()
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Published models by lower-case name: the fields of their ``PolicyShape``."""
    dimensions: Mapping[str, tuple[str, ...]] = field(default_factory=DIMENSIONS.copy)
    """:data:`DIMENSIONS` of its modules."""
    text_config: str = ""
    """Where config.json has the settings of the text model, if that is a part of the model."""
    body: str = ""
    """What the names of its tensors have between ``model.`` and those of a text model:
    ``language_model.``"""
    carried: tuple[str, ...] = ()
    """Prefixes of tensors that are no part of the policy, and that an export takes from the model
    it began with."""
    reads_head_dim: bool = True
    """Whether every reader takes ``head_dim`` from config.json, so that it need not be ``hidden /
    heads``."""

    @property
    def linear_layers(self) -> dict[str, ParameterMapping]:
        """Rows of the weights of Megatron's linear layers that may have adapters, by the names that
        the layers have without numbers: ``decoder.layers.mlp.linear_fc1``."""
        weights = [
            (name.rpartition(".")[0], row)
            for row in self.rows
            for name in row.megatron
            if ".weight" in name
        ]
        found = {re.sub(r"\.\{\w+\}", "", layer): row for layer, row in weights}
        return {name: row for name, row in found.items() if ".linear_" in name}
