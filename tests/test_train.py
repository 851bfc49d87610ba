"""What the trainer owes an engine: to let it sleep and wake, to show its events, to close it whatever happens."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_dppo.config import Config, LayoutConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.models.actor import Actor
from megatron_dppo.rl.types import Prompt, StepPlan
from megatron_dppo.rollout.engine import Completions, Sampling, WeightSource
from megatron_dppo.rollout.local import LocalEngine
from megatron_dppo.train import train
from megatron_dppo.trainer.learner import Learner
from tests.ranks import RankPool
from tests.small_runs import REWARD, configure, rows, write_run

TP2 = LayoutConfig(tp=2, dp=1)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("policy"))


def told(rank: int, size: int, config: Config) -> tuple[list[str], str, str]:
    """What the engine of a run was told, what the run said, and how it failed."""
    heard: list[str] = []

    class Hearing(LocalEngine):
        def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Future[Completions]:
            heard.append("begin")
            return super().begin(prompts, sampling)

        def pause(self) -> None:
            heard.append("pause")
            super().pause()

        def resume(self) -> None:
            heard.append("resume")
            super().resume()

        def update_weights(self, source: WeightSource, version: int) -> None:
            heard.append(f"update {version}")
            super().update_weights(source, version)

        def sample_each(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[str, Completions]:
            groups = super().begin(prompts, sampling).result()
            return {"it": groups}

        def take_events(self) -> tuple[dict[str, float], tuple[str, ...]]:
            return {"rollout/lost_servers": float(heard.count("begin"))}, ("a server was taken out",)

        def close(self) -> None:
            heard.append("close")

    release = Actor.release_memory

    def make_room(actor: Actor) -> None:
        heard.append("room")
        release(actor)

    said, failure = io.StringIO(), ""
    hearing = mock.patch("megatron_dppo.trainer.assemble.LocalEngine", Hearing)
    with hearing, mock.patch.object(Actor, "release_memory", make_room), contextlib.redirect_stdout(said):
        try:
            train(config)
        except UserError as error:
            failure = error.setting
    return heard, said.getvalue(), failure


@pytest.mark.parametrize(
    ("reward", "colocated", "steps"),
    [
        ("mixed", False, "begin pause update 1 resume begin pause update 2 resume"),
        ("mixed", True, "begin pause pause room update 1 room resume begin pause pause room update 2 room resume"),
        ("equal", False, "begin begin"),
        ("equal", True, "begin pause pause room update 0 room resume begin pause pause room update 0 room resume"),
    ],
)
def test_an_engine_that_shares_the_gpus_sleeps_while_the_trainer_trains(
    reward: str, colocated: bool, steps: str, policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    config = configure(policy, tmp_path, TP2, steps=2, reward=reward)
    config = replace(
        config,
        rollout=replace(config.rollout, colocated=colocated),
        eval=replace(config.eval, problems=0),
    )
    for rank, (heard, said, _) in enumerate(ranks.run(2, told, config)):
        room = "room " if colocated else ""
        assert " ".join(heard) == f"pause {room}update 0 {room}resume {steps} close"
        assert said.count("a server was taken out") == (rank == 0), "once, by the leader"
    assert [row["rollout/lost_servers"] for row in rows(tmp_path)] == [1.0, 2.0]


def plans_of(rank: int, size: int, config: Config) -> list[StepPlan]:
    """The plans of a run."""
    plans: list[StepPlan] = []
    learn = Learner.learn

    def noted(learner: Learner, plan: StepPlan, *rest: Any, **more: Any) -> dict[str, float]:
        plans.append(plan)
        return learn(learner, plan, *rest, **more)

    with mock.patch.object(Learner, "learn", noted):
        train(config)
    return plans


def test_packs_share_what_the_prompts_of_a_run_begin_with(policy: Path, ranks: RankPool, tmp_path: Path) -> None:
    """18 characters, each a token; the other shared lengths are those of whole prompts, within groups."""
    begun = "1+2+3+4+5+6+7+8+9+"
    lines = [json.dumps({"prompt": f"{begun}{number}=", "label": "0"}) + "\n" for number in range(1, 10)]
    (tmp_path / "sums.jsonl").write_text("".join(lines))
    config = configure(policy, tmp_path / "run", LayoutConfig(dp=1), steps=1)
    data = replace(config.data, train=str(tmp_path / "sums.jsonl"))
    config = replace(config, data=data, eval=replace(config.eval, problems=0))
    ((plan,),) = ranks.run(1, plans_of, config)
    (minibatch,) = plan.minibatches
    samples = minibatch.samples
    first = np.flatnonzero(np.diff(samples.group, prepend=-1))
    assert len(first) > 2 and samples.shared_length[first].tolist() == [0] + [len(begun)] * (len(first) - 1)


def test_the_engine_is_closed_also_when_a_run_fails(policy: Path, ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(REWARD.format(reward="undefined"))
    config = configure(policy, tmp_path / "run", TP2, steps=2)
    config = replace(config, reward=replace(config.reward, function=f"{tmp_path / 'failing.py'}:compute_score"))
    for heard, _, failure in ranks.run(2, told, config):
        assert failure == "reward.function"
        assert heard[-1] == "close"
