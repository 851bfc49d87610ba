"""Law 1: for one step plan, loss and gradient are the same for every layout, microbatch order and
pack order.

One update of Adam with eps = 1 and rate 1 moves a weight by g / (|g| + 1): the moved weights show
the gradient, after the optimizer has sharded it, to first order and in every bit that matters.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors.torch import load_file

from megatron_dppo.config import (
    CompletionPruningConfig,
    Config,
    EntropyConfig,
    LayoutConfig,
    LossConfig,
    replace,
)
from megatron_dppo.rl.types import Group, Ints, StepMetadata, StepPlan
from megatron_dppo.sft import sft
from tests.bridge.directories import SMOLLM2, Sizes, write_llama, write_qwen2, write_qwen3_moe
from tests.policies import trains, write_family, write_policy
from tests.ranks import RankPool
from tests.small_runs import live, rows, small_run, write_run
from tests.steps import (
    VOCAB,
    Weights,
    build,
    config_for,
    held_by,
    plan_for,
    run_in_layouts,
    step_of_groups,
    step_of_sequences,
    step_with_system_messages,
    weights_of,
)

Step = tuple[StepMetadata, list[Group]]
Update = tuple[dict[str, float], Weights]


def reverse_order(plan: StepPlan) -> StepPlan:
    """Return the same packs as microbatches in the opposite order, with prefix groups in the
    opposite order."""

    def reversed_pack(pack: tuple[int, ...], shared: Ints) -> tuple[int, ...]:
        firsts = [place for place, k in enumerate(pack) if not shared[k]]
        pieces = [pack[first:last] for first, last in itertools.pairwise([*firsts, len(pack)])]
        return tuple(k for piece in reversed(pieces) for k in piece)

    minibatches = []
    for each in plan.minibatches:
        shared = each.shared_length
        packs = tuple(
            tuple(reversed_pack(pack, shared) for pack in replica[::-1]) for replica in each.packs
        )
        minibatches.append(dataclasses.replace(each, packs=packs))
    return dataclasses.replace(plan, minibatches=tuple(minibatches))


def learned(
    rank: int,
    size: int,
    config: Config,
    backwards: bool = False,
    step: Callable[[int], Step] = step_of_groups,
) -> Update:
    """Return the metrics of one step, and on rank 0 the weights after it."""
    world, learner, policy = build(config)
    metadata, groups = step(size)
    plan = plan_for(world, config, metadata, groups)
    assert plan.updates
    plan = reverse_order(plan) if backwards else plan
    metrics = learner.train(plan, held_by(rank, metadata, groups), step=1, version=0)
    weights = weights_of(policy, world)
    return metrics, weights if rank == 0 else {}


def at_the_start(config: Config) -> Config:
    """Return a configuration whose update moves no weight."""
    return replace(config, optimizer=replace(config.optimizer, lr=1e-30))


METRICS = ("train/grad_norm", "train/pg_loss", "train/entropy_loss", "train/tokens")


def assert_same_updates(
    ranks: RankPool,
    calls: dict[str, tuple[Any, ...]],
    rel: float = 1e-5,
    metrics: Sequence[str] = METRICS,
) -> None:
    """Run ``learned`` with each call's arguments, and compare each update with the one called
    "reference".

    The update called "start" moves no weight.
    """
    results = run_in_layouts(
        ranks, {name: (learned, *arguments) for name, arguments in calls.items()}
    )
    updates = {name: first for name, (first, *_) in results.items()}
    (_, start), reference = updates.pop("start"), updates.pop("reference")
    for name, update in updates.items():
        assert_same_update(update, reference, start, name, rel, metrics)


def assert_same_update(
    ours: Update,
    reference: Update,
    start: Weights,
    where: str,
    rel: float = 1e-5,
    metrics: Sequence[str] = METRICS,
) -> None:
    terms = abs(
        reference[0]["train/pg_loss"]
    )  # the loss is a small difference of terms of about this size
    assert ours[0]["train/loss"] == pytest.approx(
        reference[0]["train/loss"], rel=rel, abs=rel * terms
    ), where
    for name in metrics:
        assert ours[0][name] == pytest.approx(reference[0][name], rel=rel), (where, name)
    assert ours[1].keys() == reference[1].keys() == start.keys()
    for name, before in start.items():
        moved, expected = ours[1][name] - before, reference[1][name] - before
        assert expected.norm() > 0, name
        assert (moved - expected).norm() <= rel * expected.norm() + 2e-7 * before.norm(), (
            where,
            name,
        )


ONE = LayoutConfig(dp=1)
SP = partial(LayoutConfig, tp=2, sequence_parallel=True)
LAYOUTS = {
    "tp2": LayoutConfig(tp=2, dp=1),
    "tp2 sp": SP(dp=1),
    "tp3 sp": SP(tp=3, dp=1),
    "pp2": LayoutConfig(pp=2, dp=1),
    "pp2 uneven": LayoutConfig(pp=2, first_stage_layers=1, dp=1),
    "pp2 vpp2": LayoutConfig(pp=2, vpp=2, dp=1),
    "dp2": LayoutConfig(dp=2),
    "cp2": LayoutConfig(cp=2, dp=1),
    "cp2 pp2": LayoutConfig(cp=2, pp=2, dp=1),
    "cp2 tp2 sp": SP(cp=2, dp=1),
    "tp2 sp dp2": SP(dp=2),
    "tp2 sp pp2 vpp2": SP(pp=2, vpp=2, dp=1),
    "ep2 dp2": LayoutConfig(ep=2, dp=2),
    "ep2 cp2": LayoutConfig(ep=2, cp=2, dp=1),
    "ep2 pp2": LayoutConfig(ep=2, pp=2, dp=2),
    "ep2 pp2 vpp2": LayoutConfig(ep=2, pp=2, vpp=2, dp=2),
    "dp2 etp2": LayoutConfig(etp=2, dp=2),
    "tp2 sp etp1": SP(etp=1, dp=1),
    "ep2 tp2 sp etp1": SP(ep=2, etp=1, dp=1),
    "ep2 tp2 sp etp2": SP(ep=2, dp=2),
}
PLAIN = ("dp2", "cp2", "ep2 dp2")
"""Layouts also tried with the plain optimizer, which sums gradients in another way."""
GRPO = LossConfig(name="grpo", kl_coef=0.1, tis_cap=2.0)
DAPO = LossConfig(name="dapo", tis_cap=2.0)
BONUS = LossConfig(name="dapo", entropy=EntropyConfig(coef=0.3))
EXPERTS = partial(write_qwen3_moe, sizes=Sizes(vocab_size=VOCAB, num_hidden_layers=4), experts=8)
HYBRID = partial(write_family, architecture="Qwen3_5ForCausalLM")
HYBRID_EXPERTS = partial(write_family, architecture="Qwen3_5MoeForCausalLM")


def row(
    name: str,
    write: Callable[[Path], object],
    *layouts: str,
    loss: LossConfig = GRPO,
    share: str = "on",
    **marks: Any,
) -> Any:
    return pytest.param(write, layouts, loss, share, id=name, **marks)


# Where etp is not tp, Megatron-Core before 0.17 sums gradients over the wrong ranks in silence,
# unless the parameters of experts are marked.
@pytest.mark.parametrize(
    ("write", "layouts", "loss", "share"),
    [
        row(
            "Qwen3",
            write_policy,
            "tp2 sp",
            "pp2 uneven",
            "pp2 vpp2",
            "cp2",
            "dp2",
            marks=pytest.mark.quick,
        ),
        row(
            "Qwen3 on four ranks",
            write_policy,
            "cp2 pp2",
            "cp2 tp2 sp",
            "tp2 sp dp2",
            "tp2 sp pp2 vpp2",
        ),
        row(
            "tied",
            partial(write_policy, tied=True),
            "tp2",
            "pp2",
            "cp2",
            "tp2 sp pp2 vpp2",
            loss=DAPO,
            share="off",
        ),
        row("entropy bonus", write_policy, "tp2 sp", "pp2 vpp2", "cp2", "dp2", loss=BONUS),
        row("Qwen2.5", partial(write_qwen2, sizes=Sizes(vocab_size=VOCAB)), "tp2 sp"),
        row("SmolLM2", partial(write_llama, sizes=SMOLLM2), "tp3 sp"),
        row("Qwen3-MoE", EXPERTS, "ep2 dp2", marks=pytest.mark.quick),
        row(
            "Qwen3-MoE, etp",
            EXPERTS,
            "dp2 etp2",
            "tp2 sp etp1",
            "ep2 tp2 sp etp1",
            "ep2 tp2 sp etp2",
        ),
        row("Qwen3-MoE, cp and pp", EXPERTS, "ep2 cp2", "cp2 tp2 sp", "ep2 pp2 vpp2"),
        row(
            "Qwen3.5", HYBRID, "tp2 sp", "cp2 tp2 sp", "pp2 uneven", "tp2 sp pp2 vpp2", share="off"
        ),
        row(
            "Qwen3.5-MoE",
            HYBRID_EXPERTS,
            "cp2 tp2 sp",
            "ep2 cp2",
            "tp2 sp etp1",
            "ep2 pp2",
            share="off",
        ),
    ],
)
def test_update_depends_on_no_layout_or_order_of_packs(
    write: Callable[[Path], object],
    layouts: Sequence[str],
    loss: LossConfig,
    share: Literal["on", "off"],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    """Compare with packs that share no prefix, on one rank with the plain optimizer."""
    write(tmp_path)
    if not trains(tmp_path):
        pytest.skip("this Megatron-Core cannot train it")

    def config(layout: LayoutConfig, pack_tokens: int = 64, distributed: bool = True) -> Config:
        return config_for(tmp_path, layout, loss, pack_tokens, distributed, share)

    alone = config_for(tmp_path, ONE, loss, 64, distributed=False, share="off")
    calls = {
        "start": (at_the_start(alone),),
        "reference": (alone,),
        "opposite order": (config(ONE), True),
        "large packs": (config(ONE, 400),),
    }
    calls |= {name: (config(LAYOUTS[name]),) for name in layouts}
    calls |= {
        f"{name}, plain": (config(LAYOUTS[name], distributed=False),)
        for name in layouts
        if name in PLAIN
    }
    assert_same_updates(ranks, calls)


def test_shared_prefixes_of_prompts_change_no_update(ranks: RankPool, tmp_path: Path) -> None:
    """Train on prefixes within prefixes in one pack, and in many on two ranks."""
    write_policy(tmp_path)
    alone = config_for(tmp_path, ONE, GRPO, 1024, distributed=False, share="off")
    configs = {
        "start": at_the_start(alone),
        "reference": alone,
        "one pack": config_for(tmp_path, ONE, GRPO, 1024, True),
    }
    configs |= {
        name: config_for(tmp_path, LAYOUTS[name], GRPO, 96, True)
        for name in ("cp2", "dp2", "tp2 sp")
    }
    assert_same_updates(
        ranks,
        {name: (config, False, step_with_system_messages) for name, config in configs.items()},
    )


def test_completions_cut_into_sequences_change_no_update(ranks: RankPool, tmp_path: Path) -> None:
    """Prune whole completions, and train on sequences with their contexts."""
    write_policy(tmp_path)

    def config(layout: LayoutConfig, pack_tokens: int = 64) -> Config:
        made = config_for(tmp_path, layout, GRPO, pack_tokens, distributed=False)
        by_reward = CompletionPruningConfig(
            rule="threshold"
        )  # a rule without costs, which sequences change
        return replace(made, pruning=replace(made.pruning, completions=by_reward))

    calls: dict[str, tuple[Any, ...]] = {
        "start": (at_the_start(config(ONE)),),
        "reference": (config(ONE),),
    }
    calls |= {"one pack": (config(ONE, 2048), False, step_of_sequences)}
    calls |= {name: (config(LAYOUTS[name]), True, step_of_sequences) for name in ("cp2", "dp2")}
    assert_same_updates(ranks, calls, metrics=METRICS[:-1])  # contexts are read again


@pytest.mark.parametrize("objective", ["gspo", "reinforce_pp"])
def test_second_update_depends_on_no_layout(
    objective: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Clip ratios that differ from 1: of whole sequences, or of tokens with whitened advantages."""
    loss = LossConfig(name=objective, updates_per_rollout=2, clip_low=0.02, clip_high=0.02)
    write_policy(tmp_path)
    layouts = {"alone": ONE} | {name: LAYOUTS[name] for name in ("tp2 sp", "pp2", "cp2", "dp2")}
    configs = {
        name: config_for(tmp_path, layout, loss, 64, distributed=True)
        for name, layout in layouts.items()
    }
    found = run_in_layouts(ranks, {name: (learned, config) for name, config in configs.items()})
    (alone, _), *_ = found.pop("alone")
    assert 0.0 < alone["train/pg_clipfrac"] + alone["train/tis_clipfrac"] < 0.9
    for (metrics, _), *_ in found.values():
        for name in ("train/loss", "train/grad_norm", "train/pg_clipfrac", "train/tis_clipfrac"):
            assert metrics[name] == pytest.approx(alone[name], rel=1e-4), name


def test_recomputation_and_overlap_change_no_update(ranks: RankPool, tmp_path: Path) -> None:
    """Train experts twice, with a reference on the host and clipped gradients."""
    EXPERTS(tmp_path)
    config = config_for(
        tmp_path, ONE, LossConfig(kl_coef=0.1, updates_per_rollout=2), 64, distributed=True
    )
    optimizer = replace(config.optimizer, lr=1e-2, clip_grad=1.0)
    plain = replace(config, optimizer=optimizer)
    model = replace(config.model, recompute="full", reference_on_host=True)
    config = replace(plain, model=model, optimizer=replace(optimizer, overlap=True))
    calls = {"start": at_the_start(plain), "reference": plain}
    calls |= {
        name: replace(config, layout=LAYOUTS[name]) for name in ("ep2 pp2 vpp2", "ep2 tp2 sp etp1")
    }
    assert_same_updates(ranks, {name: (each,) for name, each in calls.items()}, rel=1e-4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def warm_up(rank: int, size: int, config: Config) -> None:
    sft(config)


def test_context_parallel_run_equals_run_on_one_rank(
    run: Path, ranks: RankPool, tmp_path: Path
) -> None:
    words = ("run.steps=2", "loss.kl_coef=0.1", "loss.updates_per_rollout=2", "layout.dp=1")
    alone, shared = (small_run(run, tmp_path / str(cp), f"layout.cp={cp}", *words) for cp in (1, 2))
    run_in_layouts(ranks, {"alone": (live, alone), "shared": (live, shared)})
    expected, found = (rows(tmp_path / str(cp)) for cp in (1, 2))
    assert len(found) == len(expected) == 3
    for ours, reference in zip(found[1:], expected[1:], strict=True):
        drawn = [
            name
            for name in reference
            if name.startswith(("rollout/reward", "rollout/response", "prune/"))
        ]
        assert len(drawn) > 2
        for name in (
            *drawn,
            "train/grad_norm",
            "train/kl_loss",
            "train/entropy_loss",
            "train/tokens",
        ):
            assert ours[name] == pytest.approx(reference[name], rel=1e-3, abs=1e-7), name


def test_context_parallel_warm_up_equals_one_rank(
    run: Path, ranks: RankPool, tmp_path: Path
) -> None:
    words = ("sft.steps=3", "sft.batch=8", "layout.dp=1")
    configs = {
        cp: small_run(run, tmp_path, f"sft.out={tmp_path / cp}", f"layout.cp={cp}", *words)
        for cp in "12"
    }
    run_in_layouts(ranks, {cp: (warm_up, config) for cp, config in configs.items()})
    alone, shared = (load_file(tmp_path / cp / "model.safetensors") for cp in configs)
    assert alone.keys() == shared.keys()
    for tensor, value in alone.items():
        assert float((shared[tensor] - value).abs().max()) < 1e-4, tensor
