"""``megatron-dppo serve CONFIG``: run a rollout server on a separate node from the trainer.

- Slurm task ``n`` is the ``n``-th server of ``rollout.servers``.
- A dead server is restarted at the same address, and the trainer updates the server's weights.
- Megatron-Core is not needed: the container of a stock server is sufficient.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from types import FrameType
from urllib.parse import urlsplit

from megatron_dppo.config import Config, exclusions, replace
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import read_shape
from megatron_dppo.process import lifetime
from megatron_dppo.rollout.servers.client import ServerClient
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.launch import SECRET, load_engine_spec, server_urls
from megatron_dppo.rollout.servers.preflight import check_launch, check_servers
from megatron_dppo.rollout.servers.processes import ServerProcess, wait_ready

POLL_INTERVAL_S = 0.5
"""Seconds between checks of the server process."""


def serve(config: Config, environ: Mapping[str, str] = os.environ) -> int:
    """Start this task's server and restart the server after each death.

    Returns:
        0 after SIGTERM or SIGINT; 1 if the server died more often than ``rollout.launch.restarts``.

    Raises:
        UserError: settings are wrong, or the server ends or exceeds the timeout before generation.
    """
    process = task_server(config, environ)
    # SIGUSR1 must not end the server, because the signal is for the trainer.
    lifetime.install_stop_handler()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    http = Http()
    try:
        process.start()
        _print_status(process, f"starts; its log is {process.log}")
        return _watch(process, http, config)
    finally:
        http.close()
        process.stop()


def task_server(config: Config, environ: Mapping[str, str]) -> ServerProcess:
    """Create the server of this task, not yet started.

    Raises:
        UserError: this task has no server, or the settings do not fit this node.
    """
    task = int(environ.get("SLURM_PROCID", "0"))
    local = int(environ.get("SLURM_LOCALID", "0"))
    urls = server_urls(config, environ)
    if task >= len(urls):
        problem = f"names {len(urls)} servers, and this is task {task}, counted from 0"
        raise UserError(
            "rollout.servers", config.rollout.servers, problem, "Start one task for each server"
        )
    if not environ.get(SECRET):
        problem = "is not set: without a secret, anybody who reaches the server could use it"
        raise UserError(SECRET, "", problem, "Set it to a secret word, for the trainer too")
    shape = read_shape(config.model.folder)
    checks = exclusions.build_checks(config, "serve")
    shape_checks = exclusions.build_checks(config, "serve", shape)
    for check in (*checks, *shape_checks):
        check()
    url = urlsplit(urls[task])
    assert url.hostname and url.port
    alone = replace(config.rollout.launch, count=1, first_port=url.port, ports=1)
    config = replace(config, rollout=replace(config.rollout, servers=(), launch=alone))
    check_launch(config)
    check_servers(config, shape, environ)
    # A machine's own name may resolve to loopback, and elsewhere to a reachable address.
    is_address = ":" in url.hostname or url.hostname.replace(".", "").isdigit()
    host = url.hostname if is_address else "0.0.0.0"
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    name = f"{node}.{local}" if local else node
    return ServerProcess(
        config,
        0,
        host=host,
        secret=environ[SECRET],
        gpus=_select_gpus(config, local, environ),
        name=name,
    )


def _select_gpus(config: Config, local: int, environ: Mapping[str, str]) -> str | None:
    """Return the GPUs of the node's ``local``-th server; None without Slurm's list."""
    gpus = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    tp = config.rollout.launch.tp
    assert isinstance(tp, int)
    if not gpus:
        return None
    if len(share := gpus[local * tp : (local + 1) * tp]) < tp:
        problem = (
            f"{local + 1} servers need {(local + 1) * tp} GPUs on this node, and it has {len(gpus)}"
        )
        raise UserError(
            "rollout.launch.tp", tp, problem, "Lower it, or start fewer servers on a node"
        )
    return ",".join(share)


def _watch(process: ServerProcess, http: Http, config: Config) -> int:
    rollout = config.rollout
    begin = time.monotonic()
    deaths = 0

    def client_at(url: str) -> ServerClient:
        return load_engine_spec(rollout.engine).client(
            url, http, secret=process.secret, timeout_s=rollout.sync.timeout_s
        )

    while True:
        try:
            http.run(wait_ready(process, client_at, rollout.launch.wait_s))
            _print_status(
                process, f"can generate at {process.url} after {time.monotonic() - begin:.0f} s"
            )
            while process.is_alive():
                time.sleep(POLL_INTERVAL_S)
        # A failed first start ends the task; a failed restart counts as another death.
        except UserError:
            if deaths == 0:
                raise
        _print_status(
            process, f"{process.describe_exit()}; the end of its log:\n{process.read_log_tail()}"
        )
        if deaths == rollout.launch.restarts:
            _print_status(process, f"is given up: rollout.launch.restarts = {deaths} are used up")
            return 1
        deaths += 1
        begin = time.monotonic()
        _print_status(
            process,
            f"is started again ({deaths} of rollout.launch.restarts = {rollout.launch.restarts})",
        )
        process.restart()


def _print_status(process: ServerProcess, message: str) -> None:
    print(f"server {process.name} {message}", flush=True)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
