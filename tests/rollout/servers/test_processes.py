"""A server that the run starts has its port, its log and its secret, and leaves nothing behind when it ends."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
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

import megatron_dppo
from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.servers.client import ROUTING_FLAG
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.launch import server_command, server_environment
from megatron_dppo.rollout.servers.processes import ServerProcess, new_secret, wait_ready
from megatron_dppo.settings import load_config

STAND_IN = Path(__file__).with_name("stand_in.py")
FIRST_PORT = 14000 + os.getpid() % 400 * 20  # tests run beside each other
HOST = "127.0.0.1"

TRAINER = """
import sys, time
from megatron_dppo.rollout.servers.processes import ServerProcess
from megatron_dppo.settings import load_config
server = ServerProcess(load_config(None, sys.argv[1:]), 0, host="127.0.0.1", secret="s")
server.start()
print(server._process.pid, flush=True)
time.sleep(600)
"""


class Health:
    """Of one server; all that waiting for it needs."""

    def __init__(self, http: Http, url: str) -> None:
        self.http, self.url = http, url

    async def health(self, timeout_s: float) -> None:
        await self.http.call("GET", self.url, "/health", timeout_s=timeout_s)


def _settings(folder: Path, *more: str) -> list[str]:
    return [
        f"run.dir={folder}",
        "model.path=policy",
        "rollout.engine=sglang",
        "rollout.launch.count=1",
        f"rollout.launch.command=[{sys.executable},{STAND_IN}]",
        f"rollout.launch.first_port={FIRST_PORT}",
        "rollout.launch.ports=20",
        *more,
    ]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts a server with more settings, and sees to it that all are stopped."""
    servers = []

    def start(*more: str, index: int = 0, secret: str = "s3cret") -> ServerProcess:
        config: Config = load_config(None, _settings(tmp_path, *more))
        servers.append(ServerProcess(config, index, host=HOST, secret=secret))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def _wait(server: ServerProcess, http: Http, wait_s: float = 20.0) -> Health:
    return http.run(wait_ready(server, lambda url: Health(http, url), wait_s))


def _until(happened: Callable[[], bool]) -> bool:
    until = time.monotonic() + 15
    while not happened() and time.monotonic() < until:
        time.sleep(0.02)
    return happened()


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _gone(pids: list[int]) -> bool:
    return _until(lambda: not any(map(_lives, pids)))


def _family(server: ServerProcess) -> list[int]:
    """All processes of a server, once it has its child and its grandchild."""
    assert _until(lambda: len(server.pids()) == 3)
    return server.pids()


def test_a_server_is_ready_when_it_answers(started: Callable[..., ServerProcess], http: Http) -> None:
    server = started()
    assert _wait(server, http).url == server.url == f"http://{HOST}:{FIRST_PORT}"
    assert server.alive() and server.listens() and server.ending() == "is running"


def test_nothing_of_a_stopped_server_stays_behind(started: Callable[..., ServerProcess], http: Http) -> None:
    server = started()
    _wait(server, http)
    family = _family(server)
    begin = time.monotonic()
    server.stop()
    assert time.monotonic() - begin < 4
    assert not any(psutil.pid_exists(pid) for pid in family)
    assert not server.alive()
    server.stop()


def test_a_server_lives_on_when_slurm_tells_every_process_that_time_is_short(
    started: Callable[..., ServerProcess], http: Http
) -> None:
    server = started()
    _wait(server, http)
    family = [psutil.Process(server.pid).ppid(), *_family(server)]
    for pid in family:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    assert all(map(_lives, family)) and server.alive()


@pytest.mark.parametrize("hang", ["ignores SIGTERM", "is stopped"])
def test_a_server_that_does_not_listen_to_reason_is_killed(
    started: Callable[..., ServerProcess], http: Http, hang: str
) -> None:
    server = started("rollout.launch.env=[STAND_IN=stubborn]" if hang == "ignores SIGTERM" else "run.seed=1")
    _wait(server, http)
    family = _family(server)
    if hang == "is stopped":
        os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert not any(psutil.pid_exists(pid) for pid in family)


def test_children_of_a_killed_server_die_too_and_it_can_be_started_again(
    started: Callable[..., ServerProcess], http: Http
) -> None:
    server = started()
    _wait(server, http)
    family = _family(server)
    os.kill(server.pid, signal.SIGKILL)
    assert _gone(family)
    assert _until(lambda: not server.alive())
    assert server.ending() == "was ended by signal 9 (Killed)"
    with pytest.raises(ProcessLookupError):
        _ = server.pid
    server.restart()
    _wait(server, http)
    assert server.log.read_text().count("=== ") == 2


def test_what_a_killed_supervisor_leaves_is_cleared_away(started: Callable[..., ServerProcess], http: Http) -> None:
    server = started("rollout.launch.env=[STAND_IN=together]")
    _wait(server, http)
    family = _family(server)
    os.kill(psutil.Process(server.pid).ppid(), signal.SIGKILL)
    assert _gone(family[:1])
    assert psutil.pid_exists(family[1])
    server.stop()
    assert _gone(family)


@pytest.mark.parametrize("victim", ["trainer", "supervisor"])
def test_a_server_outlives_neither_its_trainer_nor_its_supervisor(tmp_path: Path, victim: str) -> None:
    settings = _settings(tmp_path)
    with subprocess.Popen([sys.executable, "-c", TRAINER, *settings], stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            supervisor = psutil.Process(int(trainer.stdout.readline()))
            assert _until(lambda: len(supervisor.children(recursive=True)) == 3)
            server, *others = [child.pid for child in supervisor.children(recursive=True)]
            assert len(others) == 2
            os.kill(trainer.pid if victim == "trainer" else supervisor.pid, signal.SIGKILL)
            # What a server's children do when both supervisor and server are killed is up to them.
            assert _gone([supervisor.pid, server, *others] if victim == "trainer" else [server])
        finally:
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            trainer.kill()


def test_a_port_that_is_taken_is_skipped_and_two_servers_share_none(started: Callable[..., ServerProcess]) -> None:
    with socket.create_server((HOST, FIRST_PORT)):
        servers = [started("rollout.launch.count=2", index=index) for index in (0, 1)]
    assert [server.url[-5:] for server in servers] == [str(FIRST_PORT + 2), str(FIRST_PORT + 1)]


def test_where_no_port_is_free_the_range_is_named(started: Callable[..., ServerProcess]) -> None:
    with socket.create_server((HOST, FIRST_PORT)), pytest.raises(UserError) as caught:
        started("rollout.launch.ports=1")
    assert caught.value.setting == "rollout.launch.ports"
    assert f"from {FIRST_PORT} to {FIRST_PORT}" in caught.value.problem


def test_a_port_lost_before_the_server_listens_is_exchanged_for_another(
    started: Callable[..., ServerProcess], http: Http, tmp_path: Path
) -> None:
    server = started("rollout.launch.env=[STAND_IN=late,STAND_IN_WAITS_FOR=" + f"{tmp_path}/go]")
    # The stranger answers as a server would, so that an answer alone proves nothing.
    stranger = subprocess.Popen([sys.executable, "-m", "http.server", str(FIRST_PORT), "--bind", HOST, "-d", tmp_path])
    try:
        (tmp_path / "health").write_text("well")
        assert _until(lambda: not socket.socket().connect_ex((HOST, FIRST_PORT)))
        (tmp_path / "go").touch()
        assert _wait(server, http).url == f"http://{HOST}:{FIRST_PORT + 1}"
    finally:
        stranger.kill()
        stranger.wait()


def test_a_server_that_ends_early_is_reported_at_once_with_its_last_words(
    started: Callable[..., ServerProcess], http: Http
) -> None:
    server = started("rollout.launch.env=[STAND_IN=fails]")
    begin = time.monotonic()
    with pytest.raises(UserError) as caught:
        _wait(server, http, 60)
    assert time.monotonic() - begin < 10
    assert "ended with exit code 1 before it could generate" in caught.value.problem
    assert "no such model" in caught.value.problem
    assert "s3cret" not in str(caught.value)
    assert str(server.log) in caught.value.remedy


def test_a_server_that_takes_too_long_names_the_setting_and_the_log(
    started: Callable[..., ServerProcess], http: Http
) -> None:
    server = started("rollout.launch.env=[STAND_IN=hangs]")
    with pytest.raises(UserError) as caught:
        _wait(server, http, 1.0)
    assert caught.value.setting == "rollout.launch.wait_s"
    assert str(server.log) in caught.value.remedy


def test_the_log_tells_each_start_and_last_words_are_those_of_the_last(started: Callable[..., ServerProcess]) -> None:
    server = started("rollout.launch.env=[STAND_IN=fails]")
    for again in (True, False):
        assert _until(lambda: not server.alive())
        if again:
            server.restart()
    text = server.log.read_text()
    assert server.log.parent.name == "servers" and server.log.name == "server-0.log"
    assert text.count("starting server 0") == text.count("no such model") == 2
    assert text.count(shlex.join(server.command)) == 2
    assert server.last_words().count("no such model") == 1


def test_the_secret_reaches_the_server_and_nobody_else(started: Callable[..., ServerProcess], http: Http) -> None:
    secret = new_secret()
    server = started(secret=secret)
    _wait(server, http)
    assert f"the secret is read: api-key: {secret}" in server.log.read_text()
    assert secret not in server.last_words()
    assert len(_family(server)) == 3
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert secret.encode() not in cmdline.read_bytes()
    holding = [file for file in server.log.parent.iterdir() if secret in file.read_text()]
    assert len(holding) == 2
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in holding)
    server.stop()
    assert [file.name for file in server.log.parent.iterdir()] == ["server-0.log"]


def test_secrets_differ() -> None:
    assert len({new_secret() for _ in range(100)}) == 100


def test_a_rank_s_own_variables_do_not_reach_the_server(
    started: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # which servers that sleep refuse
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    server = started("rollout.launch.env=[A=1=2,PYTORCH_ALLOC_CONF=max_split_size_mb:64]")
    _family(server)
    environment = psutil.Process(server.pid).environ()
    assert (environment["KEPT"], environment["A"], environment["NCCL_CUMEM_ENABLE"]) == ("1", "1=2", "0")
    assert environment["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    assert not {"RANK", "TORCHELASTIC_RUN_ID", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_is_started_to_tell_its_experts_where_they_are_replayed(engine: str, tmp_path: Path) -> None:
    def command(mode: str) -> list[str]:
        config = load_config(None, [*_settings(tmp_path), f"rollout.engine={engine}", f"loss.replay_routing={mode}"])
        return server_command(config, 0, host=HOST, port=1, secret_file=tmp_path / "secret")

    assert [word for word in command("rollout") if word not in command("none")] == [ROUTING_FLAG]


SGLANG_LORA = ["--enable-lora", "--max-loras-per-batch", "2", "--max-lora-rank"]


@pytest.mark.parametrize(
    ("engine", "rank", "flags"),
    [
        ("sglang", 4, [*SGLANG_LORA, "4", "--lora-target-modules", "q_proj", "v_proj"]),
        ("vllm", 1, ["--enable-lora", "--max-lora-rank", "1"]),
        ("vllm", 8, ["--enable-lora", "--max-lora-rank", "8"]),
        ("vllm", 33, ["--enable-lora", "--max-lora-rank", "64"]),
    ],
)
def test_a_server_is_started_to_take_the_adapters_that_it_is_sent(
    engine: str, rank: int, flags: list[str], tmp_path: Path
) -> None:
    def command(sent: str) -> tuple[list[str], bool]:
        overrides = [f"rollout.engine={engine}", f"model.lora.rank={rank}", "model.lora.targets=[q_proj,v_proj]"]
        config = load_config(None, [*_settings(tmp_path), *overrides, f"rollout.sync.adapter={sent}"])
        words = server_command(config, 0, host=HOST, port=1, secret_file=tmp_path / "secret")
        return words, "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in server_environment(config.rollout, secret="")

    assert command("false")[1] is False
    assert command("true") == ([*command("false")[0], *flags], engine == "vllm")


ANOTHER_KIND = """
import sys
from dataclasses import replace
from megatron_dppo.rollout.servers import sglang

class AnotherClient(sglang.SglangClient): ...

SPEC = replace(sglang.SPEC, client=AnotherClient, command=(sys.executable, "{stand_in}"))
"""
STARTS = """
import sys
from functools import partial
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.launch import spec_of
from megatron_dppo.rollout.servers.processes import servers_to_start, wait_ready
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.preflight import check_config

config, http = load_config(None, sys.argv[1:]), Http()
check_config(config)
[server] = servers_to_start(config, "s3cret", {})
server.start()
client = partial(spec_of(config.rollout.engine).client, http=http)
print(type(http.run(wait_ready(server, client, 60.0))).__name__)
server.stop()
http.close()
"""


def test_another_kind_of_server_is_one_file_and_one_row(tmp_path: Path) -> None:
    copy = tmp_path / "megatron_dppo"
    shutil.copytree(Path(megatron_dppo.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "rollout/servers/another.py").write_text(ANOTHER_KIND.format(stand_in=STAND_IN))
    table = copy / "config/rollout.py"
    table.write_text(table.read_text().replace('Literal["sglang", "vllm"]', 'Literal["sglang", "vllm", "another"]'))
    settings = [setting for setting in _settings(tmp_path) if not setting.startswith("rollout.launch.command")]
    words = [sys.executable, "-c", STARTS, *settings, "rollout.engine=another"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.stdout == "AnotherClient\n", ran.stderr
