"""Checks of the settings of rollout servers before one is started. Needs no torch."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.rollout.servers.launch import (
    rank_environment,
    server_urls,
    spec_of,
    sync_folder,
    syncs_by_files,
    tensor_parallel,
)

LAST_PORT = 65535
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def check_rollout(config: Config) -> None:
    """Hold the settings of rollouts against each other.

    Raises:
        UserError: for the first contradiction.
    """
    _check_custom(config)
    if not config.rollout.served:
        _check_local(config)
        return
    _check_source(config)
    if config.rollout.sync.adapter:
        _check_adapter(config)
    _check_sharing(config)
    _check_patience(config)
    if config.rollout.launch.count:
        _check_launch(config)


def check_servers(config: Config, shape: PolicyShape, environ: Mapping[str, str] = os.environ) -> None:
    """Hold the settings of servers against the policy and this machine. Whether given servers answer is found later.

    Raises:
        UserError: for the first thing that is wrong.
    """
    rollout = config.rollout
    if not rollout.served:
        return
    server_urls(config, environ)
    if rollout.launch.count or rollout.servers == "slurm":
        _check_both_ends(config, environ)
        _check_split(config, shape)
    if rollout.sync.adapter and shape.experts:
        _check_experts(config)
    if rollout.launch.count:
        _check_command(config)
    if rollout.colocated:
        _check_memory(config)
    if syncs_by_files(rollout):
        folder = sync_folder(config).absolute()
        place = next(place for place in (folder, *folder.parents) if place.exists())
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            problem = f"{place} is no directory that can be written to"
            raise UserError("rollout.sync.folder", folder, problem, "Name one that you and the servers share")


def _check_custom(config: Config) -> None:
    rollout = config.rollout
    if rollout.custom_generate is not None and not (rollout.served and spec_of(rollout.engine).custom_generate):
        problem = f"speaks to SGLang servers, and rollout.engine is {rollout.engine}"
        remedy = "Set rollout.engine=sglang, or leave it out"
        raise UserError("rollout.custom_generate", rollout.custom_generate, problem, remedy)
    if rollout.custom_generate is not None and config.loss.replay_routing == "rollout":
        problem = f"wants to know which experts made every token, and {rollout.custom_generate} returns tokens alone"
        remedy = "Set it to update or none, or write the function as a rollout.conversation"
        raise UserError("loss.replay_routing", "rollout", problem, remedy)
    if rollout.conversation is not None and rollout.custom_generate is not None:
        problem = f"and rollout.custom_generate = {rollout.custom_generate} both have the conversations"
        raise UserError("rollout.conversation", rollout.conversation, problem, "Leave one of the two out")
    own = rollout.engine_function
    if own is not None and rollout.served:
        problem = f"makes the engine in the trainer's own processes, and rollout.engine is {rollout.engine}"
        raise UserError("rollout.engine_function", own, problem, "Set rollout.engine=local, or leave it out")
    if own is not None and rollout.conversation is not None:
        problem = f"has the local engine for the policy's turns, and rollout.engine_function = {own} takes its place"
        raise UserError("rollout.conversation", rollout.conversation, problem, "Leave one of the two out")


def _check_local(config: Config) -> None:
    rollout = config.rollout
    for setting, value, given in (
        ("rollout.servers", rollout.servers, bool(rollout.servers)),
        ("rollout.launch.count", rollout.launch.count, rollout.launch.count > 0),
        ("rollout.colocated", "true", rollout.colocated),
        ("rollout.sync.adapter", "true", rollout.sync.adapter),
    ):
        if given:
            problem = "is for servers, and rollout.engine is local: the trainer's own processes generate, in turn"
            raise UserError(setting, value, problem, "Leave it out, or set rollout.engine=sglang or vllm")
    samples = rollout.samples_per_prompt
    if samples > rollout.max_batch and rollout.engine_function is None:
        problem = f"cannot hold the rollout.samples_per_prompt = {samples} of a single prompt"
        raise UserError("rollout.max_batch", rollout.max_batch, problem, f"Raise it to {samples} or more")


def _check_source(config: Config) -> None:
    rollout, launch = config.rollout, config.rollout.launch
    if rollout.servers and launch.count:
        problem = "servers are to be started, though rollout.servers names some that run already"
        raise UserError("rollout.launch.count", launch.count, problem, "Set it to 0, or leave rollout.servers out")
    if not rollout.servers and not launch.count:
        problem = "no server is named in rollout.servers, and none is to be started"
        remedy = "Set rollout.launch.count=1 or more, or rollout.servers=[http://HOST:PORT]"
        raise UserError("rollout.engine", rollout.engine, problem, remedy)
    if rollout.servers and isinstance(launch.tp, tuple):
        problem = "has a number for each server that the run starts, and it starts none: rollout.servers names them"
        raise UserError("rollout.launch.tp", list(launch.tp), problem, "Give one number")


def _check_adapter(config: Config) -> None:
    """Refuse servers that cannot take adapters alone, and adapters that none can take."""
    rollout, model = config.rollout, config.model
    leave = "or leave it out: servers then get merged weights"
    for wrong, problem, remedy in (
        (not model.lora.rank, "sends adapters, and model.lora.rank is 0: all weights are trained", "Raise that"),
        (
            model.checkpoint is not None,
            f"has servers hold the policy of model.path, and that of model.checkpoint = {model.checkpoint} is trained",
            "Convert the checkpoint, and name the result in model.path",
        ),
        (
            rollout.colocated,
            "has servers keep the frozen policy, and rollout.colocated has them give up their memory",
            "Set rollout.colocated=false",
        ),
        (
            rollout.sync.transport == "disk",
            "has a way of its own for adapters, and rollout.sync.transport = disk writes all weights",
            "Leave rollout.sync.transport out",
        ),
        (
            rollout.ahead > 0 and rollout.sync.in_flight != "abort",
            f"cannot go with rollout.sync.in_flight = {rollout.sync.in_flight}: a request has one adapter to its end",
            "Set that to abort",
        ),
    ):
        if wrong:
            raise UserError("rollout.sync.adapter", "true", problem, f"{remedy}, {leave}")
    spec_of(rollout.engine).adapter_flags(model.lora)  # which refuses some


def _check_experts(config: Config) -> None:
    targets = config.model.lora.targets
    if of_experts := [name for name in targets if name in ("gate_proj", "up_proj", "down_proj")]:
        problem = f"{', '.join(of_experts)} are those of experts, whose adapters rollout.sync.adapter does not send"
        remedy = "Name matrices of the attention alone, or leave that out: servers then get merged weights"
        raise UserError("model.lora.targets", ", ".join(targets), problem, remedy)


def _check_sharing(config: Config) -> None:
    rollout = config.rollout
    if rollout.colocated and rollout.ahead:
        problem = "servers cannot generate while a step trains if they share its GPUs (rollout.colocated)"
        raise UserError("rollout.ahead", rollout.ahead, problem, "Set it to 0, or rollout.colocated=false")
    if rollout.colocated and rollout.sync.transport == "collective":
        problem = "NCCL takes no two ranks on one GPU, where rollout.colocated puts the trainer and a server"
        remedy = "Set rollout.sync.transport=disk; with rollout.sync.folder in /dev/shm the weights stay in memory"
        raise UserError("rollout.sync.transport", rollout.sync.transport, problem, remedy)


def _check_patience(config: Config) -> None:
    """Ranks that have nothing to send wait for a sync in gloo, which gives up after ``rollout.timeout_s``."""
    timeout_s, sync_s = config.rollout.timeout_s, config.rollout.sync.timeout_s
    if timeout_s < 2 * sync_s:
        problem = "ranks would give up on a sync that may yet succeed: "
        problem += f"rollout.sync.timeout_s = {sync_s:g} is allowed for each of its requests"
        remedy = f"Raise it to {2 * sync_s:g} or more, or lower rollout.sync.timeout_s"
        raise UserError("rollout.timeout_s", f"{timeout_s:g}", problem, remedy)


def _check_launch(config: Config) -> None:
    launch, spec = config.rollout.launch, spec_of(config.rollout.engine)
    if isinstance(launch.tp, tuple) and len(launch.tp) != launch.count:
        problem = f"has {len(launch.tp)} numbers for rollout.launch.count = {launch.count} servers"
        remedy = "Give one for each, or one number for all"
        raise UserError("rollout.launch.tp", list(launch.tp), problem, remedy)
    last = launch.first_port + launch.ports - 1
    if last > LAST_PORT or launch.ports < launch.count:
        problem = f"{launch.count} servers want a port each from {launch.first_port} to {last}, "
        problem += f"and the last one there is is {LAST_PORT}"
        remedy = "Raise or lower it, or lower rollout.launch.first_port"
        raise UserError("rollout.launch.ports", launch.ports, problem, remedy)
    for entry in launch.env:
        if not VARIABLE.match(entry):
            raise UserError("rollout.launch.env", entry, "is no environment variable", "Write NAME=value")
    for flag in launch.flags:
        if flag.partition("=")[0] in spec.reserved_flags:
            problem = "is set by the run itself: for all servers, for each, or where nobody can read it"
            raise UserError("rollout.launch.flags", flag, problem, "Leave it out; see the settings of rollout.launch")
        if any(part in flag.replace("_", "-") for part in spec.lossy_flags):
            problem = "takes drafts more often than the policy would sample them, and no log-probability shows it"
            remedy = "Leave it out: the engine's own default samples as without drafts"
            raise UserError("rollout.launch.flags", flag, problem, remedy)


def _check_both_ends(config: Config, environ: Mapping[str, str]) -> None:
    given = dict(entry.split("=", 1) for entry in config.rollout.launch.env)
    for name, value in rank_environment(config.rollout).items():
        ours = environ.get(name, value)
        if given.get(name, ours) != ours:
            problem = f"the trainer has {name}={ours}, and NCCL wants the same at both ends of the group for weights"
            remedy = f"Leave it out, or run the trainer with {name}={given[name]}, too"
            raise UserError("rollout.launch.env", f"{name}={given[name]}", problem, remedy)


def _check_split(config: Config, shape: PolicyShape) -> None:
    for tp in tensor_parallel(config.rollout) or (config.rollout.launch.tp,):
        assert isinstance(tp, int)
        shared = shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0  # a server copies heads where it has more ranks
        if shape.heads % tp or not shared:
            heads = f"the policy's {shape.heads} query heads and {shape.kv_heads} key-value heads"
            fit = [n for n in range(1, shape.heads + 1) if shape.heads % n == 0]
            fit = [n for n in fit if shape.kv_heads % n == 0 or n % shape.kv_heads == 0]
            remedy = f"Set it to one of {', '.join(map(str, fit))}"
            raise UserError("rollout.launch.tp", tp, f"does not divide {heads}", remedy)


def _check_memory(config: Config) -> None:
    """Check the memory of servers and the trainer on the same GPUs."""
    rollout = config.rollout
    flag, share = spec_of(rollout.engine).memory_flag
    given = {word.partition("=")[0].replace("_", "-") for word in rollout.launch.flags}
    if rollout.launch.count and flag not in given:
        problem = f"has no {flag}: a server would take nearly all of the GPU that it shares with the trainer"
        remedy = f"Add {flag} with {share}; megatron-dppo plan says what the trainer keeps meanwhile"
        raise UserError("rollout.launch.flags", list(rollout.launch.flags), problem, remedy)
    import torch

    if not torch.cuda.is_available():
        remedy = "Set it to false: without GPUs nothing is shared"
        raise UserError("rollout.colocated", "true", "this machine has no CUDA", remedy)


def _check_command(config: Config) -> None:
    engine, command = config.rollout.engine, config.rollout.launch.command
    if command is None:
        if not (spec := spec_of(engine)).installed:
            remedy = f"Install it in one of its own, and set rollout.launch.command=[/ITS/bin/python,-m,{spec.module}]"
            raise UserError("rollout.launch.command", "null", f"{engine} is not installed in this environment", remedy)
    elif not command or shutil.which(command[0]) is None:
        name = command[0] if command else ""
        remedy = "Begin it with the path of an interpreter or a program"
        raise UserError("rollout.launch.command", name, "is no program that can be run", remedy)
