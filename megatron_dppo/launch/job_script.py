"""A run as a script that is run as it is: by ``sbatch`` on Slurm, by ``bash`` on this machine."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.servers.launch import gpus_to_reserve

JOB = Path(__file__).with_name("job.sh")


def local_script(words: Sequence[str]) -> str:
    """A script that trains on this machine, in this folder.

    Args:
        words: of the command line, a file and overrides.
    """
    command = shlex.join([sys.executable, "-m", "megatron_dppo", "train", *words])
    return f"#!/usr/bin/env bash\n{enter_folder()}\nexec {command}\n"


def slurm_script(config: Config, words: Sequence[str]) -> str:
    """A script for ``sbatch``: the machines that ``cluster.*`` names, then ``job.sh``.

    Args:
        config: of the run.
        words: of the command line, a file and overrides.

    Raises:
        UserError: the nodes' GPUs are too few for ranks or servers.
    """
    cluster = config.cluster
    of_all = {"account": cluster.account, "partition": cluster.partition}
    places = [f"--{name}={value}" for name, value in of_all.items() if value]
    name = re.sub(r"[^\w.-]", "-", Path(config.run.dir).name)
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name=megatron-dppo.{name} --output=%x-%j.log --open-mode=append",
        f"#SBATCH --time={slurm_time(cluster.hours)} --signal=B:USR1@{cluster.warn_s:.0f} --requeue",
        _component(cluster.nodes, ranks_per_node(config), cluster.gpus_per_node, places),
    ]
    if cluster.server_nodes:
        servers = _component(cluster.server_nodes, servers_per_node(config), cluster.gpus_per_node, places)
        lines += ["#SBATCH hetjob", servers]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job_environment(config).items()]
    job = shlex.join(["bash", str(JOB), *job_words(words)])
    return "\n".join([*lines, enter_folder(), f"exec {job}"]) + "\n"


def _component(nodes: int, tasks: int, gpus: int, places: Sequence[str]) -> str:
    sizes = (f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--gpus-per-node={gpus}", "--exclusive", "--mem=0")
    return " ".join(["#SBATCH", *sizes, *places])


def enter_folder() -> str:
    """The line that enters the folder which launches."""
    return f"cd {shlex.quote(str(Path.cwd()))} || exit 2"


def job_words(words: Sequence[str]) -> list[str]:
    """The words for ``job.sh``, which takes the first one for the file."""
    return sorted(words, key=lambda word: "=" in word and not Path(word).is_file())


def job_environment(config: Config) -> dict[str, str]:
    """Variables that ``job.sh`` reads."""
    cluster = config.cluster
    told = {"CONTAINER": cluster.container or "", "CONTAINER_MOUNTS": ",".join(cluster.mounts)}
    return told if cluster.container else {**told, "PYTHON": sys.executable}


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


def slurm_time(hours: float) -> str:
    """As ``--time`` takes it, a minute at least."""
    minutes = max(round(60 * hours), 1)
    return f"{minutes // 60:02}:{minutes % 60:02}:00"
