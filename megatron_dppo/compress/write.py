"""Write the smaller policy's files from the larger policy's, a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.bridge.chunks import FilePlan, read_tensor, tensor_bytes
from megatron_dppo.bridge.convert import write_weights
from megatron_dppo.bridge.hf_directory import copy_config_and_tokenizer
from megatron_dppo.bridge.safetensors_files import Chunk
from megatron_dppo.compress.cut import Cut
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.process.files import write_json

RECORD = "compress.json"
"""File of options, kept layers and losses."""


def write_policy(
    tensors: Mapping[str, Chunk],
    source: Path,
    shape: PolicyShape,
    cut: Cut,
    plan: FilePlan[str],
    out: Path,
    *,
    record: Mapping[str, Any],
    workers: int,
) -> None:
    """Write weights, configuration, tokenizer and record of the smaller policy.

    Args:
        tensors: the larger policy's tensors, by name.
        source: the larger policy's directory.
        plan: files of the smaller policy.
        out: an existing, empty directory.

    Raises:
        OSError: the disk is full.
        UserError: a file is truncated.
    """
    copy_config_and_tokenizer(source, out, plan.dtype)
    _update_config(out / "config.json", shape, cut)
    write_json(out / RECORD, record)
    write_weights(
        plan,
        out,
        lambda name: [tensor_bytes(read_cut_tensor(name, tensors, cut, plan.dtype))],
        workers,
        "writing",
    )


def read_cut_tensor(
    name: str,
    tensors: Mapping[str, Chunk],
    cut: Cut,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Read a tensor by its name in the smaller policy."""
    parts = name.split(".")
    if parts[1] != "layers":
        return read_tensor(tensors[name].shape, [tensors[name]], dtype)
    layer = cut.layers[int(parts[2])]
    module = parts[-2]
    parts[2] = str(layer)
    chunk = tensors[".".join(parts)]
    zeroed = {"o_proj": cut.zero_attention, "down_proj": cut.zero_feed_forward}.get(module, ())
    # Rows without a chunk are zeros.
    tensor = read_tensor(chunk.shape, [] if layer in zeroed else [chunk], dtype)
    if cut.units and module in ("gate_proj", "up_proj", "down_proj"):
        return tensor.index_select(int(module == "down_proj"), torch.tensor(cut.units[layer]))
    return tensor


def _update_config(file: Path, shape: PolicyShape, cut: Cut) -> None:
    """Set the smaller policy's sizes, keep all other settings."""
    config = json.loads(file.read_text())
    changed = cut.compute_shape(shape).config_sizes.items() - shape.config_sizes.items()
    # A size may have an older and a newer name.
    config |= {
        key: size for names, size in changed for key in names.split(" | ") if config.get(key)
    }
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][layer] for layer in cut.layers]
    write_json(file, config)
