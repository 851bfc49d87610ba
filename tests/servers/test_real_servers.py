"""Stock servers start by the settings of a run, keep strangers out, and leave nothing behind when they are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_dppo.rollout.servers.client import GenerateRequest
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.launch import spec_of
from tests.servers.real import CANARY, SGLANG_ON_CPU, Kind, RealServer, RealServers, launch_settings

pytestmark = pytest.mark.servers

SHARED: list[tuple[Kind, int]] = [("sglang", 1), ("sglang", 2), ("vllm", 1)]

TRAINER = """
import sys, time
from megatron_dppo.rollout.servers.processes import ServerProcess
from megatron_dppo.settings import load_config
server = ServerProcess(load_config(None, sys.argv[1:]), 0, host="127.0.0.1", secret="s")
server.start()
while not server.listens():
    time.sleep(0.2)
print(*server.pids(), flush=True)
time.sleep(600)
"""


def _living(pids: list[int]) -> list[int]:
    """Those that still live after a while."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return [process.pid for process in psutil.wait_procs(processes, timeout=20)[1]]


@pytest.fixture(params=SHARED, ids=lambda kind: f"{kind[0]}-tp{kind[1]}")
def server(request: pytest.FixtureRequest, real_servers: RealServers) -> RealServer:
    return real_servers.get(*request.param)


def test_a_server_serves_the_policy_that_it_was_started_with(
    server: RealServer, http: Http, served_policy: Path
) -> None:
    info = http.run(server.api.info())
    assert Path(info.model) == served_policy
    assert info.dtype == "float32"
    assert info.ranks == server.config.rollout.launch.tp[0]
    assert info.nccl is None  # SGLang does not say; vLLM does, and has none on a CPU
    ask = GenerateRequest([3, 4, 5], samples=2, max_tokens=4, temperature=1.0, stop_token_ids=[], seed=None)
    pieces = http.run(server.api.generate(ask, timeout_s=60.0))
    # The end-of-sequence token, drawn by chance once in fifteen times, stops a completion whatever the stop tokens are.
    assert len(pieces) == 2
    assert all(len(piece.token_ids) == 4 or piece.reason == "stop" for piece in pieces)


def test_a_stranger_without_the_secret_can_neither_ask_nor_change_anything(server: RealServer, http: Http) -> None:
    stranger = spec_of(server.config.rollout.engine).client(server.api.url, http, secret=None, timeout_s=10.0)
    ask = GenerateRequest([3], samples=1, max_tokens=1, temperature=1.0, stop_token_ids=[], seed=None)
    for attempt in (stranger.generate(ask, timeout_s=10.0), stranger.pause("keep"), stranger.begin_update()):
        with pytest.raises(ServerError, match="status 401"):
            http.run(attempt)
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        if cmdline.exists():
            assert server.secret.encode() not in cmdline.read_bytes()


@pytest.mark.parametrize(("kind", "tp"), SHARED[1:])
def test_a_killed_server_takes_its_ranks_along_and_comes_back(kind: Kind, tp: int, real_servers: RealServers) -> None:
    server = real_servers.get(kind, tp)
    family = server.process.pids()
    assert len(family) > 1
    os.kill(server.process.pid, signal.SIGKILL)
    assert _living(family) == []
    again = real_servers.get(kind, tp)
    assert again.process is server.process and again.process.alive()


@pytest.mark.parametrize(("kind", "tp"), [("sglang", 2), ("vllm", 1)])
def test_no_rank_of_a_server_outlives_the_trainer(
    kind: Kind, tp: int, served_policy: Path, canary: Path, tmp_path: Path
) -> None:
    settings = [f"run.dir={tmp_path}/run", f"model.path={served_policy}", *launch_settings(kind, (tp,))]
    with subprocess.Popen([sys.executable, "-c", TRAINER, *settings], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        try:
            family = [int(pid) for pid in trainer.stdout.readline().split()]
            assert len(family) > tp
            trainer.kill()
            assert _living(family) == []
        finally:
            trainer.kill()


def test_a_placeholder_that_is_called_leaves_a_mark_though_the_caller_swallows_it(tmp_path: Path) -> None:
    python = os.environ.get("SGLANG_PYTHON") or pytest.skip("needs SGLang")
    code = (
        "import contextlib, placeholders; placeholders.install(); import sgl_kernel, torchvision\n"
        "with contextlib.suppress(Exception): sgl_kernel.rmsnorm(1)\n"
        "with contextlib.suppress(Exception): torchvision.transforms.functional.resize.fast(1)\n"
        "with contextlib.suppress(Exception):\n    class Derived(torchvision.io.Video): pass\n"
    )
    mark = tmp_path / "mark"
    environment = os.environ | {CANARY: str(mark)}
    subprocess.run([python, "-c", code], check=True, env=environment, cwd=SGLANG_ON_CPU.parent)
    assert [line.rpartition(": ")[2] for line in mark.read_text().splitlines()] == [
        "sgl_kernel.rmsnorm",
        "torchvision.transforms.functional.resize.fast",
        "class derived from torchvision.io.Video",
    ]
