"""Fork server of agents: imports the agent once, and forks a process for each rollout.

- The command line is ``python -m megatron_dppo.rollout.agents.worker DESCRIPTOR``, with a socket to
  the trainer. The first message is a pickled :class:`AgentSettings`; the answer is None, or the
  UserError of the import.
- Each later message is a socket of one rollout, with a pickled :class:`AgentRequest`. The answer is
  a pickled pair of score or None, and kind of error.
- A *keeper* holds the rollout's socket, and forks the *runner*, with the agent's code. All
  processes that the agent starts belong to the keeper, and end with the runner. When the trainer
  closes the socket or has died, the keeper kills the runner.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_dppo.config import VerifiersConfig
from megatron_dppo.errors import UserError
from megatron_dppo.plugins import load_function
from megatron_dppo.process.lifetime import adopt_orphans, end_children, set_parent_death_signal
from megatron_dppo.process.streams import ignore_broken_streams
from megatron_dppo.rewards.functions import read_score
from megatron_dppo.rewards.worker import get_error_kind, set_memory_limit
from megatron_dppo.rewards.workers import describe_exit
from megatron_dppo.rl.score import Score

SETTING = "rollout.agent"
VERIFIERS = "verifiers"
MAX_LINE = 2**16
"""Most bytes of a command's output that are searched for the reward."""
Agent = Callable[[Mapping[str, Any]], Any]
"""Function from a task to the result of a reward function, or None."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    agent: str | tuple[str, ...]
    """``rollout.agent``"""
    memory_mib: int
    verifiers: VerifiersConfig


@dataclass(frozen=True, slots=True)
class AgentRequest:
    base_url: str
    api_key: str
    task: Mapping[str, Any]
    seed: int
    """Seed of Python's ``random``."""


def main(descriptor: int) -> None:
    """Fork a keeper for each rollout until the trainer closes the socket."""
    # The trainer handles Ctrl-C and Slurm's signal, and then closes the socket.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    settings = pickle.load(control.makefile("rb"))
    try:
        agent = _load_agent(settings)
    except UserError as error:
        control.sendall(pickle.dumps(error))
        return
    control.sendall(pickle.dumps(None))
    # Keepers that ended leave no zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _keep(socket.socket(fileno=descriptors[0]), agent, settings.memory_mib)
        os.close(descriptors[0])


def _load_agent(settings: AgentSettings) -> Agent:
    spec = settings.agent
    if not isinstance(spec, str):
        return lambda task: _run_command(spec, task)
    if spec == VERIFIERS:
        # Late, because the import of verifiers takes seconds.
        from megatron_dppo.data.verifiers import load_agent

        return load_agent(settings.verifiers)
    function = load_function(SETTING, spec)
    try:
        inspect.signature(function).bind("task")
    except TypeError as error:
        problem = f"cannot be called with 1 argument ({error})"
        raise UserError(SETTING, spec, problem, "Give it the parameter (task)") from error
    # Load before the forks, because openai loads its resources at the first use.
    if (openai := sys.modules.get("openai")) is not None:
        assert openai.AsyncOpenAI(api_key="none").chat.completions
    return function


def _run_command(command: Sequence[str], task: Mapping[str, Any]) -> Any:
    """Run a command with the task as JSON on its input; return the last line of its output, if the
    line is JSON."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        # The command may end without reading the task.
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(task, default=str).encode())
            process.stdin.close()
        last = b""
        while part := os.read(process.stdout.fileno(), MAX_LINE):
            last = (last + part)[-MAX_LINE:]
    if process.returncode:
        raise RuntimeError(f"The command {describe_exit(process.returncode)}.")
    lines = last.decode(errors="replace").split("\n")
    with suppress(ValueError):
        return json.loads(next((line for line in reversed(lines) if line.strip()), ""))
    return None


def _keep(connection: socket.socket, agent: Agent, memory_mib: int) -> NoReturn:
    """Run an agent until its end, or until the trainer closes the socket."""
    try:
        request = pickle.load(connection.makefile("rb"))
        adopt_orphans()
        ended, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        keeper = os.getpid()
        runner = os.fork()
        if runner == 0:
            _run(keeper, connection, agent, request, memory_mib)
        status = _wait_for(runner, connection, ended)
        # At least the agent's own group, on systems without inheritance of orphans.
        with suppress(ProcessLookupError):
            os.killpg(runner, signal.SIGKILL)
        end_children()
        if status:
            problem = f"its process {describe_exit(os.waitstatus_to_exitcode(status))}"
            _send(connection, Score.from_failure("error", problem), problem)
    finally:
        os._exit(0)


def _wait_for(runner: int, connection: socket.socket, ended: int) -> int:
    """Return the runner's wait status; 0 if the trainer has closed the socket."""
    while True:
        ready, _, _ = select.select([connection.fileno(), ended], [], [])
        if connection.fileno() in ready:
            return 0
        os.read(ended, 4096)
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == runner:
                    return found[1]


def _run(
    keeper: int,
    connection: socket.socket,
    agent: Agent,
    request: AgentRequest,
    memory_mib: int,
) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Leave the trainer's process group, because an agent may kill its process group.
        os.setsid()
        set_parent_death_signal(keeper, signal.SIGKILL)
        ignore_broken_streams()
        set_memory_limit(memory_mib)
        os.environ |= {"OPENAI_BASE_URL": request.base_url, "OPENAI_API_KEY": request.api_key}
        random.seed(request.seed)
        runner = os.getpid()
        score, kind = _compute_score(agent, request.task)
        # If the agent has forked, the child process may return here as well.
        if os.getpid() == runner:
            _send(connection, score, kind)
    finally:
        sys.stdout.flush()
        os._exit(0)


def _compute_score(agent: Agent, task: Mapping[str, Any]) -> tuple[Score | None, str]:
    try:
        returned = agent(task)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_wait_result(returned))
        return (None if returned is None else read_score(returned)), ""
    # An agent that calls sys.exit has failed like any other agent.
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        return Score.from_failure("error", text), get_error_kind(error)


async def _wait_result(awaitable: Any) -> Any:
    return await awaitable


def _send(connection: socket.socket, score: Score | None, kind: str) -> None:
    # The trainer may have closed the socket.
    with suppress(OSError):
        connection.sendall(pickle.dumps((score, kind)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
