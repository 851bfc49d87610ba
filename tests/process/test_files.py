"""Files and directories appear whole or not at all, and a folder has one writer at a time."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from megatron_dppo.bridge.hf_directory import MODEL
from megatron_dppo.errors import UserError
from megatron_dppo.process import files
from megatron_dppo.process.files import (
    HOLDER,
    LOCK,
    FolderLock,
    check_not_held,
    check_replaceable,
    replace_directory,
    replace_file,
)
from megatron_dppo.trainer.preflight import check_run_dir
from tests.bridge.conversions import contents

HOLD = """
import os, sys, time
from pathlib import Path
from megatron_dppo.bridge.hf_directory import MODEL
from megatron_dppo.process.files import FolderLock
held = FolderLock(Path(sys.argv[1]), "run.dir")
if "fork" in sys.argv and os.fork() == 0:
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(60)
os.write(1, b"held\\n")
time.sleep(60)
"""


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(ValueError, match="no"), replace_file(file) as draft:
        draft.write_text("half")
        assert file.read_text() == "old"
        raise ValueError("no")
    assert file.read_text() == "old"
    with replace_file(file) as draft:
        draft.write_text("whole")
    assert contents(tmp_path) == {"file": b"whole"}


@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        ("file", "is a file"),
        ("nowhere", "is a link that leads nowhere"),
        ("nowhere/run", "nowhere is a link that leads nowhere"),
        ("loop", "is a link that leads nowhere"),
        ("loop/run", "Too many levels of symbolic links"),
        pytest.param("x" * 300, "File name too long", id="long"),
    ],
)
def test_obstructed_folder_is_refused(folder: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to("absent")
    (tmp_path / "loop").symlink_to("loop")
    place = tmp_path / folder
    for refuse in (
        lambda: check_run_dir(place),
        lambda: FolderLock(place, "run.dir"),
        lambda: check_replaceable(place, 1, "run.dir", MODEL),
    ):
        with pytest.raises(UserError, match=problem) as caught:
            refuse()
        assert (caught.value.setting, caught.value.value) == ("run.dir", place)
    assert len([*tmp_path.iterdir()]) == 3


def test_the_earlier_writer_of_a_directory_is_undisturbed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with replace_directory(out) as first:
        (first / "first").touch()
        with (
            pytest.raises(FileExistsError, match="another process is writing there"),
            replace_directory(out),
        ):
            pytest.fail("two drafts of one directory")
        (first / "more").touch()
    assert contents(tmp_path) == {"out/first": b"", "out/more": b""}
    with replace_directory(out) as second:
        (second / "second").touch()
    assert contents(tmp_path) == {"out/second": b""}
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("former", ["out", ".out.former"])
def test_an_error_leaves_or_restores_the_old_directory(former: str, tmp_path: Path) -> None:
    """A killed process had put the old directory aside."""
    (tmp_path / former).mkdir()
    (tmp_path / former / "old").touch()
    with pytest.raises(ValueError, match="no"), replace_directory(tmp_path / "out") as draft:
        (draft / "new").touch()
        raise ValueError("no")
    assert contents(tmp_path) == {"out/old": b""}
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@contextmanager
def hold_elsewhere(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Hold a folder in another process. Yields the process and the ids of its children."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder, *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = {process.stdout.readline().strip() for _ in range(1 + len(words))}
    children = [int(word) for word in said - {"held"}]
    try:
        yield process, children
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        for child in children:
            os.kill(child, signal.SIGKILL)


def lock(folder: Path) -> None:
    FolderLock(folder, "run.dir").close()


def test_a_second_writer_is_refused_by_the_first_s_name(tmp_path: Path) -> None:
    with hold_elsewhere(tmp_path) as (process, _):
        before = sorted(tmp_path.iterdir())
        for take in (lock, check_not_held):
            with pytest.raises(UserError, match=f"process {process.pid} on .*, since 20") as caught:
                take(tmp_path)
            assert caught.value.setting == "run.dir"
        assert sorted(tmp_path.iterdir()) == before
    with closing(FolderLock(tmp_path, "run.dir")):  # the first writer was killed
        assert json.loads((tmp_path / HOLDER).read_text())["pid"] == os.getpid()
    assert [file.name for file in tmp_path.iterdir()] == [LOCK]
    check_not_held(tmp_path)


def test_a_child_of_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    with hold_elsewhere(tmp_path, "fork") as (process, children):
        process.kill()
        process.wait()
        os.kill(children[0], 0)  # the child lives, with its parent's open files
        lock(tmp_path)


def test_one_of_many_processes_gets_the_folder(tmp_path: Path) -> None:
    """Every process tries as soon as all of them have started, and holds the folder until all have
    tried."""
    start, tried = (os.pipe() for _ in range(2))
    children = []
    for _ in range(6):
        if (child := os.fork()) == 0:
            os.close(start[1])
            os.read(start[0], 1)  # returns when the parent closes the other end
            try:
                held = FolderLock(tmp_path, "run.dir")
                os.write(tried[1], b"h")
                signal.pause()
                held.close()
            except UserError as error:
                os.write(tried[1], b"r" if "is held by process" in error.problem else b"?")
            finally:
                os._exit(0)
        children.append(child)
    os.close(start[1])
    os.close(tried[1])
    outcomes = b"".join(os.read(tried[0], 1) for _ in children)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert sorted(outcomes) == sorted(b"hrrrrr")


def record_other_host(folder: Path, *, seconds_ago: float) -> None:
    record = {
        "host": "node7",
        "pid": 4711,
        "started": "1",
        "kernel": "another",
        "ids": "",
        "since": "2026-01-01",
    }
    (folder / HOLDER).write_text(json.dumps(record))
    then = time.time() - seconds_ago
    os.utime(folder / HOLDER, (then, then))


def test_an_old_record_of_another_host_is_ignored_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_other_host(tmp_path, seconds_ago=files.LEASE_S + 5)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: pytest.fail("the lock waits"))
    lock(tmp_path)


def test_a_fresh_record_s_holder_must_give_another_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LEASE_S", 1.5)
    said: list[str] = []
    record_other_host(tmp_path, seconds_ago=0.0)
    FolderLock(tmp_path, "run.dir", said.append).close()  # no sign came: the host is dead
    assert len(said) == 1 and "process 4711 on node7 holds" in said[0]

    def beat(text: str) -> None:
        os.utime(tmp_path / HOLDER)

    record_other_host(tmp_path, seconds_ago=0.0)
    with pytest.raises(UserError, match="is held by process 4711 on node7, since 2026-01-01"):
        FolderLock(tmp_path, "run.dir", beat)


def test_a_replaced_holder_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for(condition: object) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def is_replaced() -> bool:
        try:
            held.check()
        except UserError as error:
            return "process 4711 on node7" in error.problem
        return False

    monkeypatch.setattr(files, "BEAT_S", 0.05)
    with closing(FolderLock(tmp_path, "run.dir")) as held:
        held.check()
        written = (tmp_path / HOLDER).stat().st_mtime_ns
        wait_for(lambda: (tmp_path / HOLDER).stat().st_mtime_ns != written)  # a sign of life
        record_other_host(tmp_path, seconds_ago=0.0)
        wait_for(is_replaced)
    assert json.loads((tmp_path / HOLDER).read_text())["host"] == "node7", (
        "the record is not ours to remove"
    )


@pytest.mark.parametrize("left", ["", "[1]", '{"host": 3}', "\x00\xff"])
def test_a_torn_record_refuses_nobody(left: str, tmp_path: Path) -> None:
    (tmp_path / HOLDER).write_text(left)
    lock(tmp_path)
