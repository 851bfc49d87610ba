"""``megatron-dppo launch CONFIG``: a run as a NeMo-Run experiment, on this machine or on Slurm.

On Slurm the job is ``job.sh`` beside this file, as it is under ``sbatch``: NeMo-Run asks for the machines, submits it,
and keeps its log.
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
from megatron_dppo.rollout.servers.launch import gpus_to_reserve

JOB = Path(__file__).with_name("job.sh")
EXEC_JOB = """
# The job is this script. It starts its own steps, and ends the job: nothing below this line is reached.
unset SLURM_UNBUFFEREDIO  # with it, words of several ranks stand in one line
cd {folder} || exit 2
exec bash {job}
"""


def launch(
    config: Config, words: Sequence[str], *, executor: Literal["local", "slurm"], dry_run: bool, detach: bool
) -> int:
    """Launch a run.

    Args:
        config: of the run; ``config.cluster`` says on which machines.
        words: what the command line gave, a file and overrides, for the job to read.
        executor: where.
        dry_run: print what would be run, and run nothing.
        detach: do not wait for its end, on Slurm.

    Returns:
        0 if it succeeded, or was submitted; 1 else, and the log says why.

    Raises:
        UserError: NeMo-Run or Slurm is not there.
    """
    run = _nemo_run()
    on_slurm = executor == "slurm"
    if on_slurm and not dry_run and shutil.which("sbatch") is None:
        problem = "sbatch is not on the path: this machine submits no Slurm jobs"
        raise UserError("--executor", executor, problem, "Launch from a login node, or with --executor local")
    with run.Experiment(Path(config.run.dir).name, log_level="WARN") as experiment:
        if on_slurm:
            _add_to_slurm(run, experiment, config, words)
        else:
            command = shlex.join([sys.executable, "-m", "megatron_dppo", "train", *words])
            train = run.Script(inline=f"cd {shlex.quote(str(Path.cwd()))} && exec {command}")
            experiment.add(train, executor=run.LocalExecutor(), name="train")
        if dry_run:
            os.environ["COLUMNS"] = "1000"  # the script is to be read by Slurm, and not wrapped
            experiment.dryrun()
            return 0
        experiment.run(detach=detach and on_slurm, tail_logs=not on_slurm)
        return 0 if (detach and on_slurm) or _states_at_the_end(experiment) == {"SUCCEEDED"} else 1


def _states_at_the_end(experiment: Any) -> set[str]:
    """NeMo-Run stops following a task when its log ends, a moment before the task does."""
    while True:
        states = {task["status"].name for task in experiment.status(return_dict=True).values()}
        if not states & {"UNSUBMITTED", "SUBMITTED", "PENDING", "RUNNING"}:
            return states
        time.sleep(1.0)


def _add_to_slurm(run: Any, experiment: Any, config: Config, words: Sequence[str]) -> None:
    cluster = config.cluster
    # The job script takes its first word for the file.
    words = sorted(words, key=lambda word: "=" in word and not Path(word).is_file())
    job = run.Script(path=str(JOB), args=list(words), entrypoint="bash")
    actors = _slurm(run, config, words, cluster.nodes, ranks_per_node(config))
    if not cluster.server_nodes:
        experiment.add(job, executor=actors, name="train")
        return
    servers = _slurm(run, config, words, cluster.server_nodes, servers_per_node(config))
    actors.heterogeneous, actors.het_group_indices = True, [0, 1]
    experiment.add([job, job], executor=[actors, servers], name="train")  # it wants a task for each component


def _slurm(run: Any, config: Config, words: Sequence[str], nodes: int, tasks_per_node: int) -> Any:
    cluster = config.cluster
    told = {"CONTAINER": cluster.container or "", "CONTAINER_MOUNTS": ",".join(cluster.mounts)}
    if not cluster.container:
        told["PYTHON"] = sys.executable
    return run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        nodes=nodes,
        ntasks_per_node=tasks_per_node,
        gpus_per_node=cluster.gpus_per_node,
        exclusive=True,
        mem="0",
        time=_as_time(cluster.hours),
        signal=f"B:USR1@{cluster.warn_s:.0f}",
        # NeMo-Run puts the experiment's folder in the place of /nemo_run, and shows the log* that it finds there.
        additional_parameters={"output": "/nemo_run/log-%x_%j.out", "open_mode": "append"},
        env_vars={name: shlex.quote(value) for name, value in told.items()},
        job_name_prefix="megatron-dppo.",
        setup_lines=EXEC_JOB.format(folder=shlex.quote(str(Path.cwd())), job=shlex.join([str(JOB), *words])),
        tunnel=run.LocalTunnel(job_dir=str(Path(run.config.get_nemorun_home(), "experiments"))),
        packager=run.Packager(),
        launcher=None,
    )


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
