"""``megatron-dppo serve`` runs the server of its place, starts it again where it dies, and ends it when told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.init import write_model
from megatron_dppo.rollout.servers.launch import HOSTS, SECRET
from megatron_dppo.rollout.servers.serve import task_server
from megatron_dppo.settings import load_config
from tests.rollout.servers.test_processes import STAND_IN

PORT = 12000 + os.getpid() % 1000
NODE = {HOSTS: "127.0.0.1", SECRET: "s3cret", "SLURMD_NODENAME": "n7"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "qwen3"
    write_model(folder, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128)
    return folder


@pytest.fixture
def settings(policy: Path, tmp_path: Path) -> list[str]:
    return [
        f"run.dir={tmp_path}",
        f"model.path={policy}",
        "rollout.engine=sglang",
        "rollout.servers=slurm",
        f"rollout.launch.command=[{sys.executable},{STAND_IN}]",
        f"rollout.launch.first_port={PORT}",
        "rollout.launch.restarts=1",
    ]


class Served:
    """``serve`` in a process of its own, as srun starts it."""

    def __init__(self, settings: list[str], environ: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_dppo", "serve", *settings],
            env=os.environ | NODE | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said: list[str] = []

    def until(self, words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            if words in line:
                return
        raise AssertionError(f"{words!r} was not said:\n" + "\n".join(self.said))

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill_the_server(self) -> None:
        next(process for process in self.below() if str(STAND_IN) in process.cmdline()[1:2]).kill()


@pytest.fixture
def served(settings: list[str]) -> Iterator[Served]:
    served = Served(settings, {})
    yield served
    served.process.kill()
    served.process.wait()


def test_a_server_that_dies_is_started_again_at_its_place_and_given_up_in_the_end(served: Served) -> None:
    served.until(f"server n7 can generate at http://127.0.0.1:{PORT} after")
    served.kill_the_server()
    served.until("server n7 was ended by signal 9 (Killed); the end of its log:")
    served.until("server n7 is started again (1 of rollout.launch.restarts = 1)")
    served.until(f"server n7 can generate at http://127.0.0.1:{PORT} after")
    served.kill_the_server()
    served.until("server n7 is given up: rollout.launch.restarts = 1 are used up")
    assert served.process.wait(15) == 1
    assert not any("s3cret" in line for line in served.said)


def test_a_server_that_is_told_to_end_leaves_no_process(served: Served) -> None:
    served.until("can generate")
    below = served.below()
    assert len(below) >= 3
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(15) == 0
    time.sleep(0.2)
    assert not any(process.is_running() for process in below)


def test_a_server_that_fails_at_once_is_the_user_s_to_mend(settings: list[str]) -> None:
    served = Served([*settings, "rollout.launch.env=[STAND_IN=fails]"], {})
    served.until("no such model")
    assert served.process.wait(15) == 2
    assert any(line.startswith("error: rollout.launch.command") for line in served.said)


def _of_task(settings: list[str], *more: str, **environ: str) -> tuple[str | None, str, int]:
    """GPUs, name and port of a task's server."""
    server = task_server(load_config(None, [*settings, *more]), NODE | environ)
    return server.gpus, server.name, server._config.rollout.launch.first_port


def test_each_task_has_its_own_name_port_and_gpus(settings: list[str]) -> None:
    hosts = {HOSTS: "10.0.0.1,10.0.0.1,10.0.0.2,10.0.0.2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    tp = "rollout.launch.tp=2"
    assert _of_task(settings, tp, **hosts) == ("0,1", "n7", PORT)
    assert _of_task(settings, tp, **hosts, SLURM_PROCID="1", SLURM_LOCALID="1") == ("2,3", "n7.1", PORT + 1)
    assert _of_task(settings, tp, **hosts, SLURM_PROCID="2", SLURMD_NODENAME="n8") == ("0,1", "n8", PORT)


@pytest.mark.parametrize(
    ("more", "environ", "setting"),
    [
        ((), {"SLURM_PROCID": "1"}, "rollout.servers"),
        ((), {SECRET: ""}, SECRET),
        (("rollout.launch.tp=4",), {"CUDA_VISIBLE_DEVICES": "0,1"}, "rollout.launch.tp"),
        (("rollout.launch.tp=3",), {}, "rollout.launch.tp"),
        (("rollout.launch.tp=[1]",), {}, "rollout.launch.tp"),
        (("rollout.launch.command=[/no/program]",), {}, "rollout.launch.command"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    more: tuple[str, ...], environ: dict[str, str], setting: str, settings: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        _of_task(settings, *more, **environ)
    assert caught.value.setting == setting
