"""What is written loads with stock transformers, and is there whole or not at all."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dppo.bridge.export import check_destination, export_hf
from megatron_dppo.bridge.safetensors_files import INDEX, check_weights
from megatron_dppo.config import LayoutConfig
from megatron_dppo.errors import UserError
from tests.bridge.conversions import contents
from tests.bridge.directories import Sizes, assert_same_for_transformers, logits, write_qwen3
from tests.bridge.on_ranks import loaded_policy
from tests.ranks import RankPool

SHARD_BYTES = 40_000


def export(
    rank: int, size: int, source: Path, out: Path, layout: LayoutConfig, dtype: torch.dtype, shard_bytes: int
) -> None:
    model, _, world = loaded_policy(source, layout)
    export_hf(model, world, source=source, out=out, max_shard_bytes=shard_bytes, dtype=dtype)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, 10**9])
def test_transformers_loads_an_export_and_computes_the_same(
    ranks: RankPool, tmp_path: Path, tied: bool, shard_bytes: int
) -> None:
    shape = write_qwen3(tmp_path / "source", Sizes(tie_word_embeddings=tied))
    out = tmp_path / "run" / "hf"
    ranks.run(2, export, tmp_path / "source", out, LayoutConfig(tp=2), torch.float32, shard_bytes)
    assert_same_for_transformers(out, tmp_path / "source")
    check_weights(out, shape)
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) > 1) == (out / INDEX).exists() == (shard_bytes == SHARD_BYTES)
    for file in files:
        held = load_file(file)
        assert sum(tensor.nbytes for tensor in held.values()) <= shard_bytes or len(held) == 1
    assert [path.name for path in out.parent.iterdir()] == ["hf"]


def test_an_export_in_another_type_says_so(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3(tmp_path / "source", Sizes())
    ranks.run(1, export, tmp_path / "source", tmp_path / "out", LayoutConfig(), torch.bfloat16, 10**9)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    written, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "source"))
    assert all(torch.equal(written[name], stored[name].bfloat16()) for name in stored)
    assert logits(tmp_path / "out").dtype == torch.bfloat16


def export_with_little_room(rank: int, size: int, source: Path, out: Path, layout: LayoutConfig) -> str:
    """The leader may write no file beyond 20 kB: its write fails in the middle, as on a full disk."""
    model, _, world = loaded_policy(source, layout)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.leads:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        export_hf(model, world, source=source, out=out, max_shard_bytes=10**9, dtype=torch.float32)
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "nothing was raised"


@pytest.mark.parametrize("layout", [LayoutConfig(tp=2, pp=2), LayoutConfig(dp=2)], ids=["tp2pp2", "dp2"])
def test_a_failing_write_is_raised_on_every_rank_and_leaves_the_former_export(
    ranks: RankPool, tmp_path: Path, layout: LayoutConfig
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_qwen3(source, Sizes())
    ranks.run(1, export, source, out, LayoutConfig(), torch.float32, 10**9)
    before = contents(out)
    errors = ranks.run(
        layout.tp * layout.pp * (layout.dp or 1), export_with_little_room, source, out, layout, timeout=60.0
    )
    assert set(errors) == {errors[0]}
    assert errors[0].startswith(f"run.dir = {out}: the export cannot be written (File too large)")
    assert contents(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_new_export_replaces_the_former_one_whole(ranks: RankPool, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_qwen3(source, Sizes())
    ranks.run(1, export, source, out, LayoutConfig(), torch.float32, SHARD_BYTES)
    (tmp_path / ".out.writing").mkdir()
    (tmp_path / ".out.writing" / "left by a kill").touch()
    ranks.run(1, export, source, out, LayoutConfig(), torch.float32, 10**9)
    assert [file.name for file in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def export_refused(rank: int, size: int, source: Path, out: Path) -> str:
    try:
        export(rank, size, source, out, LayoutConfig(tp=2), torch.float32, 10**9)
    except UserError as error:
        return str(error)
    return "nothing was raised"


def test_a_destination_that_cannot_be_is_refused_before_anything_is_written(ranks: RankPool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_qwen3(source, Sizes())
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.tex").touch()
    for out, problem in {source: "is where the initial policy is read from", work: "is no model directory"}.items():
        before = contents(out)
        errors = ranks.run(2, export_refused, source, out)
        assert all(problem in error for error in errors)
        assert contents(out) == before


def test_too_small_a_disk_is_noticed_beforehand(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has .* GiB free") as caught:
        check_destination(tmp_path / "source", tmp_path / "run" / "hf", 10**18)
    assert caught.value.setting == "run.dir"
