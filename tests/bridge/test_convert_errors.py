"""Sources that are not whole and destinations that cannot be: one clear error, and nothing has changed anywhere."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dppo.bridge.checkpoint_folder import CHECKSUMS, METADATA, TRACKER
from tests.bridge.conversions import contents, printed_error, to_hf, to_megatron
from tests.bridge.directories import Sizes, write_qwen3
from tests.damage import UNUSABLE

LAST = "model-00002-of-00002.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model directory of two files."""
    write_qwen3(tmp_path / "source", Sizes(), shard_size="40KB")
    return tmp_path / "source"


@pytest.fixture
def checkpoint(source: Path, tmp_path: Path) -> Path:
    """A folder of checkpoints with one that was converted."""
    assert to_megatron(source, tmp_path / "checkpoint") == 0
    return tmp_path / "checkpoint"


def set_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
BAD_SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "other sizes": (lambda source: set_config(source, head_dim=8), "has shape [6], but config.json makes it [8]"),
    "another family": (lambda source: set_config(source, **QWEN2), "q_proj.bias"),
    "a model that is not supported": (lambda source: set_config(source, architectures=["LlamaForCausalLM"]), "Llama"),
    "no directory": (shutil.rmtree, "is not a directory"),
}


@pytest.mark.parametrize("bad", BAD_SOURCES)
def test_a_bad_model_directory_is_refused(
    source: Path, tmp_path: Path, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert to_megatron(source, out) == 0
    before = contents(out)
    damage, problem = BAD_SOURCES[bad]
    damage(source)
    for place, options in {out: ["--overwrite"], tmp_path / "absent": []}.items():
        assert to_megatron(source, place, *options) == 2
        text = printed_error(capsys)
        assert text.startswith(f"error: HF = {source} ")
        assert problem in text
    assert contents(out) == before
    assert not (tmp_path / "absent").exists()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "an older format": (lambda at: (at / "release/metadata.json").unlink(), "no checkpoint in Megatron's distributed"),
    "no tracker": (lambda at: (at / TRACKER).unlink(), f"holds neither {TRACKER} nor"),
    "no configuration": (lambda at: shutil.rmtree(at / "hf"), "there is no hf/ with the model's config.json"),
    "more layers": (
        lambda at: set_config(at / "hf", num_hidden_layers=3),
        "has shape [2, 24], but config.json makes it",
    ),
    "a smaller vocabulary": (lambda at: set_config(at / "hf", vocab_size=257), "has shape [256, 24], but config.json"),
    "another family": (
        lambda at: set_config(at / "hf", **QWEN2),
        "decoder.layers.self_attention.linear_qkv.bias is missing",
    ),
    "tied, and it is not": (
        lambda at: set_config(at / "hf", tie_word_embeddings=True),
        "output_layer.weight is no part of a Qwen3ForCausalLM",
    ),
}


@pytest.mark.parametrize("bad", BAD_CHECKPOINTS)
def test_a_bad_checkpoint_is_refused(
    checkpoint: Path, tmp_path: Path, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an earlier version, which wrote no checksums."""
    (checkpoint / "release" / CHECKSUMS).unlink()
    out = tmp_path / "out"
    assert to_hf(checkpoint, out) == 0
    assert "has no checksums.json, as its writer left one" in capsys.readouterr().err
    before = contents(out)
    damage, problem = BAD_CHECKPOINTS[bad]
    damage(checkpoint)
    for place, options in {out: ["--overwrite"], tmp_path / "absent": []}.items():
        assert to_hf(checkpoint, place, *options) == 2
        text = printed_error(capsys)
        assert text.startswith(("error: CKPT = ", "error: --hf = "))
        assert problem in text
    assert contents(out) == before
    assert not (tmp_path / "absent").exists()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


SHARDS = "__0_0.distcp"
READ = {
    "a directory": ("HF", to_megatron, "source", {LAST: LAST}),
    "a checkpoint": ("CKPT", to_hf, "checkpoint/release", {n: n for n in (METADATA, SHARDS, CHECKSUMS)}),
    "a checkpoint of an earlier version": (
        "CKPT",
        to_hf,
        "checkpoint/release",
        {METADATA: METADATA, SHARDS: f"{SHARDS} |embedding.word_embeddings.weight cannot be read"},
    ),
}
"""What is read, as what setting, by which conversion, where it lies, and the files of it with what is said of them."""


@pytest.mark.parametrize("damage", UNUSABLE)
@pytest.mark.parametrize("read", READ)
def test_a_damaged_file_is_named_and_nothing_is_written(
    read: str, damage: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting, convert, place, files = READ[read]
    if CHECKSUMS not in files:
        (tmp_path / "checkpoint/release" / CHECKSUMS).unlink()
    origin = (tmp_path / place).parent if convert is to_hf else tmp_path / place
    for name, said in files.items():
        if (name, damage) == (CHECKSUMS, "missing"):  # as of an earlier version
            continue
        shutil.copytree(tmp_path / place, tmp_path / "whole")
        UNUSABLE[damage](tmp_path / place / name, random.Random(damage))
        before = contents(tmp_path)
        assert convert(origin, tmp_path / "absent") == 2
        text = printed_error(capsys)
        assert text.startswith(f"error: {setting} = {tmp_path / place}") and re.search(said, text), (name, text)
        assert contents(tmp_path) == before
        shutil.rmtree(tmp_path / place)
        (tmp_path / "whole").rename(tmp_path / place)


def test_nothing_is_overwritten_unasked(
    source: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert to_hf(checkpoint, tmp_path / "hf") == 0
    before = contents(tmp_path)
    for convert, origin, out in ((to_megatron, source, checkpoint), (to_hf, checkpoint, tmp_path / "hf")):
        assert convert(origin, out) == 2
        assert f"error: OUT = {out} problem is there already" in printed_error(capsys)
    assert contents(tmp_path) == before


def other_places(source: Path, checkpoint: Path, folder: Path) -> dict[Path, str]:
    """Where a conversion must not go, even with ``--overwrite``, and why."""
    run = folder / "run/checkpoints"
    shutil.copytree(checkpoint / "release", run / "iter_0000004")
    (run / TRACKER).write_text("4\n")
    kept = folder / "kept"
    shutil.copytree(checkpoint, kept)
    shutil.copytree(source, kept, dirs_exist_ok=True)
    (kept / "thesis.tex").touch()
    (folder / "projects/hf").mkdir(parents=True)
    (folder / "file").touch()
    return {
        run: "is there already and is no",
        folder / "run": "is there already and is no",
        folder / "projects": "is there already and is no",
        folder / "file": "is there already and is no",
        kept: "in it, which is no part of a",
        Path("/proc"): "is a whole file system",
    }


@pytest.mark.parametrize("convert", [to_megatron, to_hf])
def test_what_is_no_conversion_of_the_kind_is_never_replaced(
    source: Path, checkpoint: Path, tmp_path: Path, convert: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    places = other_places(source, checkpoint, tmp_path)
    before = contents(tmp_path)
    for out, problem in places.items():
        assert convert(source if convert is to_megatron else checkpoint, out, "--overwrite") == 2
        text = printed_error(capsys)
        assert f"error: OUT = {out} problem" in text
        assert problem in text
    assert contents(tmp_path) == before


def test_the_source_is_never_replaced(
    source: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(source)
    before = contents(tmp_path)
    for out in (source, tmp_path, tmp_path / "link"):
        assert to_megatron(source, out, "--overwrite") == 2
        assert "is read from there" in printed_error(capsys)
    for out in (checkpoint / "release", checkpoint / "hf", checkpoint):
        assert to_hf(checkpoint, out, "--overwrite") == 2
        assert "is read from there" in printed_error(capsys)
    assert contents(tmp_path) == before


def test_a_directory_behind_a_link_is_replaced_where_it_is(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "disk/megatron").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk/megatron")
    for options in ([], ["--overwrite"]):
        assert to_megatron(source, tmp_path / "link", *options) == 0
        assert contents(tmp_path / "disk/megatron") == contents(checkpoint)
        assert (tmp_path / "link").is_symlink()


def test_a_folder_that_may_not_be_written_to(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert to_megatron(source, Path("/proc/out")) == 2
    assert "error: OUT = /proc/out problem" in printed_error(capsys)
    (tmp_path / "file").touch()
    assert to_megatron(source, tmp_path / "file" / "out") == 2
    assert f"error: OUT = {tmp_path}/file/out problem was not written" in printed_error(capsys)
