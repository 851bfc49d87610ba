"""Whoever writes a checkpoint ends with the rank that it writes for, however that ended: no process
is left."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.commands import Command
from tests.laws.test_resume import wait_for
from tests.small_runs import small_words, write_run
from tests.waiting import wait_until

LIMIT_S = 30.0
"""Ten are promised, of a machine that is not as busy as one that runs tests."""


def slow_disk(folder: Path) -> None:
    """In every process of the run a disk takes its time for shards."""
    flush = os.fsync

    def never(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".distcp":
            (folder / f"slow-{os.getpid()}").touch()
            time.sleep(600)
        flush(descriptor)

    os.fsync = never


def runs_in(process: psutil.Process, folder: Path) -> bool:
    """Whether it was started by the run of this test, or forked by whatever was: sessions differ,
    which ranks begin."""
    try:
        return process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


POLICY = write_run


@pytest.mark.parametrize(
    ("background", "victim"),
    [(False, "rank"), (True, "launcher")],
    ids=["at once-rank", "in the background-launcher"],
)
def test_no_writer_outlives_the_run(
    policy: Path, tmp_path: Path, background: bool, victim: str
) -> None:
    settings = (
        "run.steps=1",
        "layout.tp=2",
        "eval.problems=0",
        f"run.checkpoint_in_background={background}",
    )
    words = ["megatron-dppo", "train", *small_words(policy, tmp_path / "run", *settings)]
    launcher = Command(
        words, tmp_path / "log", tmp_path, before=partial(slow_disk, tmp_path)
    ).start()
    wait_for(launcher, lambda: len(list(tmp_path.glob("slow-*"))) >= 2)  # writers of both ranks
    rank = psutil.Process(launcher.pid).children()[0]
    os.kill(rank.pid if victim == "rank" else launcher.pid or 0, signal.SIGKILL)
    wait_until(
        lambda: not any(runs_in(process, tmp_path) for process in psutil.process_iter()), LIMIT_S
    )
    assert list((tmp_path / "run/checkpoints").glob("iter_*")) == []
