"""Real servers on this machine's CPU: what starts them, and the few that the tests share.

A test that kills, stops or slows a server needs no repair: the next one that asks for it gets it running again. Which
weights it holds is nobody's promise; a test that cares brings its own.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from megatron_dppo.config import Config
from megatron_dppo.config.rollout import ServerKind as Kind
from megatron_dppo.rollout.servers.client import ServerClient
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.launch import spec_of
from megatron_dppo.rollout.servers.processes import ServerProcess, new_secret, stop_all, wait_ready
from megatron_dppo.settings import load_config

PYTHONS = {"sglang": "SGLANG_PYTHON", "vllm": "VLLM_PYTHON"}
"""Environment variables with the interpreters of the environments that hold the servers."""
CANARY = "SGLANG_CPU_CANARY"
"""Environment variable with the file in which placeholders of SGLang's CUDA packages say that they were called."""
SGLANG_ON_CPU = Path(__file__).parent / "sglang_cpu" / "server.py"
FIRST_PORT = 23000 + os.getpid() % 100 * 40
"""Test sessions run beside each other."""
WAIT_S = 180.0


def launch_settings(kind: Kind, tp: tuple[int, ...], *, first_port: int = FIRST_PORT + 10) -> list[str]:
    """Overrides that have a run start servers on CPU; skips the test where there are none of this kind."""
    if PYTHONS[kind] not in os.environ:
        pytest.skip(f"needs {kind}: scripts/test.sh --servers")
    python = os.environ[PYTHONS[kind]]
    shared = [
        f"rollout.engine={kind}",
        f"rollout.launch.count={len(tp)}",
        f"rollout.launch.tp=[{','.join(map(str, tp))}]",
        f"rollout.launch.first_port={first_port}",
        "rollout.launch.ports=30",
        f"rollout.launch.wait_s={WAIT_S}",
    ]
    if kind == "sglang":
        return [*shared, f"rollout.launch.command=[{python},{SGLANG_ON_CPU}]"]
    return [
        *shared,
        f"rollout.launch.command=[{python},-m,vllm.entrypoints.openai.api_server]",
        "rollout.launch.flags=[--enforce-eager,--max-model-len,1024,--max-num-seqs,64]",
        "rollout.launch.env=[VLLM_CPU_KVCACHE_SPACE=1,VLLM_NO_USAGE_STATS=1,HF_HUB_OFFLINE=1,OMP_NUM_THREADS=1]",
    ]


@dataclass(frozen=True, slots=True)
class RealServer:
    """A server that can generate."""

    process: ServerProcess
    api: ServerClient
    config: Config
    secret: str


class RealServers:
    """Starts each server when it is first asked for.

    Args:
        policy: Hugging Face directory that they serve.
        folder: for their logs.
        http: through which they are spoken to.
        first_port: of theirs.
    """

    def __init__(self, policy: Path, folder: Path, http: Http, first_port: int = FIRST_PORT) -> None:
        self._policy, self._folder, self._http, self._first_port = policy, folder, http, first_port
        self._secret = new_secret()  # the same for all, as it is for the servers of a run
        self._running: dict[tuple[Kind, int], RealServer] = {}

    def get(self, kind: Kind, tp: int) -> RealServer:
        """A server of this kind with so many ranks, running and able to generate."""
        known = self._running.get((kind, tp))
        if known is not None and self._is_well(known):
            return known
        if known is not None:
            known.process.stop()
        config = known.config if known else self._config(kind, tp)
        secret = self._secret
        process = known.process if known else ServerProcess(config, 0, host="127.0.0.1", secret=secret)
        process.start()
        client = partial(spec_of(kind).client, http=self._http, secret=secret, timeout_s=60.0)
        api = self._http.run(wait_ready(process, client, WAIT_S))
        self._http.run(api.info())
        self._running[kind, tp] = RealServer(process, api, config, secret)
        return self._running[kind, tp]

    def stop(self) -> None:
        stop_all([server.process for server in self._running.values()])

    def _config(self, kind: Kind, tp: int) -> Config:
        settings = launch_settings(kind, (tp,), first_port=self._first_port + len(self._running))
        return load_config(None, [f"run.dir={self._folder}/{kind}-{tp}", f"model.path={self._policy}", *settings])

    def _is_well(self, server: RealServer) -> bool:
        for pid in server.process.pids():
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                os.kill(pid, signal.SIGCONT)
        try:
            self._http.run(server.api.resume())
            self._http.run(server.api.health(20.0))
        except ServerError:
            return False
        return server.process.alive()
