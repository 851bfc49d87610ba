"""Directories that are not what their config.json says: refused in one sentence, before any rank starts."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.bridge.mapping import expected_tensors
from megatron_dppo.bridge.safetensors_files import INDEX, SINGLE, check_weights
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape
from tests.bridge.directories import Sizes, write_qwen3
from tests.damage import UNUSABLE

UP = "model.layers.1.mlp.up_proj.weight"
UPP = "model.layers.1.mlp.upp_proj.weight"
LAST = "model-00002-of-00002.safetensors"
WHOLE, SHARDED = "1GB", "40KB"
"""Sizes of shards, of which the policy takes one or two."""


def overwrite(name: str, content: bytes, path: Path) -> None:
    (path / name).write_bytes(content)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / SINGLE)
    change(tensors)
    save_file(tensors, path / SINGLE)


def retype(path: Path, dtype: object) -> None:
    content = (path / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[UP]["dtype"] = dtype
    text = json.dumps(header).encode()
    (path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def misname_in_index(path: Path) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"][UPP] = index["weight_map"].pop(UP)
    (path / INDEX).write_text(json.dumps(index))


def write_policy(path: Path, shard_size: str) -> PolicyShape:
    shape = write_qwen3(path, Sizes(), shard_size=shard_size)
    assert len(list(path.glob("*.safetensors"))) == (2 if shard_size == SHARDED else 1)
    return shape


def refusal(path: Path, shape: PolicyShape) -> str:
    with pytest.raises(UserError) as caught:
        check_weights(path, shape)
    assert caught.value.setting == "model.path"
    assert caught.value.value == path
    return str(caught.value)


@pytest.mark.parametrize("shard_size", [WHOLE, SHARDED])
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_writes_is_accepted(tmp_path: Path, shard_size: str, tied: bool) -> None:
    shape = replace(write_policy(tmp_path, shard_size), tied=tied)
    if tied:  # Qwen3-0.6B brings a copy of the embedding
        with pytest.raises(
            UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*to false in its"
        ):
            check_weights(tmp_path, shape)
        files = {file: load_file(file) for file in tmp_path.glob("*.safetensors")}
        embedding = next(of["model.embed_tokens.weight"] for of in files.values() if "model.embed_tokens.weight" in of)
        for file, of in files.items():
            if "lm_head.weight" in of:
                save_file(of | {"lm_head.weight": embedding.double()}, file)
    found = check_weights(tmp_path, shape)
    assert {name: found[name].shape for name in expected_tensors(shape)} == expected_tensors(shape)


Damage = Callable[[Path], object]
DAMAGE: dict[str, tuple[str, Damage, str]] = {
    "no weights": (WHOLE, lambda at: (at / SINGLE).unlink(), f"holds neither {SINGLE} nor {INDEX}"),
    "no directory": (WHOLE, shutil.rmtree, "is no directory"),
    "a shard that ends in its header": (
        SHARDED,
        lambda at: (at / LAST).write_bytes((at / LAST).read_bytes()[:300]),
        f"{LAST} is truncated",
    ),
    **{
        f"a file of {content[:1]!r}": (WHOLE, partial(overwrite, SINGLE, content), f"{SINGLE} is no safetensors file")
        for content in (b"version https://git-lfs.github.com/spec/v1", b"\2" + b"\0" * 7 + b"[]")
    },
    **{
        f"an index of {content!r}": (SHARDED, partial(overwrite, INDEX, content), f"{INDEX} is no index")
        for content in (b"", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"[]")
    },
    "an index with another name": (
        SHARDED,
        misname_in_index,
        f"{INDEX} says that {UPP} is in {LAST}, where it is not (nearest name: {UP})",
    ),
    "a missing tensor": (WHOLE, lambda at: rewrite(at, lambda tensors: tensors.pop(UP)), f"{UP} is missing."),
    "a renamed tensor": (
        WHOLE,
        lambda at: rewrite(at, lambda tensors: tensors.update({UPP: tensors.pop(UP)})),
        f"{UP} is missing (nearest name: {UPP})",
    ),
    "an unexpected tensor": (
        WHOLE,
        lambda at: rewrite(at, lambda tensors: tensors.update({UP + "_scale": torch.zeros(1)})),
        f"{UP}_scale is no part of a Qwen3ForCausalLM of 2 layers (nearest name: {UP})",
    ),
    "another shape": (
        WHOLE,
        lambda at: rewrite(at, lambda tensors: tensors.update({UP: tensors[UP].T.contiguous()})),
        f"{UP} has shape [24, 40], but config.json makes it [40, 24]",
    ),
    "a type that is no name": (WHOLE, lambda at: retype(at, ["F32"]), f"{SINGLE} is no safetensors file (the type of"),
    "a quantized tensor": (
        WHOLE,
        lambda at: rewrite(at, lambda tensors: tensors.update({UP: tensors[UP].to(torch.float8_e4m3fn)})),
        f"{UP} is stored as F8_E4M3",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_directory_that_does_not_hold_the_policy_is_refused(tmp_path: Path, damage: str) -> None:
    shard_size, do, message = DAMAGE[damage]
    shape = write_policy(tmp_path / "policy", shard_size)
    do(tmp_path / "policy")
    assert message in refusal(tmp_path / "policy", shape)


@pytest.mark.parametrize("damage", UNUSABLE)
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    shape = write_policy(tmp_path, SHARDED)
    UNUSABLE[damage](tmp_path / LAST, random.Random(damage))
    assert LAST in refusal(tmp_path, shape)


def test_many_unexpected_tensors_are_counted(tmp_path: Path) -> None:
    shape = write_policy(tmp_path, WHOLE)
    assert "and 10 more tensors are no part" in refusal(tmp_path, replace(shape, num_layers=1))
