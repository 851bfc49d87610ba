"""Conversions that end in the middle: the destination is the old one or absent, and the next run makes it."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_dppo.process import files
from tests.bridge.conversions import contents, printed_error, to_hf, to_megatron
from tests.bridge.directories import Sizes, write_qwen3

LARGE = Sizes(vocab_size=12_000, hidden_size=64)
"""Twice 3 MB of embeddings, of the 9 MiB of a small disk."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crashes")
    write_qwen3(folder / "source", LARGE)
    return folder / "source"


@pytest.fixture(scope="module")
def checkpoint(source: Path) -> Path:
    assert to_megatron(source, source.parent / "checkpoint") == 0
    return source.parent / "checkpoint"


@pytest.fixture(params=[to_megatron, to_hf])
def convert(request: pytest.FixtureRequest, source: Path, checkpoint: Path) -> Callable[..., int]:
    """A conversion of either kind, of a source that is whole, to the place that is given."""
    origin = source if request.param is to_megatron else checkpoint
    return lambda out, *options: request.param(origin, out, *options)


def test_too_small_a_disk_is_noticed_before_anything_is_written(
    convert: Callable[..., int], small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_disk / "ballast").write_bytes(bytes(4 << 20))
    assert convert(small_disk / "out") == 2
    assert "are to be written, and" in printed_error(capsys)
    assert list(small_disk.iterdir()) == [small_disk / "ballast"]


@pytest.mark.parametrize("free_kb", [5000, 3000, 6, 0])
def test_a_disk_that_fills_up_meanwhile_is_one_error_and_leaves_nothing(
    convert: Callable[..., int], small_disk: Path, free_kb: int, capsys: pytest.CaptureFixture[str]
) -> None:
    room = shutil.disk_usage(small_disk)._replace(free=10**12)
    page = os.sysconf("SC_PAGE_SIZE")
    with (small_disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (shutil.disk_usage(small_disk).free - free_kb * 1000) // page * page)
    with patch.object(files.shutil, "disk_usage", return_value=room):  # what was free when that was checked
        assert convert(small_disk / "out") == 2
    text = printed_error(capsys)
    assert f"error: OUT = {small_disk}/out problem was not written" in text
    assert "No space left on device" in text
    assert list(small_disk.iterdir()) == [small_disk / "ballast"]


def test_a_write_that_fails_leaves_the_old_one(
    convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert convert(out) == 0
    before = contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, limits[1]))
    try:
        assert convert(out, "--overwrite") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"error: OUT = {out} problem was not written ([Errno 27] File too large)" in printed_error(capsys)
    assert contents(tmp_path) == before
    assert list(tmp_path.iterdir()) == [out]


def ends_at(write: int, number: int, convert: Callable[..., int], out: Path) -> None:
    """Convert in this process, and send a signal to it in the middle, when the ``write``-th run of bytes is due."""
    written, pwrite = 0, os.pwrite

    def dying(*arguments: object) -> int:
        nonlocal written
        if (written := written + 1) == write:
            assert any(out.parent.glob(".out.*"))
            os.kill(os.getpid(), number)
        return pwrite(*arguments)

    with patch.object(os, "pwrite", dying):
        os._exit(convert(out, "--overwrite"))


def exit_code(function: Callable[..., None], *arguments: object) -> int | None:
    """Of a process that runs the function."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("write", [1, 13, 40])
def test_a_kill_in_mid_write_leaves_the_old_one_or_none(
    convert: Callable[..., int], tmp_path: Path, write: int, old: bool
) -> None:
    out = tmp_path / "out"
    assert convert(out) == 0
    expected = contents(out)
    if not old:
        shutil.rmtree(out)
    assert exit_code(ends_at, write, signal.SIGKILL, convert, out) == -signal.SIGKILL
    assert out.exists() == old
    assert not old or contents(out) == expected
    assert [path.name for path in tmp_path.iterdir() if path != out] == [".out.writing"]
    assert convert(out, "--overwrite") == 0
    assert contents(out) == expected
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("old", [False, True])
def test_ctrl_c_in_mid_write_leaves_the_old_one_or_none_and_no_draft(
    convert: Callable[..., int], tmp_path: Path, old: bool
) -> None:
    out = tmp_path / "out"
    if old:
        assert convert(out) == 0
    before = contents(tmp_path)
    assert exit_code(ends_at, 5, signal.SIGINT, convert, out) == 130
    assert contents(tmp_path) == before
    assert list(tmp_path.iterdir()) == [out] * old


def killed_between_renames(convert: Callable[..., int], out: Path) -> None:
    rename = Path.rename

    def dying(self: Path, target: Path) -> Path:
        if self.name == ".out.writing":
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    with patch.object(Path, "rename", dying):
        convert(out, "--overwrite")


def test_a_kill_between_the_two_renames_loses_neither(convert: Callable[..., int], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert convert(out) == 0
    expected = contents(out)
    assert exit_code(killed_between_renames, convert, out) == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.former", ".out.writing"]
    assert convert(out, "--overwrite") == 0
    assert contents(out) == expected
    assert list(tmp_path.iterdir()) == [out]
