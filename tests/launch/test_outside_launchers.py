"""Ranks that torchrun or srun started find their places, and agree on who speaks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron_dppo.launch.processes import CLOCK_S, FirstFailure, marker_for
from megatron_dppo.launch.rank import rank_main
from megatron_dppo.launch.start import srun_started, torch_environment
from megatron_dppo.settings import load_config

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
    assert srun_started(TASK)
    ours = torch_environment(TASK)
    assert (ours["RANK"], ours["WORLD_SIZE"], ours["LOCAL_RANK"], ours["MASTER_ADDR"]) == ("3", "4", "1", "node7")
    assert 1024 < int(ours["MASTER_PORT"]) < 65536


def test_tasks_share_the_cores_of_a_node() -> None:
    node = {"SLURM_CPUS_ON_NODE": "96", "SLURM_STEP_TASKS_PER_NODE": "8(x4),2"}
    assert torch_environment(TASK | node)["OMP_NUM_THREADS"] == "12"
    assert (
        torch_environment(TASK | {"SLURM_CPUS_ON_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "8"})["OMP_NUM_THREADS"]
        == "1"
    )
    assert "OMP_NUM_THREADS" not in torch_environment(TASK | node | {"OMP_NUM_THREADS": "3"})


def test_all_tasks_of_a_step_meet_and_two_steps_do_not() -> None:
    ports = [
        torch_environment(TASK | {"SLURM_PROCID": task, "SLURM_STEP_ID": step})["MASTER_PORT"]
        for step in "01"
        for task in "03"
    ]
    assert ports[0] == ports[1] != ports[2] == ports[3]


def test_several_nodes_are_listed_by_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert torch_environment(TASK | {"SLURM_STEP_NODELIST": "node[3-4]"})["MASTER_ADDR"] == "node3"


def test_what_the_user_has_set_is_left_alone() -> None:
    ours = torch_environment(TASK | {"MASTER_ADDR": "here", "MASTER_PORT": "1"})
    assert "MASTER_ADDR" not in ours
    assert "MASTER_PORT" not in ours


def test_a_batch_script_and_a_single_task_start_their_own_ranks() -> None:
    batch = {name: value for name, value in TASK.items() if not name.startswith("SLURM_STEP")}
    assert not srun_started(batch)
    assert not srun_started(TASK | {"SLURM_STEP_NUM_TASKS": "1"})
    assert not srun_started({})


def test_the_first_to_fail_speaks_and_its_code_is_everyones(tmp_path: Path) -> None:
    ranks = [FirstFailure(tmp_path / "marker") for _ in range(3)]
    assert ranks[0].code() is None
    assert [rank.claim(code) for rank, code in zip(ranks, (2, 1, 1), strict=True)] == [
        (True, 2),
        (False, 2),
        (False, 2),
    ]


def test_what_an_earlier_run_left_silences_nobody(tmp_path: Path) -> None:
    FirstFailure(tmp_path / "marker").claim(1)
    before = time.time() - CLOCK_S - 0.5
    os.utime(tmp_path / "marker", (before, before))
    ranks = [FirstFailure(tmp_path / "marker") for _ in range(2)]
    assert [rank.claim(2) for rank in ranks] == [(True, 2), (False, 2)]


def test_a_rank_that_cannot_ask_speaks(tmp_path: Path) -> None:
    assert FirstFailure(tmp_path / "nowhere" / "marker").claim(2) == (True, 2)


def test_ranks_of_one_run_look_in_one_place_and_other_runs_elsewhere(tmp_path: Path) -> None:
    here = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    marker = marker_for(tmp_path, here | {"RANK": "0"})
    assert marker == marker_for(tmp_path, here | {"RANK": "1"})
    assert marker.parent == tmp_path
    assert marker != marker_for(tmp_path, here | {"MASTER_PORT": "2"})
    assert marker_for(tmp_path / "absent", here).parent.is_dir()


@pytest.mark.parametrize(
    ("settings", "users", "told"),
    [
        (["rollout.engine=sglang"], None, "0"),  # what SGLang sets for itself
        (["rollout.engine=sglang"], "1", "1"),  # and SGLang leaves alone
        (["rollout.engine=sglang", "rollout.sync.transport=disk"], None, "nothing"),
        (["rollout.engine=vllm"], None, "nothing"),  # which leaves it to NCCL
    ],
)
def test_whoever_starts_a_rank_it_tells_nccl_what_its_servers_tell_it(
    settings: list[str], users: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", users or "")
    if users is None:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    assert rank_main("tests.launch.jobs:note_nccl", load_config(None, [f"run.dir={tmp_path}/said", *settings])) == 0
    assert (tmp_path / "said").read_text() == told
