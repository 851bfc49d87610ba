"""Directories that are not what their config.json says: refused in one sentence, before any rank starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.bridge.mapping import expected_tensors
from megatron_dppo.bridge.safetensors_files import INDEX, SINGLE, check_weights
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape
from tests.bridge.directories import Sizes, write_qwen3

UP = "model.layers.1.mlp.up_proj.weight"
FIRST = "model-00001-of-00002.safetensors"
LAST = "model-00002-of-00002.safetensors"


def single(path: Path) -> PolicyShape:
    return write_qwen3(path, Sizes())


def sharded(path: Path) -> PolicyShape:
    shape = write_qwen3(path, Sizes(), shard_size="40KB")
    assert sorted(file.name for file in path.glob("*.safetensors")) == [FIRST, LAST]
    return shape


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / SINGLE)
    change(tensors)
    save_file(tensors, path / SINGLE)


def refusal(path: Path, shape: PolicyShape) -> str:
    with pytest.raises(UserError) as caught:
        check_weights(path, shape)
    assert caught.value.setting == "model.path"
    assert caught.value.value == path
    return str(caught.value)


@pytest.mark.parametrize("write", [single, sharded])
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_writes_is_accepted(tmp_path: Path, write: Callable, tied: bool) -> None:
    shape = replace(write(tmp_path), tied=tied)  # a tied policy may bring an output layer, as Qwen3-0.6B does
    found = check_weights(tmp_path, shape)
    assert {name: found[name].shape for name in expected_tensors(shape)} == expected_tensors(shape)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    shape = single(tmp_path)
    (tmp_path / SINGLE).unlink()
    assert f"holds neither {SINGLE} nor {INDEX}" in refusal(tmp_path, shape)
    assert "is no directory" in refusal(tmp_path / "absent", shape)


def test_a_missing_shard(tmp_path: Path) -> None:
    shape = sharded(tmp_path)
    (tmp_path / LAST).unlink()
    assert f"{LAST} is missing" in refusal(tmp_path, shape)


@pytest.mark.parametrize("kept", [0, 4, 300, -1])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    shape = sharded(tmp_path)
    whole = (tmp_path / LAST).read_bytes()
    (tmp_path / LAST).write_bytes(whole[:kept])
    assert f"{LAST} is truncated" in refusal(tmp_path, shape)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1", b"\2" + b"\0" * 7 + b"[]"])
def test_a_file_of_another_kind(tmp_path: Path, content: bytes) -> None:
    shape = single(tmp_path)
    (tmp_path / SINGLE).write_bytes(content)
    assert f"{SINGLE} is no safetensors file" in refusal(tmp_path, shape)


@pytest.mark.parametrize("content", ["", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[]"])
def test_an_index_of_another_kind(tmp_path: Path, content: str) -> None:
    shape = sharded(tmp_path)
    (tmp_path / INDEX).write_text(content)
    assert f"{INDEX} is no index" in refusal(tmp_path, shape)


def test_an_index_that_names_a_tensor_which_is_not_there(tmp_path: Path) -> None:
    shape = sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.layers.1.mlp.upp_proj.weight"] = index["weight_map"].pop(UP)
    (tmp_path / INDEX).write_text(json.dumps(index))
    message = refusal(tmp_path, shape)
    assert "model.layers.1.mlp.upp_proj.weight is in" in message
    assert f"nearest name: {UP}" in message


def test_a_missing_tensor(tmp_path: Path) -> None:
    shape = single(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop(UP))
    assert f"{UP} is missing." in refusal(tmp_path, shape)
    rewrite(tmp_path, lambda tensors: tensors.update({UP.replace("up_proj", "up_projection"): torch.zeros(40, 24)}))
    assert f"{UP} is missing (nearest name: {UP.replace('up_proj', 'up_projection')})" in refusal(tmp_path, shape)


def test_an_unexpected_tensor(tmp_path: Path) -> None:
    shape = single(tmp_path)
    assert "and 10 more tensors are no part" in refusal(tmp_path, replace(shape, num_layers=1))
    rewrite(tmp_path, lambda tensors: tensors.update({UP + "_scale": torch.zeros(1)}))
    assert f"{UP}_scale is no part of a Qwen3ForCausalLM of 2 layers (nearest name: {UP})" in refusal(tmp_path, shape)


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    shape = single(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({UP: tensors[UP].T.contiguous()}))
    assert f"{UP} has shape [24, 40], but config.json makes it [40, 24]" in refusal(tmp_path, shape)


def test_a_quantized_tensor(tmp_path: Path) -> None:
    shape = single(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({UP: tensors[UP].to(torch.float8_e4m3fn)}))
    assert f"{UP} is stored as F8_E4M3" in refusal(tmp_path, shape)
