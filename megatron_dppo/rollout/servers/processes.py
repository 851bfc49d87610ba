"""Servers started by the run: a process per server, with log, port and secret."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import psutil

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.observe.private import mask_secrets
from megatron_dppo.process import lifetime
from megatron_dppo.rollout.servers.http import ServerError, format_url_host
from megatron_dppo.rollout.servers.launch import (
    ALLOCATOR,
    assign_server_gpus,
    find_listen_address,
    local_ranks,
    server_command,
    server_environment,
    visible_gpus,
)

POLL_INTERVAL_S = 0.5
"""Seconds between checks of a starting server."""
HEALTH_S = 60.0
"""Timeout in seconds for the first answer, which includes compiling kernels."""
STOP_S = lifetime.GRACE_S + 5.0
"""Timeout in seconds for the end of a server and its children."""
LINES = 25
"""Log lines quoted in messages."""
LONG_LINE = re.compile(r"^(.{300}).+$", re.MULTILINE)
"""Line that is quoted in part: SGLang prints all its arguments in one line."""
LOG_BYTES = 2**16
"""Bytes at the end of a log searched for these lines."""

RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
RANK_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_", "CUDA_DEVICE_MAX_CONNECTIONS", *ALLOCATOR)
"""Variables and prefixes that describe a trainer rank and would mislead a server."""


class HealthClient(Protocol):
    """Methods of a :class:`ServerClient` used here."""

    def health(self, timeout_s: float) -> Awaitable[None]: ...


Client = TypeVar("Client", bound=HealthClient)


def new_secret() -> str:
    """Generate the secret of the run's own servers."""
    # Hex, because a leading minus would look like a flag.
    return secrets.token_hex(24)


class ServerProcess:
    """Server process on this machine. The server dies with this process, whatever the cause.

    Args:
        index: index of the server in the run, from 0.
        host: address to listen on.
        secret: secret required in every request.
        gpus: CUDA_VISIBLE_DEVICES of the server; None: no setting.
        name: name in messages and of the log; None: the index.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        *,
        host: str,
        secret: str,
        gpus: str | None = None,
        name: str | None = None,
    ) -> None:
        self.index = index
        self.host = host
        self.secret = secret
        self.gpus = gpus
        self.name = str(index) if name is None else name
        self.log = Path(config.run.dir).absolute() / "servers" / f"server-{self.name}.log"
        self.command: list[str] = []
        self._config = config
        self._port = 0
        self._secret_file = self.log.with_suffix(".secret.yaml")
        self._process: subprocess.Popen[bytes] | None = None
        self._begins = 0

    @property
    def url(self) -> str:
        """Current or future URL. A restarted server may have another URL."""
        return f"http://{format_url_host(self.host)}:{self._port}"

    @property
    def pid(self) -> int:
        """Id of the main process.

        Raises:
            ProcessLookupError: the server has ended.
        """
        if not (pids := self.list_pids()):
            raise ProcessLookupError(f"server {self.name} has ended")
        return pids[0]

    def list_pids(self) -> list[int]:
        """Return the server's process ids, main process first; empty after the server's end."""
        if not self.is_alive():
            return []
        assert self._process is not None
        try:
            return [
                child.pid for child in psutil.Process(self._process.pid).children(recursive=True)
            ]
        except psutil.NoSuchProcess:
            return []

    def start(self) -> None:
        """Start the server on a free port, without waiting for generation.

        Raises:
            UserError: no port of the server's range is free, or the log cannot be written.
        """
        self._port = self._free_port()
        self.command = server_command(
            self._config, self.index, host=self.host, port=self._port, secret_file=self._secret_file
        )
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            _write_secret(self._secret_file, f"api-key: {self.secret}\n")
            # For this user only, because servers log their arguments, including the secret.
            log = os.open(self.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        except OSError as error:
            remedy = "Name a directory that you may write to"
            raise UserError("run.dir", self._config.run.dir, str(error), remedy) from None
        try:
            self._begins = os.fstat(log).st_size
            now = time.strftime("%F %T")
            line = f"starting server {self.name} at {self.url}: {shlex.join(self.command)}"
            os.write(log, f"=== {now} {line}\n".encode())
            # Only the trainer receives signals from a terminal.
            self._process = subprocess.Popen(
                [sys.executable, "-IS", lifetime.__file__, str(os.getpid()), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.build_environment(os.environ),
                start_new_session=True,
            )
        finally:
            os.close(log)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def is_listening(self) -> bool:
        """Return whether the server, not a foreign process, listens on the port."""
        for pid in self.list_pids():
            try:
                sockets = psutil.Process(pid).net_connections("tcp")
            except psutil.Error:
                continue
            if any(
                found.status == psutil.CONN_LISTEN and found.laddr.port == self._port
                for found in sockets
            ):
                return True
        return False

    def is_port_taken(self) -> bool:
        """Return whether the server ended because another process took the port."""
        return not self.is_alive() and not _is_free(self.host, self._port)

    def describe_exit(self) -> str:
        """Describe the end of the server, worded to follow "server"."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return "is running" if self._process is not None else "was not started"
        # A negative code is a signal of the supervisor; a code above 128 is a signal of the server.
        number = -code if code < 0 else code - 128
        if 0 < number < signal.NSIG:
            return f"was ended by signal {number} ({signal.strsignal(number)})"
        return f"ended with exit code {code}"

    def read_log_tail(self) -> str:
        """Return the last log lines since the start, without the secret."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._begins, os.fstat(file.fileno()).st_size - LOG_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        text = LONG_LINE.sub(r"\1…", text.replace(self.secret, "***"))
        return "\n".join(text.splitlines()[-LINES:])

    def stop(self) -> None:
        """End the server and its children, first by SIGTERM, then by SIGKILL, and wait."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_S)
            # Without a supervisor, only this process can end the server.
            if self._process.poll() in (None, -signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._secret_file.unlink(missing_ok=True)

    def restart(self) -> None:
        """Stop and start the server, possibly on another port."""
        self.stop()
        self.start()

    def build_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Build the server's environment from the trainer's."""
        kept = {
            name: value
            for name, value in environ.items()
            if name not in RANK_VARIABLES and not name.startswith(RANK_PREFIXES)
        }
        if self.gpus is not None:
            kept["CUDA_VISIBLE_DEVICES"] = self.gpus
        of_kind = server_environment(self._config.rollout, secret=self.secret)
        given = dict(entry.split("=", 1) for entry in self._config.rollout.launch.env)
        # Both paths, because the kind of server may add a plugin.
        if "PYTHONPATH" in of_kind and "PYTHONPATH" in given:
            given["PYTHONPATH"] = os.pathsep.join((of_kind["PYTHONPATH"], given["PYTHONPATH"]))
        return kept | of_kind | given

    def _free_port(self) -> int:
        """Return the first free port of the server."""
        # Steps of ``count``, so that no two servers of a run share a port.
        launch = self._config.rollout.launch
        last = launch.first_port + launch.ports
        for port in range(launch.first_port + self.index, last, launch.count):
            if _is_free(self.host, port):
                return port
        problem = (
            f"no port for server {self.name} is free on {self.host} from {launch.first_port} to "
            f"{last - 1}"
        )
        remedy = "Raise it, or name another rollout.launch.first_port"
        raise UserError("rollout.launch.ports", launch.ports, problem, remedy)


def create_processes(
    config: Config,
    secret: str,
    environ: Mapping[str, str] = os.environ,
) -> list[ServerProcess]:
    """Create the servers of ``rollout.launch``, not yet started, on rank 0.

    Raises:
        UserError: too few GPUs, or no address of this machine is reachable from other machines.
    """
    host = find_listen_address(environ)
    shares = assign_server_gpus(config, visible_gpus(environ), local_ranks(environ))
    return [
        ServerProcess(config, i, host=host, secret=secret, gpus=share)
        for i, share in enumerate(shares)
    ]


async def wait_ready(
    process: ServerProcess,
    connect: Callable[[str], Client],
    wait_s: float,
) -> Client:
    """Wait until a started server can generate; restart a server whose port was taken.

    Args:
        connect: function that creates a client for a URL.
        wait_s: timeout in seconds.

    Returns:
        Client of the server.

    Raises:
        UserError: the server ended (quotes the last log lines), or the timeout was reached.
    """
    until = time.monotonic() + wait_s
    while (left := until - time.monotonic()) > 0:
        if not process.is_alive():
            if not process.is_port_taken():
                raise _make_exit_error(process)
            process.restart()
        if process.is_listening():
            client = connect(process.url)
            try:
                await client.health(min(left, HEALTH_S))
                return client
            except ServerError:
                # The server is not ready yet.
                pass
        await asyncio.sleep(POLL_INTERVAL_S)
    problem = (
        f"server {process.name} cannot generate after so long; the end of its "
        f"log:\n{process.read_log_tail()}"
    )
    remedy = f"Raise it if the server needs longer, or read {process.log}"
    raise UserError("rollout.launch.wait_s", f"{wait_s:g}", problem, remedy)


def stop_all(processes: Sequence[ServerProcess]) -> None:
    """Stop servers concurrently."""
    with ThreadPoolExecutor(max_workers=max(1, len(processes))) as threads:
        list(threads.map(ServerProcess.stop, processes))


def _make_exit_error(process: ServerProcess) -> UserError:
    problem = (
        f"server {process.name} {process.describe_exit()} before it could generate; the end "
        "of its log:\n"
    )
    remedy = (
        f"Read {process.log}, then correct the command, rollout.launch.flags or rollout.launch.env"
    )
    setting = "rollout.launch.command"
    command = " ".join(mask_secrets(setting, [*process.command]))
    return UserError(setting, command, problem + process.read_log_tail(), remedy)


def _write_secret(path: Path, text: str) -> None:
    # The mode applies to new files only.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        # As servers do, because closed connections linger.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError:
            return False
    return True
