"""Which Hugging Face tensors a Megatron parameter is made of, and which rows or columns of them
each rank holds.

A family's rows are read in both directions. :meth:`Entry.list_slices` says what the parameter of
rank r is: slices of tensors, put together along one axis. Loading copies these slices into the
parameter, streaming and export copy them back, and a directory's shapes are checked against the
same rows. No torch is needed to read them.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod

from megatron_dppo.config import LayoutConfig, LoraConfig
from megatron_dppo.models.family import (
    COLUMN,
    REPLICATED,
    ROW,
    VOCABULARY,
    ParameterMapping,
    Split,
    tensor_dimensions,
)
from megatron_dppo.models.shape import PolicyShape, padded_vocab

EMBEDDING = ParameterMapping(
    VOCABULARY, ("embedding.word_embeddings.weight",), ("model.{body}embed_tokens.weight",)
)
FINAL_NORM = ParameterMapping(
    REPLICATED, ("decoder.final_layernorm.weight",), ("model.{body}norm.weight",)
)
UNTIED_OUTPUT = ParameterMapping(VOCABULARY, ("output_layer.weight",), ("lm_head.weight",))
TIED_OUTPUT = ParameterMapping(
    VOCABULARY, ("output_layer.weight",), EMBEDDING.tensors, is_copy=True
)
"""With tied embeddings the output layer has no weight of its own, unless it is on another stage
than the embedding."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows (axis 0) or columns (axis 1) ``start`` to ``stop`` of one Hugging Face tensor; the axis
    is its entry's.

    Without a ``name``, zeros: tokens that only the padded vocabulary has.

        Slice("model.layers.0.self_attn.o_proj.weight", 96, 192)

    is the half of the columns that rank 1 of 2 holds of a [192, 192] matrix.
    """

    name: str | None
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Entry:
    """A mapping of the table for one layer (and expert) of one policy: a parameter, and the tensors
    it is made of.

        Entry(shape.family.rows[2], shape, layer=5)

    is ``decoder.layers.5.self_attention.linear_proj.weight``, made of
    ``model.layers.5.self_attn.o_proj.weight``.
    """

    mapping: ParameterMapping
    shape: PolicyShape
    layer: int | None = None
    """Counted over all stages; None outside the layers."""
    expert: int | None = None
    """Counted over all ranks; None outside the experts."""

    @property
    def megatron_names(self) -> tuple[str, ...]:
        """The parameter's possible names."""
        return tuple(self._format_name(name) for name in self.mapping.megatron)

    @property
    def key(self) -> str:
        """The parameter's name in Megatron's distributed format. Layers of one kind are a leading
        dimension there."""
        return self.mapping.key.replace(".{layer}", f".{self.layer}" if self.shape.hybrid else "")

    @property
    def stored_rows(self) -> tuple[StoredRows, ...]:
        """What of it has keys of its own in Megatron's distributed format."""
        sections = enumerate(name for _, name, _ in self.mapping.sections)
        parts = tuple(StoredRows(self, f"{self.key}.{name}", number) for number, name in sections)
        return parts or (StoredRows(self, self.key),)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the Hugging Face tensors, by name."""
        rank = self.mapping.lora_rank
        return {
            name: _tensor_shape(self.shape, name, rank)
            for name in map(self._format_name, self.mapping.tensors)
        }

    @property
    def fused_tensor(self) -> str:
        """The one tensor of files in which its tensors lie with those of all other experts; empty:
        none."""
        return self._format_name(self.mapping.fused)

    @property
    def elements(self) -> int:
        """Size of all its tensors together, without padding."""
        return sum(map(prod, self.tensors.values()))

    @property
    def leading_indices(self) -> tuple[int, ...]:
        """Where the parameter lies in the leading dimensions of its key in Megatron's distributed
        format."""
        return tuple(index for index, _ in self._leading_dimensions)

    @property
    def leading_sizes(self) -> tuple[int, ...]:
        """Sizes of these dimensions."""
        return tuple(size for _, size in self._leading_dimensions)

    @property
    def _leading_dimensions(self) -> list[tuple[int, int]]:
        layer = None if self.shape.hybrid else self.layer
        pairs = ((layer, self.shape.num_layers), (self.expert, self.shape.experts))
        return [(index, size) for index, size in pairs if index is not None]

    def expert_rank(self, ep: int) -> int:
        """Which of ``ep`` expert-parallel ranks has this expert. They hold runs of equal length."""
        assert self.expert is not None
        return self.expert // (self.shape.experts // ep)

    def count_parts(self, layout: LayoutConfig) -> int:
        """Over how many ranks the parameter is cut."""
        return layout.tp if self.expert is None else layout.expert_tp

    @property
    def axis(self) -> int:
        """The dimension along which tensors are cut and slices are put together."""
        return 1 if self.mapping.split is ROW else 0

    def shard_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of the parameter on each of ``tp`` ranks."""
        shape = list(next(iter(self.tensors.values())))
        shape[self.axis] = sum(part.length for part in self.list_slices(0, tp))
        return tuple(shape)

    def list_slices(self, tp_rank: int, tp: int) -> tuple[Slice, ...]:
        """Slices of rank ``tp_rank`` of ``tp``; joined along ``axis``, they are its parameter.

        Raises:
            ValueError: if ``tp`` does not divide the split extent.
        """
        extents = {name: shape[self.axis] for name, shape in self.tensors.items()}
        match self.mapping.split:
            case Split.VOCABULARY:
                ((name, vocabulary),) = extents.items()
                start, stop = _compute_part(padded_vocab(vocabulary, tp), tp_rank, tp, "tokens")
                held = Slice(name, min(start, vocabulary), min(stop, vocabulary))
                padding = Slice(None, max(start, vocabulary), max(stop, vocabulary))
                return tuple(part for part in (held, padding) if part.length)
            case Split.QKV:
                groups = range(*_compute_part(self.shape.kv_heads, tp_rank, tp, "query groups"))
                heads = {name: extent // self.shape.kv_heads for name, extent in extents.items()}
                return tuple(
                    Slice(name, group * size, (group + 1) * size)
                    for group in groups
                    for name, size in heads.items()
                )
            case Split.GATED_QKV:
                size = self.shape.head_dim
                heads_each = self.shape.heads // self.shape.kv_heads
                query, *others = extents
                pieces: list[tuple[str, int]] = []
                for group in range(
                    *_compute_part(self.shape.kv_heads, tp_rank, tp, "query groups")
                ):
                    of_group = range(group * heads_each, (group + 1) * heads_each)
                    pieces += [(query, 2 * head + gate) for gate in (0, 1) for head in of_group]
                    pieces += [(name, group) for name in others]
                return tuple(
                    Slice(name, place * size, (place + 1) * size) for name, place in pieces
                )
            case Split.REPLICATED:
                tp_rank = 0
                tp = 1
        names = list(extents)
        begins = dict.fromkeys(extents, 0)
        sections = [
            (names[number], self.shape.extents[kind]) for number, _, kind in self.mapping.sections
        ]
        cut = []
        for name, size in sections or extents.items():
            start, stop = _compute_part(size, tp_rank, tp, f"features of {name}")
            cut.append(Slice(name, begins[name] + start, begins[name] + stop))
            begins[name] += size
        return tuple(cut)

    def _format_name(self, name: str) -> str:
        return name.format(layer=self.layer, expert=self.expert, body=self.shape.family.body)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a parameter with a key of their own in Megatron's distributed format: most often all
    of them."""

    entry: Entry
    key: str
    section: int | None = None
    """Its number among the mapping's sections; None: there are none."""

    @property
    def rows(self) -> tuple[Slice, ...]:
        """Rows of Hugging Face tensors that it consists of, below one another."""
        tensors = self.entry.tensors.items()
        rows = (
            tuple(Slice(name, 0, size[0]) for name, size in tensors)
            if self.entry.axis
            else self.entry.list_slices(0, 1)
        )
        return rows if self.section is None else rows[self.section : self.section + 1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter's rows."""
        return (sum(part.length for part in self.rows), *self.entry.shard_shape(1)[1:])

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The same as a block of its key's tensor."""
        return (1,) * len(self.entry.leading_indices) + self.shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of its key's tensor, leading dimensions included."""
        return self.entry.leading_sizes + self.shape


def list_entries(shape: PolicyShape, layers: Sequence[range] | None = None) -> Iterator[Entry]:
    """The parameters of a pipeline stage, in the order of the forward pass.

    Args:
        shape: of the policy.
        layers: of the stage, from :func:`list_stage_layers`; None: those of the whole policy.
    """
    layers = layers or [range(shape.num_layers)]
    first = layers[0].start == 0
    last = layers[-1].stop == shape.num_layers
    if first:
        yield Entry(EMBEDDING, shape)
    yield from _list_layer_entries(shape, shape.family.rows, layers)
    if last:
        yield Entry(FINAL_NORM, shape)
    if last and not shape.tied:
        yield Entry(UNTIED_OUTPUT, shape)
    elif last and not first:
        yield Entry(TIED_OUTPUT, shape)


def list_adapter_entries(
    shape: PolicyShape, lora: LoraConfig, layers: Sequence[range] | None = None
) -> Iterator[Entry]:
    """The same for the adapters of ``lora``, whose tensors have the names that PEFT gives them."""
    mappings = _list_adapter_mappings(shape.family.rows, lora.rank, lora.targets)
    yield from _list_layer_entries(shape, mappings, layers or [range(shape.num_layers)])


def _list_layer_entries(
    shape: PolicyShape, mappings: Sequence[ParameterMapping], layers: Sequence[range]
) -> Iterator[Entry]:
    kinds = shape.layer_types
    for layer in chain.from_iterable(layers):
        there = [mapping for mapping in mappings if mapping.layers in ("", kinds[layer])]
        yield from (Entry(mapping, shape, layer) for mapping in there if not mapping.is_expert)
        for expert in range(shape.experts):
            yield from (
                Entry(mapping, shape, layer, expert) for mapping in there if mapping.is_expert
            )


PEFT = "base_model.model."
"""PEFT's prefix of a Hugging Face name."""


@cache
def _list_adapter_mappings(
    rows: tuple[ParameterMapping, ...], rank: int, targets: tuple[str, ...]
) -> tuple[ParameterMapping, ...]:
    """A and B of every matrix that is a target. The one is cut as the weight is, and every rank has
    the other whole."""
    found = []
    for mapping in rows:
        for name in mapping.tensors:
            module, _, kind = name.rpartition(".")
            target = module.rpartition(".")[2]
            if target not in targets or kind != "weight":
                continue
            splits = (REPLICATED, ROW) if mapping.split is ROW else (COLUMN, REPLICATED)
            for letter, split in zip("ba", splits, strict=True):
                names = tuple(
                    f"{_format_adapter_path(of)}.{target}.{letter}" for of in mapping.megatron
                )
                tensor = f"{PEFT}{module}.lora_{letter.upper()}.weight"
                found.append(
                    ParameterMapping(split, names, (tensor,), lora_rank=rank, layers=mapping.layers)
                )
    return tuple(found)


def _format_adapter_path(parameter: str) -> str:
    """Where the adapters of a linear layer's weight are; a grouped layer has them once for each
    expert."""
    layer, _, weight = parameter.rpartition(".")
    return f"{layer}.lora" + (".{expert}" if weight != "weight" else "")


def get_adapter_names(name: str) -> tuple[str, str]:
    """PEFT's names of A and B beside a tensor of a Hugging Face directory."""
    module = PEFT + name.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def expected_tensors(shape: PolicyShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a policy in Hugging Face's form, in the order of the
    forward pass."""
    return {name: size for entry in list_entries(shape) for name, size in entry.tensors.items()}


def file_tensors(shape: PolicyShape) -> dict[str, dict[str, tuple[int, ...]]]:
    """Tensors of files, in the order of the forward pass: name and shape of each of the policy's
    that lie in one, one after another. These are several if a file has the experts of a layer in
    one tensor."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for entry in list_entries(shape):
        for name, size in entry.tensors.items():
            found.setdefault(entry.fused_tensor or name, {})[name] = size
    return found


def file_shape(
    name: str, parts: Mapping[str, tuple[int, ...]], shape: PolicyShape
) -> tuple[int, ...]:
    """Shape of a tensor of files with these parts; of experts: [experts, rows of an expert's
    tensors, columns]."""
    sizes = list(parts.values())
    return parts.get(name) or (
        shape.experts,
        sum(size[0] for size in sizes) // shape.experts,
        *sizes[0][1:],
    )


def exact_tensors(shape: PolicyShape) -> frozenset[str]:
    """Those that are fp32 in every policy and file."""
    return frozenset(
        name for entry in list_entries(shape) if entry.mapping.exact for name in entry.tensors
    )


def list_redundant_tensors(shape: PolicyShape) -> dict[str, tuple[int, ...]]:
    """Tensors that a directory may hold besides: a copy of the embedding, as the output layer that
    is tied to it.

    Qwen3's own small models come with it.
    """
    return Entry(UNTIED_OUTPUT, shape).tensors if shape.tied else {}


def count_parameters(shape: PolicyShape, lora: LoraConfig | None = None) -> int:
    """Weights of the policy, without padding; tied embeddings count once. With ``lora``, of its
    adapters instead."""
    return sum(
        entry.elements
        for entry in (list_adapter_entries(shape, lora) if lora else list_entries(shape))
    )


def describe_mismatch(
    policy: PolicyShape,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    """Name tensors that are missing, unexpected or of another shape, the first of each kind; empty:
    there are none.

    Args:
        policy: config.json's.
        expected: shapes by name.
        found: shapes by name.
        optional: shapes of tensors that may be missing.
    """
    possible = {**expected, **(optional or {})}
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in possible]
    misshapen = [name for name in found if found[name] != possible.get(name, found[name])]
    problems = []
    if missing:
        problems.append(
            f"{_format_names(missing)} missing{format_nearest_name(missing[0], unexpected)}"
        )
    if unexpected:
        kind = f"{policy.architecture} of {policy.num_layers} layers"
        problems.append(
            f"{_format_names(unexpected)} no part of a "
            f"{kind}{format_nearest_name(unexpected[0], expected)}"
        )
    for name in misshapen[:1]:
        problems.append(
            f"{name} has shape {[*found[name]]}, but config.json makes it {[*possible[name]]}"
        )
    return "; ".join(problems)


def _format_names(names: Sequence[str]) -> str:
    """One tensor by name, many by the first name and their number."""
    return (
        f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors are"
    )


def format_nearest_name(name: str, candidates: Collection[str]) -> str:
    """Return the candidate most like ``name``, as the end of a sentence."""
    near = difflib.get_close_matches(name, candidates, n=1)
    return f" (nearest name: {near[0]})" if near else ""


def _tensor_shape(shape: PolicyShape, name: str, rank: int) -> tuple[int, ...]:
    module, _, letter = name.partition(".lora_")
    dimensions = tensor_dimensions(f"{module}.weight" if rank else name, shape.family.dimensions)
    size = tuple(shape.extents[dimension] for dimension in dimensions)
    if rank:
        return (rank, size[1]) if letter == "A.weight" else (size[0], rank)
    return size


def _compute_part(extent: int, part: int, parts: int, name: str) -> tuple[int, int]:
    """Start and stop of one of ``parts`` equal parts."""
    if extent % parts:
        raise ValueError(
            f"{name} ({extent}) cannot be cut into {parts} equal parts; check_layout refuses such "
            "a layout"
        )
    size = extent // parts
    return part * size, (part + 1) * size
