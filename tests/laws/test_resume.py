"""Law 6: a run that is killed at any instant and resumed writes the same metrics, bit for bit
except for times."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_dppo.process.lifetime import SAVED
from megatron_dppo.trainer.checkpoint import TRACKER
from tests.commands import Command
from tests.small_runs import MIXED, REWARD, rows, small_words, write_run

STEPS = 6
LIMIT_S = 120.0
pytestmark = pytest.mark.xdist_group("laws/test_resume.py")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("policy"))


def command(policy: Path, run: Path, *overrides: str, **options: Any) -> Command:
    settings = (
        f"run.steps={STEPS}",
        "run.export=true",
        "layout.tp=2",
        "loss.updates_per_rollout=2",
        *overrides,
    )
    words = ["megatron-dppo", "train", *small_words(policy, run, *settings)]
    return Command(words, log_of(run), **options)


def log_of(run: Path) -> Path:
    return run.parent / f"{run.name}.log"


def start(policy: Path, run: Path, *overrides: str) -> BaseProcess:
    return command(policy, run, *overrides).start()


def exit_code(process: BaseProcess) -> int | None:
    process.join(LIMIT_S)
    return process.exitcode


def wait_for(process: BaseProcess, moment: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not moment():
        assert process.is_alive(), "the process ended before the moment"
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.001)


def wait_until_gone(processes: list[psutil.Process], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while left := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill_when(process: BaseProcess, moment: Callable[[], bool]) -> None:
    """Kill the launcher and all its ranks by SIGKILL at the first sight of the moment."""
    wait_for(process, moment)
    ranks = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    wait_until_gone(ranks, LIMIT_S)  # a rank holds its lock until its end


def close_output() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


@pytest.fixture(scope="module")
def whole(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run with a closed output."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert command(policy, run, before=close_output).exit_code() == 0, log_of(run).read_text()
    result = rows(run)
    assert [row["step"] for row in result] == list(range(STEPS + 1))
    assert any(row.get("train/tokens", 0) > 0 for row in result[4:]), (
        "steps after the checkpoint must train"
    )
    return run


@pytest.mark.quick
def test_stopped_and_killed_run_equals_an_undisturbed_run(
    policy: Path, tmp_path: Path, whole: Path
) -> None:
    """Stopped on request, killed between steps and killed in the middle of a checkpoint."""
    run, undisturbed = tmp_path / "run", rows(whole)
    metrics, tracker = run / "metrics.jsonl", run / "checkpoints" / TRACKER
    process = start(policy, run, "run.checkpoint_every=0", "run.checkpoint_in_background=true")
    wait_for(
        process, lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 2
    )  # steps 0 and 1
    os.kill(process.pid or 0, signal.SIGUSR1)
    assert exit_code(process) == SAVED
    saved = int(tracker.read_text())
    assert 1 <= saved <= 3, "only the step under way is finished"
    assert f"stopped on request after step {saved}, and saved" in log_of(run).read_text()
    assert rows(run) == undisturbed[: saved + 1]

    first = start(policy, run)
    wait_for(first, (run / "lock.json").exists)
    assert exit_code(start(policy, run)) == 2
    assert "\n  problem  is held by process " in log_of(run).read_text()
    kill_when(first, lambda: metrics.read_bytes().count(b"\n") >= 6)  # steps 0 to 5
    assert tracker.read_text().strip() == "3"

    partial = run / "checkpoints" / f".iter_{STEPS:07d}.partial"
    before = shutil.copytree(run, tmp_path / "before")
    for _ in range(20):
        kill_when(start(policy, run), lambda: partial.exists() and any(partial.glob("*.distcp")))
        if partial.exists():
            break
        shutil.rmtree(run)  # the checkpoint was whole before the kill: repeat
        shutil.copytree(before, run)
    assert partial.exists()
    assert tracker.read_text().strip() == "3"

    assert exit_code(start(policy, run)) == 0, log_of(run).read_text()
    assert rows(run) == undisturbed
    assert tracker.read_text().strip() == str(STEPS)


def test_finished_run_is_shown_and_never_rewritten(
    policy: Path, tmp_path: Path, whole: Path
) -> None:
    """Other settings and another reward of the same name are refused, or named in the log with
    run.resume=force."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)

    def read_times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}

    def resume(*overrides: str) -> tuple[int, str]:
        log_of(run).unlink(missing_ok=True)
        return command(
            policy, run, "layout.tp=1", "loss.name=gspo", *overrides
        ).exit_code(), log_of(run).read_text()

    before, reward = read_times(), policy / "mixed.py"
    try:
        reward.write_text(reward.read_text() + "# another")
        refused, resumed = resume(), resume("run.resume=force")
    finally:
        reward.write_text(REWARD.format(reward=MIXED))
    for code, (found, log) in ((2, refused), (0, resumed)):
        assert found == code
        assert "loss.name = gspo (was grpo)" in log
        assert "reward.function: mixed.py has changed" in log
    assert "holds 6 steps" in refused[1]
    assert "Traceback" not in refused[1]
    assert "held-out accuracy" in resumed[1]
    assert read_times() == before


def test_run_resumes_on_fewer_ranks(policy: Path, tmp_path: Path, whole: Path) -> None:
    """The first step has the same prompts, answers and draws; in later ones rounding can choose
    another token."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / f"iter_{STEPS:07d}")
    (run / "checkpoints" / TRACKER).write_text("3\n")
    assert command(policy, run, "layout.tp=1").exit_code() == 0, log_of(run).read_text()
    assert [row["step"] for row in rows(run)] == [row["step"] for row in rows(whole)]
    for row, expected in zip(rows(run)[:5], rows(whole)[:5], strict=True):
        for name in row.keys() & expected.keys():
            if name.startswith(("rollout/", "reward/", "prune/", "eval/", "train/")):
                assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), (
                    row["step"],
                    name,
                )
    ranks = [
        json.loads(line)["perf/ranks"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert ranks == [2] * 4 + [1] * 3


HANGING = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    metrics = Path({metrics!r})
    if metrics.exists() and metrics.read_bytes().count(b"\\n") >= 2:
        Path({hangs!r}).touch()
        time.sleep(1000.0)
    return float(len(solution_str) % 3)
"""


def test_run_ends_though_a_reward_hangs(policy: Path, tmp_path: Path) -> None:
    """With rollouts in flight."""
    run, hangs, judge = tmp_path / "run", tmp_path / "hangs", tmp_path / "judge.py"
    judge.write_text(HANGING.format(metrics=str(run / "metrics.jsonl"), hangs=str(hangs)))
    settings = ("rollout.ahead=2", f"reward.function={judge}:compute_score", "reward.timeout_s=900")
    process = start(policy, run, *settings)
    wait_for(process, hangs.exists)
    launcher = psutil.Process(process.pid or 0)
    family = [launcher, *launcher.children(recursive=True)]
    assert len(family) > 3, "ranks and reward workers"
    launcher.send_signal(signal.SIGTERM)
    wait_until_gone(family, 60.0)
    assert exit_code(process) == 128 + signal.SIGTERM
