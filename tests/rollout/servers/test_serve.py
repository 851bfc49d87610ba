"""``megatron-dppo serve`` runs the server of its place, restarts it if it dies, and ends it on
request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.servers.launch import HOSTS, SECRET
from megatron_dppo.rollout.servers.serve import task_server
from megatron_dppo.settings import load_config
from tests.policies import write_policy
from tests.rollout.servers.test_processes import STAND_IN

POLICY = partial(write_policy, layers=1)
PORT = 12000 + os.getpid() % 1000
NODE = {HOSTS: "127.0.0.1", SECRET: "s3cret", "SLURMD_NODENAME": "n7"}


@pytest.fixture
def settings(policy: Path, tmp_path: Path) -> list[str]:
    return f"""
    run.dir={tmp_path} model.path={policy} rollout.engine=sglang rollout.servers=slurm rollout.launch.restarts=1
    rollout.launch.command=[{sys.executable},{STAND_IN}] rollout.launch.first_port={PORT}
    data.max_prompt_tokens=16 rollout.max_response_tokens=64
    """.split()


class Served:
    """``serve`` in a process of its own, as srun starts it."""

    def __init__(self, *settings: str) -> None:
        words = [sys.executable, "-m", "megatron_dppo", "serve", *settings]
        self.process = subprocess.Popen(
            words,
            env=os.environ | NODE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""

    def wait_for(self, words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if words in line:
                return
        raise AssertionError(f"{words!r} is not in\n{self.said}")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill_server(self) -> None:
        next(
            process for process in self.children() if str(STAND_IN) in process.cmdline()[1:2]
        ).kill()


@pytest.fixture
def serve(settings: list[str]) -> Iterator[Callable[..., Served]]:
    served = []

    def serve(*more: str) -> Served:
        served.append(Served(*settings, *more))
        return served[-1]

    yield serve
    for each in served:
        each.process.kill()
        each.process.wait()


def test_a_dead_server_restarts_and_is_given_up_in_the_end(serve: Callable[..., Served]) -> None:
    served = serve()
    well = f"server n7 can generate at http://127.0.0.1:{PORT} after"
    served.wait_for(well)
    served.kill_server()
    served.wait_for("server n7 was ended by signal 9 (Killed); the end of its log:")
    served.wait_for("server n7 is started again (1 of rollout.launch.restarts = 1)")
    served.wait_for(well)
    served.kill_server()
    served.wait_for("server n7 is given up: rollout.launch.restarts = 1 are used up")
    assert served.process.wait(15) == 1
    assert "s3cret" not in served.said


def test_a_terminated_serve_leaves_no_process(serve: Callable[..., Served]) -> None:
    served = serve()
    served.wait_for("can generate")
    children = served.children()
    assert len(children) >= 3
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(15) == 0
    assert psutil.wait_procs(children, timeout=15)[1] == []


def test_a_server_that_fails_at_once_is_a_users_mistake(serve: Callable[..., Served]) -> None:
    served = serve("rollout.launch.env=[STAND_IN=fails]")
    served.wait_for("error: rollout.launch.command")
    served.wait_for("no such model")
    assert served.process.wait(15) == 2


def place_of(settings: list[str], *more: str, **environ: str) -> tuple[str | None, str, int]:
    """Return GPUs, name and port of a task's server."""
    server = task_server(load_config(None, [*settings, *more]), NODE | environ)
    return server.gpus, server.name, server._config.rollout.launch.first_port


def test_each_task_has_its_own_name_port_and_gpus(settings: list[str]) -> None:
    hosts = {HOSTS: "10.0.0.1,10.0.0.1,10.0.0.2,10.0.0.2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    place = partial(place_of, settings, "rollout.launch.tp=2", **hosts)
    assert place() == ("0,1", "n7", PORT)
    assert place(SLURM_PROCID="1", SLURM_LOCALID="1") == ("2,3", "n7.1", PORT + 1)
    assert place(SLURM_PROCID="2", SLURMD_NODENAME="n8") == ("0,1", "n8", PORT)


@pytest.mark.parametrize(
    ("more", "environ", "setting"),
    [
        ("", {"SLURM_PROCID": "1"}, "rollout.servers"),
        ("", {SECRET: ""}, SECRET),
        ("rollout.launch.tp=4", {"CUDA_VISIBLE_DEVICES": "0,1"}, "rollout.launch.tp"),
        ("rollout.launch.tp=3", {}, "rollout.launch.tp"),
        ("rollout.launch.tp=[1]", {}, "rollout.launch.tp"),
        ("rollout.launch.command=[/no/program]", {}, "rollout.launch.command"),
    ],
)
def test_an_impossible_place_is_refused(
    more: str, environ: dict[str, str], setting: str, settings: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        place_of(settings, *more.split(), **environ)
    assert caught.value.setting == setting
