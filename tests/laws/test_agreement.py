"""Law 5: the engine's log-probabilities of its tokens are the actor's, in every layout, or the run
stops."""

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
from tests.laws.test_split_invariance import LAYOUTS
from tests.ranks import RankPool
from tests.rollout.scripted import pool_of
from tests.steps import build, config_for, weights_of


class TwoServers(RolloutEngine[Future[Completions]]):
    """One engine under two names, with other log-probabilities under the second."""

    def __init__(self, engine: RolloutEngine[Future[Completions]]) -> None:
        self._engine = engine

    def sample_each(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[str, Completions]:
        groups = self._engine.sample_each(prompts, sampling)["local, rank 0"]
        wrong = [
            tuple(dataclasses.replace(c, logprobs=c.logprobs - 0.01) for c in group)
            for group in groups
        ]
        return {"one": groups, "two": wrong}


def check(
    rank: int, size: int, config: Config, mistake: str = ""
) -> tuple[dict[str, float] | UserError, float]:
    """Return a check's metrics or error on this rank, and the largest change of the actor's
    weights."""
    world, _, policy = build(config)
    engine = policy.build_engine()
    policy.sync(engine, 3)
    before = weights_of(policy, world)
    if mistake == "weights" and rank == size - 1:
        engine._weights["model.norm.weight"].mul_(1.01)
    servers = TwoServers(engine) if mistake == "one of two servers" else engine
    found: dict[str, float] | UserError
    try:
        found = check_agreement(
            policy, servers, pool_of(9), version=4 if mistake == "version" else 3
        )
    except UserError as error:
        found = error
    after = weights_of(policy, world)
    return found, max(float((after[name] - before[name]).abs().max()) for name in before)


def configure(policy: Path, layout: LayoutConfig, run: Path, dtype: str = "fp32") -> Config:
    config = config_for(policy, layout, LossConfig(), 128, distributed=True)
    rollout = replace(
        config.rollout, max_logprob_diff=None, max_prob_error=None, max_response_tokens=64
    )
    run_settings, model = replace(config.run, dir=str(run)), replace(config.model, dtype=dtype)
    return replace(config, rollout=rollout, run=run_settings, model=model)


AGREEING = (
    pytest.param(2, "tp2 sp", "fp32", 1e-5, marks=pytest.mark.quick),
    (4, "cp2 pp2", "fp32", 1e-5),
    (2, "dp2", "bf16", 0.1),
)


@pytest.mark.parametrize(("size", "layout", "dtype", "limit"), AGREEING)
def test_local_engine_agrees_with_the_actor(
    size: int, layout: str, dtype: str, limit: float, ranks: RankPool, policy: Path, tmp_path: Path
) -> None:
    results = ranks.run(size, check, configure(policy, LAYOUTS[layout], tmp_path, dtype))
    for metrics, moved in results:
        assert metrics == results[0][0]
        assert 0 < metrics["rollout/agreement_mean_diff"] < limit
        assert (
            metrics["rollout/agreement_mean_diff"]
            < metrics["rollout/agreement_max_diff"]
            < 100 * limit
        )
        assert moved == 0
    assert not (tmp_path / "disagreement").exists()


def test_disagreement_stops_every_rank_and_leaves_evidence(
    ranks: RankPool, policy: Path, tmp_path: Path
) -> None:
    """Of weights on one rank, and of the version of tokens."""
    config = configure(policy, LAYOUTS["pp2"], tmp_path)
    of_weights, of_version = ranks.in_turn(
        2, (check, config, "weights"), (check, config, "version")
    )
    errors = [error for error, _ in of_weights]
    assert len({str(error) for error in errors}) == 1
    [file] = (tmp_path / "disagreement").iterdir()
    assert (errors[0].setting, errors[0].value) == ("rollout.max_logprob_diff", "0.0001")
    for words in (
        "the server local, rank 1 disagree",
        "after the sync to version 3",
        f"are in {file}",
    ):
        assert words in str(errors[0])
    evidence = json.loads(file.read_text())["completions"]
    assert len(evidence) == PROMPTS * SAMPLES
    assert {each["source"] for each in evidence} == {"local, rank 1"}
    assert max(len(each["response_ids"]) for each in evidence) == MAX_TOKENS
    for error, _ in of_version:
        assert error.setting == "rollout.engine"
        assert (
            "local, rank 0 was given weights of version 4, and reports tokens of version 3"
            in error.problem
        )


def test_only_the_wrong_server_is_named(ranks: RankPool, policy: Path, tmp_path: Path) -> None:
    [(error, _)] = ranks.run(
        1, check, configure(policy, LayoutConfig(dp=1), tmp_path), "one of two servers"
    )
    assert "the server two disagree" in error.problem
    assert "the mean |log p difference| is 0.01." in error.problem
    assert "the server one" not in error.problem
