"""A Hugging Face model directory as it is written: safetensors files, their index, configuration and tokenizer.

Where each tensor goes follows from the policy's shape and type alone. Tensors may therefore be written in any order,
and the files do not depend on who writes them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dppo.bridge.chunks import TYPE_NAMES, write_at
from megatron_dppo.bridge.mapping import Entry, adapter_entries, exact_tensors, file_tensors, fused_shape
from megatron_dppo.bridge.safetensors_files import (
    CARRIED,
    INDEX,
    SINGLE,
    Chunk,
    carried_tensors,
    read_header,
)
from megatron_dppo.config import LoraConfig
from megatron_dppo.data.tokenizer import NAMED_TEMPLATES, listed_stops, load_tokenizer, stop_token_ids
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.process.files import replace_text

MAX_SHARD_BYTES = 5 * 10**9
"""Most bytes of tensors in a safetensors file, as the hub's own files have it."""


def dtype_in(dtype: torch.dtype, entry: Entry) -> torch.dtype:
    """The type of a parameter in a policy of type ``dtype``."""
    return torch.promote_types(dtype, torch.float32) if entry.mapping.exact else dtype


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Which file each tensor goes to, and where in it.

        FilePlan(torch.bfloat16, {"model.norm.weight": (64,)}, {"model.safetensors": ["model.norm.weight"]})

    writes 128 bytes of weights, behind the header of the only file.
    """

    dtype: torch.dtype
    tensors: Mapping[str, tuple[int, ...]]
    """Shapes, in the order in which they lie in the files."""
    files: Mapping[str, list[str]]
    """The tensors of each file, in order."""
    exact: frozenset[str] = frozenset()
    """Tensors that are fp32 whatever the type of others."""
    fused: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Name and shape of the tensor in the file, for tensors that lie there as parts of one, next to each other."""

    def dtype_of(self, tensor: str) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32) if tensor in self.exact else self.dtype

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_of(name) for name in self.tensors)

    def bytes_of(self, tensor: str) -> int:
        return prod(self.tensors[tensor]) * self.dtype_of(tensor).itemsize

    def header(self, file: str) -> tuple[bytes, dict[str, int]]:
        """A file's first bytes, up to the data, and where in the file each tensor begins."""
        entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
        starts: dict[str, tuple[str, int]] = {}
        for name in self.files[file]:
            stored, size = self.fused.get(name, (name, self.tensors[name]))
            before = entries[stored][2] if stored in entries else 0
            entries[stored] = (TYPE_NAMES[self.dtype_of(name)], size, before + self.bytes_of(name))
            starts[name] = stored, before
        head, in_file = _header(entries)
        return head, {name: in_file[stored] + before for name, (stored, before) in starts.items()}

    def index(self, carried: Mapping[str, Chunk]) -> str:
        stored = {name: each for name, (each, _) in self.fused.items()}
        files = {stored.get(name, name): file for file, names in self.files.items() for name in names}
        files |= dict.fromkeys(carried, CARRIED)
        total = self.total_bytes + sum(tensor.length for tensor in carried.values())
        return json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2) + "\n"


def _header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> tuple[bytes, dict[str, int]]:
    """A file's first bytes, up to the data, and where in the file each tensor begins, of types, shapes and bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, (dtype, shape, length) in tensors.items():
        starts[name], end = end, end + length
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + start for name, start in starts.items()}


def plan_files(shape: PolicyShape, dtype: torch.dtype, max_shard_bytes: int = MAX_SHARD_BYTES) -> FilePlan:
    """Tensors in the order of the forward pass, as many to a file as fit."""
    stored = file_tensors(shape)
    tensors = {name: size for parts in stored.values() for name, size in parts.items()}
    wholes = {each: fused_shape(parts, shape) for each, parts in stored.items() if each not in parts}
    fused = {name: (each, whole) for each, whole in wholes.items() for name in stored[each]}
    files: list[list[str]] = []
    room = 0
    for parts in stored.values():
        length = sum(map(prod, parts.values())) * dtype.itemsize
        if not files or length > room:
            files.append([])
            room = max_shard_bytes
        files[-1] += parts
        room -= length
    named = {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}
    return FilePlan(dtype, tensors, named if len(files) > 1 else {SINGLE: files[0]}, exact_tensors(shape), fused)


def plan_adapter_file(shape: PolicyShape, lora: LoraConfig, dtype: torch.dtype) -> FilePlan:
    """Adapters in the order of the forward pass, in the one file that PEFT looks for."""
    tensors = {name: size for entry in adapter_entries(shape, lora) for name, size in entry.tensors.items()}
    return FilePlan(dtype, tensors, {ADAPTER_WEIGHTS: list(tensors)})


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
MODEL_FILES = ("config.json", "*.safetensors", INDEX, *COPIED_FILES, NAMED_TEMPLATES, "sft.json", "compress.json")
"""Patterns of all that is written to such a directory, by ``sft`` and ``compress`` too."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""All that is in a directory of adapters alone, by PEFT's names."""


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
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if carried := carried_tensors(source, shape):
        head, starts = _header({name: (each.dtype, each.shape, each.length) for name, each in carried.items()})
        with (folder / CARRIED).open("wb", buffering=0) as file:
            write_at(file.fileno(), 0, [head])
            for name, each in carried.items():
                data = np.memmap(each.file, np.uint8, "r", each.start, (each.length,))
                write_at(file.fileno(), starts[name], [memoryview(data)])


def list_stops(folder: Path) -> None:
    """Add the tokenizer's end of turn to the stop tokens in a policy's files. Unreadable files are not changed."""
    with suppress(UserError):
        stops = stop_token_ids(folder, load_tokenizer(folder))
        name, listed = listed_stops(folder)
        if listed != stops:
            file = folder / name
            settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            settings["eos_token_id"] = stops
            replace_text(file, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


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
    text = json.dumps(adapter_config(base, lora), indent=2, ensure_ascii=False)
    (folder / ADAPTER_CONFIG).write_text(text + "\n")


class SafetensorsWriter:
    """Writes the tensors of a plan, each once, in any order; threads may write at the same time."""

    def __init__(self, plan: FilePlan, starts: dict[str, tuple[int, int]]) -> None:
        self._plan = plan
        self._unwritten = starts
        """File descriptor and first byte of each tensor that is still to be written."""

    @classmethod
    @contextmanager
    def open(cls, plan: FilePlan, folder: Path) -> Iterator[SafetensorsWriter]:
        """Make the files. The index is written at the end of the block, unless it raises.

        Raises:
            ValueError: at the end of the block, if a tensor was not written.
            OSError: for a full disk.
        """
        starts: dict[str, tuple[int, int]] = {}
        with ExitStack() as stack:
            for name in plan.files:
                file = stack.enter_context((folder / name).open("wb", buffering=0)).fileno()
                head, in_file = plan.header(name)
                write_at(file, 0, [head])
                starts |= {tensor: (file, start) for tensor, start in in_file.items()}
            writer = cls(plan, starts)
            yield writer
        if writer._unwritten:
            raise ValueError(f"these tensors were not written: {', '.join(sorted(writer._unwritten))}")
        carried = read_header(folder / CARRIED) if (folder / CARRIED).is_file() else {}
        if len(plan.files) > 1 or carried:
            (folder / INDEX).write_text(plan.index(carried))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor, cast to the plan's type.

        Raises:
            ValueError: if the plan has no such tensor, or another shape for it, or it was written before.
            OSError: for a full disk.
        """
        if tensor.shape != self._plan.tensors.get(name):
            raise ValueError(f"{name} {list(tensor.shape)} is not in the plan")
        data = tensor.detach().to("cpu", self._plan.dtype_of(name)).contiguous().flatten().view(torch.uint8)
        self.write_bytes(name, [memoryview(data.numpy())])

    def write_bytes(self, name: str, data: Iterable[memoryview]) -> None:
        """Write a tensor's bytes, in the plan's type.

        Raises:
            ValueError: if they are too many or too few, or the tensor was written before.
            OSError: for a full disk.
        """
        if name not in self._unwritten:
            raise ValueError(f"{name} was written before, or is not in the plan")
        file, start = self._unwritten.pop(name)
        written = write_at(file, start, data) - start
        if written != self._plan.bytes_of(name):
            raise ValueError(f"{name} has {written} bytes instead of {self._plan.bytes_of(name)}")
