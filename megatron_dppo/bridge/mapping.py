"""Which Hugging Face tensors a Megatron parameter is made of, and which rows or columns of them each rank holds.

One table per family. A line of it is read in both directions, because all that it says about contents is a list of
:class:`Piece`: put together, the pieces of rank r are r's parameter; put back where they were taken from, they are the
tensors again. Loading, streaming and the check of a directory's shapes all come from these lines. No torch is needed
to read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from megatron_dppo.models.shape import PolicyShape, padded_vocab


class Split(StrEnum):
    """How a parameter is cut over the tensor-parallel ranks."""

    REPLICATED = "every rank has it whole"
    COLUMN = "output features (dimension 0) of each tensor in equal parts, a rank's parts stacked: gate, then up"
    ROW = "input features (dimension 1) in equal parts"
    VOCABULARY = "tokens (dimension 0) in equal parts, after padding with zeros to what the layout divides"
    QKV = "query groups in equal parts; within a part, each group's queries, then its key, then its value"


class Place(StrEnum):
    """Which pipeline stage has a parameter, and how often it occurs."""

    FIRST = "the first stage"
    LAYER = "the stage of the layer, once in each"
    EXPERT = "the stage of the layer, once for each of its experts"
    LAST = "the last stage"


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One line of a table. In its names ``{layer}`` is counted over all stages, ``{expert}`` over all ranks."""

    place: Place
    split: Split
    megatron: tuple[str, ...]
    """The parameter's name, one per layer specification where they differ (local norms, norms fused into a linear)."""
    tensors: Mapping[str, str]
    """Hugging Face's names, in the order of stacking, each with its dimensions by the names of :func:`_extents`."""
    copies: bool = False
    """A second copy of tensors that another row has: loaded, never streamed."""

    @property
    def key(self) -> str:
        """The parameter's name in Megatron's distributed format, whatever the specification.

        It has the fused norms' names. Layers and experts are not in it: they are leading dimensions there.
        """
        return self.megatron[-1].replace(".{layer}", "").replace(".local_experts.{expert}", ".experts")


_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."
_EMBEDDING = {"model.embed_tokens.weight": "vocabulary hidden"}
_OUTPUT = ("output_layer.weight",)

_EMBED = Row(Place.FIRST, Split.VOCABULARY, ("embedding.word_embeddings.weight",), _EMBEDDING)
_ATTENTION = (
    Row(
        Place.LAYER,
        Split.REPLICATED,
        (_M + "input_layernorm.weight", _M + "self_attention.linear_qkv.layer_norm_weight"),
        {_H + "input_layernorm.weight": "hidden"},
    ),
    Row(
        Place.LAYER,
        Split.QKV,
        (_M + "self_attention.linear_qkv.weight",),
        {
            _H + "self_attn.q_proj.weight": "queries hidden",
            _H + "self_attn.k_proj.weight": "keys hidden",
            _H + "self_attn.v_proj.weight": "keys hidden",
        },
    ),
    Row(
        Place.LAYER,
        Split.ROW,
        (_M + "self_attention.linear_proj.weight",),
        {_H + "self_attn.o_proj.weight": "hidden queries"},
    ),
)
_QK_NORMS = (
    Row(
        Place.LAYER,
        Split.REPLICATED,
        (_M + "self_attention.q_layernorm.weight",),
        {_H + "self_attn.q_norm.weight": "head"},
    ),
    Row(
        Place.LAYER,
        Split.REPLICATED,
        (_M + "self_attention.k_layernorm.weight",),
        {_H + "self_attn.k_norm.weight": "head"},
    ),
)
_QKV_BIAS = Row(
    Place.LAYER,
    Split.QKV,
    (_M + "self_attention.linear_qkv.bias",),
    {
        _H + "self_attn.q_proj.bias": "queries",
        _H + "self_attn.k_proj.bias": "keys",
        _H + "self_attn.v_proj.bias": "keys",
    },
)
_MLP = (
    Row(
        Place.LAYER,
        Split.REPLICATED,
        (_M + "pre_mlp_layernorm.weight", _M + "mlp.linear_fc1.layer_norm_weight"),
        {_H + "post_attention_layernorm.weight": "hidden"},
    ),
    Row(
        Place.LAYER,
        Split.COLUMN,
        (_M + "mlp.linear_fc1.weight",),
        {_H + "mlp.gate_proj.weight": "feed_forward hidden", _H + "mlp.up_proj.weight": "feed_forward hidden"},
    ),
    Row(
        Place.LAYER,
        Split.ROW,
        (_M + "mlp.linear_fc2.weight",),
        {_H + "mlp.down_proj.weight": "hidden feed_forward"},
    ),
)
_EXPERT = "mlp.experts.{expert}."
_EXPERTS = (
    Row(
        Place.LAYER,
        Split.REPLICATED,
        (_M + "pre_mlp_layernorm.weight",),
        {_H + "post_attention_layernorm.weight": "hidden"},
    ),
    Row(Place.LAYER, Split.REPLICATED, (_M + "mlp.router.weight",), {_H + "mlp.gate.weight": "experts hidden"}),
    Row(
        Place.EXPERT,
        Split.COLUMN,
        (_M + "mlp.experts.linear_fc1.weight{expert}", _M + "mlp.experts.local_experts.{expert}.linear_fc1.weight"),
        {
            _H + _EXPERT + "gate_proj.weight": "feed_forward hidden",
            _H + _EXPERT + "up_proj.weight": "feed_forward hidden",
        },
    ),
    Row(
        Place.EXPERT,
        Split.ROW,
        (_M + "mlp.experts.linear_fc2.weight{expert}", _M + "mlp.experts.local_experts.{expert}.linear_fc2.weight"),
        {_H + _EXPERT + "down_proj.weight": "hidden feed_forward"},
    ),
)
_FINAL_NORM = Row(Place.LAST, Split.REPLICATED, ("decoder.final_layernorm.weight",), {"model.norm.weight": "hidden"})

TABLES: Mapping[str, tuple[Row, ...]] = {
    "Qwen3ForCausalLM": (_EMBED, *_ATTENTION, *_QK_NORMS, *_MLP, _FINAL_NORM),
    "Qwen3MoeForCausalLM": (_EMBED, *_ATTENTION, *_QK_NORMS, *_EXPERTS, _FINAL_NORM),
    "Qwen2ForCausalLM": (_EMBED, *_ATTENTION, _QKV_BIAS, *_MLP, _FINAL_NORM),
}
"""By the architecture that config.json names."""
UNTIED_OUTPUT = Row(Place.LAST, Split.VOCABULARY, _OUTPUT, {"lm_head.weight": "vocabulary hidden"})
TIED_OUTPUT = Row(Place.LAST, Split.VOCABULARY, _OUTPUT, _EMBEDDING, copies=True)
"""With tied embeddings the output layer has no weight of its own, unless it is on another stage than the embedding."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``stop - start`` consecutive slices of one Hugging Face tensor along the axis that its entry is cut on.

    Without a ``name``, zeros: tokens that only the padded vocabulary has.
    """

    name: str | None
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the table for one layer (and expert) of one policy: a parameter, and the tensors it is made of."""

    row: Row
    shape: PolicyShape
    layer: int | None = None
    """Counted over all stages; None outside the layers."""
    expert: int | None = None
    """Counted over all ranks; None outside the experts."""

    @property
    def megatron(self) -> tuple[str, ...]:
        """The parameter's possible names."""
        return tuple(self._numbered(name) for name in self.row.megatron)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the Hugging Face tensors, by name."""
        extents = _extents(self.shape)
        return {
            self._numbered(name): tuple(extents[dimension] for dimension in dimensions.split())
            for name, dimensions in self.row.tensors.items()
        }

    @property
    def elements(self) -> int:
        """Of all its tensors together, without padding."""
        return sum(map(prod, self.tensors.values()))

    @property
    def leading(self) -> tuple[int, ...]:
        """Where the parameter lies in the leading dimensions of its key in Megatron's distributed format."""
        return tuple(index for index in (self.layer, self.expert) if index is not None)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of its key's tensor there, leading dimensions included."""
        return (self.shape.num_layers, self.shape.experts)[: len(self.leading)] + self.shard_shape(1)

    @property
    def axis(self) -> int:
        """The dimension along which pieces are cut and put together."""
        return 1 if self.row.split is Split.ROW else 0

    def shard_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of the parameter on each of ``tp`` ranks."""
        shape = list(next(iter(self.tensors.values())))
        shape[self.axis] = sum(piece.length for piece in self.pieces(0, tp))
        return tuple(shape)

    def pieces(self, tp_rank: int, tp: int) -> tuple[Piece, ...]:
        """What rank ``tp_rank`` of ``tp`` holds: put together along ``axis``, its parameter.

        Raises:
            ValueError: if ``tp`` does not divide what is split.
        """
        extents = {name: shape[self.axis] for name, shape in self.tensors.items()}
        match self.row.split:
            case Split.REPLICATED:
                return tuple(Piece(name, 0, extent) for name, extent in extents.items())
            case Split.COLUMN | Split.ROW:
                return tuple(
                    Piece(name, *_part(extent, tp_rank, tp, f"slices of {name}")) for name, extent in extents.items()
                )
            case Split.VOCABULARY:
                ((name, vocabulary),) = extents.items()
                start, stop = _part(padded_vocab(vocabulary, tp), tp_rank, tp, "tokens")
                held = Piece(name, min(start, vocabulary), min(stop, vocabulary))
                padding = Piece(None, max(start, vocabulary), max(stop, vocabulary))
                return tuple(piece for piece in (held, padding) if piece.length)
            case Split.QKV:
                groups = range(*_part(self.shape.kv_heads, tp_rank, tp, "query groups"))
                heads = {name: extent // self.shape.kv_heads for name, extent in extents.items()}
                return tuple(
                    Piece(name, group * size, (group + 1) * size) for group in groups for name, size in heads.items()
                )

    def _numbered(self, name: str) -> str:
        return name.format(layer=self.layer, expert=self.expert)


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """The layers of a pipeline stage.

    Raises:
        ValueError: if the stages do not divide the layers.
    """
    return range(*_part(layers, stage, stages, "layers"))


def entries(shape: PolicyShape, stage: int = 0, stages: int = 1) -> Iterator[Entry]:
    """The parameters of one pipeline stage, in the order of the forward pass: with one stage, of the whole policy."""
    table = TABLES[shape.architecture]
    first, last = stage == 0, stage == stages - 1
    yield from (Entry(row, shape) for row in table if row.place is Place.FIRST and first)
    for layer in stage_layers(shape.num_layers, stage, stages):
        yield from (Entry(row, shape, layer) for row in table if row.place is Place.LAYER)
        for expert in range(shape.experts):
            yield from (Entry(row, shape, layer, expert) for row in table if row.place is Place.EXPERT)
    yield from (Entry(row, shape) for row in table if row.place is Place.LAST and last)
    if last and not shape.tied:
        yield Entry(UNTIED_OUTPUT, shape)
    elif last and not first:
        yield Entry(TIED_OUTPUT, shape)


def expected_tensors(shape: PolicyShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a policy in Hugging Face's form, in the order of the forward pass."""
    return {name: size for entry in entries(shape) for name, size in entry.tensors.items()}


def redundant_tensors(shape: PolicyShape) -> dict[str, tuple[int, ...]]:
    """Tensors that a directory may hold besides, and that nothing reads: an output layer that is tied to the embedding.

    Qwen3's own small models come with it.
    """
    return Entry(UNTIED_OUTPUT, shape).tensors if shape.tied else {}


def parameters(shape: PolicyShape) -> int:
    """Weights of the policy, without padding; tied embeddings count once."""
    return sum(entry.elements for entry in entries(shape))


def _extents(shape: PolicyShape) -> dict[str, int]:
    return {
        "vocabulary": shape.vocab_size,
        "hidden": shape.hidden,
        "queries": shape.heads * shape.head_dim,
        "keys": shape.kv_heads * shape.head_dim,
        "head": shape.head_dim,
        "experts": shape.experts,
        "feed_forward": shape.ffn,
    }


def _part(extent: int, part: int, parts: int, what: str) -> tuple[int, int]:
    """Start and stop of one of ``parts`` equal parts."""
    if extent % parts:
        raise ValueError(
            f"{what} ({extent}) cannot be cut into {parts} equal parts; check_layout refuses such a layout"
        )
    size = extent // parts
    return part * size, (part + 1) * size
