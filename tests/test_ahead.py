"""Rollouts ahead: the order of a step's words, the age of its tokens, and law 6 with batches in flight.

Runs die here by an exception in the middle of a step: what a kill leaves on the disk is ``test_resume.py``'s matter.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config import (
    BranchConfig,
    Config,
    LayoutConfig,
    LossConfig,
    PromptPruningConfig,
    TreeConfig,
    replace,
)
from megatron_dppo.rl.types import StepPlan
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts
from megatron_dppo.train import Trainer, train
from tests.ranks import RankPool
from tests.small_runs import SAVED, Rows, begin_run, configure, rows, write_run

ONE, TP2 = LayoutConfig(dp=1), LayoutConfig(tp=2, dp=1)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("policy"))


CONVERSATION = '''
import asyncio
import random

async def rollout(client, prompt):
    """Two turns, and a tool between them that takes no time or some; for some prompts the second one knows the first
    from its context."""
    first = await client.generate(prompt.token_ids, max_tokens=3)
    await asyncio.sleep(0.01 * random.random())
    told = client.tokenizer.encode("=7", add_special_tokens=False)
    context = [*prompt.token_ids, *first.token_ids, *told]
    second = await client.generate(context)
    if prompt.id % 2 and len(second.token_ids):
        return [[first], [context, second]]
    return [first, told, second]

def group_rm(args, samples):
    order = sorted(sample.response for sample in samples)
    return [float(order.index(sample.response)) for sample in samples]
'''


class Mortal(Trainer):
    """Dies before a step trains."""

    dies_at = 4

    def train(self, plan: StepPlan, rollouts: CompleteRollouts) -> dict[str, float]:
        if self.step == self.dies_at:
            raise KeyboardInterrupt
        return super().train(plan, rollouts)


def live(rank: int, size: int, config: Config) -> None:
    train(config)


def die(rank: int, size: int, config: Config) -> None:
    with ExitStack() as to_close, pytest.raises(KeyboardInterrupt):
        begin_run(config, Mortal, to_close).run()


@pytest.fixture(scope="module")
def undisturbed(policy: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    run = tmp_path_factory.mktemp("undisturbed")
    ranks.run(2, live, configure(policy, run, TP2, ahead=1))
    return rows(run)


@pytest.fixture(scope="module")
def left_behind(policy: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run one step ahead that died two steps after its only checkpoint."""
    run = tmp_path_factory.mktemp("died") / "run"
    ranks.run(2, die, configure(policy, run, TP2, ahead=1))
    assert len(rows(run)) == Mortal.dies_at + 1
    assert [path.name for path in (run / "checkpoints").glob("iter_*")] == [f"iter_{SAVED:07d}"]
    return run


@pytest.fixture
def died(left_behind: Path, tmp_path: Path) -> Path:
    return shutil.copytree(left_behind, tmp_path / "run")


def test_tokens_are_one_version_old_but_for_the_first_step(undisturbed: Rows) -> None:
    steps = undisturbed[1:]
    assert [row["rollout/stale_tokens"] for row in steps] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [row["staleness/mean"] for row in steps] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [row.get("train/rollout_logprob_abs_diff", 1.0) < 1e-5 for row in steps] == [True] + [False] * 4
    assert [row["step"] for row in undisturbed if "rollout/agreement_max_diff" in row] == [0, 3]
    assert all(row["train/grad_norm"] > 0 for row in steps)


def test_a_run_that_dies_with_a_batch_in_flight_goes_on_bit_by_bit(
    policy: Path, ranks: RankPool, died: Path, undisturbed: Rows
) -> None:
    ranks.run(2, live, configure(policy, died, TP2, ahead=1))
    assert rows(died) == undisturbed


def test_a_run_that_dies_with_trees_in_flight_goes_on_bit_by_bit(policy: Path, ranks: RankPool, tmp_path: Path) -> None:
    def grows(run: Path) -> Config:
        """From the same seed, into ``run``."""
        config = configure(policy, run, ONE, ahead=1)
        tree = TreeConfig(branches=(BranchConfig(at=2), BranchConfig(entropy=2.2)))
        rollout = replace(config.rollout, samples_per_prompt=8, tree=tree)
        return replace(config, rollout=rollout, loss=LossConfig(name="dr_grpo"))

    ranks.run(1, live, grows(tmp_path / "undisturbed"))
    ranks.run(1, die, grows(tmp_path / "run"))
    ranks.run(1, live, grows(tmp_path / "run"))
    undisturbed = rows(tmp_path / "undisturbed")
    assert rows(tmp_path / "run") == undisturbed
    for row in undisturbed[1:]:
        assert row["rollout/unique_tokens"] < row["rollout/generated_tokens"] and row["train/grad_norm"] > 0


def test_a_run_that_dies_with_conversations_in_flight_goes_on_bit_by_bit(
    policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Scored by the group, too."""
    (file := tmp_path / "agent.py").write_text(CONVERSATION)

    def converses(run: Path) -> Config:
        config = configure(policy, run, ONE, ahead=1)
        rollout = replace(config.rollout, conversation=f"{file}:rollout")
        pruning = replace(config.pruning, prompts=PromptPruningConfig(rule="none"))
        reward = replace(config.reward, function=f"{file}:group_rm")
        return replace(config, rollout=rollout, pruning=pruning, reward=reward)

    ranks.run(1, live, converses(tmp_path / "undisturbed"))
    ranks.run(1, die, converses(tmp_path / "run"))
    ranks.run(1, live, converses(tmp_path / "run"))
    undisturbed = rows(tmp_path / "undisturbed")
    assert rows(tmp_path / "run") == undisturbed
    assert undisturbed[1]["train/rollout_logprob_abs_diff"] < 1e-5
    for row in undisturbed[1:]:
        told = row["rollout/response_len/mean"] - row["rollout/generated_tokens"] / (8 * 3)
        assert told > 2 and row["train/grad_norm"] > 0, "contexts are told anew"


def test_a_batch_in_flight_goes_to_another_number_of_ranks(
    policy: Path, ranks: RankPool, died: Path, undisturbed: Rows
) -> None:
    ranks.run(1, live, configure(policy, died, ONE, ahead=1))
    for row, expected in zip(rows(died), undisturbed, strict=True):
        for name in (name for name in expected if name.startswith(("rollout/", "prune/", "eval/", "train/"))):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), (row["step"], name)


def test_on_policy_again_the_prompts_that_were_drawn_are_rolled_out_anew(
    policy: Path, ranks: RankPool, died: Path, undisturbed: Rows
) -> None:
    ranks.run(2, live, configure(policy, died, TP2, ahead=0))
    ours = rows(died)
    assert ours[: SAVED + 1] == undisturbed[: SAVED + 1]
    for row, expected in zip(ours[SAVED + 1 :], undisturbed[SAVED + 1 :], strict=True):
        assert (row["rollout/stale_tokens"], expected["rollout/stale_tokens"]) == (0.0, 1.0)
        assert row["train/rollout_logprob_abs_diff"] < 1e-5
    first, same_draw = ours[SAVED + 1], undisturbed[SAVED + 1]
    assert first["prune/kept_prompt_fraction"] == same_draw["prune/kept_prompt_fraction"]
    assert first["rollout/entropy"] != same_draw["rollout/entropy"], "other weights rolled out"


def test_a_run_on_policy_goes_on_one_step_ahead(policy: Path, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, die, configure(policy, tmp_path, TP2, ahead=0))
    ranks.run(2, live, configure(policy, tmp_path, TP2, ahead=1))
    assert [row["rollout/stale_tokens"] for row in rows(tmp_path)[1:]] == [0.0, 0.0, 0.0, 0.0, 1.0]


@dataclass(frozen=True)
class Life:
    """What a run did from one start of it to its end or its death."""

    selected: list[int]
    """Steps whose prompts were drawn."""
    trained: dict[int, list[int]]
    """The prompts of each step."""


def lived(rank: int, size: int, config: Config, dies_at: int) -> Life:
    life = Life([], {})

    class Recorded(Mortal):
        def select(self, step: int) -> StepRollouts:
            life.selected.append(step)
            return super().select(step)

        def train(self, plan: StepPlan, rollouts: CompleteRollouts) -> dict[str, float]:
            metrics = super().train(plan, rollouts)
            life.trained[self.step] = rollouts.metadata.prompt_ids.tolist()
            return metrics

    Recorded.dies_at = dies_at
    with ExitStack() as to_close, suppress(KeyboardInterrupt):
        begin_run(config, Recorded, to_close).run()
    return life


def test_several_steps_ahead_a_run_goes_on_bit_by_bit_and_however_far_ahead_with_the_same_prompts(
    policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Three steps are in flight in the checkpoint. With fewer ahead, what is too old by then is rolled out anew, what
    is not asked for yet is in the next checkpoint, and no prompt is lost or comes twice."""

    def life(run: str, ahead: int, dies_at: int = 9, saves: int = SAVED) -> Life:
        config = configure(policy, tmp_path / run, ONE, ahead=ahead, steps=6)
        config = replace(config, run=replace(config.run, checkpoint_every=saves))
        return ranks.run(1, lived, config, dies_at)[0]

    def lags(run: str) -> list[tuple[float, float]]:
        return [(row["staleness/max"], row["staleness/mean"]) for row in rows(tmp_path / run)[1:]]

    whole = life("whole", 3)
    assert lags("whole") == [(float(lag), float(lag)) for lag in (0, 1, 2, 3, 3, 3)]
    assert {row["staleness/bound"] for row in rows(tmp_path / "whole")[1:]} == {3.0}
    assert sorted(whole.selected) == sorted(whole.trained) == list(range(6))
    died = life("died", 3, dies_at=4)
    assert sorted(died.selected) == list(range(6)) and list(died.trained) == [0, 1, 2, 3]
    for run in ("same", "fewer"):
        shutil.copytree(tmp_path / "died", tmp_path / run)

    assert life("same", 3) == Life([], {step: whole.trained[step] for step in (3, 4, 5)})
    assert rows(tmp_path / "same") == rows(tmp_path / "whole")

    assert life("fewer", 0, dies_at=4, saves=1) == Life([], {3: whole.trained[3]})
    assert len(list((tmp_path / "fewer/checkpoints/iter_0000004").glob("rollouts*"))) == 2
    assert life("fewer", 1) == Life([], {step: whole.trained[step] for step in (4, 5)})
    assert lags("fewer") == [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (0.0, 0.0), (0.0, 0.0), (1.0, 1.0)]


def words_of(rank: int, size: int, config: Config) -> list[str]:
    """What a run does, in order: the words of its steps, and the waiting for what the engine was asked."""
    said: list[str] = []

    class Telling(Trainer):
        def select(self, step: int) -> StepRollouts:
            said.append(f"select {step}")
            return super().select(step)

        def plan(self, rollouts: CompleteRollouts) -> StepPlan:
            plan = super().plan(rollouts)
            said.append(f"plan {self.step}")
            return plan

        def train(self, plan: StepPlan, rollouts: CompleteRollouts) -> dict[str, float]:
            said.append(f"train {self.step}")
            return super().train(plan, rollouts)

        def sync(self, version: int) -> None:
            super().sync(version)
            said.append(f"sync {version}")

    def told(word: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def telling(*arguments: Any) -> Any:
            said.append(word)
            return method(*arguments)

        return telling

    with ExitStack() as to_close:
        trainer = begin_run(config, Telling, to_close)
        for word in ("request", "finish"):
            setattr(trainer.collector, word, told(word, getattr(trainer.collector, word)))
        trainer.run()
    return said


def test_the_next_step_is_drawn_from_all_that_is_known_and_asked_for_before_this_one_trains(
    policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    config = configure(policy, tmp_path / "ahead", ONE, ahead=1, steps=2)
    assert " ".join(ranks.run(1, words_of, config)[0]) == (
        "sync 0 select 0 request finish plan 0 select 1 request train 0 sync 1 finish plan 1 train 1 sync 2"
    )
    config = configure(policy, tmp_path / "two", ONE, ahead=2, steps=4)
    assert " ".join(ranks.run(1, words_of, config)[0]) == (
        "sync 0 select 0 request finish plan 0 select 1 request select 2 request train 0 sync 1 "
        "finish plan 1 select 3 request train 1 sync 2 finish plan 2 train 2 sync 3 finish plan 3 train 3 sync 4"
    )
    config = configure(policy, tmp_path / "on-policy", ONE, steps=2)
    assert " ".join(ranks.run(1, words_of, config)[0]) == (
        "sync 0 select 0 request finish plan 0 train 0 sync 1 select 1 request finish plan 1 train 1 sync 2"
    )


@pytest.mark.parametrize("ahead", [0, 1])
def test_where_no_weight_has_moved_tokens_are_fresh_also_after_a_death(
    ahead: int, policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Groups of equal rewards keep nothing: there is no sync, and the engine stays at version 0, in flight or not. The
    first update then makes what is in flight one version old, and not as many as there were steps."""
    ranks.run(1, die, configure(policy, tmp_path, ONE, ahead=ahead, steps=6, reward="equal"))
    steps = rows(tmp_path)[1:]
    assert [row["train/no_op_updates"] for row in steps] == [1.0] * Mortal.dies_at
    ranks.run(1, live, configure(policy, tmp_path, ONE, ahead=ahead, steps=6))
    steps = rows(tmp_path)[1:]
    assert [row["train/no_op_updates"] for row in steps] == [1.0] * (SAVED + ahead) + [0.0] * (3 - ahead)
    ages = [(row["rollout/stale_tokens"], row["staleness/max"]) for row in steps]
    assert ages == [(0.0, 0.0)] * (6 - ahead) + [(1.0, 1.0)] * ahead
    assert steps[-1 - ahead]["train/rollout_logprob_abs_diff"] < 1e-5
