"""A server that the run starts has its port, its log and its secret, and leaves nothing behind when
it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.processes import ServerProcess, new_secret, wait_ready
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.settings import load_config
from tests.rollout.servers.script import happens

STAND_IN = Path(__file__).with_name("stand_in.py")
FIRST_PORT = 14000 + os.getpid() % 400 * 20  # tests run beside each other
HOST = "127.0.0.1"
Start = Callable[..., ServerProcess]


class Health(SglangClient):
    async def health(self, timeout_s: float) -> None:
        await self.get("/health", timeout_s=timeout_s)


def settings_of(folder: Path, *more: str) -> list[str]:
    plain = f"""
    run.dir={folder} model.path=policy rollout.engine=sglang rollout.launch.count=1
    rollout.launch.command=[{sys.executable},{STAND_IN}]
    rollout.launch.first_port={FIRST_PORT} rollout.launch.ports=20
    """
    return [*plain.split(), *more]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server with further settings. All are stopped in the end."""
    servers = []

    def start(*more: str, does: str = "", index: int = 0, secret: str = "s3cret") -> ServerProcess:
        config = load_config(
            None, settings_of(tmp_path, f"rollout.launch.env=[STAND_IN={does}]", *more)
        )
        servers.append(ServerProcess(config, index, host=HOST, secret=secret))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def wait_well(server: ServerProcess, http: Http, wait_s: float = 20.0) -> str:
    return http.run(wait_ready(server, lambda url: Health(url, http), wait_s)).url


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(pids: list[int]) -> bool:
    return happens(lambda: not any(map(lives, pids)))


def family_of(server: ServerProcess, http: Http) -> list[int]:
    """Return the pids of a server that answers, its child and its grandchild."""
    wait_well(server, http)
    assert happens(lambda: len(server.list_pids()) == 3)
    return server.list_pids()


@pytest.mark.parametrize("hang", ["", "stubborn", "SIGSTOP"])
def test_no_process_of_a_stopped_server_is_left(start: Start, http: Http, hang: str) -> None:
    server = start(does=hang)
    family = family_of(server, http)
    assert server.url == f"http://{HOST}:{FIRST_PORT}"
    assert server.is_alive() and server.is_listening() and server.describe_exit() == "is running"
    for pid in (psutil.Process(server.pid).ppid(), *family):  # as Slurm does when time is short
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.2)
    assert all(map(lives, family)) and server.is_alive()
    if hang == "SIGSTOP":
        os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert not any(psutil.pid_exists(pid) for pid in family)
    assert not server.is_alive()
    server.stop()


def test_a_killed_server_leaves_no_child_and_restarts(start: Start, http: Http) -> None:
    server = start()
    family = family_of(server, http)
    os.kill(server.pid, signal.SIGKILL)
    assert end(family) and happens(lambda: not server.is_alive())
    assert server.describe_exit() == "was ended by signal 9 (Killed)"
    with pytest.raises(ProcessLookupError):
        _ = server.pid
    server.restart()
    wait_well(server, http)


def test_children_of_a_killed_supervisor_end_with_stop(start: Start, http: Http) -> None:
    server = start(does="together")
    family = family_of(server, http)
    os.kill(psutil.Process(server.pid).ppid(), signal.SIGKILL)
    assert end(family[:1])
    assert psutil.pid_exists(family[1])
    server.stop()
    assert end(family)


TRAINER = """
import sys, time
from megatron_dppo.rollout.servers.processes import ServerProcess
from megatron_dppo.settings import load_config
server = ServerProcess(load_config(None, sys.argv[1:]), 0, host="127.0.0.1", secret="s")
server.start()
print(server._process.pid, flush=True)
time.sleep(600)
"""


def test_no_process_of_a_server_outlives_the_trainer(tmp_path: Path) -> None:
    words = [sys.executable, "-c", TRAINER, *settings_of(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        supervisor = psutil.Process(int(trainer.stdout.readline()))
        happens(lambda: len(supervisor.children(recursive=True)) == 3)
        family = [supervisor, *supervisor.children(recursive=True)]
        trainer.kill()
    assert len(family) == 4 and end([each.pid for each in family])


def test_a_taken_port_is_skipped_and_no_port_is_shared(start: Start) -> None:
    with socket.create_server((HOST, FIRST_PORT)):
        servers = [start("rollout.launch.count=2", index=index) for index in (0, 1)]
        with pytest.raises(UserError) as caught:
            start("rollout.launch.ports=1")
    assert [server.url[-5:] for server in servers] == [str(FIRST_PORT + 2), str(FIRST_PORT + 1)]
    assert caught.value.setting == "rollout.launch.ports"
    assert f"from {FIRST_PORT} to {FIRST_PORT}" in caught.value.problem


def test_a_port_lost_before_listening_is_exchanged(
    start: Start, http: Http, tmp_path: Path
) -> None:
    server = start(does=f"late,STAND_IN_WAITS_FOR={tmp_path}/go")
    # The stranger answers as a server would, so that an answer alone proves nothing.
    words = [sys.executable, "-m", "http.server", str(FIRST_PORT), "--bind", HOST, "-d", tmp_path]
    stranger = subprocess.Popen(words)
    try:
        (tmp_path / "health").write_text("well")
        assert happens(lambda: not socket.socket().connect_ex((HOST, FIRST_PORT)))
        (tmp_path / "go").touch()
        assert wait_well(server, http) == f"http://{HOST}:{FIRST_PORT + 1}"
    finally:
        stranger.kill()
        stranger.wait()


def test_a_failing_server_is_reported_with_its_last_words(start: Start, http: Http) -> None:
    server = start("rollout.launch.flags=[--hub-token,s3cret]", does="fails")
    with pytest.raises(UserError) as caught:
        wait_well(server, http, 60)
    assert "ended with exit code 1 before it could generate" in caught.value.problem
    assert "no such model" in caught.value.problem
    assert "s3cret" not in str(caught.value)
    assert str(server.log) in caught.value.remedy
    server.restart()
    assert happens(lambda: not server.is_alive())
    assert server.log.read_text().count("no such model") == 2
    tail = server.read_log_tail()
    assert tail.count("no such model") == 1 and "…" in tail
    assert max(map(len, tail.splitlines())) < 310


def test_the_secret_reaches_the_server_alone(start: Start, http: Http) -> None:
    secret = new_secret()
    assert secret != new_secret()
    server = start(secret=secret)
    family_of(server, http)
    assert f"the secret is read: api-key: {secret}" in server.log.read_text()
    assert secret not in server.read_log_tail()
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert secret.encode() not in cmdline.read_bytes()
    holding = [file for file in server.log.parent.iterdir() if secret in file.read_text()]
    assert len(holding) == 2
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in holding)
    server.stop()
    assert [file.name for file in server.log.parent.iterdir()] == ["server-0.log"]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_has_no_variable_of_a_rank(tmp_path: Path, engine: str) -> None:
    given = "rollout.launch.env=[A=1=2,PYTORCH_ALLOC_CONF=max_split_size_mb:64]"
    config = load_config(None, settings_of(tmp_path, f"rollout.engine={engine}", given))
    ours = dict.fromkeys(
        ["RANK", "TORCHELASTIC_RUN_ID", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"], "0"
    )
    kept = {"KEPT": "1", "NCCL_CUMEM_ENABLE": "0"}
    server = ServerProcess(config, 0, host=HOST, secret="s", gpus="2")
    environment = server.build_environment(ours | kept | {"VLLM_DISTRIBUTED_USE_SPLIT_GROUP": "1"})
    expected = kept | {
        "A": "1=2",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
        "CUDA_VISIBLE_DEVICES": "2",
    }
    assert expected.items() <= environment.items()
    assert not {"RANK", "TORCHELASTIC_RUN_ID", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys()
    # Else torch would split the weights' group off vLLM's default group.
    assert environment["VLLM_DISTRIBUTED_USE_SPLIT_GROUP"] == ("0" if engine == "vllm" else "1")
