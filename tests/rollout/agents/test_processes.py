"""An agent that hangs, dies, floods or lies about its end costs one rollout, and leaves no
process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_dppo.config import VerifiersConfig
from megatron_dppo.errors import UserError
from megatron_dppo.rl.score import Score
from megatron_dppo.rollout.agents.processes import AgentProcesses
from megatron_dppo.rollout.agents.worker import AgentRequest, AgentSettings

AGENTS = """
import os, random, signal, subprocess, sys, time

def reward(task):
    assert os.environ["OPENAI_BASE_URL"] == "http://here/v1" and os.environ["OPENAI_API_KEY"] == "key"
    return {"score": task["label"], "acc": True}

async def nothing(task):
    return None

def chance(task):
    return random.random()

def stumble(task):
    return task["absent"]

def leave(task):
    sys.exit("enough")

def vanish(task):
    os._exit(0)

def die(task):
    os.kill(os.getpid(), signal.SIGKILL)

def eat(task):
    return len(bytearray(2**40))

def say(task):
    return "seven"

def flood(task):
    while True:
        print("more" * 1000)

def hang(task):
    subprocess.Popen(["sleep", "1234.5"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    open(task["file"], "w").close()
    time.sleep(1000)

def orphan(task):
    subprocess.Popen(["sleep", "1234.5"], start_new_session=True)
    return 1.0

def fork(task):
    if os.fork() == 0:
        return 2.0
    time.sleep(0.5)
    return 1.0

def needs_more(task, more):
    return 0.0
"""
COMMAND = (
    "import json, os, sys; task = json.load(sys.stdin); print('thinking'); "
    "print(json.dumps(len(task['prompt']) * (os.environ['OPENAI_API_KEY'] == 'key')))"
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., AgentProcesses]]:
    started = []
    (tmp_path / "agents.py").write_text(AGENTS)

    def make(agent: str | tuple[str, ...], memory_mib: int = 256) -> AgentProcesses:
        spec = f"{tmp_path}/agents.py:{agent}" if isinstance(agent, str) else agent
        started.append(AgentProcesses(AgentSettings(spec, memory_mib, VerifiersConfig())))
        return started[-1]

    yield make
    for each in started:
        each.close()


def run(processes: AgentProcesses, seed: int = 0, **task: Any) -> Score | None:
    request = AgentRequest("http://here/v1", "key", {"prompt": "abc", "label": 3, **task}, seed)
    return asyncio.run(processes.run(request))[0]


def list_sleepers() -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] == ["sleep", "1234.5"]
    ]


def test_results_are_rewards(start: Any) -> None:
    score = run(start("reward"))
    assert score is not None and (score.reward, score.correct) == (3.0, True)
    assert run(start("nothing")) is None
    draws = [run(start("chance"), seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_a_command_reads_the_task_and_prints_the_reward(start: Any) -> None:
    score = run(start((sys.executable, "-c", COMMAND)))
    assert score is not None and score.reward == 3.0
    assert run(start(("true",))) is None
    failed = run(start(("false",)))
    assert failed is not None and "The command ended with exit code 1" in failed.traceback


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("stumble", "KeyError: 'absent'"),
        ("leave", "SystemExit: enough"),
        ("vanish", "ended its process without a result"),
        ("die", "its process was killed by SIGKILL"),
        ("eat", "MemoryError"),
        ("say", "a str for a score"),
    ],
)
def test_failures_are_named(start: Any, agent: str, words: str) -> None:
    score = run(start(agent))
    assert score is not None and score.failure == "error" and words in score.traceback


def test_forks_give_no_second_result(start: Any) -> None:
    score = run(start("fork"))
    assert score is not None and score.reward == 1.0


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_processes_end_with_their_rollout(start: Any, tmp_path: Path) -> None:
    """After a result, and after a cancellation."""
    assert run(start("orphan")) is not None
    wait_until(lambda: not list_sleepers())
    processes, file = start("hang"), tmp_path / "hangs"

    async def cancel() -> None:
        request = AgentRequest("", "", {"file": str(file)}, 0)
        task = asyncio.create_task(processes.run(request))
        while not file.exists():
            await asyncio.sleep(0.05)
        assert list_sleepers()
        task.cancel()

    asyncio.run(cancel())
    wait_until(lambda: not list_sleepers())
    tree = psutil.Process(processes._process.pid)
    wait_until(lambda: not tree.children(recursive=True))


TRAINER = """
import asyncio, sys
from megatron_dppo.config import VerifiersConfig
from megatron_dppo.rollout.agents.processes import AgentProcesses
from megatron_dppo.rollout.agents.worker import AgentRequest, AgentSettings
processes = AgentProcesses(AgentSettings(sys.argv[1] + ":hang", 256, VerifiersConfig()))
asyncio.run(processes.run(AgentRequest("", "", {"file": sys.argv[2]}, 0)))
"""


def test_processes_end_with_a_killed_trainer(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "hangs"
    arguments = [sys.executable, "-c", textwrap.dedent(TRAINER), f"{tmp_path}/agents.py", str(file)]
    with subprocess.Popen(arguments) as trainer:
        wait_until(file.exists)
        tree = psutil.Process(trainer.pid).children(recursive=True)
        assert len(tree) >= 4
        os.kill(trainer.pid, signal.SIGKILL)
    wait_until(lambda: not any(each.is_running() for each in tree))
    assert not list_sleepers()


@pytest.mark.parametrize(
    ("agent", "words"),
    [("needs_more", "cannot be called with 1 argument"), ("stumbl", "Perhaps 'stumble' was meant")],
)
def test_unusable_agents_are_refused(start: Any, agent: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        start(agent)
    assert raised.value.setting == "rollout.agent"
