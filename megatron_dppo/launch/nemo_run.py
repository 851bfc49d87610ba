"""``megatron-dppo launch CONFIG``: a run as a NeMo-Run experiment, on this machine or on Slurm.

On Slurm the job is ``job.sh`` beside this file, as it is under ``sbatch``: NeMo-Run asks for the machines, submits it,
and keeps its log.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.launch.job_script import (
    JOB,
    enter_folder,
    job_environment,
    job_words,
    local_script,
    ranks_per_node,
    servers_per_node,
    slurm_script,
    slurm_time,
)
from megatron_dppo.parallel.layout import resolve_layout

EXEC_JOB = """
# The job is this script. It starts its own steps, and ends the job: nothing below this line is reached.
unset SLURM_UNBUFFEREDIO  # with it, words of several ranks stand in one line
{enter}
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
        dry_run: print the same job as a script for ``sbatch`` or ``bash``, and run nothing.
        detach: do not wait for its end, on Slurm.

    Returns:
        0 if it succeeded, or was submitted; 1 else, and the log says why.

    Raises:
        UserError: NeMo-Run or Slurm is not there, which a dry run does not need; on Slurm also, the layout does not
            divide the ranks of ``cluster.nodes``.
    """
    on_slurm = executor == "slurm"
    if on_slurm and not dry_run and shutil.which("sbatch") is None:
        problem = "sbatch is not on the path: this machine submits no Slurm jobs"
        raise UserError("--executor", executor, problem, "Launch from a login node, or with --executor local")
    if on_slurm:  # a job would wait for its nodes to be told so
        resolve_layout(config.layout, config.cluster.nodes * ranks_per_node(config))
    if dry_run:
        print(slurm_script(config, words) if on_slurm else local_script(words), end="")
        return 0
    run = _nemo_run()
    with run.Experiment(Path(config.run.dir).name, log_level="WARN") as experiment:
        if on_slurm:
            _add_to_slurm(run, experiment, config, words)
        else:
            train = run.Script(inline=local_script(words).partition("\n")[2])
            experiment.add(train, executor=run.LocalExecutor(), name="train")
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
    words = job_words(words)
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
    return run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        nodes=nodes,
        ntasks_per_node=tasks_per_node,
        gpus_per_node=cluster.gpus_per_node,
        exclusive=True,
        mem="0",
        time=slurm_time(cluster.hours),
        signal=f"B:USR1@{cluster.warn_s:.0f}",
        # NeMo-Run puts the experiment's folder in the place of /nemo_run, and shows the log* that it finds there.
        additional_parameters={"output": "/nemo_run/log-%x_%j.out", "open_mode": "append"},
        env_vars={name: shlex.quote(value) for name, value in job_environment(config).items()},
        job_name_prefix="megatron-dppo.",
        setup_lines=EXEC_JOB.format(enter=enter_folder(), job=shlex.join([str(JOB), *words])),
        tunnel=run.LocalTunnel(job_dir=str(Path(run.config.get_nemorun_home(), "experiments"))),
        packager=run.Packager(),
        launcher=None,
    )


def _nemo_run() -> Any:
    try:
        import nemo_run
    except ImportError as error:
        remedy = "Install it: pip install 'megatron-dppo[nemo-run]'"
        raise UserError("launch", "nemo_run", f"NeMo-Run cannot be imported ({error})", remedy) from None
    return nemo_run
