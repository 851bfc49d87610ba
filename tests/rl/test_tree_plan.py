"""Trees through the real plan: what is kept of them, times its scale, is the gradient of the expected reward."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo.config import Config, RolloutConfig, replace
from megatron_dppo.rl import plan as planning
from megatron_dppo.rl.advantages import completion_advantages
from megatron_dppo.rl.objectives import objective_for
from megatron_dppo.rl.pack import TrainingSample, build_pack, prompts_shared
from megatron_dppo.rl.pruning.draw import prune_minibatch
from megatron_dppo.rl.sequences import no_further
from megatron_dppo.rl.trees import tree_advantages
from megatron_dppo.rl.types import SEGMENT, Floats, Ints, StepMetadata, StepPlan
from tests.rl.integration import FixedOffset, outcomes
from tests.rl.plans import step_config, step_metadata
from tests.rl.tree_toy import LONGEST, Forests, forests, fork_at, toy

SHORT = toy((0, 0), (0, 1), (1, 0))
CASES = {
    "one level": lambda: forests(SHORT, (2, 2), fork_at(1)),
    "early stops": lambda: forests(toy((0,), (1, 0)), (2, 2), fork_at(1)),
    "pruned before": lambda: forests(toy((0, 0), (0, 1), (1, 0), (1, 1)), (2, 2), fork_at(1), keep=(0.4,)),
}


def config_for(given: Forests, rule: str, **loss: object) -> Config:
    config = step_config(rule=rule, keep=0.5, name="dr_grpo", **loss)
    completions = replace(config.pruning.completions, draw="systematic" if rule == "threshold" else None)
    rollout = RolloutConfig(max_response_tokens=LONGEST, samples_per_prompt=given.rewards.shape[1], tree=given.tree)
    return replace(config, rollout=rollout, pruning=replace(config.pruning, completions=completions))


def metadata_of(given: Forests, groups: slice = slice(None)) -> StepMetadata:
    """Each outcome is a prompt of its own."""
    chances = [[given.toy.probability(p[:t], p[t]) for t in range(len(p))] for group in given.paths for p in group]
    norms = np.array([np.linalg.norm(1.0 - np.array(p)) for p in chances]).reshape(given.rewards.shape)
    count = len(given.rewards[groups])
    return StepMetadata(
        prompt_ids=np.arange(count),
        prompt_inclusion=np.ones(count),
        prompt_lengths=np.full(count, 2),
        response_lengths=given.lengths[groups],
        shared_lengths=prompts_shared(np.full(count, 2), given.lengths.shape[1]),
        sampled_lengths=given.lengths[groups],
        further_lengths=no_further(given.lengths[groups].shape),
        rewards=given.rewards[groups],
        score_norms=norms[groups],
        log_ratios=np.zeros((*given.lengths[groups].shape, 2)),
        teacher=np.full(count, -1),
        segments=given.segments[groups],
        versions=np.zeros_like(given.lengths[groups]),
        truncated=np.zeros(given.lengths[groups].shape, bool),
        owners=np.zeros(count, np.int64),
        window=float(count),
    )


def plan(metadata: StepMetadata, config: Config) -> StepPlan:
    return planning.plan_step(metadata, config, replicas=1, align=1, capacity_multiple=1, step=0, pipeline=1)


def gradient(given: Forests, step: StepPlan, first: int = 0) -> Floats:
    """[parameters], on-policy: Σ over what is kept of scale · Σ_t A_t ∇log π_t. Prompt 0 is the outcome ``first``."""
    (minibatch,), total = step.minibatches, np.zeros(len(given.toy.logits))
    samples = minibatch.samples
    for k in range(len(samples.group)):
        at = first + samples.group[k], samples.completion[k]
        path = given.paths[at[0]][at[1]]
        sample = training_sample(step, k, path, segments_of(given, *at))
        total += sample.scale * sample.advantage @ given.toy.scores(path)[: len(path)]
    return total


def segments_of(given: Forests, outcome: int, slot: int) -> Ints:
    """[L], the segment of each token of a path."""
    tokens = given.segments["tokens"][outcome, slot]
    return np.repeat(np.arange(len(tokens)), tokens)


def training_sample(step: StepPlan, k: int, path: tuple[int, ...], segments: Ints | list[int]) -> TrainingSample:
    samples = step.minibatches[0].samples
    return TrainingSample(
        prompt_ids=np.array([5, 6], np.int32),
        response_ids=np.array(path, np.int32),
        engine_logprobs=np.zeros(len(path), np.float32),
        loss_mask=np.ones(len(path), bool),
        advantage=samples.advantage[k, segments],
        scale=float(samples.scale[k]),
        version=0,
    )


@pytest.mark.parametrize("rule", ["neyman", "threshold"])
@pytest.mark.parametrize("name", CASES)
def test_over_all_trees_and_all_draws_the_pruned_plan_is_unbiased(
    name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = CASES[name]()
    config, total, pruned = config_for(given, rule), np.zeros(len(given.toy.logits)), False
    for outcome, probability in enumerate(given.probability.tolist()):
        metadata = metadata_of(given, slice(outcome, outcome + 1))
        known = prune_minibatch(metadata, config, objective_for(config.loss), keep=0.5, rng=np.random.default_rng(0))
        inclusion = known.inclusion[0, np.argsort(known.advantage[0], kind="stable")]
        pruned |= bool(((inclusion > 0.0) & (inclusion < 1.0)).any())
        for offset, length in outcomes(inclusion):
            monkeypatch.setattr(planning, "generator", lambda *_, offset=offset: FixedOffset(offset))
            total += probability * length * gradient(given, plan(metadata, config), outcome)
    true = given.toy.gradient()
    assert pruned
    assert np.linalg.norm(total * LONGEST - true) < 1e-9 * np.linalg.norm(true)


def test_a_path_whose_segments_all_have_the_advantage_0_is_never_kept_without_a_kl_term() -> None:
    given = CASES["early stops"]()
    segments = tree_advantages(given.rewards, given.segments, given.tree)
    for kl_coef in (0.0, 0.1):
        step = plan(metadata_of(given), config_for(given, "none", kl_coef=kl_coef))
        kept = np.zeros(given.rewards.shape, bool)
        kept[step.minibatches[0].samples.group, step.minibatches[0].samples.completion] = True
        np.testing.assert_array_equal(kept, segments.any(axis=-1) | (kl_coef > 0.0))
    assert step.metrics["prune/zero_advantage_fraction"] == pytest.approx(1.0 - segments.any(axis=-1).mean())


def test_the_score_of_a_path_is_the_norm_of_independent_segments() -> None:
    given = forests(SHORT, (2, 2, 2), fork_at(1, 2))
    metadata, config = metadata_of(given), config_for(given, "neyman")
    segments = tree_advantages(given.rewards, given.segments, given.tree)
    expected = np.sqrt((segments**2 * given.segments["square"]).sum(axis=-1))
    pruned = prune_minibatch(metadata, config, objective_for(config.loss), keep=0.5, rng=np.random.default_rng(0))
    np.testing.assert_allclose(np.abs(pruned.advantage) * metadata.score_norms, expected, atol=1e-9)


def test_where_no_norm_is_known_a_path_has_the_root_mean_square_over_its_tokens() -> None:
    segments = np.zeros((1, 1, 2), SEGMENT)
    segments["tokens"] = 2, 6
    part = step_metadata(1, 1, segments=segments, response_lengths=np.array([[8]]), score_norms=np.zeros((1, 1)))
    found = completion_advantages(part, np.array([[[-4.0, 1.0]]]))
    assert found[0, 0] == pytest.approx(-np.sqrt((2 * 16.0 + 6 * 1.0) / 8))
    assert completion_advantages(part, np.array([[[0.0, 0.0]]]))[0, 0] == 0.0


def test_a_token_of_a_pack_has_the_advantage_of_its_segment() -> None:
    given = CASES["one level"]()
    step = plan(metadata_of(given), config_for(given, "none"))
    samples = step.minibatches[0].samples
    chosen = [
        k for k in range(len(samples.group)) if len(given.paths[samples.group[k]][samples.completion[k]]) == LONGEST
    ][:2]
    places = [(samples.group[k], samples.completion[k]) for k in chosen]
    packed = [
        training_sample(step, k, given.paths[outcome][slot], segments_of(given, outcome, slot))
        for k, (outcome, slot) in zip(chosen, places, strict=True)
    ]
    pack = build_pack(packed, 12, pad_id=0, align=1)
    expected = [samples.advantage[k, [0, 1, 1]].tolist() for k in chosen]
    assert sorted(pack.advantage.tolist()) == sorted(np.ravel(expected).tolist())
    for row in (0, 1):
        assert pack.advantage[pack.sample == row].tolist() == expected[row]


@pytest.mark.parametrize("biased", [{"baseline": "depth"}, {"fusion": "probability"}], ids=str)
def test_the_log_says_of_a_biased_tree_that_it_is(biased: dict[str, str]) -> None:
    given = CASES["one level"]()
    config = config_for(given, "none")
    rollout = replace(config.rollout, tree=replace(given.tree, **biased))
    assert not any("rollout.tree" in note for note in plan(metadata_of(given), config).notes)
    ((setting, value),) = biased.items()
    notes = plan(metadata_of(given), replace(config, rollout=rollout)).notes
    assert any(note.startswith(f"rollout.tree.{setting} = {value} is biased: ") for note in notes)
