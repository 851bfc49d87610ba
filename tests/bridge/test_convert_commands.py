"""The conversion commands: refusals with one clear error, and conversions that end in the middle
change nothing."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_dppo.bridge.checkpoint_folder import CHECKSUMS, METADATA, TRACKER
from megatron_dppo.process import files
from tests.bridge.conversions import contents, printed_error, to_hf, to_megatron
from tests.bridge.directories import Sizes, write_qwen3
from tests.damage import UNUSABLE

SHARDS = "__0_0.distcp"
Convert = Callable[..., int]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model directory of two files."""
    write_qwen3(tmp_path / "source", Sizes(), shard_size="40KB")
    return tmp_path / "source"


@pytest.fixture
def checkpoint(source: Path, tmp_path: Path) -> Path:
    """A folder with a converted checkpoint."""
    assert to_megatron(source, tmp_path / "checkpoint") == 0
    return tmp_path / "checkpoint"


def set_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
BAD_ORIGINS: list[tuple[Convert, Callable[[Path], object], str]] = [
    (to_megatron, shutil.rmtree, "is not a directory"),
    (
        to_hf,
        lambda at: (at / "release/metadata.json").unlink(),
        "no checkpoint in Megatron's distributed",
    ),
    (to_hf, lambda at: shutil.rmtree(at / "hf"), "there is no hf/ with the model's config.json"),
    (
        to_hf,
        lambda at: set_config(at / "hf", **QWEN2),
        "decoder.layers.self_attention.linear_qkv.bias is missing",
    ),
]


@pytest.mark.parametrize(("convert", "damage", "problem"), BAD_ORIGINS)
def test_a_bad_origin_is_refused(
    source: Path,
    checkpoint: Path,
    tmp_path: Path,
    convert: Convert,
    damage: Callable[[Path], object],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    origin, out = source if convert is to_megatron else checkpoint, tmp_path / "out"
    assert convert(origin, out) == 0
    before = contents(out)
    damage(origin)
    for place, options in {out: ["--overwrite"], tmp_path / "absent": []}.items():
        assert convert(origin, place, *options) == 2
        assert problem in printed_error(capsys)
    assert contents(out) == before
    assert {path.name for path in tmp_path.iterdir()} <= {"source", "checkpoint", "out"}


@pytest.mark.parametrize(
    ("name", "said"),
    [(METADATA, METADATA), (SHARDS, f"{SHARDS} |embedding.word_embeddings.weight cannot be read")],
)
def test_a_damaged_file_is_named_and_nothing_is_written(
    checkpoint: Path, tmp_path: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = checkpoint / "release"
    (place / CHECKSUMS).unlink()  # as an earlier version left a checkpoint
    assert to_hf(checkpoint, tmp_path / "absent", "--dry-run") == 0
    assert "has no checksums.json of this version" in capsys.readouterr().err
    whole = (place / name).read_bytes()
    for damage in UNUSABLE:
        UNUSABLE[damage](place / name, random.Random(damage))
        before = contents(tmp_path)
        assert to_hf(checkpoint, tmp_path / "absent") == 2
        text = printed_error(capsys)
        assert text.startswith(f"error: CKPT = {place}") and re.search(said, text), (damage, text)
        assert contents(tmp_path) == before
        if (place / name).is_dir():
            (place / name).rmdir()
        (place / name).write_bytes(whole)


def test_only_conversions_are_replaced_and_only_when_asked(
    source: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, kept = tmp_path / "run/checkpoints", tmp_path / "kept"
    shutil.copytree(checkpoint / "release", run / "iter_0000004")
    (run / TRACKER).write_text("4\n")
    for origin in (checkpoint, source):
        shutil.copytree(origin, kept, dirs_exist_ok=True)
    (kept / "thesis.tex").touch()
    (tmp_path / "link").symlink_to(source)
    before = contents(tmp_path)
    of_either = {
        run: "is there already and is no",
        kept: "in it, which is no part of a",
        Path("/proc"): "is a whole file system",
    }
    refusals = [
        (convert, out, ["--overwrite"], text)
        for convert in (to_megatron, to_hf)
        for out, text in of_either.items()
    ]
    refusals += [
        (to_megatron, out, ["--overwrite"], "is read from")
        for out in (source, tmp_path, tmp_path / "link")
    ]
    refusals += [
        (to_hf, checkpoint / name, ["--overwrite"], "is read from there")
        for name in ("release", "hf", ".")
    ]
    refusals += [
        (to_megatron, checkpoint, [], "is there already"),
        (to_hf, source, [], "is there already"),
    ]
    for convert, out, options, text in refusals:
        assert convert(source if convert is to_megatron else checkpoint, out, *options) == 2
        error = printed_error(capsys)
        assert f"error: OUT = {out} problem" in error and text in error
    assert contents(tmp_path) == before


def test_a_directory_behind_a_link_is_replaced(
    source: Path, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk/megatron").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk/megatron")
    for options in ([], ["--overwrite"]):
        assert to_megatron(source, tmp_path / "link", *options) == 0
        assert contents(tmp_path / "disk/megatron") == contents(checkpoint)
        assert (tmp_path / "link").is_symlink()


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    source: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(tmp_path)
    for convert, origin, file in (
        (to_megatron, source, SHARDS),
        (to_hf, checkpoint, "model.safetensors"),
    ):
        assert convert(origin, tmp_path / "out", "--dry-run") == 0
        assert file in capsys.readouterr().out
    assert contents(tmp_path) == before


def test_a_conversion_imports_neither_megatron_nor_transformers(source: Path) -> None:
    """Checks of directories and checkpoints do without torch, too."""
    program = (
        "import sys; from pathlib import Path\n"
        "from megatron_dppo.bridge import checkpoint_folder, safetensors_files\n"
        "assert 'torch' not in sys.modules\n"
        "from tests.bridge.conversions import to_hf, to_megatron\n"
        f"folder = Path({str(source.parent)!r})\n"
        "assert to_megatron(folder / 'source', folder / 'megatron', '--verify', 'tensors') == 0\n"
        "assert to_hf(folder / 'megatron', folder / 'back', '--verify', 'tensors') == 0\n"
        "assert not {'megatron', 'transformers'} & {module.partition('.')[0] for module in "
        "sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[Convert, Path]:
    """Origins of both conversions, with twice 3 MB of embeddings: two thirds of a small disk of 9
    MiB."""
    folder = tmp_path_factory.mktemp("large")
    write_qwen3(folder / "source", Sizes(vocab_size=12_000, hidden_size=64))
    assert to_megatron(folder / "source", folder / "checkpoint") == 0
    return {to_megatron: folder / "source", to_hf: folder / "checkpoint"}


@pytest.fixture(params=[to_megatron, to_hf])
def convert(request: pytest.FixtureRequest, large: dict[Convert, Path]) -> Convert:
    """A conversion of either kind to a given place."""
    return partial(request.param, large[request.param])


@pytest.mark.parametrize("free_kb", [5000, 6, 0])
def test_a_full_disk_is_an_error_and_leaves_nothing(
    convert: Convert, small_disk: Path, free_kb: int, capsys: pytest.CaptureFixture[str]
) -> None:
    room = shutil.disk_usage(small_disk)._replace(free=10**12)
    page = os.sysconf("SC_PAGE_SIZE")
    with (small_disk / "ballast").open("wb") as file:
        os.posix_fallocate(
            file.fileno(), 0, (shutil.disk_usage(small_disk).free - free_kb * 1000) // page * page
        )
    with patch.object(
        files.shutil, "disk_usage", return_value=room
    ):  # as free as when the disk was checked
        assert convert(small_disk / "out") == 2
    text = printed_error(capsys)
    assert f"error: OUT = {small_disk}/out problem was not written" in text
    assert "No space left on device" in text
    assert list(small_disk.iterdir()) == [small_disk / "ballast"]


def end_in_mid_write(number: int, convert: Convert, out: Path) -> None:
    """Convert, and send a signal to this process when the 13th run of bytes is due."""
    written, pwrite = 0, os.pwrite

    def dying(*arguments: object) -> int:
        nonlocal written
        if (written := written + 1) == 13:
            assert any(out.parent.glob(".out.*"))
            os.kill(os.getpid(), number)
        return pwrite(*arguments)

    with patch.object(os, "pwrite", dying):
        os._exit(convert(out, "--overwrite"))


@pytest.mark.parametrize(
    ("number", "old", "code", "left"),
    [
        (signal.SIGKILL, True, -signal.SIGKILL, {".out.writing", "out"}),
        (signal.SIGKILL, False, -signal.SIGKILL, {".out.writing"}),
        (signal.SIGINT, True, 130, {"out"}),
        (signal.SIGINT, False, 130, set()),
    ],
)
def test_an_end_in_the_middle_loses_nothing(
    convert: Convert, tmp_path: Path, number: int, old: bool, code: int, left: set[str]
) -> None:
    out = tmp_path / "out"
    assert convert(out) == 0
    expected = contents(out)
    if not old:
        shutil.rmtree(out)
    process = multiprocessing.get_context("fork").Process(
        target=end_in_mid_write, args=(number, convert, out)
    )
    process.start()
    process.join(60)
    assert process.exitcode == code
    assert {path.name for path in tmp_path.iterdir()} == left
    assert "out" not in left or contents(out) == expected
    assert convert(out, "--overwrite") == 0
    assert contents(out) == expected
    assert list(tmp_path.iterdir()) == [out]
