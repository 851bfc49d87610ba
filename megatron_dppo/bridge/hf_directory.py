"""A Hugging Face model directory as it is written: safetensors files, their index, configuration and tokenizer.

Where each tensor goes follows from the policy's shape and type alone. Tensors may therefore be written in any order,
and the files do not depend on who writes them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dppo.bridge.chunks import TYPE_NAMES, TYPES, tensor_bytes, write_at
from megatron_dppo.bridge.mapping import adapter_entries, exact_tensors, file_shape, file_tensors
from megatron_dppo.bridge.safetensors_files import (
    CARRIED,
    INDEX,
    SINGLE,
    Chunk,
    carried_tensors,
    lay_out,
    read_header,
    split_chunk,
)
from megatron_dppo.config import LoraConfig
from megatron_dppo.data.tokenizer import NAMED_TEMPLATES, listed_stops, load_tokenizer, stop_token_ids
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.process.files import DirectoryKind, write_json

MAX_SHARD_BYTES = 5 * 10**9
"""Most bytes of tensors in a safetensors file, as the hub's own files have it."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Which file each tensor goes to, and where in it. Names of files are relative to a directory.

        FilePlan(torch.bfloat16, {"model.safetensors": head}, {name: chunk}, {name: "model.safetensors"})

    writes ``chunk.length`` bytes of weights, behind the header of the only file.
    """

    dtype: torch.dtype
    heads: Mapping[str, bytes]
    """First bytes of each file."""
    tensors: Mapping[str, Chunk]
    """Place of each tensor of the policy, in order."""
    files: Mapping[str, str]
    """File of each stored tensor, which experts of a layer may share."""

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of tensors in each file."""
        sizes = dict.fromkeys(self.heads, 0)
        for chunk in self.tensors.values():
            sizes[chunk.file.name] += chunk.length
        return sizes

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    def index(self, carried: Mapping[str, Chunk]) -> str:
        total = self.total_bytes + sum(tensor.length for tensor in carried.values())
        files = {**self.files, **dict.fromkeys(carried, CARRIED)}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2) + "\n"


def plan_files(shape: PolicyShape, dtype: torch.dtype, max_shard_bytes: int = MAX_SHARD_BYTES) -> FilePlan:
    """Tensors in the order of the forward pass, as many to a file as fit."""
    stored, exact = file_tensors(shape), exact_tensors(shape)
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
    heads: dict[str, bytes] = {}
    tensors: dict[str, Chunk] = {}
    homes: dict[str, str] = {}
    for number, held in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SINGLE
        heads[file], places = lay_out(Path(file), held)
        homes |= dict.fromkeys(held, file)
        for name, place in places.items():
            tensors |= split_chunk(place, stored[name])
    return FilePlan(dtype, heads, tensors, homes)


def plan_adapter_file(shape: PolicyShape, lora: LoraConfig, dtype: torch.dtype) -> FilePlan:
    """Adapters in the order of the forward pass, in the one file that PEFT looks for."""
    sizes = {name: size for entry in adapter_entries(shape, lora) for name, size in entry.tensors.items()}
    head, places = lay_out(Path(ADAPTER_WEIGHTS), {name: (TYPE_NAMES[dtype], size) for name, size in sizes.items()})
    return FilePlan(dtype, {ADAPTER_WEIGHTS: head}, places, dict.fromkeys(places, ADAPTER_WEIGHTS))


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
"""Files beside the weights that are copied as they are, where the source has them."""
_MODEL_FILES = ("config.json", "*.safetensors", INDEX, *COPIED_FILES, NAMED_TEMPLATES, "sft.json", "compress.json")
"""What is written to such a directory, by ``sft`` and ``compress`` too."""
MODEL = DirectoryKind("model directory", "config.json", _MODEL_FILES)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = _ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
ADAPTERS = DirectoryKind("directory of adapters", ADAPTER_CONFIG, _ADAPTER_FILES)
"""By PEFT's names."""


def copy_config_and_tokenizer(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy configuration, tokenizer and chat templates, and the tensors that are no part of the policy.

    config.json then says ``dtype``.

    Raises:
        UserError: as :func:`carried_tensors`.
    """
    for name in COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / NAMED_TEMPLATES).is_dir():
        shutil.copytree(source / NAMED_TEMPLATES, folder / NAMED_TEMPLATES)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older spelling
    shape = read_shape(source)
    for part in (config, config.get(shape.family.text_config)):
        if part is not None:
            part["dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / "config.json", config)
    if carried := carried_tensors(source, shape):
        head, places = lay_out(folder / CARRIED, {name: (each.dtype, each.shape) for name, each in carried.items()})
        with (folder / CARRIED).open("wb", buffering=0) as file:
            write_at(file.fileno(), 0, [head])
            for name, each in carried.items():
                data = np.memmap(each.file, np.uint8, "r", each.start, (each.length,))
                write_at(file.fileno(), places[name].start, [memoryview(data)])


def list_stops(folder: Path) -> None:
    """Add the tokenizer's end of turn to the stop tokens in a policy's files. Unreadable files are not changed."""
    with suppress(UserError):
        stops = stop_token_ids(folder, load_tokenizer(folder))
        name, listed = listed_stops(folder)
        if listed != stops:
            file = folder / name
            settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            settings["eos_token_id"] = stops
            write_json(file, settings)


def adapter_config(base: str, lora: LoraConfig) -> dict[str, Any]:
    """PEFT's configuration: the base policy, its matrices that have adapters, and the adapters' rank and scale."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        # A folder by a path that holds from anywhere; what is no folder here is an id of the hub.
        "base_model_name_or_path": str(Path(base).resolve()) if Path(base).is_dir() else base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def write_adapter_config(folder: Path, *, base: str, lora: LoraConfig) -> None:
    """Put :func:`adapter_config` where PEFT looks for it."""
    write_json(folder / ADAPTER_CONFIG, adapter_config(base, lora))


class SafetensorsWriter:
    """Writes the tensors of a plan, each once, in any order; threads may write at the same time."""

    def __init__(self, plan: FilePlan, files: Mapping[str, int]) -> None:
        self._plan, self._files = plan, files
        self._unwritten = dict(plan.tensors)

    @classmethod
    @contextmanager
    def open(cls, plan: FilePlan, folder: Path) -> Iterator[SafetensorsWriter]:
        """Make the files. The index is written at the end of the block, unless it raises.

        Raises:
            ValueError: at the end of the block, if a tensor was not written.
            OSError: for a full disk.
        """
        files: dict[str, int] = {}
        with ExitStack() as stack:
            for name, head in plan.heads.items():
                files[name] = stack.enter_context((folder / name).open("wb", buffering=0)).fileno()
                write_at(files[name], 0, [head])
            writer = cls(plan, files)
            yield writer
        if writer._unwritten:
            raise ValueError(f"these tensors were not written: {', '.join(sorted(writer._unwritten))}")
        carried = read_header(folder / CARRIED) if (folder / CARRIED).is_file() else {}
        if len(plan.heads) > 1 or carried:
            (folder / INDEX).write_text(plan.index(carried))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor, cast to the plan's type.

        Raises:
            ValueError: if the plan has no such tensor, or another shape for it, or it was written before.
            OSError: for a full disk.
        """
        place = self._plan.tensors.get(name)
        if place is None or tensor.shape != place.shape:
            raise ValueError(f"{name} {list(tensor.shape)} is not in the plan")
        self.write_rows(name, [tensor_bytes(tensor.detach().to("cpu", TYPES[place.dtype]))])

    def write_rows(self, name: str, data: Iterable[memoryview]) -> None:
        """Write a tensor's bytes, in the plan's type.

        Raises:
            ValueError: if they are too many or too few, or the tensor was written before.
            OSError: for a full disk.
        """
        if (place := self._unwritten.pop(name, None)) is None:
            raise ValueError(f"{name} was written before, or is not in the plan")
        written = write_at(self._files[place.file.name], place.start, data) - place.start
        if written != place.length:
            raise ValueError(f"{name} has {written} bytes instead of {place.length}")
