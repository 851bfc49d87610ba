"""A folder has one writer at a time, who is named; and none is kept out by what a dead one left."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.process import files
from megatron_dppo.process.files import HOLDER, LOCK, FolderLock, refuse_if_held

HOLD = """
import os, sys, time
from pathlib import Path
from megatron_dppo.process.files import FolderLock
held = FolderLock(Path(sys.argv[1]), "run.dir")
if "fork" in sys.argv and os.fork() == 0:
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(60)
os.write(1, b"held\\n")
time.sleep(60)
"""


@contextmanager
def another(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Another process that holds the folder, and the children that it has forked."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder, *words], stdout=subprocess.PIPE, text=True)
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


def test_a_second_writer_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    with another(tmp_path) as (process, _):
        before = sorted(tmp_path.iterdir())
        for take in (lambda: FolderLock(tmp_path, "run.dir"), lambda: refuse_if_held(tmp_path)):
            with pytest.raises(UserError, match=f"process {process.pid} on .*, since 20") as caught:
                take()
            assert caught.value.setting == "run.dir"
        assert sorted(tmp_path.iterdir()) == before
    with closing(FolderLock(tmp_path, "run.dir")):  # the other one was killed
        assert json.loads((tmp_path / HOLDER).read_text())["pid"] == os.getpid()
    assert [file.name for file in tmp_path.iterdir()] == [LOCK]
    refuse_if_held(tmp_path)


def test_a_child_that_outlives_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    with another(tmp_path, "fork") as (process, children):
        process.kill()
        process.wait()
        os.kill(children[0], 0)  # it is there, with all that its parent had open
        FolderLock(tmp_path, "run.dir").close()


def take(folder: Path, start: float, outcomes: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    time.sleep(max(start - time.time(), 0.0))
    try:
        held = FolderLock(folder, "run.dir")
        outcomes.put("held")
        time.sleep(1.0)
        held.close()
    except UserError as error:
        outcomes.put(error.problem)


def test_of_many_that_start_at_once_one_gets_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    outcomes = context.Queue()
    start = time.time() + 0.3
    starting = [context.Process(target=take, args=(tmp_path, start, outcomes)) for _ in range(6)]
    for process in starting:
        process.start()
    said = [outcomes.get(timeout=30) for _ in starting]
    for process in starting:
        process.join()
    assert said.count("held") == 1
    assert all("is held by process" in words for words in said if words != "held"), said


def of_another_host(folder: Path, *, seconds_ago: float) -> None:
    record = {"host": "node7", "pid": 4711, "started": "1", "kernel": "another", "ids": "", "since": "2026-01-01"}
    (folder / HOLDER).write_text(json.dumps(record))
    then = time.time() - seconds_ago
    os.utime(folder / HOLDER, (then, then))


def test_what_a_dead_host_left_is_recognised_at_once_when_it_is_old(tmp_path: Path) -> None:
    of_another_host(tmp_path, seconds_ago=files.LEASE_S + 5)
    began = time.monotonic()
    FolderLock(tmp_path, "run.dir").close()
    assert time.monotonic() - began < files.LEASE_S / 4


def test_of_a_fresh_record_another_sign_of_life_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LEASE_S", 1.5)
    said: list[str] = []
    of_another_host(tmp_path, seconds_ago=0.0)
    began = time.monotonic()
    FolderLock(tmp_path, "run.dir", said.append).close()  # none came: the host is dead
    assert time.monotonic() - began > 1.0
    assert len(said) == 1 and "process 4711 on node7 holds" in said[0]

    of_another_host(tmp_path, seconds_ago=0.0)
    beats = subprocess.Popen([sys.executable, "-c", "import os, sys, time; time.sleep(0.5); os.utime(sys.argv[1])",
                              tmp_path / HOLDER])  # fmt: skip
    with pytest.raises(UserError, match="is held by process 4711 on node7, since 2026-01-01"):
        FolderLock(tmp_path, "run.dir")
    beats.wait()


def test_a_holder_that_another_has_replaced_learns_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BEAT_S", 0.05)
    with closing(FolderLock(tmp_path, "run.dir")) as held:
        held.check()
        written = (tmp_path / HOLDER).stat().st_mtime_ns
        deadline = time.monotonic() + 30
        while (tmp_path / HOLDER).stat().st_mtime_ns == written:
            assert time.monotonic() < deadline, "no sign of life"
            time.sleep(0.01)
        of_another_host(tmp_path, seconds_ago=0.0)
        while True:
            try:
                held.check()
            except UserError as error:
                assert "process 4711 on node7" in error.problem
                break
            assert time.monotonic() < deadline, "never noticed"
            time.sleep(0.01)
    assert json.loads((tmp_path / HOLDER).read_text())["host"] == "node7", "not ours to remove"


@pytest.mark.parametrize("left", ["", "{", "[1]", '{"host": 3}', "\x00\xff"])
def test_a_torn_record_keeps_nobody_out(left: str, tmp_path: Path) -> None:
    (tmp_path / HOLDER).write_text(left)
    FolderLock(tmp_path, "run.dir").close()
