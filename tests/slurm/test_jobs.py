"""Jobs on a real Slurm, with real ranks and a real SGLang server on CPU: they train, stop, resume,
fail and end."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.jobs import ROOT, Job, Submitter, one_sglang_server
from tests.small_runs import rows

pytestmark = pytest.mark.slurm

STAMP = re.compile(r"\[ *(\d+) s\] (.*)")
SGLANG_STEPS, FOR_EVER = 4, 100_000
DRAWS = ("step", "rollout/raw_reward", "prune/kept_prompt_fraction", "train/lr")
"""Metrics that depend on prompts, draws and rewards, and not on the generated tokens."""


def lines(job: Job) -> list[str]:
    """Return the log without its stamps, of which the lines that Slurm itself adds at an end have
    none."""
    found = [
        STAMP.fullmatch(line)
        for line in job.text().splitlines()
        if not line.startswith("slurmstepd")
    ]
    assert all(found), job.text()
    return [match[2] for match in found if match]


def check_order(job: Job, *beginnings: str) -> None:
    said = iter(lines(job))
    for beginning in beginnings:
        assert any(line.startswith(beginning) for line in said), (
            f"{beginning!r} is not next in\n{job.text()}"
        )


PYXIS = """#!/bin/bash
# Replaces Pyxis, which adds these options to srun: writes them down, and runs the step outside of any container.
[ "$1" = --help ] && { echo --container-image; exit; }
kept=()
for word; do case $word in --container-*) echo "$word" >>"$PYXIS_SAW" ;; *) kept+=("$word") ;; esac; done
exec /usr/bin/srun "${kept[@]}"
"""


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Actors on one node, a real SGLang server on the other, to the end."""
    submit = Submitter(cluster, tmp_path_factory.mktemp("undisturbed"), policy)
    job = submit.heterogeneous(*one_sglang_server(25100), f"run.steps={SGLANG_STEPS}")
    assert job.wait() == 0, job.text()
    return job


@pytest.mark.smoke
def test_actors_train_with_a_server_on_the_other_node(undisturbed: Job) -> None:
    job = undisturbed
    check_order(
        job,
        f"job {job.number}, start 1",
        f"settings: {job.run}: 0 of {SGLANG_STEPS} steps are done",
        "servers: starting 1 on n2",
        "actors: starting 2 ranks on n1",
        "server n2 can generate at http://127.0.0.1:25100",
        "actors: ended with exit code 0",
        "servers: stopping",
        f"done: {job.run}: {SGLANG_STEPS} of {SGLANG_STEPS} steps are done",
    )
    assert [row["rollout/servers"] for row in rows(job.run) if row["step"]] == [1.0] * SGLANG_STEPS
    assert job.left() == []


@pytest.mark.smoke
def test_a_requeued_job_has_the_same_prompts_and_draws(undisturbed: Job, submit: Submitter) -> None:
    job = submit.heterogeneous(*one_sglang_server(25200), f"run.steps={SGLANG_STEPS}", slow=True)
    job.wait_for_step(1)
    job.tell_to_stop()
    assert job.wait() == 0, job.text()
    check_order(
        job,
        "actors: told to save and stop",
        "actors: ended with exit code 75",
        "requeued",
        "job",
        "done",
    )
    assert f"job {job.number}, start 2" in job.text()
    assert job.scored() == undisturbed.scored()
    ours, theirs = (
        [{key: row.get(key) for key in DRAWS} for row in rows(each.run)]
        for each in (job, undisturbed)
    )
    assert ours == theirs
    assert job.left() == []


def test_each_step_runs_in_the_named_container(submit: Submitter) -> None:
    (srun := submit.folder / "srun").write_text(PYXIS)
    srun.chmod(0o755)
    saw = submit.folder / "saw"
    pyxis = {"PATH": f"{submit.folder}:{os.environ['PATH']}", "PYXIS_SAW": str(saw)}
    container = {"CONTAINER": "registry#image:1", "CONTAINER_MOUNTS": "/data:/data"}
    job = submit.one_node("run.steps=1", **pyxis, **container)
    assert job.wait() == 0, job.text()
    flags = ["--container-image=registry#image:1", f"--container-workdir={ROOT}"]
    flags.append(f"--container-mounts={ROOT}:{ROOT},/data:/data")
    steps = ("check", "train", "check")
    assert saw.read_text().splitlines() == flags * len(steps)


def test_a_job_without_progress_is_not_requeued(submit: Submitter) -> None:
    job = submit.one_node(f"run.steps={FOR_EVER}")
    job.wait_for_line("actors: starting")
    job.tell_to_stop()  # long before there is a step to save
    assert job.wait(60) == 75, job.text()
    assert lines(job)[-1].startswith(
        f"not requeued, since nothing was gained: {job.run}: 0 of {FOR_EVER} steps"
    )


def test_scancel_leaves_no_process(submit: Submitter) -> None:
    job = submit.heterogeneous(*one_sglang_server(25300), f"run.steps={FOR_EVER}")
    job.wait_for_line("server n2 starts")
    wait_for(
        lambda: len(job.ranks()) == 2 and "sglang" in " ".join(job.left()), 60, "ranks and a server"
    )
    assert {rank.environ()["CUDA_VISIBLE_DEVICES"] for rank in job.ranks().values()} == {
        "0,1,2,3,4,5,6,7"
    }
    job.cluster.call("scancel", str(job.number))
    wait_for(lambda: job.left() == [], 15, "end of its processes")
    job.wait(15)
    assert job.field("JobState") == "CANCELLED"
    assert "ended by Slurm: cancelled" in lines(job)[-1]


def test_a_killed_rank_ends_the_job_with_its_name(submit: Submitter) -> None:
    job = submit.one_node(f"run.steps={FOR_EVER}")
    job.wait_for_step(1)
    job.ranks()[1].kill()
    assert job.wait(60) == 137, job.text()
    check_order(
        job,
        "actors: starting",
        "srun: error: n1: task 1: Killed",
        "actors: ended with exit code 137",
    )
    assert lines(job)[-1].startswith("ended: a rank crashed or was killed")
    assert job.left() == []


def test_a_dead_server_ends_the_job_with_its_last_words(submit: Submitter) -> None:
    dies = "[/bin/bash,-c,'echo out of memory; sleep 3; kill -9 $$']"
    settings = [*one_sglang_server(25400), f"rollout.launch.command={dies}"]
    job = submit.heterogeneous(*settings, f"run.steps={FOR_EVER}")
    assert job.wait(60) == 2, job.text()
    check_order(
        job,
        "error: rollout.launch.command",
        "servers: ended with exit code 2",
        "ended with exit code 2",
    )
    said = "\n".join(lines(job))
    assert (
        "server n2 was ended by signal 9 (Killed) before it could generate" in said
        and "out of memory" in said
    )
    assert job.left() == []


def test_a_lost_node_is_named_and_the_job_starts_again(submit: Submitter) -> None:
    job = submit.heterogeneous(*one_sglang_server(25500), f"run.steps={FOR_EVER}")
    job.wait_for_line("server n2 starts")
    wait_for(lambda: "sglang" in " ".join(job.left()), 30, "server")
    try:
        job.cluster.kill_node("n2")
        job.wait_for_line("ended by Slurm", 180)  # Slurm asks its nodes now and then
    finally:
        job.cluster.start_node("n2")
    check_order(
        job,
        "srun: error: Node failure on n2",
        "node n2 is down",
        "the last lines of its server",
        "ended",
    )
    job.wait_for_line(f"job {job.number}, start 2", 60)
