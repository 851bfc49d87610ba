"""Where servers are, and what the run starts its own with: URLs, addresses, GPUs, command line and
environment."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from megatron_dppo.config import DTYPES, Config, LoraConfig, RolloutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.meeting import LOOPBACK, is_single_node
from megatron_dppo.rollout.servers.client import ROUTING_FLAG, ServerClient
from megatron_dppo.rollout.servers.http import format_url_host

OVERRIDE = "MEGATRON_DPPO_SERVERS"
"""Environment variable with URLs, separated by commas, that take the place of what Slurm says."""
HOSTS = "MEGATRON_DPPO_SERVER_HOSTS"
"""Environment variable with the address of every server, separated by commas: a job script asks
Slurm for them, since containers lack its commands. Servers on one address have one port after the
other."""
NODES = "SLURM_JOB_NODELIST_HET_GROUP_1"
SERVER_PYTHON = "SERVER_PYTHON"
"""Environment variable with the interpreter of the servers' Python environment."""
SECRET = "MEGATRON_DPPO_SERVER_SECRET"
"""Environment variable with the API key that given servers were started with."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of torch's allocator. Segments that expand are good for training; servers that give
memory back refuse them."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Differences between kinds of servers. ``SPEC`` in ``sglang.py`` describes SGLang's."""

    client: type[ServerClient]
    command: tuple[str, ...]
    """Command that starts a server, unless ``rollout.launch.command`` or ``SERVER_PYTHON`` names
    one."""
    module: str
    """Module that starts a server, for an interpreter of another environment."""
    reserved_flags: tuple[str, ...]
    """Flags that ``rollout.launch.flags`` may not have: they would contradict the run's settings,
    or show the secret."""
    lossy_flags: tuple[str, ...]
    """Parts of flags with which drafts of speculative decoding change what is sampled. The
    log-probabilities of the tokens stay right, so that no comparison of them shows it."""
    memory_flag: tuple[str, str]
    """The flag that bounds a server's memory, and what it is a share of."""
    memory_of_free: bool
    """Whether that share is of the memory that is free when the server starts, not of the whole
    GPU."""
    flags: Callable[[Config, Path], list[str]]
    """Flags of a run's server for the policy, the secret and the run's own requests. The path is
    that of a YAML file with the secret."""
    adapter_flags: Callable[[LoraConfig], list[str]]
    """Flags for a server that takes a run's adapters: one at a time, besides none at all. It raises
    UserError for adapters that this kind does not take."""
    adapter_files: bool = False
    """Whether servers read adapters from files; else adapters come with a request."""
    adapter_environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of a server that takes adapters, besides ``environment``."""
    environment: Callable[[str], dict[str, str]] = lambda secret: {}
    """Environment variables of a server with this secret."""
    rank_environment: Mapping[str, str] = field(default_factory=dict)
    """NCCL's variables that the trainer's ranks and the servers must share in a group for weights.
    Servers that the run starts inherit them from its ranks."""

    @property
    def installed(self) -> bool:
        """Whether ``command`` can start a server in this environment."""
        if self.command[0] == sys.executable:
            return find_spec(self.module.partition(".")[0]) is not None
        return shutil.which(self.command[0]) is not None


def load_engine_spec(engine: str) -> EngineSpec:
    """The spec of a kind of server, from the file of its name beside this one."""
    spec: EngineSpec = import_module(f"{__package__}.{engine}").SPEC
    return spec


def server_urls(config: Config, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The URLs of ``rollout.servers``, each as ``http://host:port``; none where the run starts its
    servers itself.

    Raises:
        UserError: for what is no such URL, for one that is there twice, and for ``slurm`` outside
            of a heterogeneous job.
    """
    servers = config.rollout.servers
    if servers != "slurm":
        return normalize_urls("rollout.servers", servers)
    if given := environ.get(OVERRIDE):
        return normalize_urls(OVERRIDE, given.split(","))
    if given := environ.get(HOSTS):
        return normalize_urls(
            HOSTS, _assign_ports(given.split(","), config.rollout.launch.first_port)
        )
    nodes = environ.get(NODES)
    if not nodes:
        problem = f"this is no rank of a heterogeneous Slurm job: {NODES} is not set"
        remedy = f"Submit a job whose second component runs the servers, or set {OVERRIDE}=URL,URL"
        raise UserError("rollout.servers", "slurm", problem, remedy)
    return normalize_urls(NODES, _assign_ports(_expand(nodes), config.rollout.launch.first_port))


def _assign_ports(hosts: Sequence[str], first_port: int) -> list[str]:
    return [
        f"http://{format_url_host(host)}:{first_port + hosts[:i].count(host)}"
        for i, host in enumerate(hosts)
    ]


def normalize_urls(origin: str, urls: Iterable[str]) -> tuple[str, ...]:
    """URLs in one form.

    Args:
        origin: the setting or variable that they are from.
        urls: with scheme, host and port.

    Raises:
        UserError: for the first that is malformed or there twice.
    """
    found: list[str] = []
    for given in urls:
        url = _normalize_url(given.strip())
        if url is None:
            raise UserError(
                origin, given, "is no server's URL", "Write http://HOST:PORT, without a path"
            )
        if url in found:
            raise UserError(origin, given, "is named twice", "Name every server once")
        found.append(url)
    return tuple(found)


def _normalize_url(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    plain = (
        parts.path in ("", "/")
        and not parts.query
        and not parts.fragment
        and parts.username is None
    )
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not port
        or not plain
        or " " in url
    ):
        return None
    return f"{parts.scheme}://{format_url_host(parts.hostname)}:{port}"


def _expand(nodes: str) -> list[str]:
    """The names behind ``node[3-4],node7``."""
    if "[" not in nodes and "," not in nodes:
        return [nodes]
    if shutil.which("scontrol") is None:
        raise UserError(
            NODES,
            nodes,
            "scontrol, which tells the nodes' names, is not on the path",
            f"Set {OVERRIDE}",
        )
    listed = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        raise UserError(
            NODES, nodes, f"scontrol cannot read it: {listed.stderr.strip()}", f"Set {OVERRIDE}"
        )
    return listed.stdout.split()


def tensor_parallel(rollout: RolloutConfig) -> tuple[int, ...]:
    """Tensor-parallel ranks of each server that the run starts."""
    count = rollout.launch.count
    tp = rollout.launch.tp
    return (tp if isinstance(tp, tuple) else (tp,) * count)[:count]


def sync_folder(config: Config) -> Path:
    """Where weights are written that servers read."""
    return Path(config.rollout.sync.folder or Path(config.run.dir) / "sync")


def count_reserved_gpus(rollout: RolloutConfig) -> int:
    """GPUs beside the trainer's that servers will want on a machine that has any."""
    return 0 if rollout.colocated else sum(tensor_parallel(rollout))


def base_command(
    rollout: RolloutConfig, environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return the command that starts a server, without flags.

    The first of these: ``rollout.launch.command``; the engine's module in ``SERVER_PYTHON``; the
        engine's own command.
    """
    spec = load_engine_spec(rollout.engine)
    python = environ.get(SERVER_PYTHON)
    if rollout.launch.command is not None:
        return rollout.launch.command
    return (python, "-m", spec.module) if python else spec.command


def server_command(
    config: Config, index: int, *, host: str, port: int, secret_file: Path
) -> list[str]:
    """The command line of one server. Everybody on the machine can read it, so the secret is not in
    it.

    Args:
        config: of the run.
        index: of the server.
        host, port: where it shall listen.
        secret_file: YAML with the secret, where the kind takes one.
    """
    rollout = config.rollout
    tp = tensor_parallel(config.rollout)[index]
    spec = load_engine_spec(rollout.engine)
    words = [*base_command(rollout), *spec.flags(config, secret_file), "--host", host]
    words += [
        "--port",
        str(port),
        "--tensor-parallel-size",
        str(tp),
        "--dtype",
        DTYPES[config.model.dtype],
    ]
    if config.model.checkpoint is not None:
        words += [
            "--load-format",
            "dummy",
        ]  # the directory may hold no weights; the first sync brings them
    if config.loss.replay_routing == "rollout":
        words += [ROUTING_FLAG]
    if rollout.sync.adapter:
        words += spec.adapter_flags(config.model.lora)
    return [*words, *rollout.launch.flags]


def server_environment(rollout: RolloutConfig, *, secret: str) -> dict[str, str]:
    """Environment variables that this kind of server needs, besides those of
    ``rollout.launch.env``."""
    spec = load_engine_spec(rollout.engine)
    return spec.environment(secret) | (
        dict(spec.adapter_environment) if rollout.sync.adapter else {}
    )


def rank_environment(rollout: RolloutConfig) -> Mapping[str, str]:
    """NCCL's variables that both ends of the group for weights must share, unless the user sets
    them."""
    collective = rollout.served and rollout.sync.transport == "collective"
    return load_engine_spec(rollout.engine).rank_environment if collective else {}


def uses_file_sync(rollout: RolloutConfig) -> bool:
    """Whether servers read weights or adapters from files."""
    if rollout.served and rollout.sync.adapter:
        return load_engine_spec(rollout.engine).adapter_files
    return rollout.served and rollout.sync.transport == "disk"


def find_listen_address(environ: Mapping[str, str]) -> str:
    """Loopback where all ranks are on this machine, else the address at which they find rank 0."""
    if is_single_node(environ):
        return LOOPBACK
    for name in (environ.get("MASTER_ADDR", ""), socket.gethostname()):
        for address in _resolve_addresses(name):
            if not address.startswith(
                "127."
            ):  # some systems give a machine's own name one of these
                return address
    problem = (
        "is not an address at which ranks on other machines could reach a server that this "
        "one starts"
    )
    remedy = "Set it to this machine's address in their network"
    raise UserError("MASTER_ADDR", environ.get("MASTER_ADDR", ""), problem, remedy)


def local_ranks(environ: Mapping[str, str]) -> int:
    """Ranks of the trainer on the machine of rank 0, as torchrun or srun has them."""
    per_node = environ.get("LOCAL_WORLD_SIZE") or environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    return int(per_node.partition(",")[0].partition("(")[0])  # Slurm writes 8(x4),2


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES would name them."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def assign_server_gpus(config: Config, gpus: Sequence[str], local_ranks: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each server: the GPUs after those of the trainer's ranks, or,
    colocated, the same ones.

    Args:
        config: of the run.
        gpus: of this machine; without any, all shares are None.
        local_ranks: ranks of the trainer on this machine.

    Raises:
        UserError: if there are fewer GPUs than the servers need.
    """
    sizes = tensor_parallel(config.rollout)
    if not gpus:
        return [None] * len(sizes)
    colocated = config.rollout.colocated
    free = list(gpus[:local_ranks] if colocated else gpus[local_ranks:])
    if sum(sizes) > len(free):
        whose = (
            "the trainer's ranks on it have"
            if colocated
            else f"its {local_ranks} ranks of the trainer leave"
        )
        problem = (
            f"{len(sizes)} servers need {sum(sizes)} GPUs on this machine, and {whose} "
            f"{len(free)} of {len(gpus)}"
        )
        remedy = (
            "Lower rollout.launch.count or tp, or start servers elsewhere and name them in "
            "rollout.servers"
        )
        raise UserError("rollout.launch.tp", config.rollout.launch.tp, problem, remedy)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [",".join(free[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def _resolve_addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]
