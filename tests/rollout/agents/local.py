"""Agents with the local engine of a small policy, whose draws are logged outside the endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.init import build_character_tokenizer, write_tokenizer
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.agents.function import load_agent_function
from megatron_dppo.rollout.decoding import Decoding
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.local import LocalEngine
from megatron_dppo.rollout.local_conversations import LocalConversations
from megatron_dppo.rollout.tree import TreePath
from megatron_dppo.settings import load_config
from tests.policies import write_policy
from tests.rollout.agents.draws import Draw, make_draw
from tests.rollout.local import load_engine


def write_agents_policy(folder: Path) -> None:
    """Write a policy with a tokenizer of characters and a template with tools."""
    write_policy(folder, layers=1)
    write_tokenizer(build_character_tokenizer(), folder, max_tokens=512)


@contextmanager
def open_engine(policy: Path, *settings: str) -> Iterator[LocalEngine]:
    """Open an engine whose completions are the rollouts of ``rollout.agent``."""
    config = load_config(None, [f"model.path={policy}", *settings])
    function = load_agent_function(config)
    conversations = LocalConversations(function, timeout_s=60.0, attempts=1)
    engine = load_engine(policy, max_batch=256, conversations=conversations)
    try:
        yield engine
    finally:
        engine.close()


def log_draws(monkeypatch: pytest.MonkeyPatch) -> list[Draw]:
    """Return a list that gets each draw of the local engine."""
    draws: list[Draw] = []
    build = Decoding.build_paths

    def logged(decoding: Decoding, version: int) -> list[list[TreePath]]:
        paths = build(decoding, version)
        for path in (path for group in paths for path in group):
            draws.append(make_draw(path.prompt.token_ids.tolist(), path.completion))
        return paths

    monkeypatch.setattr(Decoding, "build_paths", logged)
    return draws


def make_task(number: int, text: str, tokenizer: Any, **extra: Any) -> Prompt:
    """Return a prompt of one message."""
    chat: list[Mapping[str, Any]] = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    token_ids = np.array(tokenizer.encode(rendered), np.int32)
    place = f"tasks.jsonl, row {number}"
    return Prompt(number, token_ids, rendered, "5", "", extra, chat, place)


def sampling(samples: int = 2, max_tokens: int = 40, seed: int = 3) -> Sampling:
    return Sampling(samples, max_tokens, 1.0, (0, 1, 2), seed=seed)
