"""Ranks start together, end together, and of a failure one message is seen."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_dppo.bridge.checkpoint_folder import TRACKER
from megatron_dppo.config import LaunchConfig, LayoutConfig, RolloutConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.launch import processes, start
from megatron_dppo.launch.processes import FirstFailure
from megatron_dppo.rollout.servers.launch import gpus_to_reserve
from megatron_dppo.settings import load_config
from tests.commands import Command

START = """
import os, sys
from megatron_dppo.launch.start import start_ranks
from megatron_dppo.settings import load_config
for job, folder in zip(sys.argv[1].split(), sys.argv[2].split()):
    for descriptor, name in (1, "out"), (2, "err"):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY), descriptor)
    settings = [f"run.dir={folder}", "run.steps=7", "model.deterministic=true"]
    code = start_ranks(f"tests.launch.{job}", load_config(None, settings), 2)
    open(f"{folder}/code", "w").write(str(code))
sys.exit(code)
"""
"""One process that launches several jobs in turn, with two ranks each."""

ENDING = (
    "fail_on_rank_one",
    "fail_everywhere",
    "crash_after_another_failed",
    "crash_on_rank_one",
    "exit_on_rank_one",
    "leave_on_rank_one",
    "killed_on_rank_one",
    "say_environment",
)
CAUSES = {
    "killed_before_a_barrier": (1, signal.SIGKILL),
    "terminated_before_a_sum": (0, signal.SIGTERM),
}
"""Which rank is ended by which signal, while the other is in an exchange with it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended, and what was seen of it."""

    code: int
    out: str
    err: str
    folder: Path = field(default=Path(), compare=False)


def _command(folders: dict[str, Path], module: str = "jobs") -> list[str]:
    for folder in folders.values():
        folder.mkdir()
    return ["-c", START, " ".join(f"{module}:{job}" for job in folders), " ".join(map(str, folders.values()))]


def _launch(folders: dict[str, Path]) -> subprocess.Popen[bytes]:
    unset = ("OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.Popen([sys.executable, *_command(folders)], env=environment)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Every job that comes to an end by itself; those in contact have torch imported already."""
    root = tmp_path_factory.mktemp("jobs")
    alone, in_contact = ({job: root / job for job in jobs} for jobs in (ENDING, (*CAUSES, "say_where_it_listens")))
    launcher = Command(["python", *_command(in_contact, "jobs_in_contact")], root / "log").start()
    _launch(alone).wait(timeout=240)
    launcher.join(240)
    return {
        job: Outcome(int((at / "code").read_text()), (at / "out").read_text(), (at / "err").read_text(), at)
        for job, at in (alone | in_contact).items()
    }


def _is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1].startswith("Z")
    except FileNotFoundError:
        return True


def _wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize(
    ("job", "where"),
    [("fail_on_rank_one", "on rank 1"), ("fail_everywhere", "everywhere"), ("crash_after_another_failed", "on rank 1")],
)
def test_a_mistake_is_said_once_and_ends_every_rank(outcomes: dict[str, Outcome], job: str, where: str) -> None:
    said = f"error: layout.tp = 3\n  problem  is a mistake seen {where}\n  remedy   Mend it\n"
    assert outcomes[job] == Outcome(2, "", said)


def test_a_crash_shows_its_own_traceback_alone(outcomes: dict[str, Outcome]) -> None:
    crash = outcomes["crash_on_rank_one"]
    assert crash.code == 1
    assert crash.err.startswith("rank 1 of 2 crashed:\nTraceback")
    assert crash.err.endswith("ValueError: a defect\n")
    assert crash.err.count("Traceback") == 1


@pytest.mark.parametrize(
    ("job", "first", "last"),
    [
        ("exit_on_rank_one", "rank 1 of 2 crashed:\nTraceback", "SystemExit: 0\n"),
        ("leave_on_rank_one", "rank 1 of 2 was ended by os._exit(0), called at:\n", "    os._exit(0)\n"),
    ],
)
def test_a_rank_that_ends_itself_before_its_job_does_has_failed(
    outcomes: dict[str, Outcome], job: str, first: str, last: str
) -> None:
    outcome = outcomes[job]
    assert (outcome.code, outcome.out) == (1, ""), outcome
    assert outcome.err.startswith(first) and outcome.err.endswith(last)
    assert f"in {job}\n" in outcome.err


ALONE = """
import multiprocessing, os, sys
from megatron_dppo.config import Config
from megatron_dppo.launch.rank import rank_main
copy = lambda config: multiprocessing.get_context("fork").Process(target=os._exit, args=(0,)).start()
ending = {"exit": lambda config: sys.exit(0), "leave": lambda config: os._exit(0), "saved": lambda config: os._exit(75)}
sys.exit(rank_main({**ending, "fork": copy}[sys.argv[1]], Config()))
"""


@pytest.mark.parametrize(("how", "code"), [("exit", 1), ("leave", 1), ("saved", 1), ("fork", 0)])
def test_so_has_a_run_of_one_rank(tmp_path: Path, how: str, code: int) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MEGATRON_DPPO_FAILURE": str(tmp_path / "failure")}
    assert Command(["python", "-c", ALONE, how], tmp_path / "log", environ=environ).exit_code() == code
    assert ("the run" in (tmp_path / "log").read_text()) is bool(code)


@pytest.mark.parametrize("how", ["exit", "leave"])
def test_a_run_of_one_rank_leaves_no_marker_to_its_next_start(tmp_path: Path, how: str) -> None:
    (tmp_path / "run").mkdir()
    job = ALONE.replace("Config())", f"Config(run={{'dir': '{tmp_path / 'run'}'}}))")
    environ = {"RANK": "0", "WORLD_SIZE": "1"}
    assert Command(["python", "-c", job, how], tmp_path / "log", environ=environ).exit_code() == 1
    assert [*(tmp_path / "run").iterdir()] == []


def test_a_rank_that_is_killed_is_named(outcomes: dict[str, Outcome]) -> None:
    said = "error: rank 1 was ended by SIGKILL (was the machine out of memory?)\n"
    assert outcomes["killed_on_rank_one"] == Outcome(128 + signal.SIGKILL, "", said)


@pytest.mark.parametrize("job", CAUSES)
def test_the_rank_that_ended_first_is_named_whatever_the_other_has_to_say(
    outcomes: dict[str, Outcome], job: str
) -> None:
    rank, number = CAUSES[job]
    hint = " (was the machine out of memory?)" if number == signal.SIGKILL else ""
    outcome = outcomes[job]  # gloo's own words come besides
    assert outcome.code == 128 + number and outcome.err.endswith(
        f"error: rank {rank} was ended by {number.name}{hint}\n"
    )
    assert outcome.err.count("error:") == 1 and "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("failed", "claimed_s_ago", "code", "named"),
    [
        ({1: -signal.SIGKILL}, None, 137, "rank 1 was ended by SIGKILL"),
        ({0: 1, 1: -signal.SIGSEGV}, 0.0, 139, "rank 1 was ended by SIGSEGV"),  # whatever rank 0 has said since then
        ({0: -signal.SIGABRT, 1: -signal.SIGBUS}, None, 135, "rank 1 was ended by SIGBUS"),
        ({0: -signal.SIGABRT}, None, 134, "rank 0 was ended by SIGABRT"),
        ({0: 2, 1: -signal.SIGABRT}, 0.0, 2, ""),  # NCCL ends a rank that has lost its peers
        ({0: 2, 1: -signal.SIGKILL}, 9.0, 2, ""),  # long after rank 0 had said why
        ({0: 75, 1: -signal.SIGTERM}, 9.0, 75, ""),
        ({1: 3}, None, 3, "rank 1 ended with exit code 3, and did not say why"),
    ],
)
def test_what_was_seen_of_the_ranks_tells_the_first_cause(
    failed: dict[int, int],
    claimed_s_ago: float | None,
    code: int,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failure, now = FirstFailure(tmp_path / "marker"), time.time()
    if claimed_s_ago is not None:
        failure.claim(failed[0])
        os.utime(tmp_path / "marker", (now - claimed_s_ago,) * 2)
    assert processes._first_cause(failed, failure, all_lived=now - 0.05) == code
    said = capsys.readouterr().err
    assert said.startswith(f"error: {named}") if named else said == ""


def test_on_one_machine_nobody_listens_where_another_machine_could_reach_it(
    outcomes: dict[str, Outcome],
) -> None:
    assert outcomes["say_where_it_listens"].code == 0, outcomes["say_where_it_listens"].err
    folder = outcomes["say_where_it_listens"].folder
    addresses = [(folder / f"rank{rank}").read_text().split() for rank in (0, 1)]
    assert len(addresses[0]) > len(addresses[1]) > 0, "the stores are rank 0's"
    assert {address for each in addresses for address in each} == {"127.0.0.1"}


def test_ranks_are_told_their_places_and_share_the_cores(outcomes: dict[str, Outcome]) -> None:
    threads = max(1, start.usable_cores() // 2)
    told = outcomes["say_environment"]
    assert (told.code, told.err) == (0, "")
    assert sorted(told.out.splitlines()) == [
        f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} OMP_NUM_THREADS={threads} CUDA_DEVICE_MAX_CONNECTIONS=1 "
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 steps=7"
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    launcher = _launch({"say_process_ids": folder})
    files = [folder / f"rank{rank}" for rank in (0, 1)]
    ranks: list[int] = []
    try:
        assert _wait_for(lambda: all(file.exists() for file in files))
        ranks = [int(file.read_text()) for file in files]
        launcher.send_signal(number)
        assert launcher.wait(timeout=20) == (-number if number == signal.SIGKILL else 128 + number)
        assert (folder / "err").read_text() == ""
        assert _wait_for(lambda: all(map(_is_gone, ranks)), 10)
    finally:
        launcher.kill()
        for process in (rank for rank in ranks if not _is_gone(rank)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def test_ctrl_c_says_from_where_a_run_goes_on_and_how_it_is_asked_to_save(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = load_config(None, [f"run.dir={tmp_path}", "run.checkpoint_every=9"])
    checkpoints = tmp_path / "checkpoints"
    for said in (
        "interrupted; before its first checkpoint (run.checkpoint_every = 9): the same command begins anew",
        f"interrupted; the same command goes on from step 9 of 100, the last checkpoint in {checkpoints}",
    ):
        code = start.start_ranks("train", config, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        heard = capfd.readouterr().err
        assert (code, heard) == (130, f"{said}. SIGUSR1 in place of Ctrl-C has a run save before it ends\n")
        (checkpoints / "iter_0000009").mkdir(parents=True, exist_ok=True)
        (checkpoints / TRACKER).write_text("9")


@pytest.mark.parametrize(
    ("layout", "gpus", "ranks"),
    [
        (LayoutConfig(tp=2, pp=2), 0, 4),  # without GPUs, one replica
        (LayoutConfig(tp=2, dp=3), 0, 6),
        (LayoutConfig(tp=2), 8, 8),  # with them, as many as they are enough for
        (LayoutConfig(tp=3), 8, 6),
        (LayoutConfig(tp=2, dp=1), 8, 2),
    ],
)
def test_the_layout_says_how_many_ranks(
    monkeypatch: pytest.MonkeyPatch, layout: LayoutConfig, gpus: int, ranks: int
) -> None:
    monkeypatch.setattr(start, "_gpus", lambda: gpus)
    assert start.ranks_of(layout) == ranks


def test_servers_that_the_run_starts_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_gpus", lambda: 8)
    assert start.ranks_of(LayoutConfig(tp=2), reserved=3) == 4
    with pytest.raises(UserError, match="needs 4 GPUs and its servers 5, and this machine has 8"):
        start.ranks_of(LayoutConfig(tp=4), reserved=5)
    monkeypatch.setattr(start, "_gpus", lambda: 0)
    assert start.ranks_of(LayoutConfig(tp=2), reserved=3) == 2
    servers = RolloutConfig(launch=LaunchConfig(count=2, tp=(1, 2)))
    assert gpus_to_reserve(servers) == 3
    assert gpus_to_reserve(replace(servers, colocated=True)) == gpus_to_reserve(RolloutConfig()) == 0


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_gpus", lambda: 2)
    with pytest.raises(UserError, match="needs 4 GPUs, and this machine has 2"):
        start.ranks_of(LayoutConfig(tp=4))
