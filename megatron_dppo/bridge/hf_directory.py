"""Write a Hugging Face model directory: safetensors files, index, configuration and tokenizer.

The position of each tensor depends only on the policy's shape and type, so that tensors may be
written in any order.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dppo.bridge.chunks import TYPE_NAMES, FilePlan, create_files
from megatron_dppo.bridge.mapping import (
    exact_tensors,
    file_shape,
    file_tensors,
    list_adapter_entries,
)
from megatron_dppo.bridge.safetensors_files import (
    CARRIED,
    INDEX,
    SINGLE,
    Chunk,
    find_carried_tensors,
    read_header,
    split_chunk,
)
from megatron_dppo.config import LoraConfig
from megatron_dppo.data.tokenizer import (
    NAMED_TEMPLATES,
    load_tokenizer,
    read_eos_token_ids,
    stop_token_ids,
)
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.process.files import DirectoryKind, write_json

MAX_SHARD_BYTES = 5 * 10**9
"""Maximum bytes of tensors in a safetensors file, like in the hub's own files."""


def plan_files(
    shape: PolicyShape,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> FilePlan[str]:
    """Plan the files of all weights, in the order of the forward pass. Each file is filled up to
    ``max_shard_bytes``."""
    stored = file_tensors(shape)
    exact = exact_tensors(shape)
    files: list[dict[str, tuple[str, tuple[int, ...]]]] = []
    room = 0
    for name, parts in stored.items():
        kind = torch.promote_types(dtype, torch.float32) if name in exact else dtype
        length = sum(map(prod, parts.values())) * dtype.itemsize
        if not files or length > room:
            files.append({})
            room = max_shard_bytes
        files[-1][name] = TYPE_NAMES[kind], file_shape(name, parts, shape)
        room -= length
    plan: FilePlan[str] = FilePlan(dtype)
    for number, held in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SINGLE
        one = plan_file(file, dtype, held)
        plan.frames.update(one.frames)
        for name, place in one.places.items():
            plan.places.update(split_chunk(place, stored[name]))
    return plan


def plan_adapter_file(shape: PolicyShape, lora: LoraConfig, dtype: torch.dtype) -> FilePlan[str]:
    """Plan the adapters in the single file that PEFT expects."""
    sizes = {
        name: size
        for entry in list_adapter_entries(shape, lora)
        for name, size in entry.tensors.items()
    }
    return plan_file(
        ADAPTER_WEIGHTS, dtype, {name: (TYPE_NAMES[dtype], size) for name, size in sizes.items()}
    )


def plan_file(
    file: str,
    dtype: torch.dtype,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
) -> FilePlan[str]:
    """Plan a safetensors file with tensors one after another.

    Args:
        file: name of the file.
        dtype: ``FilePlan.dtype``; tensors may have other types.
        tensors: safetensors type and shape of each tensor, by name.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    plan: FilePlan[str] = FilePlan(dtype)
    end = 0
    for name, (kind, shape) in tensors.items():
        plan.places[name] = place = Chunk(Path(file), end, kind, shape)
        end += place.length
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [place.start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padding of the header aligns the data.
    text += b" " * (-len(text) % 8)
    plan.frames[file] = [(0, head := len(text).to_bytes(8, "little") + text)]
    for name, place in plan.places.items():
        plan.places[name] = replace(place, start=len(head) + place.start)
    return plan


def write_index(folder: Path, plan: FilePlan[str]) -> None:
    """Write the index of a directory's tensors: the files of a plan, and carried tensors if any."""
    files = [*plan.frames, *[CARRIED] * (folder / CARRIED).is_file()]
    tensors = {
        name: tensor for file in files for name, tensor in read_header(folder / file).items()
    }
    # A single file needs no index.
    if len(files) > 1:
        total = sum(tensor.length for tensor in tensors.values())
        homes = {name: tensor.file.name for name, tensor in tensors.items()}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": homes})


COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "LICENSE",
)
"""Files beside the weights that are copied unchanged, if present in the source."""
_MODEL_FILES = (
    "config.json",
    "*.safetensors",
    INDEX,
    *COPIED_FILES,
    NAMED_TEMPLATES,
    "sft.json",
    "compress.json",
)
"""Patterns of the files in a model directory, with files of ``sft`` and ``compress``."""
MODEL = DirectoryKind("model directory", "config.json", _MODEL_FILES)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = _ADAPTER_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
)
ADAPTERS = DirectoryKind("directory of adapters", ADAPTER_CONFIG, _ADAPTER_FILES)
"""Directory of adapters, with PEFT's file names."""


def copy_config_and_tokenizer(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy configuration (with ``dtype``), tokenizer, chat templates, and carried tensors (tensors
    that are no part of the policy, such as a vision tower).

    Raises:
        UserError: see :func:`find_carried_tensors`.
    """
    for name in COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / NAMED_TEMPLATES).is_dir():
        shutil.copytree(source / NAMED_TEMPLATES, folder / NAMED_TEMPLATES)
    config = json.loads((source / "config.json").read_text())
    # The older spelling could contradict dtype.
    config.pop("torch_dtype", None)
    shape = read_shape(source)
    for part in (config, config.get(shape.family.text_config)):
        if part is not None:
            part["dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / "config.json", config)
    if carried := find_carried_tensors(source, shape):
        plan = plan_file(
            CARRIED, dtype, {name: (each.dtype, each.shape) for name, each in carried.items()}
        )
        with create_files(plan, folder) as write:
            for name, each in carried.items():
                data = np.memmap(each.file, np.uint8, "r", each.start, (each.length,))
                write(name, [memoryview(data)])


def add_stop_tokens(folder: Path) -> None:
    """Add the tokenizer's end of turn to the stop tokens in a policy's files."""
    # Unreadable files are unchanged.
    with suppress(UserError):
        stops = stop_token_ids(folder, load_tokenizer(folder))
        name, listed = read_eos_token_ids(folder)
        if listed != stops:
            file = folder / name
            settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            settings["eos_token_id"] = stops
            write_json(file, settings)


def build_adapter_config(base: str, lora: LoraConfig) -> dict[str, Any]:
    """Return PEFT's configuration."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        # An absolute path is valid from any directory; a hub's id is kept.
        "base_model_name_or_path": str(Path(base).resolve()) if Path(base).is_dir() else base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def write_adapter_config(folder: Path, *, base: str, lora: LoraConfig) -> None:
    """Write :func:`build_adapter_config` under the file name that PEFT expects."""
    write_json(folder / ADAPTER_CONFIG, build_adapter_config(base, lora))
