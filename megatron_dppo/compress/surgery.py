"""The smaller policy as a Hugging Face directory, written from the larger one's files a few rows at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.bridge.chunks import Chunk, read_rows
from megatron_dppo.bridge.convert import in_threads
from megatron_dppo.bridge.hf_directory import FilePlan, SafetensorsWriter, copy_config_and_tokenizer
from megatron_dppo.bridge.mapping import tensor_dimensions
from megatron_dppo.compress.cut import Cut
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.process.streams import Advance

RECORD = "compress.json"
"""Beside the weights: what was done."""


def write_cut(
    tensors: Mapping[str, Chunk],
    source: Path,
    shape: PolicyShape,
    cut: Cut,
    plan: FilePlan,
    out: Path,
    *,
    record: Mapping[str, Any],
    workers: int,
    advance: Advance,
    fitted: Mapping[str, torch.Tensor],
) -> None:
    """Write what a cut leaves of a policy.

    Args:
        tensors: of the larger policy, by name.
        source: its directory.
        plan: of the smaller policy's files.
        out: an existing, empty directory.
        record: what ``compress.json`` is to say.
        fitted: tensors that stand in the place of the larger policy's, by name.

    Raises:
        OSError: if the disk is full.
        UserError: if a file ends before a tensor does.
    """
    with SafetensorsWriter.open(plan, out) as writer:
        copy_config_and_tokenizer(source, out, plan.dtype)
        _write_config(out / "config.json", shape, cut)
        (out / RECORD).write_text(json.dumps(record, indent=2) + "\n")

        def write(name: str) -> None:
            writer.write_bytes(name, cut_tensor(name, tensors, shape, cut, plan.dtype, fitted))
            advance(plan.bytes_of(name))

        in_threads(write, plan.tensors, workers)


def cut_tensor(
    name: str,
    tensors: Mapping[str, Chunk],
    shape: PolicyShape,
    cut: Cut,
    dtype: torch.dtype,
    fitted: Mapping[str, torch.Tensor],
) -> Iterator[memoryview]:
    """The bytes of a tensor of the smaller policy, in its own names, from its first row to its last."""
    parts, layer = name.split("."), None
    if parts[1] == "layers":
        layer = cut.layers[int(parts[2])]
        parts[2] = str(layer)
        if parts[4] == "experts" and cut.experts is not None:
            parts[5] = str(cut.experts[layer][int(parts[5])])
    whole = ".".join(parts)
    stored, kept = tensors[whole], _kept(shape, cut, layer)
    rows, columns, *_ = [*map(kept.get, tensor_dimensions(name)), None]  # a vector has no columns
    if parts[-2] == "o_proj" and layer in cut.silenced:
        size = [stored.rows if rows is None else len(rows), stored.columns if columns is None else len(columns)]
        yield from read_rows(size, [], dtype)  # what no chunk covers is zero
        return
    if whole in fitted:
        yield _bytes(_of(fitted[whole].to("cpu", dtype), rows, columns))
        return
    yield from _selected(stored, dtype, rows, columns)


def _kept(shape: PolicyShape, cut: Cut, layer: int | None) -> dict[str, torch.Tensor]:
    """Which numbers are left, by what a dimension counts; all of those that are not named.

    Args:
        layer: of the larger policy; None outside the layers.
    """
    kept = {}
    if cut.channels is not None:
        kept["hidden"] = torch.tensor(cut.channels)
    if layer is None:
        return kept
    for dimension, chosen in (("feed_forward", cut.neurons), ("experts", cut.experts)):
        if chosen is not None:
            kept[dimension] = torch.tensor(chosen[layer])
    if cut.groups is not None:
        for dimension, heads in (("queries", shape.heads // shape.kv_heads), ("keys", 1)):
            width = shape.head_dim * heads
            kept[dimension] = (torch.tensor(cut.groups[layer])[:, None] * width + torch.arange(width)).flatten()
    return kept


def _selected(
    stored: Chunk, dtype: torch.dtype, rows: torch.Tensor | None, columns: torch.Tensor | None
) -> Iterator[memoryview]:
    """Rows and columns of a stored matrix; None: all of them. Rows that go are read, too: they are few."""
    top = 0
    for data in read_rows((stored.rows, stored.columns), [stored], dtype):
        if rows is None and columns is None:
            yield data
            continue
        block = torch.frombuffer(data, dtype=dtype).view(-1, stored.columns)
        inside = rows if rows is None else rows[(rows >= top) & (rows < top + len(block))] - top
        top += len(block)
        yield _bytes(_of(block, inside, columns))


def _of(block: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None) -> torch.Tensor:
    block = block if rows is None else block[rows]
    return block if columns is None else block[:, columns]


def _bytes(block: torch.Tensor) -> memoryview:
    return memoryview(block.contiguous().flatten().view(torch.uint8).numpy())


def _write_config(file: Path, shape: PolicyShape, cut: Cut) -> None:
    """Change the sizes that a cut changes, and leave all else as it was."""
    config = json.loads(file.read_text())
    left = cut.shape(shape)
    changed = left.config_sizes.items() - shape.config_sizes.items()
    config |= {each: size for name, size in changed for each in name.split(" | ") if config.get(each)}
    if cut.groups is not None or cut.channels is not None:  # which readers else take for hidden_size / heads
        config["head_dim"] = left.head_dim
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][layer] for layer in cut.layers]
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
