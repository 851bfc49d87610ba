"""The smaller policy as a Hugging Face directory, written from the larger one's files a few rows at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.bridge.chunks import Chunk, read_rows
from megatron_dppo.bridge.convert import Advance, in_threads
from megatron_dppo.bridge.hf_directory import FilePlan, SafetensorsWriter, copy_config_and_tokenizer
from megatron_dppo.compress.cut import Cut
from megatron_dppo.models.shape import PolicyShape

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
) -> None:
    """Write what a cut leaves of a policy.

    Args:
        tensors: of the larger policy, by name.
        source: its directory.
        plan: of the smaller policy's files.
        out: an existing, empty directory.
        record: what ``compress.json`` is to say.

    Raises:
        OSError: if the disk is full.
        UserError: if a file ends before a tensor does.
    """
    with SafetensorsWriter.open(plan, out) as writer:
        copy_config_and_tokenizer(source, out, plan.dtype)
        _write_config(out / "config.json", shape, cut)
        (out / RECORD).write_text(json.dumps(record, indent=2) + "\n")

        def write(name: str) -> None:
            writer.write_bytes(name, cut_tensor(name, tensors, shape, cut, plan.dtype))
            advance(plan.bytes_of(name))

        in_threads(write, plan.tensors, workers)


def cut_tensor(
    name: str, tensors: Mapping[str, Chunk], shape: PolicyShape, cut: Cut, dtype: torch.dtype
) -> Iterator[memoryview]:
    """The bytes of a tensor of the smaller policy, in its own names, from its first row to its last."""
    parts = name.split(".")
    if parts[1] != "layers":
        yield from _selected(tensors[name], dtype, None, None)
        return
    layer = cut.layers[int(parts[2])]
    parts[2] = str(layer)
    stored = tensors[".".join(parts)]
    module = parts[-2]
    rows = columns = None
    if module in ("gate_proj", "up_proj", "down_proj") and cut.neurons is not None:
        rows = torch.tensor(cut.neurons[layer])
    elif module in ("q_proj", "k_proj", "v_proj", "o_proj") and cut.groups is not None:
        width = shape.head_dim * (shape.heads // shape.kv_heads if module in ("q_proj", "o_proj") else 1)
        rows = (torch.tensor(cut.groups[layer])[:, None] * width + torch.arange(width)).flatten()
    if module in ("down_proj", "o_proj"):
        rows, columns = None, rows
    if module == "o_proj" and layer in cut.silenced:
        size = stored.rows, stored.columns if columns is None else len(columns)
        yield from read_rows(size, [], dtype)  # what no chunk covers is zero
        return
    yield from _selected(stored, dtype, rows, columns)


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
        if rows is not None:
            block, top = block[rows[(rows >= top) & (rows < top + len(block))] - top], top + len(block)
        if columns is not None:
            block = block[:, columns]
        yield memoryview(block.contiguous().flatten().view(torch.uint8).numpy())


def _write_config(file: Path, shape: PolicyShape, cut: Cut) -> None:
    """Change the sizes that a cut changes, and leave all else as it was."""
    config = json.loads(file.read_text())
    left = cut.shape(shape)
    config |= {
        "num_hidden_layers": left.num_layers,
        "num_attention_heads": left.heads,
        "num_key_value_heads": left.kv_heads,
    }
    if not shape.experts:
        config["intermediate_size"] = left.ffn
    if cut.groups is not None:
        config["head_dim"] = left.head_dim
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][layer] for layer in cut.layers]
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
