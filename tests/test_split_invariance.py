"""Law 1: for one step plan, loss and gradient are the same for every layout, microbatch order and pack order.

One update of Adam with eps = 1 and rate 1 moves a weight by g / (|g| + 1): the moved weights show the gradient, after
the optimizer has sharded it, to first order and in every bit that matters.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_dppo.config import (
    CompletionPruningConfig,
    Config,
    LayoutConfig,
    LossConfig,
    replace,
)
from megatron_dppo.rl.types import Group, Ints, StepMetadata, StepPlan
from tests.bridge.directories import SMOLLM2, Sizes, write_llama, write_qwen2, write_qwen3_moe
from tests.policies import trains, write_family, write_policy
from tests.ranks import RankPool
from tests.steps import (
    VOCAB,
    Weights,
    build,
    config_for,
    held_by,
    plan_for,
    step_of_groups,
    step_of_one_group,
    step_of_sequences,
    step_with_system_messages,
    weights_of,
)

Step = tuple[StepMetadata, list[Group]]


def reverse_order(plan: StepPlan) -> StepPlan:
    """The same packs as microbatches in the opposite order, with their samples in the opposite order, unless one begins
    with another's tokens."""

    def reversed_pack(pack: tuple[int, ...], shared: Ints) -> tuple[int, ...]:
        firsts = [place for place, k in enumerate(pack) if not shared[k]]
        pieces = [pack[first:last] for first, last in itertools.pairwise([*firsts, len(pack)])]
        return tuple(k for piece in reversed(pieces) for k in piece)

    minibatches = (
        dataclasses.replace(
            m,
            packs=tuple(
                tuple(reversed_pack(pack, m.samples.shared_length) for pack in replica[::-1]) for replica in m.packs
            ),
        )
        for m in plan.minibatches
    )
    return dataclasses.replace(plan, minibatches=tuple(minibatches))


def learned(
    rank: int, size: int, config: Config, backwards: bool, step: Callable[[int], Step] = step_of_groups
) -> tuple[dict[str, float], Weights]:
    """Loss and metrics of one update, and the weights after it."""
    world, learner, policy = build(config)
    metadata, groups = step(size)
    plan = plan_for(world, config, metadata, groups)
    assert plan.updates
    metrics = learner.learn(
        reverse_order(plan) if backwards else plan, held_by(rank, metadata, groups), step=1, version=0
    )
    weights = weights_of(policy, world)
    return metrics, weights if rank == 0 else {}


Update = tuple[dict[str, float], Weights]


def size_of(layout: LayoutConfig) -> int:
    return layout.tp * layout.pp * layout.cp * layout.dp


def assert_same_update(ours: Update, reference: Update, start: Weights, where: str) -> None:
    terms = abs(reference[0]["train/pg_loss"])  # the loss is a small difference of terms of about this size
    assert ours[0]["train/loss"] == pytest.approx(reference[0]["train/loss"], rel=1e-5, abs=1e-5 * terms), where
    for name in ("train/grad_norm", "train/pg_loss", "train/entropy_loss", "train/tokens"):
        assert ours[0][name] == pytest.approx(reference[0][name], rel=1e-5), (where, name)
    assert ours[1].keys() == reference[1].keys() == start.keys()
    for name, before in start.items():
        moved, expected = ours[1][name] - before, reference[1][name] - before
        assert expected.norm() > 0, name
        assert (moved - expected).norm() <= 1e-5 * expected.norm() + 2e-7 * before.norm(), (where, name)


ONE = LayoutConfig(dp=1)
LAYOUTS = {
    "tp2": LayoutConfig(tp=2, dp=1),
    "tp2 sp": LayoutConfig(tp=2, dp=1, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2, dp=1),
    "dp2": LayoutConfig(dp=2),
    "tp2 pp2": LayoutConfig(tp=2, pp=2, dp=1),
    "cp2": LayoutConfig(cp=2, dp=1),
    "cp4": LayoutConfig(cp=4, dp=1),
    "cp2 dp2": LayoutConfig(cp=2, dp=2),
    "cp2 pp2": LayoutConfig(cp=2, pp=2, dp=1),
    "cp2 tp2 sp": LayoutConfig(cp=2, tp=2, dp=1, sequence_parallel=True),
    "tp2 sp dp2": LayoutConfig(tp=2, dp=2, sequence_parallel=True),
    "tp2 sp pp2": LayoutConfig(tp=2, pp=2, dp=1, sequence_parallel=True),
    "pp2 uneven": LayoutConfig(pp=2, first_stage_layers=1, dp=1),
    "pp2 vpp2": LayoutConfig(pp=2, vpp=2, dp=1),
    "tp2 sp pp2 vpp2": LayoutConfig(tp=2, pp=2, vpp=2, dp=1, sequence_parallel=True),
}
THREE = {"tp3 sp": LayoutConfig(tp=3, dp=1, sequence_parallel=True)}
GRPO = LossConfig(name="grpo", kl_coef=0.1, tis_cap=2.0)
DAPO = LossConfig(name="dapo", tis_cap=2.0)
PLAIN = ("dp2", "cp2", "ep2 dp2")
"""Where the plain optimizer, whose state is not distributed, is tried as well: it sums gradients in another way."""
OF_FAMILIES = ("tp2 sp", "tp2 sp pp2", "tp2 sp dp2")
DENSE = [*LAYOUTS]
EXPERTS = {
    "ep2 dp2": LayoutConfig(ep=2, dp=2),
    "ep2 cp2": LayoutConfig(ep=2, cp=2, dp=1),
    "dp2 etp2": LayoutConfig(etp=2, dp=2),
    "tp2 sp etp1": LayoutConfig(tp=2, etp=1, dp=1, sequence_parallel=True),
    "ep2 tp2 sp etp1": LayoutConfig(ep=2, tp=2, etp=1, dp=1, sequence_parallel=True),
    "ep2 tp2 sp etp2": LayoutConfig(ep=2, tp=2, dp=2, sequence_parallel=True),
    "ep2 pp2": LayoutConfig(ep=2, pp=2, dp=2),
    "ep2 pp2 vpp2": LayoutConfig(ep=2, pp=2, vpp=2, dp=2),
    "ep4 dp4": LayoutConfig(ep=4, dp=4),
}
"""Layouts of experts. Where etp is not tp, Megatron before 0.17 sums gradients over the wrong ranks in silence, unless
the experts' parameters are marked."""
LAYOUTS |= EXPERTS | THREE
MATRIX: dict[str, tuple[Callable[[Path], object], LossConfig, Sequence[str]]] = {
    "Qwen3, grpo": (write_policy, GRPO, DENSE),
    "Qwen3 tied, dapo": (partial(write_policy, tied=True), DAPO, DENSE),
    "Qwen2.5, grpo": (partial(write_qwen2, sizes=Sizes(vocab_size=VOCAB)), GRPO, OF_FAMILIES),
    "SmolLM2, grpo": (partial(write_llama, sizes=SMOLLM2), GRPO, ("dp2", *THREE)),
    "Qwen3-MoE, grpo": (
        partial(write_qwen3_moe, sizes=Sizes(vocab_size=VOCAB, num_hidden_layers=4), experts=8),
        GRPO,
        ("dp2", "cp2 tp2 sp", *OF_FAMILIES, *EXPERTS),
    ),
    "Qwen3.5, grpo": (
        partial(write_family, architecture="Qwen3_5ForCausalLM"),
        GRPO,
        ("tp2", "tp2 sp", "cp2", "cp2 tp2 sp", "pp2 uneven", "tp2 sp pp2 vpp2"),
    ),
    "Qwen3.5-MoE, grpo": (
        partial(write_family, architecture="Qwen3_5MoeForCausalLM"),
        GRPO,
        ("tp2 sp", "cp2 tp2 sp", "pp2 uneven", "tp2 sp pp2 vpp2", "ep2 dp2", "ep2 cp2", "tp2 sp etp1", "ep2 pp2"),
    ),
}
"""Family and loss: who writes the policy, and the layouts that it is trained in."""
APART = ("Qwen3 tied, dapo", "Qwen3.5, grpo", "Qwen3.5-MoE, grpo")
"""Rows whose packs share no prefixes. All others do, and are compared with a reference that does not."""


@pytest.mark.parametrize("row", MATRIX)
def test_an_update_depends_on_no_layout_no_order_and_no_size_of_packs(
    row: str, ranks: RankPool, tmp_path: Path
) -> None:
    write, loss, layouts = MATRIX[row]
    write(tmp_path)
    if not trains(tmp_path):
        pytest.skip("this Megatron-Core cannot train it")
    sharing: Literal["on", "off"] = "off" if row in APART else "on"

    def config(layout: LayoutConfig, pack_tokens: int = 64, distributed: bool = True) -> Config:
        return config_for(tmp_path, layout, loss, pack_tokens, distributed, sharing)

    alone = config_for(tmp_path, ONE, loss, 64, distributed=False, share="off")
    calls = {
        "start": (replace(alone, optimizer=replace(alone.optimizer, lr=1e-30)), False),
        "reference": (alone, False),
        "opposite order": (config(ONE), True),
        "large packs": (config(ONE, 400), False),
    }
    calls |= {name: (config(LAYOUTS[name]), False) for name in layouts}
    calls |= {f"{name}, plain": (config(LAYOUTS[name], distributed=False), False) for name in layouts if name in PLAIN}
    found: dict[str, Update] = {}
    for size in {size_of(of.layout) for of, _ in calls.values()}:
        names = [name for name, (of, _) in calls.items() if size_of(of.layout) == size]
        results = ranks.in_turn(size, *((learned, *calls[name]) for name in names))
        found |= {name: of_ranks[0] for name, of_ranks in zip(names, results, strict=True)}
    (_, start), reference = found.pop("start"), found.pop("reference")
    assert found.keys() >= set(layouts)
    for name, update in found.items():
        assert_same_update(update, reference, start, name)


@pytest.mark.parametrize("step", [step_of_one_group, step_with_system_messages])
def test_families_are_trained_on_alike_shared_and_apart(
    step: Callable[[int], Step], ranks: RankPool, tmp_path: Path
) -> None:
    """64 completions of a prompt of one token, and prompts that begin alike: in one pack, and in many on two replicas,
    each of which begins anew."""
    write_policy(tmp_path)
    alone = config_for(tmp_path, ONE, GRPO, 1024, distributed=False, share="off")
    calls = {
        "start": replace(alone, optimizer=replace(alone.optimizer, lr=1e-30)),
        "reference": alone,
        "one pack": config_for(tmp_path, ONE, GRPO, 1024, distributed=True),
        "cp2": config_for(tmp_path, LAYOUTS["cp2"], GRPO, 96, distributed=True),
        "dp2": config_for(tmp_path, LAYOUTS["dp2"], GRPO, 96, distributed=True),
        "tp2 sp": config_for(tmp_path, LAYOUTS["tp2 sp"], GRPO, 96, distributed=True),
    }
    found: dict[str, Update] = {}
    for size in (1, 2):
        names = [name for name, config in calls.items() if size_of(config.layout) == size]
        each = ((learned, calls[name], False, step) for name in names)
        found |= {name: of_ranks[0] for name, of_ranks in zip(names, ranks.in_turn(size, *each), strict=True)}
    (_, start), reference = found.pop("start"), found.pop("reference")
    for name, update in found.items():
        assert_same_update(update, reference, start, name)


def test_completions_cut_into_sequences_are_trained_on_as_whole_ones(ranks: RankPool, tmp_path: Path) -> None:
    """Where each sequence goes on from what stood there before the cut, pruned as they would be."""
    write_policy(tmp_path)

    def config(layout: LayoutConfig, pack_tokens: int = 64, lr: float = 1.0) -> Config:
        made = config_for(tmp_path, layout, GRPO, pack_tokens, distributed=False)
        pruning = replace(made.pruning, completions=CompletionPruningConfig(rule="threshold"))  # which asks for no cost
        return replace(made, pruning=pruning, optimizer=replace(made.optimizer, lr=lr))

    alone: dict[str, tuple[Config, Callable[[int], Step]]] = {
        "start": (config(ONE, lr=1e-30), step_of_groups),
        "reference": (config(ONE), step_of_groups),
        "one pack": (config(ONE, 2048), step_of_sequences),
    }
    spread = {name: (config(LAYOUTS[name]), step_of_sequences) for name in ("tp2 sp", "pp2", "cp2", "dp2")}
    found: dict[str, Update] = {}
    for size, calls in ((1, alone), (2, spread)):
        each = ((learned, made, size == 2, step) for made, step in calls.values())
        found |= {name: of_ranks[0] for name, of_ranks in zip(calls, ranks.in_turn(size, *each), strict=True)}
    (_, start), reference = found.pop("start"), found.pop("reference")
    for name, (metrics, weights) in found.items():
        assert metrics["train/tokens"] > reference[0]["train/tokens"], "contexts are read again"
        whole = metrics | {"train/tokens": reference[0]["train/tokens"]}
        assert_same_update((whole, weights), reference, start, name)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "gspo", "clip_low": 0.02, "clip_high": 0.02},
        {"name": "gmpo", "clip_low": 0.02, "clip_high": 0.02},
        {"name": "cispo", "clip_high": 0.02, "mask_below": 1e-12, "tis_level": "sequence"},
        {"name": "sapo", "mask_below": 0.05, "mask_above": 1.0},
        {"name": "rloo", "trust_region": "tv", "clip_low": 0.02},
        {"name": "reinforce_pp", "clip_low": 0.02, "clip_high": 0.02},
        {"name": "reinforce_pp_baseline", "trust_region": "kl"},
    ],
    ids=lambda settings: settings["name"],
)
def test_a_second_update_depends_on_no_layout(settings: dict[str, Any], ranks: RankPool, tmp_path: Path) -> None:
    """There ratios, some of which are of whole sequences, differ from 1, and some are clipped or masked."""
    loss = LossConfig(updates_per_rollout=2, **settings)
    path = write_policy(tmp_path)

    def in_layouts(size: int, *layouts: LayoutConfig) -> list[Update]:
        configs = [config_for(path, layout, loss, 64, distributed=True) for layout in layouts]
        return [results[0] for results in ranks.in_turn(size, *((learned, config, False) for config in configs))]

    [alone] = in_layouts(1, ONE)
    cut = ("train/pg_clipfrac", "train/tis_clipfrac")
    assert 0.0 < sum(alone[0][name] for name in cut) < 0.9
    for shared in in_layouts(2, *(LAYOUTS[name] for name in ("tp2 sp", "pp2", "cp2", "dp2"))):
        for name in ("train/loss", "train/grad_norm", *cut):
            assert shared[0][name] == pytest.approx(alone[0][name], rel=1e-4), name
