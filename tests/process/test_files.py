"""Files and directories appear whole or not at all, also when two processes want the same directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.process.files import replacing_directory, replacing_file
from tests.bridge.conversions import contents


def test_a_file_is_what_it_was_until_the_new_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(ValueError, match="no"), replacing_file(file) as draft:
        draft.write_text("half")
        assert file.read_text() == "old"
        raise ValueError("no")
    assert file.read_text() == "old"
    with replacing_file(file) as draft:
        draft.write_text("whole")
    assert contents(tmp_path) == {"file": b"whole"}


def test_of_two_that_write_to_one_place_the_earlier_goes_on_undisturbed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with replacing_directory(out) as first:
        (first / "first").touch()
        with pytest.raises(FileExistsError, match="another process is writing there"), replacing_directory(out):
            pytest.fail("two drafts of one directory")
        (first / "more").touch()
    assert contents(tmp_path) == {"out/first": b"", "out/more": b""}


def test_one_after_the_other_the_later_replaces_the_earlier_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("earlier", "later"):
        with replacing_directory(out) as draft:
            (draft / name).touch()
    assert contents(tmp_path) == {"out/later": b""}
    assert list(tmp_path.iterdir()) == [out]


def test_the_draft_of_a_killed_process_is_emptied(tmp_path: Path) -> None:
    (tmp_path / ".out.writing" / "half").mkdir(parents=True)
    (tmp_path / ".out.writing" / "file").touch()
    with replacing_directory(tmp_path / "out") as draft:
        (draft / "new").touch()
    assert contents(tmp_path) == {"out/new": b""}


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    with pytest.raises(ValueError, match="no"), replacing_directory(out) as draft:
        (draft / "new").touch()
        raise ValueError("no")
    assert contents(tmp_path) == {"out/old": b""}
    assert list(tmp_path.iterdir()) == [out]


def test_what_a_kill_had_put_aside_comes_back_whatever_happens_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / ".out.former").mkdir()
    (tmp_path / ".out.former/old").touch()
    with pytest.raises(ValueError, match="no"), replacing_directory(out):
        raise ValueError("no")
    assert contents(tmp_path) == {"out/old": b""}
