"""Drafts: guesses at what a completion goes on with. They save steps and change no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_dppo.config.rollout import BranchConfig
from megatron_dppo.rollout import decoding
from megatron_dppo.rollout.decoding import DraftIndex
from megatron_dppo.rollout.engine import generate
from tests.rollout.test_local import (
    make_engine,
    make_policy,
    make_prompts,
    one_thread,  # noqa: F401
    sampling_of,
    shapes_read,
    tokens_of,
)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_drafts_change_no_token(tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, prompts = make_policy(dtype=torch.float64), make_prompts(5, 9, 2, 5)
    plain = make_engine(policy, tmp_path, dtype=torch.float64)
    drafted = make_engine(policy, tmp_path, dtype=torch.float64, draft_tokens=3, max_batch=8)
    shapes = shapes_read(monkeypatch)
    steps: list[int] = []
    for seed in (5, 6, 5):  # the third time every completion is known to the index
        sampling = sampling_of(samples=2, temperature=temperature, seed=seed)
        expected, found = (generate(engine, prompts, sampling) for engine in (plain, drafted))
        assert tokens_of(found) == tokens_of(expected)
        for one, two in zip(sum(found, ()), sum(expected, ()), strict=True):
            assert one.finish_reason == two.finish_reason
            np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
        shapes.clear()
        generate(drafted, prompts, sampling)
        steps.append(len(shapes))
    longest = max(len(completion.token_ids) for completion in sum(expected, ()))
    assert steps[-1] < 0.75 * longest, "guesses of three tokens must have been right"


def test_drafts_change_no_leaf_of_a_tree(tmp_path: Path) -> None:
    policy = make_policy(dtype=torch.float64)
    branches = (BranchConfig(at=3), BranchConfig(entropy=2.5))
    sampling = replace(sampling_of(samples=8), branches=branches)
    plain = make_engine(policy, tmp_path, dtype=torch.float64)
    drafted = make_engine(policy, tmp_path, dtype=torch.float64, draft_tokens=2)
    for _ in range(2):
        expected, found = (generate(engine, make_prompts(5, 2), sampling) for engine in (plain, drafted))
        assert tokens_of(found) == tokens_of(expected)
        assert [leaf.forks for group in found for leaf in group] == [leaf.forks for group in expected for leaf in group]


def test_a_guess_is_what_was_said_after_the_same_four_tokens_of_the_same_prompt() -> None:
    index = DraftIndex()
    index.add(b"prompt", [5, 6, 7, 8, 9, 3, 4])
    assert list(index.after(b"prompt", [1, 6, 7, 8, 9], 1)) == [3]
    assert list(index.after(b"prompt", [1, 6, 7, 8, 9], 4)) == [3, 4]
    assert list(index.after(b"prompt", [1, 6, 7, 8, 8], 4)) == []
    assert list(index.after(b"another", [1, 6, 7, 8, 9], 4)) == []
    index.add(b"prompt", [6, 7, 8, 9, 1])
    assert list(index.after(b"prompt", [6, 7, 8, 9], 4)) == [1], "the latest completion counts"


def test_the_index_forgets_the_prompts_that_were_asked_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MOST_DRAFT_TOKENS", 6)
    index = DraftIndex()
    for prompt in (b"a", b"b", b"a", b"c"):
        index.add(prompt, [1, 2, 3, 4, 5, 6, 7])
    assert list(index.after(b"b", [1, 2, 3, 4], 1)) == []
    assert list(index.after(b"a", [1, 2, 3, 4], 1)) == list(index.after(b"c", [1, 2, 3, 4], 1)) == [5]
