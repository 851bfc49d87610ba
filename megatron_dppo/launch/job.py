"""``megatron-dppo launch CONFIG``: a run as a NeMo-Run experiment, or as a script for ``sbatch`` or
``bash``.

The job on Slurm is ``scripts/slurm/job.sh`` in both cases.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError, install_command
from megatron_dppo.parallel.layout import resolve_layout
from megatron_dppo.process.streams import print_message
from megatron_dppo.rollout.servers.launch import HOSTS, OVERRIDE, SERVER_PYTHON, count_reserved_gpus
from megatron_dppo.rollout.servers.preflight import check_server_command
from megatron_dppo.trainer.preflight import find_mistakes, run_checks

PACKAGE = Path(__file__).parents[1]
EXAMPLES = PACKAGE / "examples" if (PACKAGE / "examples").is_dir() else PACKAGE.parent
"""Folder with ``configs`` and ``scripts/slurm``: in an installed package, or the checkout."""
JOB = EXAMPLES / "scripts/slurm/job.sh"


def render_local_script(words: Sequence[str]) -> str:
    """Return a script that trains on this machine, in this folder, with ``words`` of the command
    line."""
    command = shlex.join([sys.executable, "-m", "megatron_dppo", "train", *words])
    return f"#!/usr/bin/env bash\n{enter_folder()}\nexec {command}\n"


def render_slurm_script(config: Config, words: Sequence[str]) -> str:
    """Return a script for ``sbatch`` that requests the machines of ``cluster.*``, then runs
    ``job.sh``.

    Raises:
        UserError: the nodes have too few GPUs for ranks or servers.
    """
    cluster = config.cluster
    of_all = {"account": cluster.account, "partition": cluster.partition}
    places = [f"--{name}={value}" for name, value in of_all.items() if value]
    name = re.sub(r"[^\w.-]", "-", Path(config.run.dir).name)
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name=megatron-dppo.{name} --output=%x-%j.log --open-mode=append",
        f"#SBATCH --time={format_slurm_time(cluster.hours)} "
        f"--signal=B:USR1@{cluster.stop_before_limit_s:.0f} --requeue",
        _render_component(
            cluster.nodes, count_ranks_per_node(config), cluster.gpus_per_node, places
        ),
    ]
    if cluster.server_nodes:
        servers = _render_component(
            cluster.server_nodes, count_servers_per_node(config), cluster.gpus_per_node, places
        )
        lines += ["#SBATCH hetjob", servers]
    variables = build_job_environment(config)
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    job = shlex.join(["bash", str(JOB), *sort_job_words(words)])
    return "\n".join([*lines, enter_folder(), f"exec {job}"]) + "\n"


def _render_component(nodes: int, tasks: int, gpus: int, places: Sequence[str]) -> str:
    sizes = (
        f"--nodes={nodes}",
        f"--ntasks-per-node={tasks}",
        f"--gpus-per-node={gpus}",
        "--exclusive",
        "--mem=0",
    )
    return " ".join(["#SBATCH", *sizes, *places])


def enter_folder() -> str:
    """Return a script's line that enters the current folder."""
    return f"cd {shlex.quote(str(Path.cwd()))} || exit 2"


def sort_job_words(words: Sequence[str]) -> list[str]:
    """Return the words for ``job.sh``, which takes the first word for the file."""
    return sorted(words, key=lambda word: "=" in word and not Path(word).is_file())


def build_job_environment(config: Config) -> dict[str, str]:
    """Return the variables that ``job.sh`` reads."""
    cluster = config.cluster
    variables = {"CONTAINER": cluster.container or "", "CONTAINER_MOUNTS": ",".join(cluster.mounts)}
    if python := os.environ.get(SERVER_PYTHON):
        variables |= {SERVER_PYTHON: python}
    return variables if cluster.container else {**variables, "PYTHON": sys.executable}


def count_ranks_per_node(config: Config) -> int:
    """Return the number of ranks on each actor node: the GPUs that the run's own servers leave.

    Raises:
        UserError: no GPU is left for a rank, or the servers share the first of several nodes.
    """
    cluster = config.cluster
    reserved = count_reserved_gpus(config.rollout)
    left = cluster.gpus_per_node - reserved
    # Nodes of one job component have equally many ranks, but only the first node has servers.
    if left < 1 or (reserved and cluster.nodes > 1):
        problem = (
            f"the servers of rollout.launch take {reserved} GPUs of the first of "
            f"{cluster.nodes} nodes"
        )
        remedy = "Give servers nodes of their own: cluster.server_nodes, with rollout.servers=slurm"
        raise UserError("cluster.gpus_per_node", cluster.gpus_per_node, problem, remedy)
    return left


def count_servers_per_node(config: Config) -> int:
    """Return the number of servers on each server node: the most that fit.

    Raises:
        UserError: a node has too few GPUs for one server, or ``rollout.launch.tp`` is a list.
    """
    gpus = config.cluster.gpus_per_node
    tp = config.rollout.launch.tp
    if not isinstance(tp, int) or tp > gpus:
        problem = f"a server has to have {tp} GPUs on one node, which has {gpus}"
        raise UserError(
            "rollout.launch.tp", tp, problem, "Give one number, at most cluster.gpus_per_node"
        )
    return gpus // tp


def format_slurm_time(hours: float) -> str:
    """Return the time for ``--time``, at least one minute."""
    minutes = max(round(60 * hours), 1)
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


EXEC_JOB = """
# The job is this script. It starts its own steps, and ends the job:
# no line below is reached.
unset SLURM_UNBUFFEREDIO  # with it, words of several ranks stand in one line
{enter}
exec bash {job}
"""


def launch(
    config: Config,
    words: Sequence[str],
    *,
    executor: Literal["local", "slurm"],
    dry_run: bool,
    detach: bool,
) -> int:
    """Launch a run.

    Args:
        config: configuration of the run; ``config.cluster`` defines the machines.
        words: words of the command line, a file and overrides, which the job reads again.
        executor: ``local`` for this machine, ``slurm`` for a Slurm cluster.
        dry_run: print the job as a script for ``sbatch`` or ``bash``; needs no NeMo-Run and no
            Slurm.
        detach: on Slurm, return without waiting for the end of the run.

    Returns:
        0 if the run succeeded or was submitted; else 1, and the log has the reason.

    Raises:
        UserError: NeMo-Run or Slurm is missing; or, on Slurm, the layout does not divide the
            ranks.
    """
    on_slurm = executor == "slurm"
    if on_slurm and not dry_run and shutil.which("sbatch") is None:
        problem = "sbatch is not on the path: this machine submits no Slurm jobs"
        raise UserError(
            "--executor", executor, problem, "Launch from a login node, or with --executor local"
        )
    # Before submission, because a job would fail only after a wait for nodes.
    if on_slurm:
        resolve_layout(config.layout, config.cluster.nodes * count_ranks_per_node(config))
    if dry_run:
        for note in _list_local_mistakes(config):
            print_message(f"note: {note}")
        print(
            render_slurm_script(config, words) if on_slurm else render_local_script(words), end=""
        )
        return 0
    run = _import_nemo_run()
    with run.Experiment(Path(config.run.dir).name, log_level="WARN") as experiment:
        if on_slurm:
            _add_to_slurm(run, experiment, config, words)
        else:
            train = run.Script(inline=render_local_script(words).partition("\n")[2])
            experiment.add(train, executor=run.LocalExecutor(), name="train")
        experiment.run(detach=detach and on_slurm, tail_logs=not on_slurm)
        if detach and on_slurm:
            return 0
        return 0 if _wait_for_final_states(experiment) == {"SUCCEEDED"} else 1


def _list_local_mistakes(config: Config) -> Iterator[str]:
    """Describe missing files of the run on this machine: model, data, servers' environment."""
    environ = assume_server_nodes(config, os.environ)
    servers = []
    # Servers with nodes of their own are checked there, and in a container by the image.
    if config.rollout.servers == "slurm" and not config.cluster.container:
        servers = [partial(check_server_command, config, environ)]
    try:
        for mistake in (*run_checks(servers), *find_mistakes(config, "train", environ)):
            yield f"on this machine, {mistake}"
    except ModuleNotFoundError as error:
        yield f"{error.name} is not installed here, so that not everything was checked"


def assume_server_nodes(config: Config, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment, with names for ``cluster.server_nodes`` if no Slurm job names
    nodes."""
    nodes = (
        config.cluster.server_nodes
        if config.rollout.served and config.rollout.servers == "slurm"
        else 0
    )
    if not nodes or {OVERRIDE, HOSTS, "SLURM_JOB_ID"} & environ.keys():
        return environ
    print_message(
        f"note: no Slurm job here: cluster.server_nodes = {nodes} is assumed; the job checks its "
        "own nodes for servers"
    )
    return {**environ, HOSTS: ",".join(f"node{number}" for number in range(nodes))}


def _wait_for_final_states(experiment: Any) -> set[str]:
    # Poll, because NeMo-Run stops following a task at the end of the log, a moment too early.
    while True:
        states = {task["status"].name for task in experiment.status(return_dict=True).values()}
        if not states & {"UNSUBMITTED", "SUBMITTED", "PENDING", "RUNNING"}:
            return states
        time.sleep(1.0)


def _add_to_slurm(run: Any, experiment: Any, config: Config, words: Sequence[str]) -> None:
    cluster = config.cluster
    words = sort_job_words(words)
    job = run.Script(path=str(JOB), args=words, entrypoint="bash")
    actors = _make_slurm_executor(run, config, words, cluster.nodes, count_ranks_per_node(config))
    if not cluster.server_nodes:
        experiment.add(job, executor=actors, name="train")
        return
    servers = _make_slurm_executor(
        run, config, words, cluster.server_nodes, count_servers_per_node(config)
    )
    actors.heterogeneous = True
    actors.het_group_indices = [0, 1]
    # NeMo-Run requires a task for each component of the job.
    experiment.add([job, job], executor=[actors, servers], name="train")


def _make_slurm_executor(
    run: Any,
    config: Config,
    words: Sequence[str],
    nodes: int,
    tasks_per_node: int,
) -> Any:
    cluster = config.cluster
    return run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        nodes=nodes,
        ntasks_per_node=tasks_per_node,
        gpus_per_node=cluster.gpus_per_node,
        exclusive=True,
        mem="0",
        time=format_slurm_time(cluster.hours),
        signal=f"B:USR1@{cluster.stop_before_limit_s:.0f}",
        # NeMo-Run replaces /nemo_run by the experiment's folder, and shows log* from this folder.
        additional_parameters={"output": "/nemo_run/log-%x_%j.out", "open_mode": "append"},
        env_vars={
            name: shlex.quote(value) for name, value in build_job_environment(config).items()
        },
        job_name_prefix="megatron-dppo.",
        setup_lines=EXEC_JOB.format(enter=enter_folder(), job=shlex.join([str(JOB), *words])),
        tunnel=run.LocalTunnel(job_dir=str(Path(run.config.get_nemorun_home(), "experiments"))),
        packager=run.Packager(),
        launcher=None,
    )


def _import_nemo_run() -> Any:
    try:
        import nemo_run
    except ImportError as error:
        remedy = f"Install it: {install_command('nemo-run')}"
        raise UserError(
            "launch", "nemo_run", f"NeMo-Run cannot be imported ({error})", remedy
        ) from None
    return nemo_run
