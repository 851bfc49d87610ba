"""Agents as conversations of an engine: one process, one key and one record for each rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from megatron_dppo.config import Config
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.data.turns import ChatRenderer
from megatron_dppo.models.shape import read_shape
from megatron_dppo.rl.score import Score
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.agents.endpoint import Endpoint
from megatron_dppo.rollout.agents.processes import AgentProcesses
from megatron_dppo.rollout.agents.session import AgentLimits, Session
from megatron_dppo.rollout.agents.worker import SETTING, AgentRequest, AgentSettings
from megatron_dppo.rollout.turns import Client, RolloutFunction

if TYPE_CHECKING:  # torch
    from megatron_dppo.rollout.engine import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFunction(RolloutFunction):
    """``rollout.agent``"""

    processes: AgentProcesses
    renderer: ChatRenderer
    limits: AgentLimits
    temperature: float
    """``rollout.temperature``, permitted in requests of an evaluation as well."""
    find_stop_token: Callable[[str], int | None]
    endpoint: Endpoint = field(default_factory=Endpoint)
    reported: set[str] = field(default_factory=set)
    """Kinds of errors with a traceback in the log."""

    async def run(self, client: Client) -> Completion:
        """Run an agent; a failure becomes the completion's score.

        Raises:
            UserError: the process that starts agents has died.
            Exception: an error of the engine in a turn.
        """
        sampling = client.sampling
        session = Session(
            client,
            self.renderer,
            self.limits,
            _list_sampling_values(sampling, self.temperature),
            self.find_stop_token,
        )
        base_url, key = await self.endpoint.open(session)
        prompt = client.prompt
        seed = sampling.derive_seed(prompt.id, client.number)
        request = AgentRequest(base_url, key, build_task(prompt), seed)
        agent = asyncio.create_task(self.processes.run(request))
        try:
            score = await self._wait(session, agent, prompt)
        finally:
            agent.cancel()
            self.endpoint.close_session(key)
        return session.build_completion(score)

    async def close(self) -> None:
        await self.endpoint.close()
        self.processes.close()

    async def _wait(
        self,
        session: Session,
        agent: asyncio.Task[tuple[Score | None, str]],
        prompt: Prompt,
    ) -> Score | None:
        """Wait for an agent; return the score of its process, or of a failure."""
        while (left_s := session.idle_left_s) > 0:
            either: list[asyncio.Future[Any]] = [agent, session.failed]
            await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                session.failed.result()
            if agent.done():
                score, kind = agent.result()
                return self._describe_failure(score, kind, prompt)
        problem = f"sent no request for rollout.agent_timeout_s = {self.limits.idle_s:g}"
        timeout = Score.from_failure("timeout", problem)
        return self._describe_failure(timeout, problem, prompt)

    def _describe_failure(self, score: Score | None, kind: str, prompt: Prompt) -> Score | None:
        """Return a score; of a failure, with place and traceback if the kind was not reported."""
        if score is None or score.failure is None:
            return score
        text = "" if kind in self.reported else f"{SETTING} = {self.spec}, for {prompt.place}: "
        self.reported.add(kind)
        return Score.from_failure(score.failure, text and text + score.traceback)


def load_agent_function(config: Config) -> AgentFunction:
    """Start the processes of agents.

    Raises:
        UserError: see :class:`AgentProcesses`.
    """
    rollout = config.rollout
    agent = rollout.agent
    assert agent is not None, "only runs with an agent call this function"
    folder = config.model.folder
    tokenizer = load_tokenizer(folder)
    limits = AgentLimits(
        turns=rollout.agent_turns,
        tokens=rollout.agent_tokens,
        idle_s=rollout.agent_timeout_s,
    )
    return AgentFunction(
        setting=SETTING,
        spec=agent if isinstance(agent, str) else " ".join(agent),
        vocabulary=read_shape(folder).vocab_size,
        tokenizer=tokenizer,
        processes=AgentProcesses(
            AgentSettings(agent, config.reward.memory_mib, config.data.verifiers)
        ),
        renderer=ChatRenderer(tokenizer, config.data),
        limits=limits,
        temperature=rollout.temperature,
        find_stop_token=_make_stop_finder(tokenizer),
    )


def build_task(prompt: Prompt) -> Mapping[str, Any]:
    """Return an agent's task: the row of the data set."""
    return {
        "prompt": prompt.raw_prompt,
        "label": prompt.label,
        "data_source": prompt.data_source,
        "extra_info": dict(prompt.extra),
    }


def _list_sampling_values(sampling: Sampling, temperature: float) -> dict[str, Sequence[object]]:
    return {
        "temperature": (sampling.temperature, temperature),
        "top_p": (sampling.top_p or 1, 1),
        "top_k": (sampling.top_k or -1, -1),
    }


def _make_stop_finder(tokenizer: Any) -> Callable[[str], int | None]:
    """Return a function from a stop text to the only token with this text, or None."""

    @cache
    def list_pieces() -> list[str]:
        return [tokenizer.decode([token]) for token in range(len(tokenizer))]

    @cache
    def find_stop_token(text: str) -> int | None:
        is_added = any(token.content == text for token in tokenizer.added_tokens_decoder.values())
        # Several tokens together may have the text of one longer token.
        if not is_added and len(text) != 1:
            return None
        holders = [token for token, piece in enumerate(list_pieces()) if text in piece]
        return holders[0] if len(holders) == 1 else None

    return find_stop_token
