"""``megatron-dppo launch CONFIG``: a run as a NeMo-Run experiment, on this machine or on Slurm.

On Slurm it is the job of ``scripts/slurm``: one task for each rank; and one for each rollout server in a second
heterogeneous component, if ``cluster.server_nodes`` gives servers nodes of their own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.process.stop import SAVED
from megatron_dppo.rollout.servers.launch import gpus_to_reserve

LOOK_S = 5
"""Seconds between NeMo-Run's looks whether the trainer or a server has ended, which ends the other."""

PREPARE = """
address() {{ scontrol show node "$1" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2; }}
nodes() {{ scontrol show hostnames "$1"; }}
export MASTER_ADDR=$(address "$(nodes "${{SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}}" | head -n1)")
{{ set +x; }} 2>/dev/null  # the log is to hold no secret
export MEGATRON_DPPO_SERVER_SECRET=$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \\n')
set -x
if [ -n "${{SLURM_JOB_NODELIST_HET_GROUP_1:-}}" ]; then
    export MEGATRON_DPPO_SERVER_HOSTS=$(for node in $(nodes "$SLURM_JOB_NODELIST_HET_GROUP_1"); do
        for task in $(seq {servers}); do address "$node"; done
    done | paste -sd,)
fi
check() {{ {check}; }}
before=$(check) || exit $?
requeue() {{ after=$(check) && [ "$after" != "$before" ] && scontrol requeue "$SLURM_JOB_ID"; }}
trap 'case $? in {saved} | 138) requeue ;; esac' EXIT  # 138: told to stop before it could listen
"""
"""What the batch script does before it starts anything: tell the tasks where they are, look for mistakes, and see to it
that a run which has saved and stopped is queued again, unless it got nowhere."""


def launch(
    config: Config, words: Sequence[str], *, executor: Literal["local", "slurm"], dry_run: bool, detach: bool
) -> int:
    """Launch a run.

    Args:
        config: of the run; ``config.cluster`` says on which machines.
        words: what the command line gave, the file first, for the tasks to read.
        executor: where.
        dry_run: print what would be run, and run nothing.
        detach: do not wait for its end, on Slurm.

    Returns:
        0 if it succeeded, or was submitted; 1 else, and the tasks' logs say why.

    Raises:
        UserError: NeMo-Run or Slurm is not there.
    """
    run = _nemo_run()
    if executor == "slurm" and not dry_run and shutil.which("sbatch") is None:
        problem = "sbatch is not on the path: this machine submits no Slurm jobs"
        raise UserError("--executor", executor, problem, "Launch from a login node, or with --executor local")
    name = Path(config.run.dir).name
    with run.Experiment(name, log_level="WARN") as experiment:
        if executor == "local":
            experiment.add(run.Script(inline=_task("train", words, None)), executor=run.LocalExecutor(), name="train")
        else:
            _add_to_slurm(run, experiment, config, words)
        if dry_run:
            os.environ["COLUMNS"] = "1000"  # the script is to be read by Slurm, and not wrapped
            experiment.dryrun()
            return 0
        experiment.run(detach=detach and executor == "slurm", tail_logs=executor == "local")
        if detach and executor == "slurm":
            return 0
        return 0 if _states_at_the_end(experiment) == {"SUCCEEDED"} else 1


def _states_at_the_end(experiment: Any) -> set[str]:
    """NeMo-Run stops following a task when its log ends, a moment before the task does."""
    while True:
        states = {task["status"].name for task in experiment.status(return_dict=True).values()}
        if not states & {"UNSUBMITTED", "SUBMITTED", "PENDING", "RUNNING"}:
            return states
        time.sleep(1.0)


def _add_to_slurm(run: Any, experiment: Any, config: Config, words: Sequence[str]) -> None:
    cluster = config.cluster
    actors = _slurm(run, config, words, cluster.nodes, ranks_per_node(config))
    train = run.Script(inline=_task("train", words, cluster.container))
    if not cluster.server_nodes:
        experiment.add(train, executor=actors, name="train")
        return
    servers = _slurm(run, config, words, cluster.server_nodes, servers_per_node(config))
    actors.heterogeneous, actors.het_group_indices = True, [0, 1]
    serve = run.Script(inline=_task("serve", words, cluster.container))
    experiment.add([train, serve], executor=[actors, servers], name="train")


def _slurm(run: Any, config: Config, words: Sequence[str], nodes: int, tasks_per_node: int) -> Any:
    cluster = config.cluster
    mounts = [f"{Path.cwd()}:{Path.cwd()}", *cluster.mounts] if cluster.container else []
    return run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        nodes=nodes,
        ntasks_per_node=tasks_per_node,
        gpus_per_node=cluster.gpus_per_node,
        exclusive=True,
        mem="0",
        time=_as_time(cluster.hours),
        signal=f"USR1@{cluster.warn_s:.0f}",
        container_image=cluster.container,
        container_mounts=mounts,
        job_name_prefix="megatron-dppo.",
        # Ranks that have saved end one after the other: the first of them is not to end the rest.
        srun_args=["--cpu-bind=none", "--kill-on-bad-exit=0"],
        setup_lines=_prepare(config, words, mounts),
        tunnel=run.LocalTunnel(job_dir=str(Path(run.config.get_nemorun_home(), "experiments"))),
        packager=run.Packager(),
        wait_time_for_group_job=0,
        monitor_group_job_wait_time=LOOK_S,
        launcher=None,
    )


def _prepare(config: Config, words: Sequence[str], mounts: Sequence[str]) -> str:
    cluster, ranks = config.cluster, config.cluster.nodes * ranks_per_node(config)
    srun = ["srun", *(["--het-group=0"] if cluster.server_nodes else []), "-N1", "-n1", "--ntasks-per-node=1"]
    if cluster.container:
        srun += ["--container-image", cluster.container, "--container-mounts", ",".join(mounts)]
    task = _task("train", [*words, "--check", str(ranks)], cluster.container)
    check = f"{shlex.join([*srun, 'bash', '-c', task])} </dev/null"
    return PREPARE.format(servers=servers_per_node(config), check=check, saved=SAVED)


def ranks_per_node(config: Config) -> int:
    """Ranks on each actor node: a GPU each, but for those of the servers that the run itself starts there.

    Raises:
        UserError: none are left.
    """
    cluster, reserved = config.cluster, gpus_to_reserve(config.rollout)
    left = cluster.gpus_per_node - reserved
    if left < 1 or (reserved and cluster.nodes > 1):
        problem = f"the servers of rollout.launch take {reserved} GPUs of the first of {cluster.nodes} nodes"
        remedy = "Give servers nodes of their own: cluster.server_nodes, with rollout.servers=slurm"
        raise UserError("cluster.gpus_per_node", cluster.gpus_per_node, problem, remedy)
    return left


def servers_per_node(config: Config) -> int:
    """Servers on each server node, as many as its GPUs are enough for.

    Raises:
        UserError: for not a single one.
    """
    gpus, tp = config.cluster.gpus_per_node, config.rollout.launch.tp
    if not isinstance(tp, int) or tp > gpus:
        problem = f"a server has to have {tp} GPUs on one node, which has {gpus}"
        raise UserError("rollout.launch.tp", tp, problem, "Give one number, at most cluster.gpus_per_node")
    return gpus // tp


def _task(command: str, words: Sequence[str], container: str | None) -> str:
    """The shell command of a task. The shell goes away for it, so that signals for the task reach it."""
    python = "python3" if container else sys.executable
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([python, '-m', 'megatron_dppo', command, *words])}"


def _as_time(hours: float) -> str:
    minutes = max(round(60 * hours), 1)
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def _nemo_run() -> Any:
    try:
        import nemo_run
    except ImportError as error:
        remedy = "pip install 'megatron-dppo[nemo-run]'"
        raise UserError("launch", "nemo_run", f"NeMo-Run cannot be imported ({error})", remedy) from None
    return nemo_run
