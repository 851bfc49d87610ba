"""The plan of a step as a function of metadata, configuration and step."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.config import (
    BranchConfig,
    Config,
    PackConfig,
    RunConfig,
    ScheduleConfig,
    TreeConfig,
    replace,
)
from megatron_dppo.rl.advantages import compute_group_advantages
from megatron_dppo.rl.packing import resolve_min_packs
from megatron_dppo.rl.plan import gather_metadata, select_groups
from megatron_dppo.rl.types import SEGMENT, MinibatchPlan, StepMetadata, StepPlan
from tests.rl import plans
from tests.rl.plans import step_config, step_metadata

RULES = ["none", "threshold", "neyman"]


def plan(metadata: StepMetadata, config: Config, **options) -> StepPlan:
    return plans.plan(metadata, config, **({"replicas": 2, "step": 3} | options))


def samples_of(metadata: StepMetadata, config: Config, **options) -> MinibatchPlan:
    return plan(metadata, config, **options).minibatches[0]


def pairs(samples: MinibatchPlan) -> list[tuple[int, int]]:
    return list(zip(samples.group.tolist(), samples.completion.tolist(), strict=True))


def uniform_step(rewards: list[list[float]], **fields) -> StepMetadata:
    """Return groups of completions of ten tokens with scores of norm one."""
    shape = np.shape(rewards)
    made = {"response_lengths": np.full(shape, 10), "score_norms": np.ones(shape)} | fields
    return step_metadata(*shape, rewards=np.array(rewards, float), **made)


def contents(step: StepPlan) -> list[object]:
    return [(pairs(each), each.scale.tolist(), each.packs) for each in step.minibatches]


def test_plan_is_a_function_of_metadata_configuration_and_step():
    metadata, config = step_metadata(32), step_config(updates_per_rollout=2)
    first = contents(plan(metadata, config))
    assert contents(plan(metadata, config)) == first
    assert contents(plan(metadata, config, step=4)) != first
    assert contents(plan(metadata, replace(config, run=RunConfig(seed=2)))) != first


def test_training_samples_do_not_depend_on_the_layout():
    metadata, config = step_metadata(32), step_config()
    here = samples_of(metadata, config)
    there = samples_of(metadata, config, replicas=4, align=8, capacity_multiple=64, pipeline=4)
    assert pairs(here) == pairs(there)
    np.testing.assert_array_equal(here.scale, there.scale)


def test_samples_carry_the_numbers_of_their_completion():
    metadata = step_metadata(24)
    minibatch = plan(metadata, step_config()).minibatches[0]
    samples = minibatch
    at = (samples.group, samples.completion)
    assert pairs(samples) == sorted(set(pairs(samples)))
    np.testing.assert_array_equal(samples.owner, metadata.owners[samples.group])
    np.testing.assert_array_equal(samples.prompt_length, metadata.prompt_lengths[samples.group])
    np.testing.assert_array_equal(samples.response_length, metadata.response_lengths[at])
    np.testing.assert_array_equal(
        samples.advantage[:, 0], compute_group_advantages(metadata.rewards, normalise=True)[at]
    )
    assert minibatch.normaliser == 24 * 8
    np.testing.assert_allclose(
        samples.scale, samples.weight / samples.response_length / (24 * 8), rtol=1e-15
    )


@settings(max_examples=50)
@given(
    st.integers(0, 10_000),
    st.floats(0.05, 1.0),
    st.floats(1.5, 10.0),
    st.sampled_from(RULES),
    st.floats(0, 1),
)
def test_product_of_both_levels_weights_is_bounded(seed, keep, max_weight, rule, spread):
    inclusion = np.maximum(np.random.default_rng(seed).random(16) ** spread, 1.0 / max_weight)
    metadata = step_metadata(16, seed=seed, prompt_inclusion=inclusion)
    result = plan(metadata, step_config(rule=rule, keep=keep, max_weight=max_weight))
    assert result.minibatches[0].weight.max(initial=0.0) <= max_weight * (1 + 1e-12)
    assert not any("max_weight" in note for note in result.notes)


BRANCHES = (BranchConfig(at=1, children=2),)


@pytest.mark.parametrize(
    ("loss", "inclusion", "rollout", "note"),
    [
        ({}, 0.1, {}, "pruning.max_weight"),
        ({"name": "dapo", "updates_per_rollout": 2}, 0.5, {}, "O(1/prompts)"),
        ({"name": "reinforce_pp_baseline"}, 0.5, {}, "moments"),
        ({"advantage": "gdpo", "reward_weights": {"all": 1.0}}, 0.5, {}, "advantages by gdpo"),
        ({"name": "dr_grpo"}, 1.0, {"roles": ("solver", "critic")}, "rollout.roles"),
        (
            {"name": "dr_grpo"},
            1.0,
            {"tree": TreeConfig(branches=BRANCHES, baseline="depth")},
            "baseline = depth is biased",
        ),
        ({"name": "dapo"}, 1.0, {}, ""),
        ({"name": "rloo"}, 0.5, {}, ""),
    ],
)
def test_log_names_what_is_biased_or_estimated(loss, inclusion, rollout, note):
    """Once a step, and only where it is."""
    metadata = step_metadata(8, prompt_inclusion=np.full(8, inclusion))
    metadata = dataclasses.replace(metadata, parts={"reward/all": metadata.rewards})
    segments = np.zeros((8, 8, 2 if rollout else 0), SEGMENT)
    segments["tokens"] = 1
    segments["reward"] = metadata.rewards[..., None]
    config = step_config(**loss)
    config = replace(config, rollout=replace(config.rollout, samples_per_prompt=8, **rollout))
    notes = plan(dataclasses.replace(metadata, segments=segments), config).notes
    assert [note in line for line in notes] == [True] * bool(note)


@pytest.mark.parametrize("updates", [1, 2])
def test_step_of_equal_groups_keeps_nothing_and_says_so(updates: int):
    metadata = step_metadata(8, rewards=np.repeat([[0.0], [1.0]], 4, axis=0) * np.ones((8, 8)))
    result = plan(metadata, step_config(updates_per_rollout=updates))
    for minibatch in result.minibatches:
        assert (minibatch.capacity, minibatch.packs, len(minibatch.group)) == (0, ((), ()), 0)
    assert ["nothing" in note for note in result.notes] == [True] * updates
    assert result.metrics["prune/zero_advantage_fraction"] == 1.0
    assert result.metrics["prune/kept_token_fraction"] == 0.0


def test_step_without_any_group_keeps_nothing():
    empty = select_groups(step_metadata(4), np.arange(0))
    result = plan(empty, step_config(updates_per_rollout=2))
    assert [minibatch.capacity for minibatch in result.minibatches] == [0]
    json.dumps(result.metrics, allow_nan=False)


def test_minibatches_are_whole_groups_with_a_part_of_the_window():
    metadata = step_metadata(30, prompt_inclusion=np.full(30, 0.6), window=50.0)
    result = plan(metadata, step_config(rule="none", updates_per_rollout=4, kl_coef=0.1))
    groups = [np.unique(minibatch.group) for minibatch in result.minibatches]
    assert (
        sorted(np.concatenate(groups).tolist())
        == list(range(30))
        != np.concatenate(groups).tolist()
    )
    assert [minibatch.normaliser for minibatch in result.minibatches] == [
        50 * len(g) / 30 * 8 for g in groups
    ]
    assert [len(minibatch.group) for minibatch in result.minibatches] == [
        8 * len(g) for g in groups
    ]


def first_minibatch(packing: PackConfig | None = None, **options) -> MinibatchPlan:
    return plan(step_metadata(64), step_config(pack=packing), **options).minibatches[0]


def test_packs_obey_the_settings_of_the_layout_and_of_packing():
    minibatch = first_minibatch(replicas=3, align=11, capacity_multiple=64)
    assert (len(minibatch.packs), minibatch.capacity % (11 * 64)) == (3, 0)
    for least, count in ((0, 8), (3, 3)):
        packs = first_minibatch(PackConfig(max_tokens=65536, min_per_rank=least), pipeline=4).packs
        assert [len(rank) for rank in packs] == [count, count]
    assert [resolve_min_packs(0, stages) for stages in (1, 2, 4)] == [1, 4, 8]
    narrow, wide = (
        first_minibatch(PackConfig(max_tokens=300, window=n, share_prefixes="off")) for n in (1, 64)
    )
    assert narrow.packs != wide.packs and narrow.capacity <= 300
    square, flat = (first_minibatch(replicas=4, hidden=hidden) for hidden in (1e-3, math.inf))
    assert square.packs != flat.packs


def test_metadata_is_gathered_in_the_order_of_the_prompts():
    whole = step_metadata(12)
    parts = [select_groups(whole, np.flatnonzero(whole.owners == rank)) for rank in (3, 1, 0, 2)]
    parts.insert(1, select_groups(whole, np.arange(0)))
    gathered = gather_metadata(parts, window=whole.window)
    for field in StepMetadata.__slots__:
        np.testing.assert_array_equal(getattr(gathered, field), getattr(whole, field))
    assert len(gather_metadata(parts[1:2], window=0.0).prompt_ids) == 0


def test_metrics_of_a_step_written_out():
    """Two prompts of three were rolled out at π 1 and 0.5; group 0 is mixed one to three, group 1
    all right."""
    metadata = uniform_step(
        [[1, 0, 0, 0], [1, 1, 1, 1]],
        prompt_inclusion=np.array([1.0, 0.5]),
        prompt_lengths=np.array([10, 30]),
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


def test_beginnings_of_prompts_are_in_a_pack_once():
    """Groups 0, 1 and 3 are mixed; the prompts of the first two begin with 20 tokens, that of the
    last with 10 of them, which are too few."""
    message = np.arange(20, dtype=np.int32)
    prompts = [
        np.append(message[:common], [100 + i] * 5).astype(np.int32)
        for i, common in enumerate([20, 20, 20, 10])
    ]
    metadata = uniform_step(
        [[1, 0], [1, 0], [1, 1], [0, 1]],
        response_lengths=np.full((4, 2), 7),
        prompt_lengths=np.array([len(prompt) for prompt in prompts]),
    )
    (minibatch,) = plan(metadata, step_config(rule="none"), replicas=1, prompts=prompts).minibatches
    assert minibatch.shared_length.tolist() == [0, 25, 20, 25, 0, 15]
    assert minibatch.capacity == 25 + 5 + 15 + 6 * 7
    apart = samples_of(metadata, step_config(rule="none"), replicas=1)
    assert apart.shared_length.tolist() == [0, 25, 0, 25, 0, 15]


def test_variance_inflation_runs_over_the_window():
    """Two equal groups at π 0.5 and 1, none of whose completions is pruned: (1/0.5² + 1) / (1/0.5 +
    1)."""
    metadata = uniform_step([[1, 0, 0, 0]] * 2, prompt_inclusion=np.array([0.5, 1.0]))
    metrics = plan(metadata, step_config(rule="none")).metrics
    assert metrics["prune/variance_inflation"] == pytest.approx(5 / 3)
    assert metrics["prune/effective_sample_size"] == pytest.approx(12**2 / (8 * 20))


@pytest.mark.parametrize(("rule", "step"), [("none", 50), ("threshold", 0), ("neyman", 90)])
def test_all_that_can_teach_is_kept_where_nothing_is_pruned(rule: str, step: int):
    """Pruning begins after step 0 and ends for the last tenth of a hundred steps."""
    metadata, config = step_metadata(32), step_config(rule=rule, keep=0.3)
    schedule = ScheduleConfig(shape="linear", ramp=0.5, off_last=0.1)
    completions = replace(config.pruning.completions, schedule=schedule)
    config = replace(
        config, run=RunConfig(steps=100), pruning=replace(config.pruning, completions=completions)
    )
    samples = samples_of(metadata, config, step=step)
    group, completion = np.nonzero(compute_group_advantages(metadata.rewards, normalise=True))
    assert pairs(samples) == list(zip(group.tolist(), completion.tolist(), strict=True))
    assert (samples.weight == 1.0).all()
    middle = samples_of(metadata, config, step=50)
    assert (len(middle.group) < len(group)) == (rule != "none")


def test_every_minibatch_has_a_draw_of_its_own():
    """Minibatches of identical groups: one draw repeated would keep the same completions of both,
    step after step."""
    lengths = np.tile(np.arange(20, 100, 10), (12, 1))
    metadata = uniform_step(
        [[1, 1, 1, 0, 0, 0, 0, 0]] * 12, prompt_lengths=np.full(12, 10), response_lengths=lengths
    )
    steps = [
        plan(metadata, step_config(keep=0.37, updates_per_rollout=2), step=step)
        for step in range(20)
    ]
    kept = [[each.completion.tolist() for each in step.minibatches] for step in steps]
    assert sum(first == second for first, second in kept) < 5
    assert len({str(first) for first, _ in kept}) > 10, "and every step its own"
