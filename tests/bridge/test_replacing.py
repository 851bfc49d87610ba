"""Directories appear whole or not at all, also when two processes want the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.bridge.replacing import replacing
from tests.bridge.conversions import contents


def test_of_two_that_write_to_one_place_the_later_wins_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(FileExistsError, match="another process writes there too"), replacing(out) as first:
        (first / "first").touch()
        with replacing(out) as second:
            (second / "second").touch()
    assert contents(tmp_path) == {"out/second": b""}


def test_the_earlier_leaves_the_later_ones_draft_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    earlier, later = replacing(out), replacing(out)
    (earlier.__enter__() / "earlier").touch()
    (later.__enter__() / "later").touch()
    with pytest.raises(FileExistsError):
        earlier.__exit__(None, None, None)
    later.__exit__(None, None, None)
    assert contents(tmp_path) == {"out/later": b""}


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    with pytest.raises(ValueError, match="no"), replacing(out) as draft:
        (draft / "new").touch()
        raise ValueError("no")
    assert contents(tmp_path) == {"out/old": b""}
    assert list(tmp_path.iterdir()) == [out]


def test_what_a_kill_had_put_aside_comes_back_whatever_happens_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / ".out.former").mkdir()
    (tmp_path / ".out.former/old").touch()
    with pytest.raises(ValueError, match="no"), replacing(out):
        raise ValueError("no")
    assert contents(tmp_path) == {"out/old": b""}
