"""What ``launch --dry-run`` prints is a script that runs as it is; Slurm judges it in tests/slurm/test_nemo_run.py."""

from __future__ import annotations

import os
import re
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


SRUN = """
[ "$1" = --help ] && { echo --container-image; exit; }
printf '%s\\n' "$*" >> "$SAID"
while [ "${1#-}" != "$1" ]; do shift; done
SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 exec "$@"
"""
"""Runs one task here, and writes down its command line."""
PYTHON = """
case "$*" in *--check*) echo "$RUN: 0 of 1 steps are done" ;; *megatron_dppo.launch.health*) exec "$REAL" "$@" ;; esac
echo "greeting: ${GREETING:-none}"
"""
"""In place of the run it says what the prologue has exported."""


class Node:
    """One node of a cluster that is two programs, for what job.sh asks of them: no Slurm, Pyxis or Apptainer."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.said = folder / "programs", folder / "said"
        self.checkout = folder / "checkout"
        for place in (self.programs, self.checkout):
            place.mkdir()
        self.add("scontrol", 'case "$*" in *hostnames*) echo n1 ;; *) echo NodeAddr=127.0.0.1 ;; esac')
        self.add("srun", SRUN)
        self.add("python", PYTHON)
        self.run = folder / "run"

    def add(self, program: str, words: str) -> None:
        (self.programs / program).write_text(f"#!/usr/bin/env bash\n{words}\n")
        (self.programs / program).chmod(0o755)

    def job(self, config: str = "run.yaml", **environ: str) -> tuple[int, str]:
        """The exit code of a job and its log."""
        slurm = {"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "1"}
        own = {"SAID": str(self.said), "REAL": sys.executable, "RUN": str(self.run), "PYTHONPATH": str(ROOT)}
        of_all = {**os.environ, **slurm, **own, "PYTHON": str(self.programs / "python"), **environ}
        of_all["PATH"] = f"{self.programs}:{os.environ['PATH']}"
        command = ["bash", "-c", f"source {ROOT}/scripts/slurm/job.sh {config}"]
        done = subprocess.run(
            command, cwd=self.checkout, env=of_all, capture_output=True, text=True, timeout=200, check=False
        )
        return done.returncode, done.stdout

    def steps(self) -> list[str]:
        return self.said.read_text().splitlines()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_prologue_is_sourced_in_every_task_before_its_program(node: Node, tmp_path: Path) -> None:
    (node.checkout / "prologue").write_text("module() { export GREETING=$1; }\nmodule 'good morning'\n")
    code, log = node.job(PROLOGUE="prologue")
    assert code == 0 and "greeting: good morning" in log, log
    assert all(f'exec "$@" {node.checkout}/prologue {node.programs}/python' in step for step in node.steps())


@pytest.mark.parametrize(
    ("words", "reason"),
    [(None, "there is no such file"), ("module load nothing\nfalse", "ended with exit code 1")],
)
def test_a_prologue_that_fails_ends_the_job_by_its_name(node: Node, words: str | None, reason: str) -> None:
    if words is not None:
        (node.checkout / "prologue").write_text(words)
    code, log = node.job(PROLOGUE="./prologue")
    assert code == 2
    assert re.search(rf"error: PROLOGUE = \S*/prologue: {reason}", log), log


def test_apptainer_runs_the_steps_of_a_sif_file_behind_the_prologue_that_loads_it(node: Node, tmp_path: Path) -> None:
    """As far as its command line: in place of Apptainer is a program that runs what stands behind the image."""
    (node.checkout / "image.sif").touch()
    code, log = node.job(CONTAINER="image.sif", CONTAINER_MOUNTS="/data:/data")
    assert code == 2 and "there is no apptainer on the path" in log
    (other := tmp_path / "modules").mkdir()
    node.add("apptainer", 'shift 7; exec "$@"')
    (node.programs / "apptainer").rename(other / "apptainer")
    (node.checkout / "prologue").write_text(f"export PATH=$PATH:{other} GREETING=hello\n")
    code, log = node.job(CONTAINER="image.sif", CONTAINER_MOUNTS="/data:/data", PROLOGUE="prologue")
    assert code == 0 and "greeting: hello" in log, log
    here = node.checkout
    for step in node.steps():
        _, _, command = step.partition(f"{here}/prologue ")
        expected = (
            f"apptainer exec --nv --pwd {here} --bind {here}:{here},/data:/data image.sif {node.programs}/python -m"
        )
        assert command.startswith(expected) and "--container-image" not in step


@pytest.mark.parametrize("image", ["registry#image:1", "image.sif"])
def test_a_container_sees_a_configuration_and_a_prologue_outside_of_the_checkout(
    node: Node, tmp_path: Path, image: str
) -> None:
    (node.checkout / "image.sif").touch()
    node.add("apptainer", 'shift 7; exec "$@"')
    for name in ("home/run.yaml", "site/prologue"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (node.checkout / "link").symlink_to(tmp_path / "home")
    here = node.checkout
    mounts = [f"{here}:{here}", f"{tmp_path}/home:{tmp_path}/home", f"{tmp_path}/site:{tmp_path}/site"]
    for config in (f"{tmp_path}/home/run.yaml", "../home/run.yaml", "link/run.yaml"):
        code, log = node.job(config, CONTAINER=image, PROLOGUE=f"{tmp_path}/site/prologue")
        assert code == 0, log
        step = node.steps()[-1]
        assert f" --{'bind ' if image == 'image.sif' else 'container-mounts='}{','.join(mounts)} " in step
        assert step.split("megatron_dppo ")[1].split()[1] == f"{tmp_path}/home/run.yaml"
    (here / "run.yaml").touch()
    node.job(CONTAINER=image)
    step = node.steps()[-1]
    assert str(tmp_path / "home") not in step and step.endswith(" train run.yaml --check 1")


def test_the_health_of_the_nodes_is_looked_at_before_anything_starts(node: Node) -> None:
    code, log = node.job(HEALTH_CHECK="1")
    assert code == 0 and "1 ranks on" in log and log.index("add up 64 MiB") < log.index("actors: starting"), log
    node.add("nvidia-smi", "echo lost; exit 15")
    code, log = node.job(HEALTH_CHECK="1")
    assert code == 1 and "nvidia-smi ended with exit code 15: lost" in log and "actors: starting" not in log, log
