"""Routing replay: the same in every layout, nothing where it repeats what the router chooses by itself, and something
where it does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.init import character_tokenizer, write_tokenizer
from megatron_dppo.models.routing import REPLACED
from megatron_dppo.rl.types import Group
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.laws.test_split_invariance import ONE, Update, assert_same_update
from tests.policies import trains, write_family
from tests.ranks import RankPool
from tests.small_runs import configure, rows, write_run
from tests.steps import VOCAB, build, config_for, held_by, plan_for, size_of, step_of_groups, weights_of
from tests.test_ahead import Mortal, die, live

EXPERTS, LAYERS = 8, 4
SHARED = "in shared packs"
LAYOUTS = {
    "recomputing": ONE,
    "pp2 vpp2": LayoutConfig(pp=2, vpp=2, dp=1),
    "ep2 dp2": LayoutConfig(ep=2, dp=2),
    "tp2 sp": LayoutConfig(tp=2, dp=1, sequence_parallel=True),
    "cp2": LayoutConfig(cp=2, dp=1),
}
UPDATE = LossConfig(name="grpo", updates_per_rollout=2, replay_routing="update")
ROLLOUT, NONE = (replace(UPDATE, replay_routing=mode) for mode in ("rollout", "none"))


def routed(groups: list[Group]) -> list[Group]:
    """The groups with experts at random, other ones for every token and layer, but the same where all tokens up to
    there are; of a few tokens nothing is known."""
    made = []
    for group in groups:
        completions = []
        for completion in group.completions:
            tokens = [*group.prompt.token_ids, *completion.token_ids]
            table = np.stack([experts_after(tokens[: t + 1]) for t in range(len(tokens) - 1)])
            completions.append(dataclasses.replace(completion, routing=table))
        made.append(dataclasses.replace(group, completions=tuple(completions)))
    return made


def experts_after(tokens: list[int]) -> np.ndarray:
    """[LAYERS, 2], those of the last token."""
    rng = np.random.default_rng(tokens)
    chosen = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (LAYERS, 1)), axis=-1)[:, :2]
    return np.full_like(chosen, 255) if rng.random() < 0.1 else chosen


def learned(rank: int, size: int, config: Config) -> Update:
    """Metrics of a step of two updates, and the weights after it."""
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    metrics = learner.learn(plan_for(world, config, metadata), held_by(rank, metadata, routed(groups)), 1, version=0)
    weights = weights_of(policy, world)
    return metrics, weights if rank == 0 else {}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_qwen3_moe(folder, Sizes(vocab_size=VOCAB, num_hidden_layers=LAYERS), experts=EXPERTS)
    return folder


def config_of(
    policy: Path,
    layout: LayoutConfig,
    loss: LossConfig,
    *,
    recompute: str,
    lr: float = 1.0,
    share: Literal["on", "off"] = "off",
) -> Config:
    made = config_for(policy, layout, loss, 64, distributed=True, share=share)
    model, optimizer = replace(made.model, recompute=recompute), replace(made.optimizer, lr=lr)
    return replace(made, model=model, optimizer=optimizer)


def updates_of(ranks: RankPool, calls: dict[str, Config]) -> dict[str, Update]:
    found: dict[str, Update] = {}
    for size in (1, 2):
        names = [name for name, config in calls.items() if size_of(config.layout) == size]
        results = ranks.in_turn(size, *((learned, calls[name]) for name in names)) if names else []
        found |= {name: of_ranks[0] for name, of_ranks in zip(names, results, strict=True)}
    return found


def test_what_is_replayed_depends_on_no_layout_and_on_no_recomputation(ranks: RankPool, policy: Path) -> None:
    calls = {f"update, {name}": config_of(policy, layout, UPDATE, recompute="full") for name, layout in LAYOUTS.items()}
    calls["update, ep2 dp2"] = config_of(policy, LAYOUTS["ep2 dp2"], UPDATE, recompute="selective")
    for loss, names in ((UPDATE, ("pp2 vpp2",)), (ROLLOUT, ("pp2 vpp2", "tp2 sp", "cp2"))):
        for name in names:
            config = config_of(policy, LAYOUTS[name], loss, recompute="full", share="on")
            calls[f"{loss.replay_routing}, {name}, {SHARED}"] = config
    for loss in (UPDATE, ROLLOUT):
        calls[f"{loss.replay_routing}, alone"] = config_of(policy, ONE, loss, recompute="none")
    calls["start"] = config_of(policy, ONE, NONE, recompute="none", lr=1e-30)
    found = updates_of(ranks, calls)
    _, start = found.pop("start")
    for name, update in found.items():
        alone = found[f"{name.partition(',')[0]}, alone"]
        assert_same_update(update, alone, start, name)
        if not name.endswith(SHARED):  # how many tokens there are, is a matter of packs there
            assert update[0][REPLACED] == pytest.approx(alone[0][REPLACED], abs=1e-3), name
    # Of two updates the second chooses otherwise by itself; experts at random are what nobody chooses.
    assert 0.1 < found["update, alone"][0][REPLACED] < 0.8
    assert found["rollout, alone"][0][REPLACED] > 0.9


@pytest.mark.parametrize("family", ["Qwen3-MoE", "Qwen3.5-MoE"])
def test_its_own_choice_replayed_changes_no_bit_and_anothers_changes_the_gradient(
    ranks: RankPool, policy: Path, family: str, tmp_path: Path
) -> None:
    """The reference of the KL term chooses by itself: it is another model."""
    if family == "Qwen3.5-MoE" and not trains(
        policy := write_family(tmp_path, "Qwen3_5MoeForCausalLM", experts=EXPERTS)
    ):
        pytest.skip("this Megatron-Core cannot train it")
    with_reference = (replace(loss, kl_coef=0.1) for loss in (NONE, UPDATE, ROLLOUT))
    calls = {loss.replay_routing: config_of(policy, ONE, loss, recompute="none", lr=1e-30) for loss in with_reference}
    found = {name: metrics for name, (metrics, _) in updates_of(ranks, calls).items()}
    assert found["update"].pop(REPLACED) == 0.0
    assert REPLACED not in found["none"]
    assert found["update"] == found["none"]
    assert found["none"]["train/kl_loss"] < 1e-6 < found["rollout"]["train/kl_loss"]
    assert abs(found["rollout"]["train/grad_norm"] / found["none"]["train/grad_norm"] - 1.0) > 1e-3


# Whole runs with the local engine, which says its routing.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs"))
    write_qwen3_moe(folder / "hf", Sizes(vocab_size=VOCAB), experts=EXPERTS)
    write_tokenizer(character_tokenizer(), folder / "hf", max_tokens=128)
    return folder


def test_the_engines_choice_replayed_is_the_trainers_own_while_weights_are_the_same(
    ranks: RankPool, runs: Path, tmp_path: Path
) -> None:
    """In fp32 engine and trainer choose alike, so that a table that is out of place by one token would show."""
    found = {}
    for mode in ("none", "rollout"):
        config = configure(runs, tmp_path / mode, LayoutConfig(pp=2, dp=1), steps=2)
        ranks.run(2, live, replace(config, loss=replace(config.loss, replay_routing=mode)))
        found[mode] = rows(tmp_path / mode)
    assert [row.pop(REPLACED) for row in found["rollout"][1:]] == [0.0, 0.0]
    assert all(row["train/grad_norm"] > 0 for row in found["none"][1:])
    assert found["rollout"] == found["none"]


def test_a_run_that_dies_with_routed_rollouts_in_flight_goes_on_bit_by_bit(
    ranks: RankPool, runs: Path, tmp_path: Path
) -> None:
    def config(name: str) -> Config:
        made = configure(runs, tmp_path / name, ONE, ahead=1)
        return replace(made, loss=replace(made.loss, replay_routing="rollout"))

    ranks.run(1, live, config("undisturbed"))
    ranks.run(1, die, config("died"))
    assert len(rows(tmp_path / "died")) == Mortal.dies_at + 1
    ranks.run(1, live, config("died"))
    undisturbed = rows(tmp_path / "undisturbed")
    assert rows(tmp_path / "died") == undisturbed
    # Of rollouts in flight from before routing was asked for, the prompts are rolled out anew.
    unrouted = replace(config("unrouted"), loss=LossConfig())
    ranks.run(1, die, unrouted)
    ranks.run(1, live, replace(config("unrouted"), run=replace(unrouted.run, resume="anyway")))
    assert [row["rollout/stale_tokens"] for row in rows(tmp_path / "unrouted")[1:]] == [0.0, 1.0, 1.0, 0.0, 1.0]
    # The first step's rollouts are of the weights that it trains, the others' of weights one update older.
    assert [row[REPLACED] > 0 for row in undisturbed[1:]] == [False, True, True, True, True]
