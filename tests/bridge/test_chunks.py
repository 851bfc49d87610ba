"""Matrices from rectangles in files: equal wherever they are cut, with one buffer of rows in memory
at a time."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.bridge import chunks as module
from megatron_dppo.bridge.chunks import (
    TYPE_NAMES,
    list_parameter_chunks,
    list_tensor_chunks,
    read_rows,
)
from megatron_dppo.bridge.mapping import list_entries
from megatron_dppo.bridge.safetensors_files import Chunk
from megatron_dppo.models.family import Split
from megatron_dppo.models.shape import PolicyShape

QWEN3 = PolicyShape(1, 12, 6, 3, 4, 10, 37, False, 1e6, 1e-6, 128)
SHAPES = [
    QWEN3,
    replace(QWEN3, architecture="Qwen2ForCausalLM"),
    replace(QWEN3, architecture="Qwen3MoeForCausalLM", experts=2, experts_per_token=1),
]
ENTRIES = [entry for shape in SHAPES for entry in list_entries(shape)]
DTYPES = st.sampled_from(list(TYPE_NAMES))


def store(file: Path, matrix: torch.Tensor, row: int = 0, column: int = 0) -> Chunk:
    """Append a matrix, or a vector, to a file."""
    with file.open("ab") as opened:
        start = opened.tell()
        opened.write(matrix.contiguous().flatten().view(torch.uint8).numpy())
    return Chunk(file, start, TYPE_NAMES[matrix.dtype], (*matrix.shape,), row, column)


def read(shape: tuple[int, ...], chunks: list[Chunk], dtype: torch.dtype) -> torch.Tensor:
    data = bytearray(b"".join(map(bytes, read_rows(shape, chunks, dtype))))
    return torch.frombuffer(data, dtype=dtype).view(shape)


def cuts(data: st.DataObject, extent: int) -> list[tuple[int, int]]:
    """Cut an extent into parts of any sizes."""
    points = sorted({0, extent, *data.draw(st.lists(st.integers(0, extent), max_size=3))})
    return list(pairwise(points))


@settings(max_examples=75)
@given(data=st.data())
def test_parameters_cut_anyhow_equal_the_tensors(data: st.DataObject) -> None:
    entry = data.draw(st.sampled_from(ENTRIES))
    (part,) = entry.stored_rows
    stored, cast = data.draw(DTYPES), data.draw(DTYPES)
    tensors = {name: torch.randn(size).to(stored) for name, size in entry.tensors.items()}
    with (
        TemporaryDirectory() as folder,
        patch.object(module, "BUFFER_BYTES", data.draw(st.integers(1, 999))),
    ):
        whole = {name: store(Path(folder, "hf"), tensor) for name, tensor in tensors.items()}
        parameter = read(entry.shard_shape(1), list_parameter_chunks(part, whole), stored)
        matrix = parameter.view(parameter.shape[0], -1)
        if entry.mapping.split is Split.VOCABULARY:
            assert not matrix[QWEN3.vocab_size :].any()
        chunks = [
            store(
                Path(folder, data.draw(st.sampled_from("xy"))),
                matrix[top:bottom, left:right],
                top,
                left,
            )
            for top, bottom in cuts(data, matrix.shape[0])
            for left, right in cuts(data, matrix.shape[1])
        ]
        for name, tensor in tensors.items():
            parts = list_tensor_chunks(name, part, data.draw(st.permutations(chunks)))
            assert torch.equal(read(entry.tensors[name], parts, cast), tensor.to(cast))


@pytest.mark.parametrize(("columns", "dtype"), [(3, torch.float32), (200_000, torch.bfloat16)])
def test_a_buffer_is_in_memory_at_a_time(tmp_path: Path, columns: int, dtype: torch.dtype) -> None:
    matrix = torch.randn(1_500_000 // columns, columns)
    seen = list(read_rows(matrix.shape, [store(tmp_path / "file", matrix)], dtype))
    assert len({id(buffer.obj) for buffer in seen}) == 1
    assert max(buffer.nbytes for buffer in seen) <= max(
        module.BUFFER_BYTES, columns * dtype.itemsize
    )
    assert sum(buffer.nbytes for buffer in seen) == matrix.numel() * dtype.itemsize
