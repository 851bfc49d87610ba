"""The policy that a Megatron checkpoint holds: where each parameter lies in it, and its Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron_dppo.bridge.checkpoint_folder import METADATA, damaged, refusing_damage
from megatron_dppo.bridge.checksums import DamagedError
from megatron_dppo.bridge.mapping import UNTIED_OUTPUT, Entry, Split, entries
from megatron_dppo.bridge.safetensors_files import nearest_name
from megatron_dppo.bridge.strips import Part, tensor_parts
from megatron_dppo.bridge.torch_dist import StoredCheckpoint
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape

Chunks = Sequence[ChunkStorageMetadata]


class StoredPolicy:
    """The weights of a checkpoint, whatever layout wrote it. Checked when built; nothing else of it is read.

    Args:
        folder: the directory of one iteration, ``metadata.json`` in it.
        shape: of the policy that it should hold.

    Raises:
        UserError: naming ``setting``, if it is no such checkpoint, or a file or parameter is missing, truncated,
            unexpected, or of another shape.
    """

    def __init__(self, folder: Path, shape: PolicyShape, setting: str) -> None:
        self._folder, self._setting = folder, setting
        if not (folder / METADATA).is_file():
            problem = f"has no {METADATA}, as checkpoints in Megatron's torch_dist format do"
            raise damaged(folder, setting, problem)
        with refusing_damage(folder, setting):
            self._checkpoint = StoredCheckpoint(folder)
        self._check_files()
        self.parameters: Mapping[Entry, Chunks] = self._find(shape)

    @property
    def checked(self) -> bool:
        """Whether what is read of it is held against checksums, which an earlier version did not write."""
        return self._checkpoint.checksums is not None

    def check(self, *, share: int = 0, of: int = 1) -> None:
        """Read weights and hold them against their checksums.

        Args:
            share: take every ``of``-th block, from this one on.

        Raises:
            UserError: naming the first file that is damaged.
        """
        blocks = [(entry.row.key, chunk) for entry, chunks in self.parameters.items() for chunk in chunks]
        with refusing_damage(self._folder, self._setting):
            for key, chunk in blocks[share::of]:
                self._checkpoint.check(key, chunk)

    @property
    def dtype(self) -> torch.dtype:
        """The type that holds every stored weight."""
        dtypes = {self._checkpoint.tensors[entry.row.key].properties.dtype for entry in self.parameters}
        return reduce(torch.promote_types, dtypes)

    def tensors(self, entry: Entry) -> dict[str, list[Part]]:
        """What the Hugging Face tensors of a parameter are put together from, by name.

        Raises:
            UserError: if a file is damaged there.
        """
        key, leading = entry.row.key, len(entry.leading)
        try:
            chunks = [self._checkpoint.part(key, chunk, leading) for chunk in self.parameters[entry]]
        except DamagedError as error:
            raise damaged(self._folder, self._setting, str(error)) from error
        except Exception as error:  # whatever reading a damaged archive raises
            raise self._unreadable(f"{key} cannot be read ({error})", "Fetch the checkpoint again") from error
        return tensor_parts(entry, chunks)

    def _check_files(self) -> None:
        for name, end in self._checkpoint.files.items():
            file = self._folder / name
            if not file.is_file():
                raise damaged(self._folder, self._setting, f"{name} is missing")
            if file.stat().st_size < end:
                problem = f"{name} is truncated: {file.stat().st_size:,} bytes of at least {end:,}"
                raise damaged(self._folder, self._setting, problem)

    def _find(self, shape: PolicyShape) -> dict[Entry, Chunks]:
        tensors = self._checkpoint.tensors
        wanted = list(entries(shape))
        keys = {entry.row.key: len(entry.leading) for entry in wanted}
        roots = {key.partition(".")[0] for key in (*keys, UNTIED_OUTPUT.key)}  # beside these are an optimizer's
        unexpected = [key for key in tensors if key.partition(".")[0] in roots and key not in keys]
        if missing := [key for key in keys if key not in tensors]:
            raise self._other_policy(f"{missing[0]} is missing{nearest_name(missing[0], unexpected)}")
        if unexpected:
            near = nearest_name(unexpected[0], keys)
            raise self._other_policy(f"{unexpected[0]} is no part of a {shape.architecture}{near}")
        places: dict[tuple[str, tuple[int, ...]], list[ChunkStorageMetadata]] = {}
        for key, leading in keys.items():
            for chunk in tensors[key].chunks:
                places.setdefault((key, tuple(chunk.offsets[:leading])), []).append(chunk)
        found: dict[Entry, Chunks] = {entry: places.get((entry.row.key, entry.leading), []) for entry in wanted}
        for entry, chunks in found.items():
            self._check_parameter(entry, tuple(tensors[entry.row.key].size), chunks)
        return found

    def _check_parameter(self, entry: Entry, stored: tuple[int, ...], chunks: Chunks) -> None:
        expected = list(entry.stored_shape)
        if entry.row.split is Split.VOCABULARY and stored[:1] >= (entry.shape.vocab_size,):
            expected[0] = stored[0]  # the padding depends on who wrote it
        if stored != tuple(expected):
            raise self._other_policy(f"{entry.row.key} has shape {list(stored)}, but config.json makes it {expected}")
        if sum(prod(chunk.sizes) for chunk in chunks) != prod(expected[len(entry.leading) :]):
            place = f" of layer {entry.layer}" if entry.leading else ""
            raise self._unreadable(f"{entry.row.key}{place} is there in part only", "Fetch the checkpoint again")

    def _other_policy(self, problem: str) -> UserError:
        return self._unreadable(problem, "Give the config.json of the policy that it was written of")

    def _unreadable(self, problem: str, remedy: str) -> UserError:
        return UserError(self._setting, self._folder, problem, remedy)
