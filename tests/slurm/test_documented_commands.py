"""What the documentation has people type on a cluster, on a real Slurm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.documents import commands
from tests.docs.sandbox import Sandbox, write_quickstart
from tests.docs.ways import typed_in, way_of
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import TINY, Job, Submitter, one_sglang_server

pytestmark = pytest.mark.slurm
DOCUMENTED = typed_in("slurm")
TEN = "docs/cluster.md#0"
STEPS = 8
SMALL_JOB = (
    "layout.tp=2 layout.pp=1 layout.first_stage_layers=null layout.last_stage_layers=null "
    "model.dtype=fp32 rollout.launch.tp=1 data.max_prompt_tokens=64 "
    f"data.chat_template_kwargs={{}} eval.benchmarks=[] run.steps={STEPS}"
)


def environ_of(cluster: Cluster, folder: Path) -> dict[str, str]:
    return {
        "SLURM_CONF": cluster.environment["SLURM_CONF"],
        "NEMORUN_HOME": str(folder / "nemo"),
        "MASTER_ADDR": "127.0.0.1",  # these nodes' names are no hosts' names
    }


@pytest.mark.parametrize("document", DOCUMENTED)
def test_the_commands_of_a_page_work_on_a_cluster(
    document: str, cluster: Cluster, tmp_path: Path
) -> None:
    (place := tmp_path / "checkout").mkdir()
    sandbox = Sandbox(place, document, write_quickstart(tmp_path, trained=False))
    for command in DOCUMENTED[document]:
        sandbox.type(command, environ_of(cluster, tmp_path))


def test_the_ten_commands_lead_from_a_plan_to_an_exported_policy(
    cluster: Cluster, submit: Submitter, tmp_path: Path
) -> None:
    """The environments are this test's, and policy and problems are small."""
    (place := tmp_path / "checkout").mkdir()
    sandbox = Sandbox(place, TEN)
    submit.settings(slow=True)
    (place / "models").mkdir()
    (place / "models/Qwen3-32B").symlink_to(submit.policy)
    (place / "data/dapo-math-17k.jsonl").symlink_to(submit.run / "problems.jsonl")
    reward = f"reward.function={submit.run / 'reward.py'}:compute_score"
    settings = " ".join([SMALL_JOB, *TINY, reward, *one_sglang_server(25400)])
    submission, job = "", None
    for command in commands(TEN):
        way = way_of(command)
        assert way is not None
        if way.suite in ("elsewhere", "nowhere"):
            continue
        number = str(job.number) if job else "JOB"
        typed = command.text if "configs/" in command.text else way.typed(command)
        if "configs/" in typed or "scripts/slurm/" in typed:
            typed += f" {settings}"
        if typed.startswith("megatron-dppo export"):
            (submit.run / "slow").unlink()
            assert wait_for_end(cluster, sandbox, submission, tmp_path) == 0
        said = sandbox.type(typed.replace("JOB", number), environ_of(cluster, tmp_path))
        if "sbatch" in typed:
            submission, job = typed, submitted(cluster, sandbox, said)
            job.wait_for_step(1)
        if "--signal=USR1" in typed:
            assert job is not None
            job.wait_for_line("requeued")
    assert (place / "report.html").exists() and (place / "policy/model.safetensors").exists()


def submitted(cluster: Cluster, sandbox: Sandbox, said: str) -> Job:
    """The job of ``Submitted batch job 4711``."""
    found = re.search(r"Submitted batch job (\d+)", said)
    assert found, said
    log = sandbox.folder / f"qwen3-32b-dppo-{found[1]}.log"
    return Job(cluster, int(found[1]), log, sandbox.folder / "runs/qwen3_32b_dppo")


def wait_for_end(cluster: Cluster, sandbox: Sandbox, submission: str, folder: Path) -> int:
    """Submit again: the run resumes, and ends."""
    job = submitted(cluster, sandbox, sandbox.type(submission, environ_of(cluster, folder)))
    code = job.wait()
    assert f"{STEPS} of {STEPS} steps are done" in job.text(), job.text()
    assert ": 0 of" not in job.text().partition("servers: starting")[0], "begun anew"
    return code
