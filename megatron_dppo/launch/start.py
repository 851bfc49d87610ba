"""Start a command: as ranks of this machine, or as one rank that torchrun or srun started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from megatron_dppo.bridge.checkpoint_folder import find_latest_step
from megatron_dppo.config import Config, LayoutConfig
from megatron_dppo.config.types import TRAINING, Command
from megatron_dppo.errors import MistakesError, UserError
from megatron_dppo.launch.job import assume_server_nodes, count_servers_per_node
from megatron_dppo.launch.processes import FirstFailure, run_ranks
from megatron_dppo.launch.rank import LAUNCHER, NO_OPTIONS, Options, rank_main, set_environment
from megatron_dppo.parallel.layout import format_layout, resolve_layout
from megatron_dppo.parallel.meeting import LOOPBACK
from megatron_dppo.process.files import check_not_held, raise_file_limit
from megatron_dppo.process.lifetime import MARKER
from megatron_dppo.process.streams import ignore_broken_streams, print_message
from megatron_dppo.rl.pruning.draw import describe_bound
from megatron_dppo.rollout.servers.launch import count_reserved_gpus
from megatron_dppo.settings import as_yaml
from megatron_dppo.trainer.preflight import (
    find_mistakes,
    list_function_checks,
    prepare_data,
    run_checks,
    run_preflight,
    tokenize_data,
)

MOST_WITHOUT_GPUS = 256
"""Largest number of ranks on one machine without a GPU.

A larger layout is meant for a cluster, and would exhaust the machine's memory.
"""


def run(command: Command, config: Config, options: Options = NO_OPTIONS) -> int:
    """Run a command to its end and return the exit code of the process.

    Args:
        command: key of ``JOBS``.
        config: identical on every rank.
        options: named arguments of the command, in addition to the settings.

    Raises:
        UserError: if a check before the start of the ranks fails.
    """
    prepare_environment(config)
    # torchrun or srun has started all ranks; otherwise this process starts the ranks.
    if is_rank():
        return rank_main(
            command, config, options, prepare=lambda: _check_before_run(command, config)
        )
    ranks = resolve_rank_count(command, config)
    if ranks == 1:
        os.environ.update(get_single_rank_environment())
        try:
            return rank_main(command, config, options)
        except KeyboardInterrupt:
            _print_resume_hint(command, config)
            raise
    return start_ranks(command, config, ranks, options=options)


def prepare_environment(config: Config) -> None:
    """Prepare a process that may become a rank, before any code has CUDA count the GPUs."""
    ignore_broken_streams()
    raise_file_limit()
    if is_srun_task(os.environ):
        os.environ.update(build_torch_environment(os.environ))
    set_environment(config)


def is_rank() -> bool:
    """Return whether torchrun, srun or the launcher started this process."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def resolve_rank_count(command: Command, config: Config) -> int:
    """Run the checks of a command, then return the number of ranks to start on this machine.

    Raises:
        UserError: about the first problem that a check finds.
    """
    run_preflight(config, command)
    if command in TRAINING:
        check_not_held(Path(config.run.dir))
    ranks = count_ranks(config.layout, reserved=count_reserved_gpus(config.rollout))
    resolve_layout(config.layout, ranks)
    return ranks


def _check_before_run(command: Command, config: Config) -> None:
    run_preflight(config, command)
    resolve_layout(config.layout, int(os.environ["WORLD_SIZE"]))


def count_ranks(layout: LayoutConfig, *, reserved: int = 0) -> int:
    """Return the number of ranks of a layout on this machine.

    Args:
        reserved: GPUs reserved for the servers that the run starts, if this machine has GPUs.

    Raises:
        UserError: if ranks and servers need more GPUs than this machine has, or without GPUs are
            more than ``MOST_WITHOUT_GPUS``.
    """
    least = layout.min_ranks
    gpus = count_gpus()
    # Without ``layout.dp`` the number of replicas is the largest for which the GPUs suffice.
    largest = least * max((gpus - reserved) // least, 1)
    ranks = layout.tp * layout.pp * layout.cp * (layout.dp or 0) or largest
    if ranks + reserved > (gpus or MOST_WITHOUT_GPUS):
        servers = f" and its servers {reserved}" if reserved else ""
        problem = f"needs {ranks} GPUs{servers}, and this machine has {gpus}"
        remedy = "Lower the layout, or start the ranks on several machines with torchrun or srun"
        raise UserError("layout", format_layout(layout), problem, remedy)
    return ranks


def start_ranks(
    job: str,
    config: Config,
    ranks: int,
    on_poll: Callable[[], None] = lambda: None,
    on_failure: Callable[[str], object] = lambda text: None,
    options: Options = NO_OPTIONS,
) -> int:
    """Run a job on ranks of this machine, and return when all ranks have ended.

    - A rank that fails, or a signal that ends this process, ends all ranks.
    - The signal that requests a stop of the run is forwarded to the ranks.

    Args:
        job: a command, or ``module:function`` for a function that takes a Config.
        on_poll: function that this process calls several times a second while the ranks run.
        on_failure: function that is called with the printed reason if a rank fails.
        options: named arguments of the job in addition to the Config, JSON-able.

    Returns:
        0; or the exit code of the rank that failed first; or 128 + the signal that ended a rank or
        this process.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-dppo-") as folder:
        marker = Path(folder, "failure")
        settings = Path(folder, "config.yaml")
        # Ranks read the configuration from a file, because they are separate processes.
        settings.write_text(as_yaml(config), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "megatron_dppo.launch.rank",
            job,
            str(settings),
            json.dumps(options),
        ]
        threads = os.environ.get("OMP_NUM_THREADS", str(count_usable_cores() // ranks or 1))
        variables = {MARKER: str(marker), LAUNCHER: str(os.getpid()), "OMP_NUM_THREADS": threads}
        failure = FirstFailure(marker)
        code = run_ranks(command, {**os.environ, **variables}, ranks, failure, on_poll)
        if code:
            on_failure(failure.get_message())
    if code == 128 + signal.SIGINT:
        _print_resume_hint(job, config)
    return code


def _print_resume_hint(job: str, config: Config) -> None:
    """Print, after Ctrl-C, the step of the last checkpoint, and the signal that saves a run."""
    if job != "train":
        return
    checkpoints = Path(config.run.dir) / "checkpoints"
    step = find_latest_step(checkpoints)
    every = config.run.checkpoint_every
    if step is None:
        kept = (
            f"before its first checkpoint (run.checkpoint_every = {every}): the same command "
            "starts again from step 0"
        )
    else:
        kept = (
            f"the same command resumes from step {step} of {config.run.steps}, the last "
            f"checkpoint in {checkpoints}"
        )
    print_message(f"interrupted; {kept}. To save before the end, send SIGUSR1 instead of Ctrl-C")


def get_single_rank_environment() -> dict[str, str]:
    group = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": "0",
    }
    return group | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(count_usable_cores()))}


def count_usable_cores() -> int:
    """Return the number of usable cores, by CPU affinity and container quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        most, period = quota.read_text().split()
        if most != "max":
            cores = min(cores, round(int(most) / int(period)) or 1)
    return cores


def count_gpus() -> int:
    # Imported late, because torch takes seconds to import.
    import torch

    return torch.cuda.device_count()


def check(config: Config, command: Command, *, ranks: int = 0) -> str:
    """Return one line for job scripts, ``RUN.DIR: 30 of 100 steps are done``, if all checks pass.

    Args:
        ranks: number of ranks to start; 0 if the layout determines the number.

    Raises:
        MistakesError: lists all mistakes that can be checked independently.
    """
    environ = assume_server_nodes(config, os.environ)
    found = [*find_mistakes(config, command, environ)]
    if environ is not os.environ:
        found += run_checks([partial(count_servers_per_node, config)], earlier=found)
    # Keep the standard output for the result, because imported modules may print.
    with redirect_stdout(sys.stderr):
        found += run_checks(list_function_checks(config, command), earlier=found)
    if ranks:
        found += run_checks([partial(resolve_layout, config.layout, ranks)], earlier=found)
    if not found:
        found += run_checks(
            [partial(prepare_data, config, command), partial(tokenize_data, config, command)]
        )
    if found:
        raise MistakesError(found)
    if command == "train" and (note := describe_bound(config.pruning)):
        print_message(f"note: {note}")
    done = find_latest_step(Path(config.run.dir) / "checkpoints") or 0
    return f"{config.run.dir}: {done} of {config.run.steps} steps are done"


FIRST_PORT = 20000
PORTS = 20000


def is_srun_task(environ: Mapping[str, str]) -> bool:
    """Return whether this process is one of several tasks of a Slurm step."""
    # Only the step's variables are conclusive: a batch script also has SLURM_PROCID and
    # SLURM_NTASKS.
    return "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def build_torch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a Slurm task for torch, without variables that are already set."""
    job = int(environ["SLURM_JOB_ID"])
    step = int(environ.get("SLURM_STEP_ID", "0"))
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        # The port depends on job and step, so that two jobs on one node use different ports.
        "MASTER_PORT": str(FIRST_PORT + (job * 17 + step) % PORTS),
        "OMP_NUM_THREADS": str(_count_task_cores(environ)),
    }
    if "MASTER_ADDR" not in environ:
        variables["MASTER_ADDR"] = _first_host(environ)
    return {name: value for name, value in variables.items() if name not in environ}


def _count_task_cores(environ: Mapping[str, str]) -> int:
    """Return the cores of the node per task, at least 1."""
    # Read the first number of a list such as 8(x4),2.
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    tasks = int(listed.partition(",")[0].partition("(")[0])
    return int(environ.get("SLURM_CPUS_ON_NODE", "1")) // tasks or 1


def _first_host(environ: Mapping[str, str]) -> str:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if nodes and "[" not in nodes and "," not in nodes:
        return nodes
    if nodes and shutil.which("scontrol"):
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
        return listed.stdout.split()[0]
    return environ["SLURM_LAUNCH_NODE_IPADDR"]
