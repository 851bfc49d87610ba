"""Agents with real servers: trained tokens are the servers', by a log outside the endpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.rollout.agents.function import load_agent_function
from megatron_dppo.rollout.servers.client import GenerateResult
from megatron_dppo.rollout.servers.conversations import Conversations, to_completion
from megatron_dppo.rollout.servers.http import ServerError, run_all
from megatron_dppo.settings import load_config
from tests.rollout.agents.draws import Draw, list_draws, make_draw
from tests.rollout.agents.local import make_task, sampling
from tests.servers.real import Kind, RealServers

pytestmark = pytest.mark.servers
pytest.importorskip("openai")
TWO_AGENTS = Path(__file__).parents[1] / "rollout/agents/two_agents.py"
TASKS, SAMPLES, TURNS = 20, 10, 4


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_trained_tokens_are_the_servers(
    kind: Kind, real_servers: RealServers, served_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = real_servers.get(kind).api
    draws: list[Draw] = []
    generate = api.generate

    def read_versions(versions: Any) -> np.ndarray:
        return np.repeat(np.int32(1), sum(count for _, count in versions))

    async def logged(token_ids: list[int], *rest: Any, **more: Any) -> list[GenerateResult]:
        try:
            results = await generate(token_ids, *rest, **more)
        except ServerError:
            # A server may close an idle connection while a request is sent. A run's pool repeats
            # such a request.
            results = await generate(token_ids, *rest, **more)
        for result in results:
            turn = to_completion(result, read_versions(result.versions))
            draws.append(make_draw(list(token_ids), turn))
        return results

    monkeypatch.setattr(api, "generate", logged)
    tokenizer: Any = load_tokenizer(served_policy)
    prompts = [make_task(i, f"{i}+2=", tokenizer) for i in range(TASKS)]
    settings = [f"model.path={served_policy}", f"rollout.agent={TWO_AGENTS}:agent"]
    conversations = Conversations(load_agent_function(load_config(None, settings)), timeout_s=600.0)
    try:
        requests = (
            conversations(api, prompt, sampling(SAMPLES, 200), read_versions) for prompt in prompts
        )
        groups = api.http.run(run_all(requests), 900.0)
    finally:
        conversations.close()
    found = []
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            assert completion.score is not None
            assert completion.score.failure is None, completion.score.traceback
            found += list_draws(prompt, completion)
    assert len(found) == TASKS * SAMPLES * TURNS and Counter(found) == Counter(draws)
