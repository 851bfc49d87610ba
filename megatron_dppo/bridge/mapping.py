"""Mapping between Megatron parameters and Hugging Face tensors, and each rank's rows or columns.

The rows of a family's table are used in both directions: loading copies slices of tensors into a
rank's parameter, streaming and export copy them back, and a directory's shapes are checked against
the same rows. The rows are readable without torch.
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
"""Copy of the embedding as the output layer, with tied embeddings, if the last stage has no
embedding."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows (axis 0) or columns (axis 1) of a Hugging Face tensor, along the axis of the entry.

    Without a ``name``: zeros for tokens that only the padded vocabulary has.
    """

    name: str | None
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Entry:
    """A mapping of the table for a layer (and expert): a parameter and its source tensors."""

    mapping: ParameterMapping
    shape: PolicyShape
    layer: int | None = None
    """Index over all stages; ``None`` outside the layers."""
    expert: int | None = None
    """Index over all ranks; ``None`` outside the experts."""

    @property
    def megatron_names(self) -> tuple[str, ...]:
        """Possible names of the parameter."""
        return tuple(self._format_name(name) for name in self.mapping.megatron)

    @property
    def key(self) -> str:
        """Name of the parameter in Megatron's distributed format."""
        # Layers of the same kind are a leading dimension there.
        return self.mapping.key.replace(".{layer}", f".{self.layer}" if self.shape.hybrid else "")

    @property
    def stored_rows(self) -> tuple[StoredRows, ...]:
        """Parts of the parameter with separate keys in Megatron's distributed format."""
        sections = enumerate(name for _, name, _ in self.mapping.sections)
        parts = tuple(StoredRows(self, f"{self.key}.{name}", number) for number, name in sections)
        return parts or (StoredRows(self, self.key),)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the Hugging Face tensors."""
        rank = self.mapping.lora_rank
        return {
            name: _tensor_shape(self.shape, name, rank)
            for name in map(self._format_name, self.mapping.tensors)
        }

    @property
    def fused_tensor(self) -> str:
        """Name of the file's tensor that combines the tensors of all experts; else empty."""
        return self._format_name(self.mapping.fused)

    @property
    def elements(self) -> int:
        """Number of elements, without padding."""
        return sum(map(prod, self.tensors.values()))

    @property
    def leading_indices(self) -> tuple[int, ...]:
        """Position of the parameter in the leading dimensions of the key's tensor."""
        return tuple(index for index, _ in self._leading_dimensions)

    @property
    def leading_sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self._leading_dimensions)

    @property
    def _leading_dimensions(self) -> list[tuple[int, int]]:
        layer = None if self.shape.hybrid else self.layer
        pairs = ((layer, self.shape.num_layers), (self.expert, self.shape.experts))
        return [(index, size) for index, size in pairs if index is not None]

    def expert_rank(self, ep: int) -> int:
        """Return which of ``ep`` expert-parallel ranks has this expert."""
        # Each rank has a range of consecutive experts, of equal length.
        assert self.expert is not None
        return self.expert // (self.shape.experts // ep)

    def count_parts(self, layout: LayoutConfig) -> int:
        """Return the number of ranks that share the parameter."""
        return layout.tp if self.expert is None else layout.expert_tp

    @property
    def axis(self) -> int:
        """Dimension along which tensors are split and slices are joined."""
        return 1 if self.mapping.split is ROW else 0

    def shard_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape of the parameter on each of ``tp`` ranks."""
        shape = list(next(iter(self.tensors.values())))
        shape[self.axis] = sum(part.length for part in self.list_slices(0, tp))
        return tuple(shape)

    def list_slices(self, tp_rank: int, tp: int) -> tuple[Slice, ...]:
        """Return the slices of rank ``tp_rank`` of ``tp``, which form the rank's parameter along
        ``axis``.

        Raises:
            ValueError: if ``tp`` does not divide the split extent.
        """
        extents = {name: shape[self.axis] for name, shape in self.tensors.items()}
        match self.mapping.split:
            case Split.VOCABULARY:
                # The padded vocabulary is split evenly, so that the last ranks hold the padding.
                ((name, vocabulary),) = extents.items()
                start, stop = _compute_part(padded_vocab(vocabulary, tp), tp_rank, tp, "tokens")
                held = Slice(name, min(start, vocabulary), min(stop, vocabulary))
                padding = Slice(None, max(start, vocabulary), max(stop, vocabulary))
                return tuple(part for part in (held, padding) if part.length)
            # Megatron interleaves queries, keys and values by query group.
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
                # Per query group: query heads, gate heads, then key and value. The query tensor
                # alternates head and gate, both of size head_dim.
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
                # Every rank holds the whole parameter.
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
    """Rows of a parameter with a separate key in Megatron's distributed format; mostly all rows."""

    entry: Entry
    key: str
    section: int | None = None
    """Index among the mapping's sections; ``None`` for a mapping without sections."""

    @property
    def rows(self) -> tuple[Slice, ...]:
        """Rows of Hugging Face tensors that form the stored rows, from top to bottom."""
        tensors = self.entry.tensors.items()
        rows = (
            tuple(Slice(name, 0, size[0]) for name, size in tensors)
            if self.entry.axis
            else self.entry.list_slices(0, 1)
        )
        return rows if self.section is None else rows[self.section : self.section + 1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored rows of the whole parameter, over all ranks."""
        return (sum(part.length for part in self.rows), *self.entry.shard_shape(1)[1:])

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of the stored rows as a block of the key's tensor."""
        return (1,) * len(self.entry.leading_indices) + self.shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the key's tensor."""
        return self.entry.leading_sizes + self.shape


def list_entries(shape: PolicyShape, layers: Sequence[range] | None = None) -> Iterator[Entry]:
    """Yield the parameters of a pipeline stage with ``layers``, in order of the forward pass."""
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
    # With tied embeddings a last stage without the embedding needs a copy.
    elif last and not first:
        yield Entry(TIED_OUTPUT, shape)


def list_adapter_entries(
    shape: PolicyShape,
    lora: LoraConfig,
    layers: Sequence[range] | None = None,
) -> Iterator[Entry]:
    """Yield the entries of the adapters of ``lora``; tensors have PEFT's names."""
    mappings = _list_adapter_mappings(shape.family.rows, lora.rank, lora.targets)
    yield from _list_layer_entries(shape, mappings, layers or [range(shape.num_layers)])


def _list_layer_entries(
    shape: PolicyShape,
    mappings: Sequence[ParameterMapping],
    layers: Sequence[range],
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
    rows: tuple[ParameterMapping, ...],
    rank: int,
    targets: tuple[str, ...],
) -> tuple[ParameterMapping, ...]:
    """Return the mappings of A and B for every target matrix."""
    found = []
    for mapping in rows:
        for name in mapping.tensors:
            module, _, kind = name.rpartition(".")
            target = module.rpartition(".")[2]
            if target not in targets or kind != "weight":
                continue
            # A factor is split like the weight, and the second factor is replicated on every rank.
            splits = (REPLICATED, ROW) if mapping.split is ROW else (COLUMN, REPLICATED)
            for letter, split in zip("ba", splits, strict=True):
                paths = map(_format_adapter_path, mapping.megatron)
                names = tuple(f"{path}.{target}.{letter}" for path in paths)
                tensor = f"{PEFT}{module}.lora_{letter.upper()}.weight"
                found.append(
                    ParameterMapping(split, names, (tensor,), lora_rank=rank, layers=mapping.layers)
                )
    return tuple(found)


def _format_adapter_path(parameter: str) -> str:
    """Return the path of the adapters of a linear layer's weight."""
    layer, _, weight = parameter.rpartition(".")
    # A grouped layer has adapters per expert.
    return f"{layer}.lora" + (".{expert}" if weight != "weight" else "")


def get_adapter_names(name: str) -> tuple[str, str]:
    """Return PEFT's names of A and B for a Hugging Face tensor."""
    module = PEFT + name.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def expected_tensors(shape: PolicyShape) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every Hugging Face tensor, in order of the forward pass."""
    return {name: size for entry in list_entries(shape) for name, size in entry.tensors.items()}


def file_tensors(shape: PolicyShape) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the tensors of files, in order of the forward pass, each with the names and shapes of
    the policy's tensors in the file's tensor."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for entry in list_entries(shape):
        for name, size in entry.tensors.items():
            # A file may fuse the experts of a layer; their tensors are then consecutive.
            found.setdefault(entry.fused_tensor or name, {})[name] = size
    return found


def file_shape(
    name: str,
    parts: Mapping[str, tuple[int, ...]],
    shape: PolicyShape,
) -> tuple[int, ...]:
    """Return the shape of a file's tensor that combines ``parts``."""
    sizes = list(parts.values())
    # Fused experts: [experts, rows of an expert's tensors, columns].
    return parts.get(name) or (
        shape.experts,
        sum(size[0] for size in sizes) // shape.experts,
        *sizes[0][1:],
    )


def exact_tensors(shape: PolicyShape) -> frozenset[str]:
    """Return the tensors that are fp32 in every policy and file."""
    return frozenset(
        name for entry in list_entries(shape) if entry.mapping.exact for name in entry.tensors
    )


def list_redundant_tensors(shape: PolicyShape) -> dict[str, tuple[int, ...]]:
    """Return additional tensors that a directory may hold: the output layer of tied embeddings."""
    # Qwen3's small models include the copy.
    return Entry(UNTIED_OUTPUT, shape).tensors if shape.tied else {}


def count_parameters(shape: PolicyShape, lora: LoraConfig | None = None) -> int:
    """Return the number of weights of the policy, or of adapters with ``lora``, without padding;
    tied embeddings count once."""
    entries = list_adapter_entries(shape, lora) if lora else list_entries(shape)
    return sum(entry.elements for entry in entries)


def describe_mismatch(
    policy: PolicyShape,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    """Name the first missing, unexpected and misshapen tensor; empty if all tensors match.

    Args:
        policy: shape from config.json.
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
    return (
        f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors are"
    )


def format_nearest_name(name: str, candidates: Collection[str]) -> str:
    """Return the candidate most similar to ``name``, as the end of a sentence."""
    near = difflib.get_close_matches(name, candidates, n=1)
    return f" (nearest name: {near[0]})" if near else ""


def _tensor_shape(shape: PolicyShape, name: str, rank: int) -> tuple[int, ...]:
    module, _, letter = name.partition(".lora_")
    dimensions = tensor_dimensions(f"{module}.weight" if rank else name, shape.family.dimensions)
    size = tuple(shape.extents[dimension] for dimension in dimensions)
    # A is [rank, inputs], B is [outputs, rank].
    if rank:
        return (rank, size[1]) if letter == "A.weight" else (size[0], rank)
    return size


def _compute_part(extent: int, part: int, parts: int, name: str) -> tuple[int, int]:
    """Return start and stop of a part."""
    if extent % parts:
        raise ValueError(
            f"{name} ({extent}) cannot be cut into {parts} equal parts; check_layout refuses such "
            "a layout"
        )
    size = extent // parts
    return part * size, (part + 1) * size
