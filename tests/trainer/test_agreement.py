"""Law 5: what the engine says of its tokens is what the actor says of them, in every layout, or the run stops."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import Completions, RolloutEngine, Sampling
from megatron_dppo.trainer.agreement import MAX_TOKENS, PROMPTS, SAMPLES, check_agreement
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.rollout.scripted import pool_of
from tests.steps import build, config_for, weights_of

Claims = dict[str, float] | UserError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


class TwoServers(RolloutEngine[Future[Completions]]):
    """One engine under two names, which under the second says something else of its tokens."""

    def __init__(self, engine: RolloutEngine[Future[Completions]]) -> None:
        self._engine = engine

    def sample_each(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[str, Completions]:
        groups = self._engine.sample_each(prompts, sampling)["local, rank 0"]
        wrong = [tuple(dataclasses.replace(c, logprobs=c.logprobs - 0.01) for c in group) for group in groups]
        return {"one": groups, "two": wrong}


def checked(rank: int, size: int, config: Config, mistake: str) -> tuple[Claims, float]:
    """What a check returns or raises on this rank, and how far it moved the actor's weights."""
    world, _, policy = build(config)
    engine = policy.engine()
    policy.sync(engine, 3)
    before = weights_of(policy, world)
    if mistake == "weights" and rank == size - 1:
        engine._weights["model.norm.weight"].mul_(1.01)
    servers = TwoServers(engine) if mistake == "one of two servers" else engine
    try:
        claim: Claims = check_agreement(policy, servers, pool_of(9), version=4 if mistake == "version" else 3)
    except UserError as error:
        claim = error
    after = weights_of(policy, world)
    return claim, max(float((after[name] - before[name]).abs().max()) for name in before)


def strict(path: Path, layout: LayoutConfig, run: Path, dtype: str = "fp32") -> Config:
    config = config_for(path, layout, LossConfig(), 128, distributed=True)
    rollout = replace(config.rollout, max_logprob_diff=None, max_prob_error=None, max_response_tokens=64)
    return replace(
        config, rollout=rollout, run=replace(config.run, dir=str(run)), model=replace(config.model, dtype=dtype)
    )


LAYOUTS = {
    "tp2 sp": (2, LayoutConfig(tp=2, dp=1, sequence_parallel=True), "fp32", 1e-5),
    "pp2 dp2": (4, LayoutConfig(pp=2, dp=2), "fp32", 1e-5),
    "cp2 tp2 sp": (4, LayoutConfig(cp=2, tp=2, dp=1, sequence_parallel=True), "fp32", 1e-5),
    "bf16": (2, LayoutConfig(dp=2), "bf16", 0.1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_local_engine_agrees_with_the_actor_in_every_layout(
    name: str, ranks: RankPool, path: Path, tmp_path: Path
) -> None:
    size, layout, dtype, limit = LAYOUTS[name]
    claims = ranks.run(size, checked, strict(path, layout, tmp_path, dtype), "")
    for claim, moved in claims:
        assert claim == claims[0][0], "the same on every rank"
        assert 0 < claim["rollout/agreement_mean_diff"] < limit
        assert claim["rollout/agreement_mean_diff"] < claim["rollout/agreement_max_diff"] < 100 * limit
        assert moved == 0
    assert not (tmp_path / "disagreement").exists()


@pytest.mark.parametrize("layout", [LayoutConfig(tp=2, dp=1), LayoutConfig(pp=2, dp=1)], ids=["tp2", "pp2"])
def test_other_weights_on_one_rank_stop_every_rank_and_leave_evidence(
    layout: LayoutConfig, ranks: RankPool, path: Path, tmp_path: Path
) -> None:
    errors = [claim for claim, _ in ranks.run(2, checked, strict(path, layout, tmp_path), "weights")]
    assert len({str(error) for error in errors}) == 1
    (file,) = (tmp_path / "disagreement").iterdir()
    assert errors[0].setting == "rollout.max_logprob_diff" and errors[0].value == "0.0001"
    for word in ("the server local, rank 1 disagree", "after the sync to version 3", f"are in {file}"):
        assert word in str(errors[0])
    evidence = json.loads(file.read_text())
    assert len(evidence["completions"]) == PROMPTS * SAMPLES
    assert {each["source"] for each in evidence["completions"]} == {"local, rank 1"}
    assert max(len(each["response_ids"]) for each in evidence["completions"]) == MAX_TOKENS


def test_the_server_that_is_wrong_is_named_and_the_right_one_is_not(
    ranks: RankPool, path: Path, tmp_path: Path
) -> None:
    ((error, _),) = ranks.run(1, checked, strict(path, LayoutConfig(dp=1), tmp_path), "one of two servers")
    assert "the server two disagree" in error.problem and "the mean |log p difference| is 0.01." in error.problem
    assert "the server one" not in error.problem


def test_tokens_of_another_version_stop_every_rank(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    for error, _ in ranks.run(2, checked, strict(path, LayoutConfig(dp=2), tmp_path), "version"):
        assert error.setting == "rollout.engine"
        assert "local, rank 0 was given weights of version 4, and says that version 3 made its tokens" in error.problem
