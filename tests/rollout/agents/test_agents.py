"""Agents with the local engine: trained tokens are the engine's draws, and failures are scores."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rollout.scoring import GroupScoring
from tests.rollout.agents.draws import list_draws
from tests.rollout.agents.local import (
    log_draws,
    make_task,
    open_engine,
    sampling,
    write_agents_policy,
)
from tests.rollout.local import bits_of, generate

pytest.importorskip("openai")
REWARD, REWARD_TIMEOUT_S = "exact", 30.0
TWO_AGENTS = Path(__file__).with_name("two_agents.py")
AGENTS = f"""
import asyncio, sys, time
import openai
sys.path.append("{TWO_AGENTS.parent}")
from two_agents import say

async def unscored(task):
    await say([*task["prompt"]], openai.AsyncOpenAI(), max_tokens=4)

async def troubled(task):
    client = openai.AsyncOpenAI(max_retries=0)
    await say([*task["prompt"]], client, max_tokens=4)
    trouble = task["extra_info"].get("trouble")
    if trouble == "hang":
        time.sleep(1000)
    if trouble == "flood":
        await asyncio.gather(*(say([*task["prompt"]], client, max_tokens=2) for _ in range(50)))
    if trouble == "idle":
        raise ZeroDivisionError("no such tool")
    return 1.0

async def silent(task):
    return 1.0
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    write_agents_policy(folder)
    (folder / "agents.py").write_text(AGENTS)
    return folder


@pytest.fixture
def tokenizer(policy: Path) -> Any:
    return load_tokenizer(policy)


def test_trained_tokens_are_the_draws(
    policy: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 200 rollouts of two agents, token by token, and with the same bits a second time."""
    draws = log_draws(monkeypatch)
    prompts = [make_task(i, f"{i}+2=", tokenizer) for i in range(20)]
    with open_engine(policy, f"rollout.agent={TWO_AGENTS}:agent") as engine:
        groups = generate(engine, prompts, sampling(10, 200))
        found = [
            draw
            for prompt, group in zip(prompts, groups, strict=True)
            for completion in group
            for draw in list_draws(prompt, completion)
        ]
        assert len(found) == 800 and Counter(found) == Counter(draws)
        few = generate(engine, prompts[:2], sampling(2, 200))
        assert bits_of(generate(engine, prompts[:2], sampling(2, 200))) == bits_of(few)
    for completion in (each for group in groups for each in group):
        assert len(completion.starts) == 1 and completion.score is not None
        assert completion.score.failure is None
    assert len({each.token_ids.tobytes() for group in groups for each in group}) > 190


def test_failures_are_scores_of_their_rollouts(policy: Path, tokenizer: Any) -> None:
    troubles = ["", "hang", "flood", "idle"]
    prompts = [
        make_task(i, "2+3=", tokenizer, trouble=trouble) for i, trouble in enumerate(troubles)
    ]
    settings = ("rollout.agent_timeout_s=10", "rollout.agent_turns=9")
    with open_engine(policy, f"rollout.agent={policy}/agents.py:troubled", *settings) as engine:
        groups = generate(engine, prompts, sampling(2, 60))
    scores = [[each.score for each in group] for group in groups]
    assert [[score.failure for score in group if score] for group in scores] == [
        [None] * 2,
        ["timeout"] * 2,
        ["error"] * 2,
        ["error"] * 2,
    ]
    # Either of two rollouts may fail first.
    texts = [sorted(score.traceback for score in group if score) for group in scores]
    assert "sent no request for rollout.agent_timeout_s = 10" in texts[1][1]
    assert "rollout.agent_turns = 9" in "".join(texts[2])
    assert "agents.py:troubled, for tasks.jsonl, row 3: Traceback" in texts[3][1]
    assert texts[3][0] == "", "a kind of failure is reported once"
    assert all(len(each.token_ids) == 0 for group in groups[1:] for each in group)


def test_rewards_are_the_agents_or_the_functions(
    policy: Path, tokenizer: Any, workers: RewardWorkers
) -> None:
    prompts = [make_task(0, "2+3=", tokenizer)]
    rewards = []
    of_file = [f"{policy}/agents.py:{name}" for name in ("unscored", "silent")]
    for agent in (f"{TWO_AGENTS}:agent", *of_file):
        with open_engine(policy, f"rollout.agent={agent}") as engine:
            completions = generate(engine, prompts, sampling(2, 200))
        scoring = GroupScoring(workers, tokenizer, prompts, max_failures=9)
        (group,) = scoring.finish(completions)
        rewards.append(group.rewards)
        if "unscored" in agent:
            expected = [float(text.strip() == "5") for text in group.texts]
            assert group.rewards.tolist() == expected
    assert (rewards[0] >= 1).all()
    assert np.isnan(rewards[2]).all(), "an agent without a turn has nothing to train on"
