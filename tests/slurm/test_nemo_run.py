"""One run as a NeMo-Run experiment, on this machine and on a real Slurm; and the same job as a
script for sbatch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.jobs import ROOT, WAIT_S, Job, Submitter, one_sglang_server
from tests.small_runs import rows

pytestmark = pytest.mark.slurm

STEPS = 3
ON_SLURM = ("--executor", "slurm", "cluster.partition=loopback", "cluster.gpus_per_node=2")


def launch(home: Path, cluster: Cluster, *words: str, code: int = 0, **more: str) -> str:
    command = [sys.executable, "-m", "megatron_dppo", "launch", *words]
    environ = cluster.environment | {"NEMORUN_HOME": str(home), "OMP_NUM_THREADS": "1"} | more
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr * (code != 0)


def submit_detached(submit: Submitter, *words: str) -> Job:
    """Return the one job that there is."""
    cluster = submit.cluster
    launch(submit.folder / "nemo", cluster, *words, *ON_SLURM, "--detach")
    number = cluster.call("squeue", "-h", "-o", "%A").stdout.split()[0]
    log = re.search(r"StdOut=(\S*/log-\S+)", cluster.call("scontrol", "show", "job", number).stdout)
    assert log, "NeMo-Run looks for the log under this name"
    return Job(cluster, int(number), Path(log[1]), submit.run)


def check_done(job: Job) -> None:
    assert job.wait() == 0, job.text()
    assert f"done: {job.run}: {STEPS} of {STEPS} steps are done" in job.text(), (
        "the job script of sbatch"
    )
    assert len(rows(job.run)) == STEPS


def test_a_local_launch_trains_and_a_mistake_fails(submit: Submitter, tmp_path: Path) -> None:
    settings = submit.settings(f"run.steps={STEPS}", "layout.tp=2")
    launch(tmp_path / "nemo", submit.cluster, *settings)
    assert len(rows(submit.run)) == STEPS
    assert "error: layout.tp = 3" in launch(
        tmp_path / "nemo", submit.cluster, *settings, "layout.tp=3", code=1
    )


def test_actors_train_with_a_server_on_its_own_node(submit: Submitter) -> None:
    server = [
        *one_sglang_server(25600),
        "rollout.launch.tp=2",
    ]  # on both GPUs that a node has for this job
    settings = submit.settings(f"run.steps={STEPS}", "layout.tp=2", *server)
    placed = ["cluster.server_nodes=1", "cluster.hours=0.2"]
    job = submit_detached(submit, *settings, *placed)
    check_done(job)
    assert json.loads((submit.run / "summary.json").read_text())["steps"] == STEPS
    assert re.search("[0-9a-f]{48}", job.text()) is None, "the log holds the servers' secret"
    wait_for(lambda: not job.left(), 30, "end of all processes")


def test_a_stopped_job_saves_and_resumes_in_its_next_start(submit: Submitter) -> None:
    settings = submit.settings("run.steps=100000", "layout.tp=2", slow=True)
    job = submit_detached(submit, *settings)
    job.wait_for_step(1)
    job.tell_to_stop()
    wait_for(
        lambda: job.field("Restarts") == "1" and job.field("JobState") == "RUNNING",
        WAIT_S,
        "second start",
    )
    saved = max(int(path.name[5:]) for path in (job.run / "checkpoints").glob("iter_*"))
    job.wait_for_step(saved + 1)
    steps = [row["step"] for row in rows(job.run)]
    assert steps == list(range(1, len(steps) + 1)), "a step is there twice, or missing"
    assert f"stopped on request after step {saved}, and saved" in job.text()
    assert f"requeued: {job.run}: {saved} of 100000 steps are done" in job.text()


def test_the_script_of_a_dry_run_runs_as_it_is(submit: Submitter, tmp_path: Path) -> None:
    def script(*words: str) -> str:
        (tmp_path / "job.sh").write_text(
            launch(tmp_path / "nemo", submit.cluster, *words, "--dry-run")
        )
        assert not (tmp_path / "nemo").exists()
        return str(tmp_path / "job.sh")

    judged = submit.cluster.call(
        "sbatch", "--test-only", script("configs/qwen3_32b_dppo.yaml", *ON_SLURM[:2])
    )
    assert judged.returncode == 0 and " to start at " in judged.stderr, judged.stderr
    settings = submit.settings(f"run.steps={STEPS}", "layout.tp=2")
    sent = submit.cluster.call(
        "sbatch", "--parsable", f"--output={tmp_path}/log", script(*settings, *ON_SLURM)
    )
    assert sent.returncode == 0, sent.stderr
    check_done(Job(submit.cluster, int(sent.stdout), tmp_path / "log", submit.run))


def test_a_machine_without_slurm_is_named(cluster: Cluster, tmp_path: Path) -> None:
    words = ["configs/qwen3_32b_dppo.yaml", *ON_SLURM]
    said = launch(tmp_path, cluster, *words, code=2, PATH=str(Path(sys.executable).parent))
    assert said.startswith("error: --executor = slurm\n  problem  sbatch is not on the path")
