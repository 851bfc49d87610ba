"""Ranks start together, end together, and have one exit code; ranks of torchrun or srun find their
places."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.launch import start
from megatron_dppo.launch.start import build_torch_environment, is_srun_task
from megatron_dppo.rollout.servers.launch import count_reserved_gpus
from megatron_dppo.settings import load_config
from tests.commands import Command

pytestmark = pytest.mark.xdist_group("launch/test_start")

START = """
import os, sys
from megatron_dppo.launch.start import start_ranks
from megatron_dppo.settings import load_config
for name in "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS":
    os.environ.pop(name, None)
for job in sys.argv[1:]:
    folder = job.partition(":")[2]
    os.mkdir(folder)
    for descriptor, name in (1, "out"), (2, "err"):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY), descriptor)
    settings = [f"run.dir={folder}", "run.steps=7", "model.deterministic=true"]
    code = start_ranks(f"tests.launch.{job}", load_config(None, settings), 2)
    open(f"{folder}/code", "w").write(str(code))
sys.exit(code)
"""
"""A program that launches several jobs in turn, with two ranks each."""

ENDING = """
fail_on_rank_one fail_everywhere crash_after_another_failed crash_on_rank_one leave_on_rank_one killed_on_rank_one
say_environment
"""
CAUSES = {
    "killed_before_a_barrier": (1, signal.SIGKILL),
    "terminated_before_a_sum": (0, signal.SIGTERM),
}
"""The rank that a signal ends while the other rank is in an exchange, and the signal."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A job's end and output."""

    code: int
    out: str
    err: str
    folder: Path = field(default=Path(), compare=False)


def launch(root: Path, *jobs: str) -> Command:
    """Return a command whose ranks are forked, too."""
    return Command(["python", "-c", START, *jobs], root / "log", folder=root)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Every job that ends by itself."""
    root = tmp_path_factory.mktemp("jobs")
    jobs = [f"jobs:{job}" for job in ENDING.split()]
    jobs += [f"jobs_in_contact:{job}" for job in (*CAUSES, "say_where_it_listens")]
    assert launch(root, *jobs).exit_code() == 0, (root / "log").read_text()
    return {at.name: read_outcome(at) for at in root.iterdir() if at.is_dir()}


def read_outcome(at: Path) -> Outcome:
    code, out, err = ((at / name).read_text() for name in ("code", "out", "err"))
    return Outcome(int(code), out, err, at)


@pytest.mark.parametrize(
    ("job", "where"),
    [
        ("fail_on_rank_one", "on rank 1"),
        ("fail_everywhere", "everywhere"),
        ("crash_after_another_failed", "on rank 1"),
    ],
)
def test_a_mistake_is_printed_once_and_ends_every_rank(
    outcomes: dict[str, Outcome], job: str, where: str
) -> None:
    said = f"error: layout.tp = 3\n  problem  is a mistake seen {where}\n  remedy   Mend it\n"
    assert outcomes[job] == Outcome(2, "", said)


@pytest.mark.parametrize(
    ("job", "first", "last"),
    [
        ("crash_on_rank_one", "rank 1 of 2 crashed:\nTraceback", "ValueError: a defect\n"),
        (
            "leave_on_rank_one",
            "rank 1 of 2 was ended by os._exit(0), called at:\n",
            "    os._exit(0)\n",
        ),
    ],
)
def test_a_crash_or_early_end_shows_its_own_traceback(
    outcomes: dict[str, Outcome], job: str, first: str, last: str
) -> None:
    outcome = outcomes[job]
    assert (outcome.code, outcome.out) == (1, ""), outcome
    assert outcome.err.startswith(first) and outcome.err.endswith(last)
    assert f"in {job}\n" in outcome.err and outcome.err.count("Traceback") <= 1


@pytest.mark.quick
def test_a_killed_rank_is_named(outcomes: dict[str, Outcome]) -> None:
    said = "error: rank 1 was ended by SIGKILL (was the machine out of memory?)\n"
    assert outcomes["killed_on_rank_one"] == Outcome(128 + signal.SIGKILL, "", said)


@pytest.mark.parametrize("job", CAUSES)
def test_the_rank_that_ended_first_is_named(outcomes: dict[str, Outcome], job: str) -> None:
    """Gloo's own words may come before."""
    rank, number = CAUSES[job]
    hint = " (was the machine out of memory?)" if number == signal.SIGKILL else ""
    outcome = outcomes[job]
    assert outcome.code == 128 + number
    assert outcome.err.endswith(f"error: rank {rank} was ended by {number.name}{hint}\n")
    assert outcome.err.count("error:") == 1 and "Traceback" not in outcome.err


def test_ranks_of_one_machine_listen_on_the_loopback_alone(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["say_where_it_listens"]
    assert outcome.code == 0, outcome.err
    addresses = [(outcome.folder / f"rank{rank}").read_text().split() for rank in (0, 1)]
    assert len(addresses[0]) > len(addresses[1]) > 0, "the stores are rank 0's"
    assert {address for each in addresses for address in each} == {"127.0.0.1"}


def test_ranks_are_given_their_places_and_share_the_cores(outcomes: dict[str, Outcome]) -> None:
    threads = max(1, start.count_usable_cores() // 2)
    outcome = outcomes["say_environment"]
    assert (outcome.code, outcome.err) == (0, "")
    assert sorted(outcome.out.splitlines()) == [
        f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} OMP_NUM_THREADS={threads} "
        "CUDA_DEVICE_MAX_CONNECTIONS=1 NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 steps=7"
        for rank in (0, 1)
    ]


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1].startswith("Z")
    except FileNotFoundError:
        return True


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "say_process_ids"
    launcher = launch(tmp_path, "jobs:say_process_ids").start()
    files = [folder / f"rank{rank}" for rank in (0, 1)]
    try:
        assert wait_for(lambda: all(file.exists() for file in files))
        ranks = [int(file.read_text()) for file in files]
        os.kill(launcher.pid or 0, number)
        launcher.join(60)
        assert launcher.exitcode == (-number if number == signal.SIGKILL else 128 + number)
        assert (folder / "err").read_text() == ""
        assert wait_for(lambda: all(map(is_gone, ranks)))
    finally:
        launcher.kill()


@pytest.mark.parametrize(
    ("layout", "gpus", "reserved", "ranks"),
    [
        ("tp=2 pp=2", 0, 0, 4),  # one replica without GPUs
        ("tp=2", 0, 3, 2),
        ("tp=2", 8, 0, 8),  # as many replicas as there are GPUs for
        ("tp=2 dp=1", 8, 0, 2),
        ("tp=2", 8, 3, 4),
        ("tp=4", 8, 5, "needs 4 GPUs and its servers 5, and this machine has 8"),
        ("tp=2 dp=1000000000", 0, 0, "needs 2000000000 GPUs, and this machine has 0"),
    ],
)
def test_the_layout_decides_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, layout: str, gpus: int, reserved: int, ranks: int | str
) -> None:
    monkeypatch.setattr(start, "count_gpus", lambda: gpus)
    config = load_config(None, [f"layout.{word}" for word in layout.split()])
    if isinstance(ranks, int):
        assert start.count_ranks(config.layout, reserved=reserved) == ranks
    else:
        with pytest.raises(UserError, match=ranks):
            start.count_ranks(config.layout, reserved=reserved)


def test_a_run_s_own_servers_reserve_gpus_unless_colocated() -> None:
    servers = ["rollout.launch.count=2", "rollout.launch.tp=[1,2]"]
    reserved = [
        count_reserved_gpus(load_config(None, words).rollout)
        for words in (servers, [*servers, "rollout.colocated=true"], [])
    ]
    assert reserved == [3, 0, 0]


TASK = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node7",
}


def test_a_task_of_srun_is_a_rank() -> None:
    assert is_srun_task(TASK)
    ours = build_torch_environment(TASK)
    assert (ours["RANK"], ours["WORLD_SIZE"], ours["LOCAL_RANK"], ours["MASTER_ADDR"]) == (
        "3",
        "4",
        "1",
        "node7",
    )
    assert 1024 < int(ours["MASTER_PORT"]) < 65536
    given = {"MASTER_ADDR": "here", "MASTER_PORT": "1", "OMP_NUM_THREADS": "3"}
    assert not build_torch_environment(TASK | given).keys() & given.keys(), (
        "the user's values are kept"
    )
    batch = {name: value for name, value in TASK.items() if not name.startswith("SLURM_STEP")}
    for alone in (batch, TASK | {"SLURM_STEP_NUM_TASKS": "1"}, {}):
        assert not is_srun_task(alone)


@pytest.mark.parametrize(("cores", "tasks", "threads"), [("96", "8(x4),2", "12"), ("2", "8", "1")])
def test_tasks_share_the_cores_of_a_node(cores: str, tasks: str, threads: str) -> None:
    node = {"SLURM_CPUS_ON_NODE": cores, "SLURM_STEP_TASKS_PER_NODE": tasks}
    assert build_torch_environment(TASK | node)["OMP_NUM_THREADS"] == threads


def test_tasks_of_a_step_meet_and_two_steps_do_not() -> None:
    steps = [TASK | {"SLURM_PROCID": task, "SLURM_STEP_ID": step} for step in "01" for task in "03"]
    ports = [build_torch_environment(step)["MASTER_PORT"] for step in steps]
    assert ports[0] == ports[1] != ports[2] == ports[3]


def test_several_nodes_are_listed_by_scontrol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert (
        build_torch_environment(TASK | {"SLURM_STEP_NODELIST": "node[3-4]"})["MASTER_ADDR"]
        == "node3"
    )
