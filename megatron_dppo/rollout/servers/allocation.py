"""Where servers are that run already: as given, or in Slurm's allocation."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError

OVERRIDE = "MEGATRON_DPPO_SERVERS"
"""Environment variable with URLs, separated by commas, that take the place of what Slurm says."""
HOSTS = "MEGATRON_DPPO_SERVER_HOSTS"
"""Environment variable with the address of every server, separated by commas: a job script asks Slurm for them, since
containers lack its commands. Servers on one address have one port after the other."""
NODES = "SLURM_JOB_NODELIST_HET_GROUP_1"
SECRET = "MEGATRON_DPPO_SERVER_SECRET"
"""Environment variable with what given servers want to see, where they were started with an API key."""


def server_urls(config: Config, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The URLs of ``rollout.servers``, each as ``http://host:port``; none where the run starts its servers itself.

    Raises:
        UserError: for what is no such URL, for one that is there twice, and for ``slurm`` outside of a heterogeneous
            job.
    """
    servers = config.rollout.servers
    if servers != "slurm":
        return normal_urls("rollout.servers", servers)
    if given := environ.get(OVERRIDE):
        return normal_urls(OVERRIDE, given.split(","))
    if given := environ.get(HOSTS):
        return normal_urls(HOSTS, _one_port_each(given.split(","), config.rollout.launch.first_port))
    nodes = environ.get(NODES)
    if not nodes:
        raise UserError(
            "rollout.servers",
            "slurm",
            f"this is no rank of a heterogeneous Slurm job: {NODES} is not set",
            f"Submit a job whose second component runs the servers, or set {OVERRIDE}=URL,URL",
        )
    return normal_urls(NODES, _one_port_each(_expand(nodes), config.rollout.launch.first_port))


def _one_port_each(hosts: Sequence[str], first_port: int) -> list[str]:
    return [f"http://{host}:{first_port + hosts[:i].count(host)}" for i, host in enumerate(hosts)]


def normal_urls(origin: str, urls: Iterable[str]) -> tuple[str, ...]:
    """URLs in one form.

    Args:
        origin: the setting or variable that they are from.
        urls: with scheme, host and port.

    Raises:
        UserError: for the first that is malformed or there twice.
    """
    found: list[str] = []
    for given in urls:
        url = _normal(given.strip())
        if url is None:
            raise UserError(origin, given, "is no server's URL", "Write http://HOST:PORT, without a path")
        if url in found:
            raise UserError(origin, given, "is named twice", "Name every server once")
        found.append(url)
    return tuple(found)


def _normal(given: str) -> str | None:
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError:
        return None
    plain = parts.path in ("", "/") and not parts.query and not parts.fragment and parts.username is None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port or not plain or " " in given:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def _expand(nodes: str) -> list[str]:
    """The names behind ``node[3-4],node7``."""
    if "[" not in nodes and "," not in nodes:
        return [nodes]
    if shutil.which("scontrol") is None:
        raise UserError(NODES, nodes, "scontrol, which tells the nodes' names, is not on the path", f"Set {OVERRIDE}")
    listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
    if listed.returncode:
        raise UserError(NODES, nodes, f"scontrol cannot read it: {listed.stderr.strip()}", f"Set {OVERRIDE}")
    return listed.stdout.split()
