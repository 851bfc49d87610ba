"""Law 6: a run that is killed at any instant and started again writes the same metrics, bit for bit but for times."""

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

import psutil
import pytest

from megatron_dppo.cli import main
from megatron_dppo.data import stored
from megatron_dppo.process.lifetime import SAVED
from megatron_dppo.trainer.checkpoint import TRACKER
from tests.commands import Command

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
    assert main(["init", str(folder / "hf"), "--tokenizer", "arithmetic", *size]) == 0
    (folder / "reward.py").write_text(REWARD)
    return folder


def start(policy: Path, run: Path, *overrides: str) -> BaseProcess:
    return command(policy, run, *overrides).start()


def command(policy: Path, run: Path, *overrides: str) -> Command:
    return Command(["megatron-dppo", *words(policy, run, *overrides)], run.parent / f"{run.name}.log")


def words(policy: Path, run: Path, *overrides: str) -> list[str]:
    settings = [s.format(reward=f"{policy / 'reward.py'}:compute_score") for s in (*SETTINGS, *overrides)]
    return ["train", f"run.dir={run}", f"model.path={policy / 'hf'}", *settings]


def run_alone(policy: Path, run: Path, *overrides: str) -> int:
    """To its end, on one rank; the exit code."""
    return command(policy, run, "layout.tp=1", *overrides).exit_code()


def finish(process: BaseProcess, run: Path) -> list[dict]:
    assert ended(process) == 0, (run.parent / f"{run.name}.log").read_text()
    return rows(run)


def ended(process: BaseProcess) -> int | None:
    """The exit code."""
    process.join(180)
    return process.exitcode


def rows(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("perf/")} for line in lines]


def wait_for(process: BaseProcess, moment: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not moment():
        assert process.is_alive() and time.monotonic() < deadline, "the moment never came"
        time.sleep(0.001)


def kill_when(process: BaseProcess, moment: Callable[[], bool]) -> None:
    """kill -9 of the launcher and all its ranks, at the first sight of the moment."""
    wait_for(process, moment)
    ranks = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    deadline = time.monotonic() + 60.0
    while any(map(_lives, ranks)) and time.monotonic() < deadline:  # a rank holds its lock until it is gone
        time.sleep(0.01)


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def let_nobody_read() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


@pytest.fixture(scope="module")
def whole(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbs, though nobody reads what it says."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    log = run.parent / "log"
    typed = ["megatron-dppo", *words(policy, run)]
    assert Command(typed, log, before=let_nobody_read).exit_code() == 0, log.read_text()
    result = rows(run)
    assert [row["step"] for row in result] == list(range(STEPS + 1))
    assert any(row.get("train/tokens", 0) > 0 for row in result[4:]), "steps after the checkpoint must train"
    return run


@pytest.fixture
def undisturbed(whole: Path) -> list[dict]:
    return rows(whole)


def test_stopped_on_request_killed_between_steps_and_in_the_middle_of_a_checkpoint_a_run_is_as_if_it_never_was(
    policy: Path, tmp_path: Path, undisturbed: list[dict]
) -> None:
    run = tmp_path / "run"
    metrics, tracker = run / "metrics.jsonl", run / "checkpoints" / TRACKER
    process = start(policy, run, "run.checkpoint_every=0", "run.checkpoint_in_background=true")
    wait_for(process, lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 2)  # steps 0 and 1
    os.kill(process.pid or 0, signal.SIGUSR1)
    assert ended(process) == SAVED
    said, saved = (tmp_path / "run.log").read_text(), int(tracker.read_text())
    assert 1 <= saved <= 3, "the step under way was to be finished, and no other"
    assert said.endswith(f"stopped on request after step {saved}, and saved: run the same command again to go on\n")
    assert rows(run) == undisturbed[: saved + 1]

    first = start(policy, run)
    wait_for(first, (run / "lock.json").exists)
    second = start(policy, run)
    assert ended(second) == 2
    assert "\n  problem  is held by process " in (tmp_path / "run.log").read_text()
    kill_when(first, lambda: metrics.read_bytes().count(b"\n") >= 6)  # steps 0 to 5
    assert tracker.read_text().strip() == "3"

    partial = run / "checkpoints" / f".iter_{STEPS:07d}.partial"
    before = shutil.copytree(run, tmp_path / "before")
    for _ in range(5):
        kill_when(start(policy, run), lambda: partial.exists() and any(partial.glob("*.distcp")))
        if partial.exists():
            break
        shutil.rmtree(run)  # the checkpoint was whole before the kill came: once more
        shutil.copytree(before, run)
    assert partial.exists() and tracker.read_text().strip() == "3"

    assert finish(start(policy, run), run) == undisturbed
    assert tracker.read_text().strip() == str(STEPS)


def test_a_finished_run_is_shown_and_not_rewritten_and_never_under_other_settings(
    policy: Path, tmp_path: Path, whole: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}

    before, reward = written(), policy / "reward.py"
    try:
        reward.write_text(REWARD + "# another")
        assert run_alone(policy, run, "loss.name=gspo", "pruning.completions.keep=0.3") == 2
        said = (tmp_path / "run.log").read_text()
        assert "holds 6 steps" in said and "loss.name = gspo (was grpo)" in said and "keep = 0.3 (was auto)" in said
        assert "reward.function: reward.py has changed" in said
        assert "run.resume=anyway" in said and "Traceback" not in said
        assert run_alone(policy, run, "loss.name=gspo", "run.resume=anyway") == 0
    finally:
        reward.write_text(REWARD)
    said = (tmp_path / "run.log").read_text()
    assert "changed since step 6: loss.name = gspo (was grpo)" in said and "nothing is left to train" in said
    assert "changed since step 6: reward.function: reward.py has changed" in said
    assert "held-out accuracy" in said, "what it came to is shown"
    assert written() == before


def test_a_run_goes_on_with_fewer_ranks_in_another_layout(
    policy: Path, tmp_path: Path, whole: Path, undisturbed: list[dict]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / f"iter_{STEPS:07d}")
    (run / "checkpoints" / TRACKER).write_text("3\n")
    assert run_alone(policy, run) == 0, (tmp_path / "run.log").read_text()
    ours = rows(run)
    assert [row["step"] for row in ours] == list(range(STEPS + 1))
    for row, expected in zip(ours, undisturbed, strict=True):  # the same prompts, answers and draws, to rounding
        for name in row.keys() & expected.keys():
            if name.startswith(("rollout/", "reward/", "prune/", "eval/", "train/")):
                assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), (row["step"], name)
    held = [json.loads(line)["perf/ranks"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert held == [2] * 4 + [1] * 3  # what each step cost is told by its row


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


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_run_ends_within_two_seconds_though_a_judge_hangs_and_rollouts_are_in_flight(
    policy: Path, tmp_path: Path
) -> None:
    run, hangs, judge = tmp_path / "run", tmp_path / "hangs", tmp_path / "judge.py"
    judge.write_text(HANGING.format(metrics=str(run / "metrics.jsonl"), hangs=str(hangs)))
    settings = ("rollout.ahead=2", f"reward.function={judge}:compute_score", "reward.timeout_s=900")
    process = start(policy, run, *settings)
    wait_for(process, hangs.exists)
    launcher = psutil.Process(process.pid or 0)
    family = [launcher, *launcher.children(recursive=True)]
    assert len(family) > 3, "ranks and what scores"
    launcher.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 2.0
    while left := [each for each in family if lives(each)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    assert ended(process) == 128 + signal.SIGTERM


def read_all_from_the_disk() -> None:
    """Every file is a large one; for the launcher and for its ranks, which are forked from it."""
    stored.LARGE = 0


def test_a_run_on_stored_rows_of_several_sources_goes_on_as_if_it_had_never_stopped(
    policy: Path, tmp_path: Path
) -> None:
    sources = []
    for first, (name, weight) in enumerate((("a", 3), ("b", 1))):
        sums = [(first + 2 * i, j) for i in range(4) for j in range(3)]
        lines = [json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b), "data_source": name}) for a, b in sums]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        sources.append({"path": str(tmp_path / f"{name}.jsonl"), "weight": weight})
    listed = json.dumps(sources).replace("{", "{{").replace("}", "}}")
    settings = [f"data.train={listed}", "rollout.prompts_per_step=8", "eval.every=0", "run.steps=4", "layout.tp=1"]
    settings += ["run.checkpoint_every=2", "run.export=false", "optimizer.schedule=constant"]
    log, cache = tmp_path / "log", {stored.CACHE: str(tmp_path / "cache")}

    def run(folder: Path) -> list[dict]:
        typed = ["megatron-dppo", *words(policy, folder, *settings)]
        assert Command(typed, log, environ=cache, before=read_all_from_the_disk).exit_code() == 0, log.read_text()
        return rows(folder)

    undisturbed = run(tmp_path / "run")
    said = log.read_text()
    assert all(said.count(f"tokenising {source['path']}: done") == 1 for source in sources), said
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "run", resumed)
    shutil.rmtree(resumed / "checkpoints" / "iter_0000004")
    (resumed / "checkpoints" / TRACKER).write_text("2")
    assert run(resumed) == undisturbed
    assert log.read_text().count("tokenising") == said.count("tokenising"), "the second run was to read what is there"
