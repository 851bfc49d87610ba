"""URLs of servers, and launch parameters of the run's own servers: addresses, GPUs, command line,
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
"""Environment variable with comma-separated URLs, which override Slurm's list."""
HOSTS = "MEGATRON_DPPO_SERVER_HOSTS"
"""Environment variable with the comma-separated address of every server, set by a job script
because containers lack Slurm's commands. Servers on the same address have consecutive ports."""
NODES = "SLURM_JOB_NODELIST_HET_GROUP_1"
SERVER_PYTHON = "SERVER_PYTHON"
"""Environment variable with the Python interpreter for servers."""
SECRET = "MEGATRON_DPPO_SERVER_SECRET"
"""Environment variable with the API key of externally managed servers."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of torch's allocator. Expandable segments suit training, but are refused by servers
that release memory."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Properties of a kind of server. ``SPEC`` in ``sglang.py`` describes SGLang."""

    client: type[ServerClient]
    command: tuple[str, ...]
    """Command that starts a server, unless ``rollout.launch.command`` or ``SERVER_PYTHON`` is
    set."""
    module: str
    """Module that starts a server with the interpreter of another environment."""
    reserved_flags: tuple[str, ...]
    """Flags forbidden in ``rollout.launch.flags``: would contradict the run's settings, or show the
    secret."""
    lossy_flags: tuple[str, ...]
    """Parts of flags that let speculative decoding change the sampling distribution. No comparison
    reveals the change, because the log-probabilities stay right."""
    memory_flag: tuple[str, str]
    """Flag that limits a server's memory, and a description of its value, a fraction."""
    memory_of_free: bool
    """Whether the fraction refers to the memory free at the start, not to the whole GPU."""
    flags: Callable[[Config, Path], list[str]]
    """Flags of a run's server for policy, secret and requests. The path is a YAML file with the
    secret."""
    adapter_flags: Callable[[LoraConfig], list[str]]
    """Flags of a server that loads adapters, one at a time. Raises UserError for adapters not
    supported by this kind of server."""
    mask_flags: tuple[str, ...] = ()
    """Flags of a server that reports the kept ids of ``rollout.top_k``."""
    adapter_files: bool = False
    """Whether adapters come in files; otherwise with a request."""
    adapter_environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of a server that loads adapters."""
    environment: Callable[[str], dict[str, str]] = lambda secret: {}
    """Environment variables of a server with a given secret."""
    rank_environment: Mapping[str, str] = field(default_factory=dict)
    """NCCL variables that trainer and servers must share in a group for weights. Servers started by
    the run inherit these variables."""

    @property
    def installed(self) -> bool:
        """Whether ``command`` can start a server in this environment."""
        if self.command[0] == sys.executable:
            return find_spec(self.module.partition(".")[0]) is not None
        return shutil.which(self.command[0]) is not None


def load_engine_spec(engine: str) -> EngineSpec:
    spec: EngineSpec = import_module(f"{__package__}.{engine}").SPEC
    return spec


def server_urls(config: Config, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the URLs of ``rollout.servers``; empty if the run starts servers.

    Raises:
        UserError: an entry is no ``http://host:port`` or is duplicated, or ``slurm`` is set outside
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
    """Normalize URLs that come from ``origin``, a setting or variable.

    Raises:
        UserError: a URL is malformed or duplicated.
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
    # No path or query, because requests append a path to the URL.
    has_path = parts.path not in ("", "/")
    if has_path or parts.query or parts.fragment or parts.username is not None or " " in url:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        return None
    return f"{parts.scheme}://{format_url_host(parts.hostname)}:{port}"


def _expand(nodes: str) -> list[str]:
    """Expand ``node[3-4],node7`` into names of nodes."""
    if "[" not in nodes and "," not in nodes:
        return [nodes]
    if shutil.which("scontrol") is None:
        problem = "scontrol, which lists the nodes' names, is not on the path"
        raise UserError(NODES, nodes, problem, f"Set {OVERRIDE}")
    listed = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        problem = f"scontrol cannot read it: {listed.stderr.strip()}"
        raise UserError(NODES, nodes, problem, f"Set {OVERRIDE}")
    return listed.stdout.split()


def tensor_parallel(rollout: RolloutConfig) -> tuple[int, ...]:
    """Return the tensor-parallel ranks of each server started by the run."""
    count = rollout.launch.count
    tp = rollout.launch.tp
    return (tp if isinstance(tp, tuple) else (tp,) * count)[:count]


def sync_folder(config: Config) -> Path:
    """Return the directory of weights for servers."""
    return Path(config.rollout.sync.folder or Path(config.run.dir) / "sync")


def count_reserved_gpus(rollout: RolloutConfig) -> int:
    """Return the number of GPUs needed by servers in addition to the trainer's."""
    return 0 if rollout.colocated else sum(tensor_parallel(rollout))


def base_command(
    rollout: RolloutConfig, environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return the command that starts a server, without flags.

    The first defined command of this list:

    1. ``rollout.launch.command``
    2. the engine's module in ``SERVER_PYTHON``
    3. the engine's own command
    """
    spec = load_engine_spec(rollout.engine)
    python = environ.get(SERVER_PYTHON)
    if rollout.launch.command is not None:
        return rollout.launch.command
    return (python, "-m", spec.module) if python else spec.command


def server_command(
    config: Config,
    index: int,
    *,
    host: str,
    port: int,
    secret_file: Path,
) -> list[str]:
    """Return the command line of server ``index``.

    Args:
        host: address to listen on.
        secret_file: YAML file with the secret, if this kind of server reads such files.
    """
    # Never contains the secret, because all users of the machine can read command lines.
    rollout = config.rollout
    tp = tensor_parallel(config.rollout)[index]
    spec = load_engine_spec(rollout.engine)
    words = [*base_command(rollout), *spec.flags(config, secret_file), "--host", host]
    words += ["--port", str(port), "--tensor-parallel-size", str(tp)]
    words += ["--dtype", DTYPES[config.model.dtype]]
    if config.model.checkpoint is not None:
        # Dummy weights, because the directory may have no weights; the first sync sends the real
        # weights.
        words += ["--load-format", "dummy"]
    if config.loss.replay_routing == "rollout":
        words += [ROUTING_FLAG]
    if rollout.top_k is not None:
        words += spec.mask_flags
    if rollout.sync.adapter:
        words += spec.adapter_flags(config.model.lora)
    return [*words, *rollout.launch.flags]


def server_environment(rollout: RolloutConfig, *, secret: str) -> dict[str, str]:
    """Return the environment variables of a server, without ``rollout.launch.env``."""
    spec = load_engine_spec(rollout.engine)
    adapter = dict(spec.adapter_environment) if rollout.sync.adapter else {}
    return spec.environment(secret) | adapter


def rank_environment(rollout: RolloutConfig) -> Mapping[str, str]:
    """Return the NCCL variables that both ends of the group for weights must share."""
    collective = rollout.served and rollout.sync.transport == "collective"
    return load_engine_spec(rollout.engine).rank_environment if collective else {}


def uses_file_sync(rollout: RolloutConfig) -> bool:
    """Return whether servers read weights or adapters from files."""
    if rollout.served and rollout.sync.adapter:
        return load_engine_spec(rollout.engine).adapter_files
    return rollout.served and rollout.sync.transport == "disk"


def find_listen_address(environ: Mapping[str, str]) -> str:
    """Return rank 0's address as used by all ranks."""
    # On a single node other machines need not, and should not, reach the servers.
    if is_single_node(environ):
        return LOOPBACK
    for name in (environ.get("MASTER_ADDR", ""), socket.gethostname()):
        for address in _resolve_addresses(name):
            # Several systems map a machine's own name to a loopback address.
            if not address.startswith("127."):
                return address
    problem = (
        "is not an address at which ranks on other machines could reach the servers of this machine"
    )
    remedy = "Set it to this machine's address in their network"
    raise UserError("MASTER_ADDR", environ.get("MASTER_ADDR", ""), problem, remedy)


def local_ranks(environ: Mapping[str, str]) -> int:
    """Return the number of trainer ranks on rank 0's machine."""
    # torchrun and srun set different variables.
    per_node = environ.get("LOCAL_WORLD_SIZE") or environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    # Slurm's format is 8(x4),2.
    return int(per_node.partition(",")[0].partition("(")[0])


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return this machine's GPUs, in the notation of CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    # With CUDA_VISIBLE_DEVICES, no torch is needed here.
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def assign_server_gpus(config: Config, gpus: Sequence[str], local_ranks: int) -> list[str | None]:
    """Return each server's CUDA_VISIBLE_DEVICES: the GPUs after the trainer's, or, if colocated,
    the trainer's.

    Args:
        gpus: GPUs of this machine; if empty, every element of the result is None.
        local_ranks: number of trainer ranks on this machine.

    Raises:
        UserError: the servers need more GPUs than available.
    """
    sizes = tensor_parallel(config.rollout)
    if not gpus:
        return [None] * len(sizes)
    colocated = config.rollout.colocated
    free = list(gpus[:local_ranks] if colocated else gpus[local_ranks:])
    if sum(sizes) > len(free):
        owner = f"its {local_ranks} ranks of the trainer leave"
        if colocated:
            owner = "the trainer's ranks on it have"
        problem = (
            f"{len(sizes)} servers need {sum(sizes)} GPUs on this machine, and {owner} "
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
