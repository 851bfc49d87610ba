"""Processes of agents, seen from the trainer: an agent that hangs or dies costs a rollout, never
the run."""

from __future__ import annotations

import asyncio
import pickle
import socket
import subprocess
import sys

from megatron_dppo.errors import UserError
from megatron_dppo.rewards.workers import build_environment
from megatron_dppo.rl.score import Score
from megatron_dppo.rollout.agents.worker import SETTING, AgentRequest, AgentSettings

END_LIMIT_S = 5.0
"""Seconds for the fork server to end."""


class AgentProcesses:
    """Fork server of a rank's agents.

    Raises:
        UserError: the agent cannot be found, imported or called with a task.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._control, theirs = socket.socketpair()
        # A fixed seed of hashes, because an agent may iterate over a set.
        environment = build_environment() | {"PYTHONHASHSEED": "0"}
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_dppo.rollout.agents.worker", str(descriptor)],
                env=environment,
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
            )
        self._control.sendall(pickle.dumps(settings))
        with self._control.makefile("rb") as answers:
            try:
                problem = pickle.load(answers)
            except EOFError:
                problem = self._make_error("ended its process while imported")
        if problem is not None:
            self.close()
            raise problem

    async def run(self, request: AgentRequest) -> tuple[Score | None, str]:
        """Run an agent; return the score, or None without a reward, and the kind of an error. A
        cancellation ends all processes of the agent.

        Raises:
            UserError: the fork server has died.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise self._make_error("ended the process that starts agents") from error
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(pickle.dumps(request))
            await writer.drain()
            answer = await reader.read()
        except OSError:
            answer = b""
        finally:
            writer.close()
        problem = "ended its process without a result"
        known: tuple[Score | None, str] = Score.from_failure("error", problem), problem
        return pickle.loads(answer) if answer else known

    def close(self) -> None:
        """End the fork server. Idempotent."""
        self._control.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _make_error(self, problem: str) -> UserError:
        spec = self._settings.agent
        return UserError(SETTING, spec, problem, "Run it by hand, and correct the cause")
