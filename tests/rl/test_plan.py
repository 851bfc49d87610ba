import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.config import (
    CompletionPruningConfig,
    Config,
    PackConfig,
    PruningConfig,
    RunConfig,
    ScheduleConfig,
    replace,
)
from megatron_dppo.rl.advantages import group_advantages
from megatron_dppo.rl.pack import prefix_tree
from megatron_dppo.rl.packing import CostModel
from megatron_dppo.rl.plan import gather_metadata, plan_step, split_groups, take_groups
from megatron_dppo.rl.types import StepMetadata, StepPlan, TrainingSamples
from tests.rl.plans import step_config, step_metadata

RULES = ["none", "threshold", "neyman"]


def plan(metadata: StepMetadata, config: Config, **options: int) -> StepPlan:
    layout = {"replicas": 2, "align": 1, "capacity_multiple": 1, "step": 3, "pipeline": 1}
    return plan_step(metadata, config, **(layout | options))


def same(one: StepPlan, other: StepPlan) -> bool:
    return all(
        np.array_equal(a, b)
        for x, y in zip(one.minibatches, other.minibatches, strict=True)
        for a, b in zip(asdict(x.samples).values(), asdict(y.samples).values(), strict=True)
    ) and [m.packs for m in one.minibatches] == [m.packs for m in other.minibatches]


def test_a_plan_is_a_function_of_metadata_configuration_and_step():
    metadata, config = step_metadata(32), step_config(updates_per_rollout=2)
    assert same(plan(metadata, config), plan(metadata, config))
    assert not same(plan(metadata, config), plan(metadata, config, step=4))
    assert not same(plan(metadata, config), plan(metadata, replace(config, run=RunConfig(seed=2))))


@pytest.mark.parametrize("options", [{"replicas": 4}, {"align": 8}, {"capacity_multiple": 64}, {"pipeline": 4}])
def test_what_is_trained_on_does_not_depend_on_the_layout(options: dict[str, int]):
    metadata, config = step_metadata(32), step_config()
    here, there = (
        plan(metadata, config).minibatches[0].samples,
        plan(metadata, config, **options).minibatches[0].samples,
    )
    np.testing.assert_array_equal(here.group * 8 + here.completion, there.group * 8 + there.completion)
    np.testing.assert_array_equal(here.scale, there.scale)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_samples_carry_the_numbers_of_their_completion(rule: str, name: str):
    metadata = step_metadata(24)
    minibatch = plan(metadata, step_config(rule=rule, name=name)).minibatches[0]
    samples = minibatch.samples
    at = (samples.group, samples.completion)
    assert np.all(np.diff(samples.group * 8 + samples.completion) > 0), "sorted by (prompt, completion)"
    np.testing.assert_array_equal(samples.owner, metadata.owners[samples.group])
    np.testing.assert_array_equal(samples.prompt_length, metadata.prompt_lengths[samples.group])
    np.testing.assert_array_equal(samples.response_length, metadata.response_lengths[at])
    np.testing.assert_array_equal(samples.advantage[:, 0], group_advantages(metadata.rewards, normalise=True)[at])
    c, z = (1 / samples.response_length, 24 * 8) if name == "grpo" else (1.0, metadata.response_lengths.sum())
    assert minibatch.normaliser == z
    np.testing.assert_allclose(samples.scale, samples.weight * c / z, rtol=1e-15)


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.floats(0.05, 1.0), st.floats(1.5, 10.0), st.sampled_from(RULES), st.floats(0, 1))
def test_the_product_of_both_levels_weights_stays_below_its_bound(seed, keep, max_weight, rule, spread):
    floor = 1.0 / max_weight
    inclusion = np.maximum(np.random.default_rng(seed).random(16) ** spread, floor)
    metadata = step_metadata(16, seed=seed, prompt_inclusion=inclusion)
    result = plan(metadata, step_config(rule=rule, keep=keep, max_weight=max_weight))
    assert result.minibatches[0].samples.weight.max(initial=0.0) <= max_weight * (1 + 1e-12)
    assert not any("max_weight" in note for note in result.notes)


def test_a_prompt_kept_below_the_bound_is_said_in_words():
    result = plan(step_metadata(16, prompt_inclusion=np.full(16, 0.1)), step_config(max_weight=5.0))
    assert any("pruning.max_weight" in note for note in result.notes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_of_equal_groups_keeps_nothing_and_says_so(rule: str, updates: int):
    metadata = step_metadata(8, rewards=np.repeat([[0.0], [1.0]], 4, axis=0) * np.ones((8, 8)))
    result = plan(metadata, step_config(rule=rule, updates_per_rollout=updates))
    for minibatch in result.minibatches:
        assert (minibatch.capacity, minibatch.packs, len(minibatch.samples.group)) == (0, ((), ()), 0)
    assert len(result.notes) == updates
    assert "nothing" in result.notes[0]
    assert result.metrics["prune/zero_advantage_fraction"] == 1.0
    assert result.metrics["prune/kept_token_fraction"] == 0.0


def test_a_step_without_any_group_is_a_step_that_keeps_nothing():
    empty = take_groups(step_metadata(4), np.arange(0))
    result = plan(empty, step_config(updates_per_rollout=2))
    assert [minibatch.capacity for minibatch in result.minibatches] == [0]
    json.dumps(result.metrics, allow_nan=False)


def test_with_a_kl_term_completions_without_advantage_are_trained_on():
    metadata = step_metadata(8, rewards=np.ones((8, 8)))
    samples = plan(metadata, step_config(keep=0.5, kl_coef=0.01)).minibatches[0].samples
    assert 0 < len(samples.group) < 64
    assert (samples.advantage == 0.0).all()


def test_minibatches_are_whole_groups_each_with_its_share_of_the_window():
    metadata = step_metadata(30, prompt_inclusion=np.full(30, 0.6), window=50.0)
    result = plan(metadata, step_config(rule="none", updates_per_rollout=4, kl_coef=0.1))
    groups = [np.unique(minibatch.samples.group) for minibatch in result.minibatches]
    assert sorted(np.concatenate(groups).tolist()) == list(range(30))
    assert [minibatch.normaliser for minibatch in result.minibatches] == [50 * len(g) / 30 * 8 for g in groups]
    for group, minibatch in zip(groups, result.minibatches, strict=True):
        assert len(minibatch.samples.group) == 8 * len(group)


def test_a_minibatch_is_on_average_what_the_whole_window_is():
    """Over all permutations, of five groups in two unequal minibatches, each estimates the window's sum over Z."""
    metadata = step_metadata(5, prompt_inclusion=np.array([0.4, 0.9, 0.5, 1.0, 0.7]), window=8.0)
    term = np.random.default_rng(0).normal(size=5) / metadata.prompt_inclusion
    whole = term.sum() / metadata.window

    class Permutations:
        def permutation(self, count: int) -> np.ndarray:
            return self.now

    rng, estimates = Permutations(), []
    for order in itertools.permutations(range(5)):
        rng.now = np.array(order)
        parts = split_groups(np.arange(5), 2, rng)
        estimates.append([term[part].sum() / take_groups(metadata, part).window for part in parts])
    np.testing.assert_allclose(np.mean(estimates, axis=0), whole, rtol=1e-12)


def test_only_an_estimated_normaliser_is_called_a_ratio():
    pruned, whole = step_metadata(8, prompt_inclusion=np.full(8, 0.5)), step_metadata(8)
    assert any("O(1/prompts)" in note for note in plan(pruned, step_config(name="dapo")).notes)
    assert not plan(whole, step_config(name="dapo")).notes
    assert not plan(pruned, step_config(name="grpo")).notes


def slots_of(samples: TrainingSamples, pack: Sequence[int], *, align: int) -> int:
    """What a pack's segments take up, each padded."""
    segments = prefix_tree(samples.lengths[list(pack)].tolist(), samples.shared_length[list(pack)].tolist())
    return sum(-(-(end - begin) // align) * align for *_, begin, end in segments)


def test_packs_hold_every_sample_once_within_the_capacity():
    result = plan(step_metadata(64), step_config(pack=PackConfig(max_tokens=1024)), replicas=3, align=4, pipeline=2)
    for minibatch in result.minibatches:
        samples = minibatch.samples
        packs = [pack for rank in minibatch.packs for pack in rank]
        assert sorted(sample for pack in packs for sample in pack) == list(range(len(samples.group)))
        assert max(slots_of(samples, pack, align=4) for pack in packs) <= minibatch.capacity <= 1024
        assert {len(rank) for rank in minibatch.packs} == {len(packs) // 3}
        assert len(packs) // 3 >= 4, "twice the pipeline stages"


def test_metadata_is_gathered_in_the_order_of_the_prompts_whoever_holds_them():
    whole = step_metadata(12)
    parts = [take_groups(whole, np.flatnonzero(whole.owners == rank)) for rank in (3, 1, 0, 2)]
    parts.insert(1, take_groups(whole, np.arange(0)))
    gathered = gather_metadata(parts, window=whole.window)
    for field in StepMetadata.__slots__:
        np.testing.assert_array_equal(getattr(gathered, field), getattr(whole, field))
    assert len(gather_metadata(parts[1:2], window=0.0).prompt_ids) == 0


def test_metrics_of_a_step_written_out():
    """Two prompts of three were rolled out at π 1 and 0.5; group 0 is mixed one to three, group 1 all right."""
    metadata = step_metadata(
        2,
        4,
        prompt_inclusion=np.array([1.0, 0.5]),
        rewards=np.array([[1.0, 0, 0, 0], [1, 1, 1, 1]]),
        response_lengths=np.full((2, 4), 10),
        prompt_lengths=np.array([10, 30]),
        score_norms=np.ones((2, 4)),
        window=3.0,
    )
    metrics = plan(metadata, step_config(rule="none"), replicas=1).metrics
    assert metrics == {
        "prune/kept_prompt_fraction": pytest.approx(2 / 3),
        "prune/discarded_groups": 0.0,
        "prune/noise_share_prompts": 0.0,
        "prune/noise_share_completions": 0.0,
        "prune/saved_tokens_prompts": 160.0,
        "prune/saved_tokens_completions": 0.0,
        "prune/zero_advantage_tokens": 160.0,
        "prune/kept_completion_fraction": 0.5,
        "prune/kept_token_fraction": 80 / 240,
        "prune/zero_advantage_fraction": 0.5,
        "prune/max_weight": 1.0,
        "prune/effective_sample_size": 1.0,
        "prune/variance_inflation": 1.0,
        "pack/fill": 1.0,
        "pack/count": 1.0,
        "pack/empty": 0.0,
        "pack/shared": 30 / 80,
        "pack/capacity": 50.0,
        "pack/imbalance": 1.0,
    }


def test_what_prompts_begin_with_is_in_a_pack_once():
    """Groups 0, 1 and 3 are mixed; the prompts of the first two begin with 20 tokens, that of the last with 10 of them,
    which are too few."""
    message = np.arange(20, dtype=np.int32)
    prompts = [np.append(message[:common], [100 + i] * 5).astype(np.int32) for i, common in enumerate([20, 20, 20, 10])]
    metadata = step_metadata(
        4,
        2,
        rewards=np.array([[1.0, 0], [1, 0], [1, 1], [0, 1]]),
        response_lengths=np.full((4, 2), 7),
        prompt_lengths=np.array([len(prompt) for prompt in prompts]),
        score_norms=np.ones((4, 2)),
    )
    (minibatch,) = plan(metadata, step_config(rule="none"), replicas=1, prompts=prompts).minibatches
    assert minibatch.samples.shared_length.tolist() == [0, 25, 20, 25, 0, 15]
    assert minibatch.capacity == 25 + 5 + 15 + 6 * 7
    (apart,) = plan(metadata, step_config(rule="none"), replicas=1).minibatches
    assert apart.samples.shared_length.tolist() == [0, 25, 0, 25, 0, 15]


def test_variance_inflation_runs_over_the_window_and_not_over_what_was_rolled_out():
    """Two groups alike at π 0.5 and 1, none of whose completions is pruned: (1/0.5² + 1) / (1/0.5 + 1)."""
    metadata = step_metadata(
        2,
        4,
        prompt_inclusion=np.array([0.5, 1.0]),
        rewards=np.array([[1.0, 0, 0, 0]] * 2),
        response_lengths=np.full((2, 4), 10),
        score_norms=np.ones((2, 4)),
    )
    result = plan(metadata, step_config(rule="none"))
    assert result.metrics["prune/variance_inflation"] == pytest.approx(5 / 3)
    assert result.metrics["prune/effective_sample_size"] == pytest.approx(12**2 / (8 * 20))


def scheduled(schedule: ScheduleConfig, *, rule: str = "neyman", keep: float = 0.3, seed: int = 1) -> Config:
    completions = CompletionPruningConfig(rule=rule, keep=keep, schedule=schedule)
    return replace(step_config(), run=RunConfig(seed=seed, steps=100), pruning=PruningConfig(completions=completions))


def test_kept_tokens_follow_the_schedule_of_the_completions():
    """Linear over half of a hundred steps from 1 to 0.3, constant until the last tenth. Over twenty seeds each."""
    metadata = step_metadata(64, seed=1)
    for step, keep in ((30, 0.58), (40, 0.44), (50, 0.3), (89, 0.3)):
        configs = [scheduled(ScheduleConfig(shape="linear", ramp=0.5, off_last=0.1), seed=seed) for seed in range(20)]
        kept = [plan(metadata, config, step=step).metrics["prune/kept_token_fraction"] for config in configs]
        assert np.mean(kept) == pytest.approx(keep, abs=0.01), step


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("step", [0, 90, 99])
def test_where_the_schedule_prunes_nothing_all_that_can_teach_is_kept_at_weight_one(rule: str, step: int):
    metadata = step_metadata(32)
    config = scheduled(ScheduleConfig(shape="linear", ramp=0.5, off_last=0.1), rule=rule)
    samples = plan(metadata, config, step=step).minibatches[0].samples
    group, completion = np.nonzero(group_advantages(metadata.rewards, normalise=True))
    np.testing.assert_array_equal(samples.group, group)
    np.testing.assert_array_equal(samples.completion, completion)
    assert (samples.weight == 1.0).all()


@pytest.mark.parametrize("rule", ["threshold", "neyman"])
def test_every_minibatch_has_a_draw_of_its_own(rule: str):
    """Minibatches of identical groups: one draw repeated would keep the same completions of both, step after step."""
    metadata = step_metadata(
        12,
        rewards=np.tile([1.0, 1, 1, 0, 0, 0, 0, 0], (12, 1)),
        prompt_lengths=np.full(12, 10),
        response_lengths=np.tile(np.arange(20, 100, 10), (12, 1)),
        score_norms=np.ones((12, 8)),
    )
    config = step_config(rule=rule, keep=0.37, updates_per_rollout=2)

    def mask(step: int) -> list[list[tuple[int, int]]]:
        masks = []
        split = plan(metadata, step_config(rule="none", updates_per_rollout=2), step=step)
        for whole, minibatch in zip(split.minibatches, plan(metadata, config, step=step).minibatches, strict=True):
            place = np.searchsorted(np.unique(whole.samples.group), minibatch.samples.group)
            masks.append(list(zip(place.tolist(), minibatch.samples.completion.tolist(), strict=True)))
        return masks

    masks = [mask(step) for step in range(20)]
    assert sum(first == second for first, second in masks) < 5
    assert len({str(first) for first, _ in masks}) > 10, "and every step its own"


def test_packs_obey_the_settings_of_the_layout_and_of_packing():
    metadata = step_metadata(64)
    for least, count in ((0, 8), (3, 3)):
        pack = PackConfig(max_tokens=65536, min_per_rank=least)
        packs = plan(metadata, step_config(pack=pack), pipeline=4).minibatches[0].packs
        assert [len(rank) for rank in packs] == [count, count]
    padded = plan(metadata, step_config(), capacity_multiple=64).minibatches[0]
    assert padded.capacity % 64 == 0 != plan(metadata, step_config()).minibatches[0].capacity % 64


def test_packer_looks_as_far_as_it_is_told():
    metadata = step_metadata(64)
    packs = [
        [
            plan(metadata, step_config(pack=PackConfig(max_tokens=most, window=n, share_prefixes="off")))
            .minibatches[0]
            .packs
            for n in (1, 64)
        ]
        for most in (256, 300)
    ]
    assert any(narrow != wide for narrow, wide in packs)


def test_replicas_are_balanced_by_the_costs_that_are_given():
    metadata = step_metadata(64)
    layout = {"replicas": 4, "align": 1, "capacity_multiple": 1, "step": 3, "pipeline": 1}
    square, flat = CostModel(0.0, 1.0), CostModel(1.0, 0.0)
    plans = [plan_step(metadata, step_config(), **layout, costs=costs) for costs in (square, flat)]
    assert plans[0].minibatches[0].packs != plans[1].minibatches[0].packs
