"""What Slurm and a job say of mistakes, before anything heavy has started."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SCRIPTS, Job, Submitter
from tests.slurm.test_scripts import SHIPPED

pytestmark = pytest.mark.slurm

SOON_S = 60.0
"""A mistake is to be answered within a minute."""


@pytest.fixture(autouse=True)
def within_a_minute() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < SOON_S


def _sbatch(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return cluster.call("sbatch", *words)


def _refusal(job: Job, *, code: int) -> list[str]:
    """What a job says that has ended by itself, without its stamps."""
    assert job.wait(SOON_S) == code, job.text()
    return [line.partition("] ")[2] for line in job.text().splitlines()]


@pytest.mark.parametrize("script", SHIPPED)
def test_a_shipped_script_is_accepted_as_it_stands_by_a_cluster_of_its_size(script: str, cluster: Cluster) -> None:
    judged = _sbatch(cluster, "--test-only", str(SCRIPTS / script))
    assert judged.returncode == 0 and " to start at " in judged.stderr, judged.stderr


def test_a_cluster_that_is_too_small_says_so(cluster: Cluster) -> None:
    for flags in (["--partition=loopback"], ["--nodes=40"]):
        for test_only in (["--test-only"], []):
            refused = _sbatch(cluster, *test_only, *flags, str(SCRIPTS / "qwen3_32b_dppo.sh"))
            assert refused.returncode != 0
            assert "node" in refused.stderr.lower(), refused.stderr
    assert cluster.call("squeue", "-h").stdout == ""


def test_any_number_of_nodes_may_be_asked_for(cluster: Cluster) -> None:
    script = str(SCRIPTS / "qwen3_32b_dppo.sh")
    assert _sbatch(cluster, "--test-only", "--nodes=8", ":", "--nodes=4", script).returncode == 0
    assert _sbatch(cluster, "--test-only", "--nodes=33", ":", "--nodes=4", script).returncode != 0


def test_a_script_that_is_submitted_from_elsewhere_says_so(submit: Submitter) -> None:
    log = submit.folder / "log"
    words = ["--partition=loopback", f"--output={log}", "--wait", str(SCRIPTS / "qwen3_4b_dppo.sh")]
    done = subprocess.run(
        ["sbatch", *words], cwd=submit.folder, env=submit.cluster.environment, timeout=SOON_S, check=False
    )
    assert done.returncode == 2
    assert "submit this from the folder that holds scripts/slurm" in log.read_text()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["loss.nmae=dapo"], "error: loss.nmae = dapo"),
        (["model.path=/no/model"], "error: model.path = /no/model"),
        (["layout.pp=2"], "error: layout = tp 2 x pp 2 x cp 1 x dp any"),
        (["rollout.servers=slurm", "rollout.engine=sglang", "rollout.launch.tp=3"], "error: rollout.launch.tp = 3"),
    ],
)
def test_a_mistake_in_the_settings_ends_the_job_before_anything_starts(
    words: list[str], reason: str, submit: Submitter
) -> None:
    lines = _refusal(submit.heterogeneous("run", *words), code=2)
    assert lines[2] == reason, "the reason comes first, after two lines that say what is done"
    assert not any("starting" in line for line in lines)


@pytest.mark.parametrize(
    ("image", "reason"),
    [("/no/such/image.sqsh", "there is no such file"), ("registry#image:1", "this cluster's srun knows no")],
)
def test_a_container_that_cannot_be_had_is_the_first_thing_a_job_says(
    image: str, reason: str, submit: Submitter
) -> None:
    (line,) = _refusal(submit.one_node("run", CONTAINER=image), code=2)
    assert line.startswith(f"error: CONTAINER = {image}: {reason}")


def test_an_environment_without_the_packages_is_the_first_thing_a_job_says(submit: Submitter) -> None:
    lines = _refusal(submit.one_node("run", PYTHON="/no/python"), code=2)
    assert "cannot import megatron_dppo" in lines[-1]


def test_a_server_that_never_can_generate_ends_the_job_with_its_last_words(submit: Submitter) -> None:
    command = "[/bin/bash,-c,'echo still loading; exec sleep 600']"
    words = ["rollout.engine=sglang", "rollout.servers=slurm", f"rollout.launch.command={command}"]
    job = submit.heterogeneous("run", *words, "rollout.launch.wait_s=5")
    lines = _refusal(job, code=2)
    first = next(i for i, line in enumerate(lines) if line.startswith("error: rollout.launch.wait_s = 5"))
    assert "still loading" in lines[first : first + 4] or any("still loading" in line for line in lines[first:])
    assert "servers: ended with exit code 2 while the actors were running, which are stopped" in lines
    assert job.left() == []
