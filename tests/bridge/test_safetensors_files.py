"""Directories that differ from their config.json: refused in one sentence, before any rank
starts."""

import random
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
from tests.damage import UNUSABLE

UP = "model.layers.1.mlp.up_proj.weight"
UPP = "model.layers.1.mlp.upp_proj.weight"
LAST = "model-00002-of-00002.safetensors"
WHOLE, SHARDED = "1GB", "40KB"
"""Sizes of shards: the policy takes one, or two."""


def rewrite(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        tensors = load_file(path / SINGLE)
        change(tensors)
        save_file(tensors, path / SINGLE)

    return damage


def overwrite(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(content)


def misname_in_index(path: Path) -> None:
    (path / INDEX).write_text((path / INDEX).read_text().replace(UP, UPP))


def refuse(path: Path, shape: PolicyShape) -> str:
    with pytest.raises(UserError) as caught:
        check_weights(path, shape)
    assert caught.value.setting == "model.path"
    assert caught.value.value == path
    return str(caught.value)


def test_a_tied_output_layer_has_to_be_the_embedding(tmp_path: Path) -> None:
    shape = replace(write_qwen3(tmp_path, Sizes()), tied=True)
    assert "lm_head.weight differs from model.embed_tokens.weight" in refuse(tmp_path, shape)
    rewrite(lambda of: of.update({"lm_head.weight": of["model.embed_tokens.weight"].double()}))(
        tmp_path
    )
    assert expected_tensors(shape).keys() == check_weights(tmp_path, shape).keys()


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    (WHOLE, lambda at: (at / SINGLE).unlink(), f"holds neither {SINGLE} nor {INDEX}"),
    (
        WHOLE,
        overwrite(SINGLE, b"version https://git-lfs.github.com/spec/v1"),
        f"{SINGLE} is not a complete safetensors file (Error while deserializing header: header too "
        "large)",
    ),
    (SHARDED, overwrite(INDEX, b"{}"), f"{INDEX} is no index"),
    (
        SHARDED,
        misname_in_index,
        f"{INDEX} places {UPP} in {LAST}, where it is not (nearest name: {UP})",
    ),
    (
        WHOLE,
        rewrite(lambda of: of.update({UPP: of.pop(UP)})),
        f"{UP} is missing (nearest name: {UPP})",
    ),
    (
        WHOLE,
        rewrite(lambda of: of.update({UP + "_scale": torch.zeros(1)})),
        f"{UP}_scale is no part of a Qwen3ForCausalLM of 2 layers (nearest name: {UP})",
    ),
    (
        WHOLE,
        rewrite(lambda of: of.update({UP: of[UP].T.contiguous()})),
        f"{UP} has shape [24, 40], but config.json makes it [40, 24]",
    ),
    (
        WHOLE,
        rewrite(lambda of: of.update({UP: of[UP].to(torch.float8_e4m3fn)})),
        f"{UP} is stored as F8_E4M3",
    ),
]
"""Size of shards, damage, and the fact that the refusal names."""


@pytest.mark.parametrize(("shard_size", "damage", "message"), DAMAGE)
def test_a_directory_without_the_policy_is_refused(
    tmp_path: Path, shard_size: str, damage: Callable[[Path], object], message: str
) -> None:
    shape = write_qwen3(tmp_path / "policy", Sizes(), shard_size=shard_size)
    damage(tmp_path / "policy")
    assert message in refuse(tmp_path / "policy", shape)


@pytest.mark.parametrize("damage", UNUSABLE)
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    shape = write_qwen3(tmp_path, Sizes(), shard_size=SHARDED)
    UNUSABLE[damage](tmp_path / LAST, random.Random(damage))
    assert LAST in refuse(tmp_path, shape)
