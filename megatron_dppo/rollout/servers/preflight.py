"""Checks of the settings of rollout servers before one is started. Needs no torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.observe.private import mask_secrets
from megatron_dppo.rollout.servers.launch import (
    SERVER_PYTHON,
    EngineSpec,
    load_engine_spec,
    rank_environment,
    server_urls,
    sync_folder,
    tensor_parallel,
    uses_file_sync,
)

ASK_S = 60.0
"""Timeout in seconds of a look for a package."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def check_launch(config: Config) -> None:
    """Check the variables and flags of servers started by the run.

    Raises:
        UserError: a variable or flag is invalid for every server; names the first at fault.
    """
    launch = config.rollout.launch
    if not config.rollout.served or not launch.count:
        return
    spec = load_engine_spec(config.rollout.engine)
    for entry in launch.env:
        if not VARIABLE.match(entry):
            raise UserError(
                "rollout.launch.env", entry, "is no environment variable", "Write NAME=value"
            )
    for flag in launch.flags:
        if flag.partition("=")[0] in spec.reserved_flags:
            problem = "is set by the run: for all servers, for each server, or as a secret"
            remedy = "Leave it out; see the settings of rollout.launch"
            raise UserError("rollout.launch.flags", flag, problem, remedy)
        if any(part in flag.replace("_", "-") for part in spec.lossy_flags):
            problem = (
                "accepts drafts more often than the policy would sample them, and "
                "log-probabilities do not show it"
            )
            remedy = (
                "Remove it: the engine's default keeps the distribution of sampling without drafts"
            )
            raise UserError("rollout.launch.flags", flag, problem, remedy)


def check_servers(
    config: Config,
    shape: PolicyShape,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Check the settings of servers against the policy and this machine, without a request to a
    server.

    Raises:
        UserError: a setting is wrong; names the first at fault.
    """
    for check in server_checks(config, environ):
        check()
    check_split(config, shape)


def server_checks(
    config: Config, environ: Mapping[str, str] = os.environ
) -> Iterator[Callable[[], object]]:
    """Yield the checks of ``check_servers`` that need no policy."""
    rollout = config.rollout
    if not rollout.served:
        return
    yield partial(server_urls, config, environ)
    if _are_started(config):
        yield partial(_check_environment, config, environ)
    if rollout.launch.count:
        yield partial(check_server_command, config, environ)
    if rollout.colocated:
        yield partial(_check_memory, config)
    if uses_file_sync(rollout):
        yield partial(_check_sync_folder, config)


def _are_started(config: Config) -> bool:
    """Return whether the run or its Slurm job starts servers."""
    return config.rollout.served and bool(
        config.rollout.launch.count or config.rollout.servers == "slurm"
    )


def _check_sync_folder(config: Config) -> None:
    folder = sync_folder(config).absolute()
    # The run creates missing directories below the nearest existing parent.
    place = next(place for place in (folder, *folder.parents) if place.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        problem = f"{place} is no directory that can be written to"
        remedy = "Name a directory that you and the servers share"
        raise UserError("rollout.sync.folder", folder, problem, remedy)


def _check_environment(config: Config, environ: Mapping[str, str]) -> None:
    given = dict(entry.split("=", 1) for entry in config.rollout.launch.env)
    for name, value in rank_environment(config.rollout).items():
        # Trainer ranks set the value unless already set.
        trainer_value = environ.get(name, value)
        if given.get(name, trainer_value) != trainer_value:
            problem = (
                f"the trainer has {name}={trainer_value}, and NCCL requires the same value in "
                "the trainer and the servers"
            )
            remedy = f"Leave it out, or run the trainer with {name}={given[name]}, too"
            raise UserError("rollout.launch.env", f"{name}={given[name]}", problem, remedy)


def check_split(config: Config, shape: PolicyShape) -> None:
    """Check that the policy's heads can be split over the ranks of a server.

    Raises:
        UserError: the ranks of a server do not divide the heads; names the first server at fault.
    """
    if not _are_started(config):
        return
    for tp in tensor_parallel(config.rollout) or (config.rollout.launch.tp,):
        assert isinstance(tp, int)
        # A server with more ranks than key-value heads copies heads.
        shared = shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0
        if shape.heads % tp or not shared:
            heads = f"the policy's {shape.heads} query heads and {shape.kv_heads} key-value heads"
            fit = [n for n in range(1, shape.heads + 1) if shape.heads % n == 0]
            fit = [n for n in fit if shape.kv_heads % n == 0 or n % shape.kv_heads == 0]
            remedy = f"Set it to one of {', '.join(map(str, fit))}"
            raise UserError("rollout.launch.tp", tp, f"does not divide {heads}", remedy)


def _check_memory(config: Config) -> None:
    rollout = config.rollout
    flag, share = load_engine_spec(rollout.engine).memory_flag
    given = {word.partition("=")[0].replace("_", "-") for word in rollout.launch.flags}
    if rollout.launch.count and flag not in given:
        problem = (
            f"has no {flag}: a server would take nearly all of the GPU that it shares with "
            "the trainer"
        )
        remedy = (
            f"Add {flag} with {share}; megatron-dppo plan prints the memory that the trainer keeps"
        )
        flags = "rollout.launch.flags"
        raise UserError(flags, mask_secrets(flags, [*rollout.launch.flags]), problem, remedy)
    # Most checks need no torch.
    import torch

    if not torch.cuda.is_available():
        remedy = "Set it to false: without GPUs nothing is shared"
        raise UserError("rollout.colocated", "true", "this machine has no CUDA", remedy)


def check_server_command(config: Config, environ: Mapping[str, str]) -> None:
    command = config.rollout.launch.command
    spec = load_engine_spec(config.rollout.engine)
    python = environ.get(SERVER_PYTHON)
    # Same order of precedence as in launch.base_command.
    if command is None and python:
        _check_python(python, spec)
    elif command is None and not spec.installed:
        problem = f"{config.rollout.engine} is not installed in this environment"
        ways = (
            f"{SERVER_PYTHON}=/ITS/bin/python, or "
            f"rollout.launch.command=[/ITS/bin/python,-m,{spec.module}]"
        )
        remedy = f"Install it in a separate environment (docs/gpu.md), and set the variable {ways}"
        raise UserError("rollout.launch.command", "null", problem, remedy)
    elif command is not None and (not command or shutil.which(command[0]) is None):
        name = command[0] if command else ""
        remedy = "Begin it with the path of an interpreter or a program"
        raise UserError("rollout.launch.command", name, "is no program that can be run", remedy)


def _check_python(python: str, spec: EngineSpec) -> None:
    package = spec.module.partition(".")[0]
    code = (
        "import sys; from importlib.util import find_spec; "
        f"sys.exit(find_spec({package!r}) is None)"
    )
    remedy = (
        f"Name an interpreter that has {package}, by a path that exists on every node with servers"
    )
    try:
        found = subprocess.run(
            [python, "-c", code], capture_output=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(SERVER_PYTHON, python, f"cannot be run ({error})", remedy) from error
    if found.returncode:
        raise UserError(SERVER_PYTHON, python, f"has no package {package}", remedy)
