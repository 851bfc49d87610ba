"""What ``launch --dry-run`` prints is a script that runs as it is; Slurm judges it in tests/slurm/test_nemo_run.py."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.cli import main
from megatron_dppo.launch.job import JOB

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs/qwen3_32b_dppo.yaml")
WITHOUT = """import sys; sys.modules["nemo_run"] = None
from megatron_dppo.cli import main; sys.exit(main())"""


def printed(folder: Path, *words: str) -> str:
    """Where there is neither NeMo-Run nor Slurm; nothing is to be left in the folder."""
    environ = {**os.environ, "PATH": "/nowhere", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    command = [sys.executable, "-B", "-c", WITHOUT, "launch", *words, "--dry-run"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout


def test_the_script_for_slurm_asks_for_the_cluster_s_machines_and_hands_words_on_whole(tmp_path: Path) -> None:
    words = ["run.dir=runs/my run; $(exit)", "cluster.account=mine", "cluster.server_nodes=5", "rollout.launch.tp=4"]
    text = printed(tmp_path, *words[:1], CONFIG, *words[1:], "--executor", "slurm")
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    sizes = "--gpus-per-node=8 --exclusive --mem=0 --account=mine"
    assert asked[0].startswith("--job-name=megatron-dppo.my-run----exit- ")
    assert asked[1] == "--time=24:00:00 --signal=B:USR1@600 --requeue"
    assert asked[2:] == [f"--nodes=2 --ntasks-per-node=8 {sizes}", "hetjob", f"--nodes=5 --ntasks-per-node=2 {sizes}"]
    *_, enter, job = text.splitlines()
    assert shlex.split(enter)[:2] == ["cd", str(tmp_path)]
    assert shlex.split(job) == ["exec", "bash", str(JOB), CONFIG, *words], "job.sh takes the first word for the file"
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_layout_that_does_not_divide_the_cluster_s_ranks_is_refused_before_a_job_waits_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    large = str(ROOT / "configs/qwen3_235b_a22b_dppo.yaml")
    assert main(["launch", large, "--executor", "slurm", "--dry-run", "cluster.nodes=7"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: layout = tp 4 x pp 8 x cp 1 x dp any\n")


def test_the_script_for_this_machine_trains_when_it_is_run(tmp_path: Path) -> None:
    text = printed(tmp_path, "model.path=no such policy", "data.train=nothing.jsonl")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash"], input=text, env=environ, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.path = no such policy"), done.stderr


@pytest.mark.parametrize("name", ["CONTAINER", "SERVER_CONTAINER"])
def test_the_container_that_is_not_there_is_named_by_its_variable(tmp_path: Path, name: str) -> None:
    """In place of Slurm are two programs that know one node."""
    for program, words in (
        ("scontrol", 'case "$*" in *hostnames*) echo n1 ;; *) echo NodeAddr=n1 ;; esac'),
        ("srun", ""),
    ):
        (tmp_path / program).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / program).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "1"}
    environ = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}", name: "/no/such/image"}
    command = ["bash", "-c", f"source {ROOT}/scripts/slurm/job.sh run.yaml"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"error: {name} = /no/such/image: there is no such file" in done.stdout
