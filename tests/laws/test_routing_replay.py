"""Routing replay: the same update in every layout; no change with the router's own choice; another
gradient with another choice."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.init import build_character_tokenizer, write_tokenizer
from megatron_dppo.rl.types import Group
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.laws.test_split_invariance import LAYOUTS, ONE, Update, assert_same_update
from tests.policies import trains, write_family
from tests.ranks import RankPool
from tests.small_runs import live, rows, small_run, write_run
from tests.steps import VOCAB, build, config_for, held_by, plan_for, step_of_groups, weights_of

EXPERTS, LAYERS = 8, 4
POLICY = partial(
    write_qwen3_moe, sizes=Sizes(vocab_size=VOCAB, num_hidden_layers=LAYERS), experts=EXPERTS
)


def route(groups: list[Group]) -> list[Group]:
    """Return the groups with random experts of every token and layer, a function of all tokens up
    to there. A tenth of the tokens have unknown experts."""
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
    """Return the experts of the last token, [LAYERS, 2]."""
    rng = np.random.default_rng(tokens)
    chosen = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (LAYERS, 1)), axis=-1)[:, :2]
    return np.full_like(chosen, 255) if rng.random() < 0.1 else chosen


def learn(rank: int, size: int, config: Config) -> Update:
    """Return the metrics of a step of two updates, and the weights after it."""
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    metrics = learner.train(
        plan_for(world, config, metadata), held_by(rank, metadata, route(groups)), 1, version=0
    )
    weights = weights_of(policy, world)
    return metrics, weights if rank == 0 else {}


def configure(
    policy: Path,
    mode: str,
    layout: LayoutConfig = ONE,
    recompute: str = "none",
    share: str = "off",
    *,
    lr: float = 1.0,
    kl_coef: float = 0.0,
) -> Config:
    loss = LossConfig(name="grpo", updates_per_rollout=2, replay_routing=mode, kl_coef=kl_coef)
    config = config_for(policy, layout, loss, 64, distributed=True, share=share)
    model, optimizer = replace(config.model, recompute=recompute), replace(config.optimizer, lr=lr)
    return replace(config, model=model, optimizer=optimizer)


def learn_each(ranks: RankPool, configs: dict[str, Config], size: int) -> dict[str, Update]:
    results = ranks.in_turn(size, *((learn, config) for config in configs.values()))
    return {name: of_ranks[0] for name, of_ranks in zip(configs, results, strict=True)}


ON_TWO_RANKS = (
    ("pp2 vpp2", "full", "off"),
    ("ep2 dp2", "selective", "off"),
    ("pp2 vpp2", "full", "on"),
    ("tp2 sp", "full", "on"),
    ("cp2", "full", "on"),
)
"""Layouts, recomputation, and whether packs share prefixes."""


def test_replay_depends_on_no_layout_or_recomputation(ranks: RankPool, policy: Path) -> None:
    alone = {
        recompute: configure(policy, "rollout", recompute=recompute)
        for recompute in ("none", "full")
    }
    alone["start"] = configure(policy, "none", lr=1e-30)
    on_two = {
        ", ".join(each): configure(policy, "rollout", LAYOUTS[each[0]], *each[1:])
        for each in ON_TWO_RANKS
    }
    found = learn_each(ranks, alone, 1) | learn_each(ranks, on_two, 2)
    (_, start), reference = found.pop("start"), found.pop("none")
    for name, update in found.items():
        assert_same_update(update, reference, start, name)


@pytest.mark.parametrize("family", ["Qwen3-MoE", "Qwen3.5-MoE"])
def test_replay_of_another_choice_changes_the_gradient(
    ranks: RankPool, policy: Path, family: str, tmp_path: Path
) -> None:
    """The reference of the KL term, another model, chooses itself."""
    if family == "Qwen3.5-MoE":
        policy = write_family(tmp_path, "Qwen3_5MoeForCausalLM", experts=EXPERTS)
        if not trains(policy):
            pytest.skip("this Megatron-Core cannot train it")
    configs = {mode: configure(policy, mode, lr=1e-30, kl_coef=0.1) for mode in ("none", "rollout")}
    found = {mode: metrics for mode, (metrics, _) in learn_each(ranks, configs, 1).items()}
    assert found["none"]["train/kl_loss"] < 1e-6 < found["rollout"]["train/kl_loss"]
    assert abs(found["rollout"]["train/grad_norm"] / found["none"]["train/grad_norm"] - 1.0) > 1e-3


def test_replay_of_fresh_rollouts_is_the_trainers_choice(ranks: RankPool, tmp_path: Path) -> None:
    """In fp32 engine and trainer make the same choice: a table shifted by one token would differ.
    Rollouts of older weights have other experts."""
    folder = write_run(tmp_path)
    write_qwen3_moe(folder / "hf", Sizes(vocab_size=VOCAB), experts=EXPERTS)
    write_tokenizer(build_character_tokenizer(), folder / "hf", max_tokens=128)
    replay, ahead = "loss.replay_routing=rollout", "rollout.ahead=1"
    settings = {
        "none": (),
        "rollout": (replay,),
        "ahead_none": (ahead,),
        "ahead_rollout": (replay, ahead),
    }
    found = {
        name: small_run(folder, tmp_path / name, "layout.pp=2", "run.steps=2", *words)
        for name, words in settings.items()
    }
    ranks.in_turn(2, *((live, config) for config in found.values()))
    none, rollout, *late = (rows(tmp_path / name) for name in found)
    assert all(row["train/grad_norm"] > 0 for row in none[1:])
    assert rollout == none
    assert [ours == theirs for ours, theirs in zip(*late, strict=True)][1:] == [True, False]
