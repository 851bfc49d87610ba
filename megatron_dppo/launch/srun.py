"""Ranks that srun started: Slurm's variables, said again in the words of torch.distributed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

FIRST_PORT, PORTS = 20000, 20000


def srun_started(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of a Slurm step.

    A batch script has SLURM_PROCID and SLURM_NTASKS too, though it is one process: only a step's own variables tell.
    """
    return "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def torch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for a task, and what our launcher sets besides; what is
    set already is left alone.

    Rank 0 runs on the first node of the step. The port is a function of the job and the step, so that two jobs that
    share a node do not meet.
    """
    job, step = int(environ["SLURM_JOB_ID"]), int(environ.get("SLURM_STEP_ID", "0"))
    ours = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "MASTER_PORT": str(FIRST_PORT + (job * 17 + step) % PORTS),
        "OMP_NUM_THREADS": str(_cores(environ)),
    }
    if "MASTER_ADDR" not in environ:
        ours["MASTER_ADDR"] = _first_host(environ)
    return {name: value for name, value in ours.items() if name not in environ}


def _cores(environ: Mapping[str, str]) -> int:
    """This task's share of the cores of a node."""
    tasks = int(environ.get("SLURM_STEP_TASKS_PER_NODE", "1").partition(",")[0].partition("(")[0])  # 8(x4),2
    return max(1, int(environ.get("SLURM_CPUS_ON_NODE", "1")) // tasks)


def _first_host(environ: Mapping[str, str]) -> str:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if nodes and "[" not in nodes and "," not in nodes:
        return nodes
    if nodes and shutil.which("scontrol"):
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
        return listed.stdout.split()[0]
    return environ["SLURM_LAUNCH_NODE_IPADDR"]
