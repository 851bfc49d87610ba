"""Law 6: a run that is killed at any instant and started again writes the same metrics, bit for bit but for times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_dppo.checkpoint import TRACKER

STEPS = 6
SETTINGS = (
    f"run.steps={STEPS}",
    "run.checkpoint_every=3",
    "layout.tp=2",
    "data.train=arithmetic",
    "data.chat_template=false",
    "data.max_prompt_tokens=24",
    "data.arithmetic.problems=24",
    "data.arithmetic.eval_problems=8",
    "rollout.prompts_per_step=10",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=12",
    "reward.function={reward}",
    "pack.max_tokens=256",
    "optimizer.lr=1e-3",
    "loss.updates_per_rollout=2",
    "eval.every=2",
    "eval.problems=8",
)
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Mixed on purpose: an untrained policy is never right, and a step of equal rewards would prove nothing."""
    return float(len(solution_str) % 3)
'''


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    size = ["--hidden", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--ffn", "48"]
    command = [sys.executable, "-m", "megatron_dppo", "init", str(folder / "hf"), "--tokenizer", "arithmetic", *size]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "reward.py").write_text(REWARD)
    return folder


def start(policy: Path, run: Path) -> subprocess.Popen[bytes]:
    settings = [s.format(reward=f"{policy / 'reward.py'}:compute_score") for s in SETTINGS]
    command = [sys.executable, "-m", "megatron_dppo", "train", f"run.dir={run}", f"model.path={policy / 'hf'}"]
    log = (run.parent / f"{run.name}.log").open("ab")
    return subprocess.Popen([*command, *settings], stdout=log, stderr=log, start_new_session=True)


def finish(process: subprocess.Popen[bytes], run: Path) -> list[dict]:
    assert process.wait(timeout=180) == 0, (run.parent / f"{run.name}.log").read_text()
    return rows(run)


def rows(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("perf/")} for line in lines]


def wait_for(process: subprocess.Popen[bytes], moment: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not moment():
        assert process.poll() is None and time.monotonic() < deadline, "the moment never came"
        time.sleep(0.001)


def kill_when(process: subprocess.Popen[bytes], moment: Callable[[], bool]) -> None:
    """kill -9 of the launcher and all its ranks, at the first sight of the moment."""
    wait_for(process, moment)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def undisturbed(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    result = finish(start(policy, run), run)
    assert [row["step"] for row in result] == list(range(STEPS + 1))
    assert any(row.get("train/tokens", 0) > 0 for row in result[4:]), "steps after the checkpoint must train"
    return result


def test_kill_between_steps_changes_nothing(policy: Path, tmp_path: Path, undisturbed: list[dict]) -> None:
    run = tmp_path / "run"
    process = start(policy, run)
    metrics = run / "metrics.jsonl"
    kill_when(process, lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 6)  # steps 0 to 5
    assert (run / "checkpoints" / TRACKER).read_text().strip() == "3"
    assert finish(start(policy, run), run) == undisturbed


def test_kill_of_the_launcher_alone_leaves_no_process_behind(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(policy, run)
    tracker = run / "checkpoints" / TRACKER
    wait_for(process, tracker.exists)  # a checkpoint has been written: whatever that starts is there
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while left := [p.cmdline() for p in psutil.process_iter() if in_session(p, process.pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def in_session(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def test_kill_in_the_middle_of_a_checkpoint_changes_nothing(
    policy: Path, tmp_path: Path, undisturbed: list[dict]
) -> None:
    run = tmp_path / "run"
    process = start(policy, run)
    partial = run / "checkpoints" / f".iter_{STEPS:07d}.partial"
    kill_when(process, lambda: partial.exists() and any(partial.glob("*.distcp")))
    assert (run / "checkpoints" / TRACKER).read_text().strip() == "3"
    assert finish(start(policy, run), run) == undisturbed
    assert (run / "checkpoints" / TRACKER).read_text().strip() == str(STEPS)
