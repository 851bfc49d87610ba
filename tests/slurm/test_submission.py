"""Slurm and a job name a mistake before anything heavy has started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SCRIPTS, Submitter
from tests.slurm.test_scripts import SHIPPED

pytestmark = pytest.mark.slurm

SOON_S = 60.0
"""A mistake is to be answered within a minute."""


@pytest.mark.parametrize("script", SHIPPED)
def test_a_cluster_of_its_size_accepts_a_shipped_script(script: str, cluster: Cluster) -> None:
    judged = cluster.call("sbatch", "--test-only", str(SCRIPTS / script))
    assert judged.returncode == 0 and " to start at " in judged.stderr, judged.stderr


def test_a_submission_from_another_folder_is_refused(submit: Submitter) -> None:
    log = submit.folder / "log"
    words = [
        "sbatch",
        "--partition=loopback",
        f"--output={log}",
        "--wait",
        str(SCRIPTS / "qwen3_4b_dppo.sh"),
    ]
    done = subprocess.run(
        words, cwd=submit.folder, env=submit.cluster.environment, timeout=SOON_S, check=False
    )
    assert done.returncode == 2
    assert "submit this from the folder that holds scripts/slurm" in log.read_text()


@pytest.mark.parametrize(
    ("words", "environ", "reason"),
    [
        ("loss.nmae=dapo", {}, "error: loss.nmae = dapo"),
        (
            "rollout.servers=slurm rollout.engine=sglang rollout.launch.tp=3",
            {},
            "error: rollout.launch.tp = 3",
        ),
        (
            "rollout.servers=slurm rollout.engine=sglang",
            {"SERVER_PYTHON": "/no/python"},
            "error: SERVER_PYTHON = /no/python",
        ),
        (
            "",
            {"CONTAINER": "/no/image.sqsh"},
            "error: CONTAINER = /no/image.sqsh: there is no such file",
        ),
        (
            "",
            {"CONTAINER": "registry#image:1"},
            "error: CONTAINER = registry#image:1: this cluster's srun knows no",
        ),
        ("", {"PYTHON": "/no/python"}, "cannot import megatron_dppo"),
    ],
)
def test_a_mistake_ends_the_job_before_anything_starts(
    words: str, environ: dict[str, str], reason: str, submit: Submitter
) -> None:
    job = submit.heterogeneous(*words.split(), **environ)
    assert job.wait(SOON_S) == 2, job.text()
    assert reason in job.text() and "starting" not in job.text()


def test_a_servers_node_without_the_engine_ends_the_job_before_a_rank_starts(
    submit: Submitter,
) -> None:
    job = submit.heterogeneous(
        "rollout.servers=slurm", "rollout.engine=sglang", SERVER_PYTHON=sys.executable
    )
    assert job.wait(SOON_S) == 2, job.text()
    facts = (
        f"error: SERVER_PYTHON = {sys.executable}",
        "has no package sglang",
        "n2: task 0: Exited with exit code 2",
    )
    assert all(fact in job.text() for fact in facts) and "starting" not in job.text(), job.text()
