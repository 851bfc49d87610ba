"""Whoever writes a checkpoint ends with the rank that it writes for, however that ended: no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_dppo.cli import main
from tests.trainer.test_resume import wait_for

SETTINGS = (
    "run.steps=1",
    "layout.tp=2",
    "data.train=arithmetic",
    "data.chat_template=false",
    "data.arithmetic.problems=24",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.max_response_tokens=4",
    "eval.problems=0",
)
SLOW = '''
import os, pathlib, time

flush = os.fsync

def never(descriptor):
    """A disk that takes its time for shards, in every process of the run."""
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
        pathlib.Path(__file__).with_name(f"slow-{os.getpid()}").touch()
        time.sleep(3600)
    flush(descriptor)

os.fsync = never
'''
LIMIT_S = 30.0
"""Ten are promised, of a machine that is not as busy as one that runs tests."""


def runs_with(process: psutil.Process, path: str) -> bool:
    """Whether it was started by the run of this test, or forked by whatever was: sessions differ, which ranks begin."""
    try:
        return process.environ().get("PYTHONPATH") == path and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    size = ["--hidden", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--ffn", "48"]
    assert main(["init", str(folder), "--tokenizer", "arithmetic", *size]) == 0
    return folder


@pytest.mark.parametrize(
    ("background", "victim"), [(False, "rank"), (True, "launcher")], ids=["at once-rank", "in the background-launcher"]
)
def test_no_writer_outlives_a_killed(policy: Path, tmp_path: Path, background: bool, victim: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    command = [sys.executable, "-m", "megatron_dppo", "train", f"run.dir={tmp_path / 'run'}", f"model.path={policy}"]
    command += [*SETTINGS, f"run.checkpoint_in_background={str(background).lower()}"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, env=os.environ | {"PYTHONPATH": path}
        )
    wait_for(launcher, lambda: len(list(tmp_path.glob("slow-*"))) >= 2)  # writers of both ranks
    rank = next(p for p in psutil.Process(launcher.pid).children() if "megatron_dppo.launch.rank" in p.cmdline())
    os.kill(rank.pid if victim == "rank" else launcher.pid, signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while left := [p for p in psutil.process_iter() if runs_with(p, path)]:
        if time.monotonic() > deadline:
            said = [f"{p.pid}: {' '.join(p.cmdline())}" for p in left]
            for process in left:
                process.kill()
            pytest.fail(f"outlived the {victim}: {said}")
        time.sleep(0.1)
        launcher.poll()
    assert list((tmp_path / "run/checkpoints").glob("iter_*")) == []
