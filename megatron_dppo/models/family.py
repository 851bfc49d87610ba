"""Description of a family of models, given by a file in ``models/families``. Needs no torch.

A family lists the parameters of a layer as rows: Megatron's names, Hugging Face tensors, and split
over ranks. Rows shared by several families are defined here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar


class Split(StrEnum):
    """Split of a parameter over the tensor-parallel ranks."""

    REPLICATED = "every rank has it whole"
    COLUMN = (
        "output features (dimension 0) of each tensor in equal parts, a rank's parts stacked: "
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
        "as QKV, with the gates of a group's queries behind these; in the tensor each gate is "
        "behind its query"
    )
    SECTIONS = "each section of the tensors' output features in equal parts, a rank's parts stacked"


REPLICATED, COLUMN, ROW, VOCABULARY, QKV, GATED_QKV, SECTIONS = Split


@dataclass(frozen=True, slots=True, eq=False)
class ParameterMapping:
    """A Megatron parameter and its Hugging Face tensors.

    Placeholders in names: ``{layer}`` is numbered over all stages, ``{expert}`` over all ranks, and
    ``{body}`` is :attr:`Family.body`.
    """

    split: Split
    megatron: tuple[str, ...]
    """A single name, or two: with separate norms, and in Transformer Engine's layer specification,
    which fuses a norm into the following linear layer."""
    tensors: tuple[str, ...]
    """Hugging Face names, in the order of stacking."""
    is_copy: bool = False
    """Whether another mapping has the same tensors; copies are loaded, but never streamed."""
    lora_rank: int = 0
    """Rank of the adapter whose matrix A or B this is; 0: a parameter of the policy."""
    layers: str = ""
    """Layers with this parameter: an entry of config.json's ``layer_types``; empty: all layers."""
    sections: tuple[tuple[int, str, str], ...] = ()
    """For ``SECTIONS``: index of the tensor, name in Megatron's distributed format, kind of
    dimension."""
    exact: bool = False
    """Whether the parameter is fp32 in every policy and file."""
    fused: str = ""
    """Name of the tensor in files that stack all experts; empty: one tensor per expert."""

    @property
    def key(self) -> str:
        """Name in Megatron's distributed format, the same for both layer specifications."""
        # Experts are a leading dimension there, and no part of the name.
        return self.megatron[-1].replace(".local_experts.{expert}", ".experts")

    @property
    def modules(self) -> tuple[str, ...]:
        """Hugging Face modules of the tensors: ``q_proj``, ``k_proj``, ``v_proj``."""
        return tuple(name.split(".")[-2] for name in self.tensors)

    @property
    def is_expert(self) -> bool:
        """Whether a layer has the parameter once for each expert."""
        return "{expert}" in self.tensors[0]


def layer_row(split: Split, megatron: str, *tensors: str, **more: Any) -> ParameterMapping:
    """Return the mapping of a parameter of every layer; ``|`` separates two Megatron names."""
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
"""Dimensions of a Hugging Face module's weight, outputs first. A bias has the outputs, and an
absent norm has ``hidden``. The enclosing module's name may precede a key."""


def tensor_dimensions(
    name: str, known: Mapping[str, tuple[str, ...]] = DIMENSIONS
) -> tuple[str, ...]:
    """Return the kind of each dimension of a Hugging Face tensor.

        tensor_dimensions("model.layers.5.self_attn.o_proj.weight") == ("hidden", "queries")

    Further kinds: vocabulary, keys, head, feed_forward, experts.
    """
    *around, module, kind = name.split(".")
    # Look up the name with the enclosing module first, because a shared expert's dimensions differ.
    dimensions = known.get(".".join((*around[-1:], module))) or known.get(module, ("hidden",))
    return dimensions[:1] if kind == "bias" else dimensions


@dataclass(frozen=True)
class RopeScaling:
    """Scaled rotary positions. Subclasses have config.json's numbers as fields."""

    rope_type: ClassVar[str]

    def scale(self, frequencies: Any) -> Any:
        """Scale ``frequencies``, in radians per token."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """Decoders with grouped-query attention, SwiGLU (dense or experts), RMSNorm, and rotary
    positions."""

    architecture: str
    """Class in transformers: ``Qwen3ForCausalLM``."""
    model_type: str
    """Short name in config.json and in ``init --family``: ``qwen3``."""
    rows: tuple[ParameterMapping, ...]
    """Parameters of a layer."""
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of Megatron's ``TransformerConfig``."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """config.json's names of ``PolicyShape`` fields, if not as in :data:`shape.KEYS`; ``|``
    separates an earlier and a later name."""
    optional: tuple[str, ...] = ()
    """Sizes that config.json may omit and transformers derives: ``head_dim``,
    ``num_key_value_heads``."""
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Supported values of config.json's settings; the first value is the default, and written by
    ``init``."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Values of settings absent from config.json, if transformers does not use the first supported
    value."""
    rope_scalings: tuple[type[RopeScaling], ...] = ()
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Published models by lower-case name: the fields of their ``PolicyShape``."""
    dimensions: Mapping[str, tuple[str, ...]] = field(default_factory=DIMENSIONS.copy)
    """:data:`DIMENSIONS` of the family's modules."""
    text_config: str = ""
    """config.json's key of the text model's settings, if the model has further parts."""
    body: str = ""
    """Part of tensor names after ``model.``, if the model has further parts:
    ``language_model.``"""
    carried: tuple[str, ...] = ()
    """Prefixes of tensors outside the policy; an export copies the base model's."""
    reads_head_dim: bool = True
    """Whether every reader takes ``head_dim`` from config.json. If not, ``head_dim`` must be
    ``hidden / heads``."""

    @property
    def linear_layers(self) -> dict[str, ParameterMapping]:
        """Rows of weights that may have adapters, by layer name without numbers:
        ``decoder.layers.mlp.linear_fc1``."""
        weights = [
            (name.rpartition(".")[0], row)
            for row in self.rows
            for name in row.megatron
            if ".weight" in name
        ]
        found = {re.sub(r"\.\{\w+\}", "", layer): row for layer, row in weights}
        return {name: row for name, row in found.items() if ".linear_" in name}
