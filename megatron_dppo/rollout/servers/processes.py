"""Servers that the run starts itself: one process each, with its log, its port and its secret."""

from __future__ import annotations

import asyncio
import contextlib
import os
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
"""Seconds between looks at a server that is starting."""
HEALTH_S = 60.0
"""How long the first answer of a server may take: kernels are compiled for it."""
STOP_S = lifetime.GRACE_S + 5.0
"""How long a server and all of its processes may take to end."""
LINES = 25
"""Lines of a log that are worth repeating."""
LOG_BYTES = 2**16
"""Bytes at the end of a log that are searched for them."""

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
"""Variables, and prefixes of variables, that describe a rank of the trainer and would mislead a
server."""


class HealthClient(Protocol):
    """Methods of a :class:`ServerClient` used here."""

    def health(self, timeout_s: float) -> Awaitable[None]: ...


Client = TypeVar("Client", bound=HealthClient)


def new_secret() -> str:
    """A new secret that our servers want with every request. In hex, since a leading minus would
    look like a flag."""
    return secrets.token_hex(24)


class ServerProcess:
    """One server on this machine. It dies with this process, however either of them ends.

    Args:
        config: ``rollout.launch`` says what to start, ``rollout.engine`` of which kind it is.
        index: of the server among those of the run, from 0.
        host: address to listen on.
        secret: to be shown with every request.
        gpus: its CUDA_VISIBLE_DEVICES; None leaves them to the server.
        name: what messages and its log call it; None: its index.
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
        """Where it listens, or will. A server that is started again may be elsewhere."""
        return f"http://{format_url_host(self.host)}:{self._port}"

    @property
    def pid(self) -> int:
        """The server's main process.

        Raises:
            ProcessLookupError: if it has ended.
        """
        if not (pids := self.list_pids()):
            raise ProcessLookupError(f"server {self.name} has ended")
        return pids[0]

    def list_pids(self) -> list[int]:
        """The server's processes, the main one first; none once it has ended."""
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
        """Start it on a free port, without waiting until it can generate.

        Raises:
            UserError: if no port of its range is free, or the log cannot be written.
        """
        self._port = self._free_port()
        self.command = server_command(
            self._config, self.index, host=self.host, port=self._port, secret_file=self._secret_file
        )
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            _write_secret(self._secret_file, f"api-key: {self.secret}\n")
            # Servers write their arguments, the secret among them, into their logs.
            log = os.open(self.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        except OSError as error:
            remedy = "Name a directory that you may write to"
            raise UserError("run.dir", self._config.run.dir, str(error), remedy) from None
        try:
            self._begins = os.fstat(log).st_size
            now = time.strftime("%F %T")
            what = f"starting server {self.name} at {self.url}: {shlex.join(self.command)}"
            os.write(log, f"=== {now} {what}\n".encode())
            self._process = subprocess.Popen(
                [sys.executable, "-IS", lifetime.__file__, str(os.getpid()), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.build_environment(os.environ),
                start_new_session=True,  # signals from a terminal are the trainer's business
            )
        finally:
            os.close(log)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def is_listening(self) -> bool:
        """Whether one of its processes, and no stranger, listens at its port."""
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
        """Whether it ended because another process took the port before it could."""
        return not self.is_alive() and not _is_free(self.host, self._port)

    def describe_exit(self) -> str:
        """How it ended, to stand after "server"; or that it has not."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return "is running" if self._process is not None else "was not started"
        number = -code if code < 0 else code - 128  # of the supervisor, of the server
        if 0 < number < signal.NSIG:
            return f"was ended by signal {number} ({signal.strsignal(number)})"
        return f"ended with exit code {code}"

    def read_log_tail(self) -> str:
        """The end of what it has logged since its last start, without the secret."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._begins, os.fstat(file.fileno()).st_size - LOG_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.replace(self.secret, "***").splitlines()[-LINES:])

    def stop(self) -> None:
        """End it and all of its processes, asking before killing; returns when they have ended."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_S)
            if self._process.poll() in (
                None,
                -signal.SIGKILL,
            ):  # nobody sees to the server's end but we
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._secret_file.unlink(missing_ok=True)

    def restart(self) -> None:
        """End what is left of it and start it again, perhaps on another port."""
        self.stop()
        self.start()

    def build_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Environment of the server, from the trainer's, ``environ``."""
        kept = {
            name: value
            for name, value in environ.items()
            if name not in RANK_VARIABLES and not name.startswith(RANK_PREFIXES)
        }
        if self.gpus is not None:
            kept["CUDA_VISIBLE_DEVICES"] = self.gpus
        of_kind = server_environment(self._config.rollout, secret=self.secret)
        given = dict(entry.split("=", 1) for entry in self._config.rollout.launch.env)
        if "PYTHONPATH" in of_kind and "PYTHONPATH" in given:
            given["PYTHONPATH"] = os.pathsep.join((of_kind["PYTHONPATH"], given["PYTHONPATH"]))
        return kept | of_kind | given

    def _free_port(self) -> int:
        """The first of its ports that is free. No two servers of a run have one in common."""
        launch = self._config.rollout.launch
        last = launch.first_port + launch.ports
        for port in range(launch.first_port + self.index, last, launch.count):
            if _is_free(self.host, port):
                return port
        problem = (
            f"no port for server {self.name} is free on {self.host} from "
            f"{launch.first_port} "
            f"to {last - 1}"
        )
        remedy = "Raise it, or name another rollout.launch.first_port"
        raise UserError("rollout.launch.ports", launch.ports, problem, remedy)


def create_processes(
    config: Config, secret: str, environ: Mapping[str, str] = os.environ
) -> list[ServerProcess]:
    """The servers of ``rollout.launch``, not yet started; for the run's first rank.

    Raises:
        UserError: if the GPUs are too few, or no address of this machine is fit for others to
            reach.
    """
    host = find_listen_address(environ)
    shares = assign_server_gpus(config, visible_gpus(environ), local_ranks(environ))
    return [
        ServerProcess(config, i, host=host, secret=secret, gpus=share)
        for i, share in enumerate(shares)
    ]


async def wait_ready(
    process: ServerProcess, connect: Callable[[str], Client], wait_s: float
) -> Client:
    """Wait until a started server can generate.

    One whose port another process took is started again on another.

    Args:
        process: the server.
        connect: makes of its URL what asks it.
        wait_s: how long it may take.

    Returns:
        The result of ``connect`` for its URL.

    Raises:
        UserError: if it ends, with its last words; or at the timeout.
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
                pass  # not yet
        await asyncio.sleep(POLL_INTERVAL_S)
    problem = (
        f"server {process.name} cannot generate after so long; the end of its "
        f"log:\n{process.read_log_tail()}"
    )
    remedy = f"Raise it if the server needs longer, or read {process.log}"
    raise UserError("rollout.launch.wait_s", f"{wait_s:g}", problem, remedy)


def stop_all(processes: Sequence[ServerProcess]) -> None:
    """End servers, all at the same time."""
    with ThreadPoolExecutor(max_workers=max(1, len(processes))) as threads:
        list(threads.map(ServerProcess.stop, processes))


def _make_exit_error(process: ServerProcess) -> UserError:
    problem = (
        f"server {process.name} {process.describe_exit()} before it could generate; the end "
        "of its log:\n"
    )
    remedy = (
        f"Read {process.log}, then mend the command, rollout.launch.flags or rollout.launch.env"
    )
    setting = "rollout.launch.command"
    command = " ".join(mask_secrets(setting, [*process.command]))
    return UserError(setting, command, problem + process.read_log_tail(), remedy)


def _write_secret(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(
        os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(text)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do; closed connections linger
        try:
            trial.bind((host, port))
        except OSError:
            return False
    return True
