"""A step's prompts are drawn from what earlier steps taught, under the schedule, and a resumed run draws the same."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from megatron_dppo.config import (
    Config,
    LossConfig,
    PromptPruningConfig,
    PruningConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    replace,
)
from megatron_dppo.data.prompts import PromptPool, SourcePool
from megatron_dppo.errors import UserError
from megatron_dppo.rl.advantages import group_advantages
from megatron_dppo.rl.plan import gather_metadata
from megatron_dppo.rl.pruning.forecast import Outcomes, PromptForecast
from megatron_dppo.rl.pruning.schedule import mixed
from megatron_dppo.rl.types import Selection, StepMetadata
from megatron_dppo.trainer.prompt_sampler import PromptOrder, PromptSampler
from tests.rl.plans import made_up_pool as made_up_prompts
from tests.rl.plans import step_metadata

WINDOW, SAMPLES = 24, 8


def sampler_config(
    *, rule: str = "neyman", keep: float = 0.5, steps: int = 20, predictor: str = "auto", **schedule: object
) -> Config:
    return Config(
        run=RunConfig(seed=3, steps=steps),
        rollout=RolloutConfig(prompts_per_step=WINDOW, samples_per_prompt=SAMPLES),
        loss=LossConfig(),
        pruning=PruningConfig(
            prompts=PromptPruningConfig(
                rule=rule, keep=keep, floor=0.1, predictor=predictor, schedule=ScheduleConfig(**schedule)
            )
        ),
    )


def rolled_out(selection: Selection, accuracy: np.ndarray, *, seed: int = 0) -> StepMetadata:
    """What rolling out the selection gives, where prompt i is answered rightly with probability accuracy[i], always in
    20 tokens that are equally surprising."""
    ids = np.sort(selection.prompt_ids)
    draws = np.random.default_rng([seed, *ids.tolist()]).random((len(ids), SAMPLES))
    rewards = (draws < accuracy[ids][:, None]).astype(float)
    inclusion = selection.inclusion[np.argsort(selection.prompt_ids)]
    alike = {"response_lengths": np.full(rewards.shape, 20), "score_norms": np.ones(rewards.shape)}
    return step_metadata(len(ids), SAMPLES, prompt_ids=ids, prompt_inclusion=inclusion, rewards=rewards, **alike)


def made_up_pool(size: int) -> PromptPool:
    return PromptPool([SourcePool(made_up_prompts(size))])


def assert_same(one: Selection, other: Selection) -> None:
    np.testing.assert_array_equal(one.prompt_ids, other.prompt_ids)
    np.testing.assert_array_equal(one.inclusion, other.inclusion)
    assert one.window == other.window


def inclusion_by_prompt(selection: Selection) -> dict[int, float]:
    return dict(zip(selection.prompt_ids.tolist(), selection.inclusion.tolist(), strict=True))


@pytest.mark.parametrize(
    ("rule", "predictor"), [("threshold", "auto"), ("neyman", "auto"), ("neyman", "record"), ("neyman", "model")]
)
def test_selection_knows_earlier_visits_only(rule: str, predictor: str) -> None:
    """The same selections until rewards are remembered, whatever they are, and others from then on."""
    right = np.zeros(WINDOW)
    right[::2] = 1.0
    config = sampler_config(rule=rule, predictor=predictor)
    one, other = (PromptSampler(config, made_up_pool(WINDOW)) for _ in range(2))
    first, again = one.select(0), other.select(0)
    assert_same(first, again)
    assert np.ptp(first.inclusion) < 0.1, "nothing is known of any prompt"
    one.remember(rolled_out(first, np.full(WINDOW, 0.5)))
    other.remember(rolled_out(again, right))
    assert set(one.select(1).inclusion) != set(other.select(1).inclusion)


def test_selecting_teaches_nothing() -> None:
    """Two steps of which nothing is remembered leave every prompt as unknown as it was."""
    sampler = PromptSampler(sampler_config(), made_up_pool(WINDOW))
    for step in range(2):
        np.testing.assert_allclose(sampler.select(step).inclusion, 0.5, rtol=1e-12)


@pytest.mark.parametrize("predictor", ["auto", "record", "model"])
def test_prompts_that_taught_nothing_come_back_less_often(predictor: str) -> None:
    """Even prompts are always right, odd ones mixed: in the next pass over the pool the odd ones are likelier. A record
    tells each of them apart, the model draws one that had luck to the others."""
    accuracy = np.where(np.arange(WINDOW) % 2 == 0, 1.0, 0.5)
    sampler = PromptSampler(
        sampler_config(predictor=predictor, shape="linear", ramp=1.0, steps=2), made_up_pool(WINDOW)
    )
    sampler.remember(rolled_out(sampler.select(0), accuracy))
    inclusion = inclusion_by_prompt(sampler.select(1))
    even = [pi for prompt, pi in inclusion.items() if prompt % 2 == 0]
    odd = [pi for prompt, pi in inclusion.items() if prompt % 2 == 1]
    assert max(even, default=0.0) < min(odd) if predictor == "record" else np.mean(even) < 0.95 * np.mean(odd)


def test_paper_rule_scores_a_prompt_by_its_normalised_advantages() -> None:
    """Of groups one in eight and four in eight right, |A| is 0.66 and 1 with the objective's normalisation."""
    sampler = PromptSampler(sampler_config(rule="threshold", keep=0.3), made_up_pool(WINDOW))
    ids = np.arange(WINDOW)
    rewards = (np.arange(SAMPLES) < np.where(ids % 2 == 0, 1, 4)[:, None]).astype(float)
    sampler.remember(step_metadata(WINDOW, SAMPLES, prompt_ids=ids, rewards=rewards * 100.0))
    rewards[0] *= 1e-3  # the scale of a prompt's rewards says nothing of what it teaches
    sampler.remember(step_metadata(1, SAMPLES, prompt_ids=ids[:1], rewards=rewards[:1]))
    sampler.remember(step_metadata(1, SAMPLES, prompt_ids=ids[1:2], rewards=rewards[1:2] * 1e-3))
    inclusion = inclusion_by_prompt(sampler.select(0))
    assert {pi for prompt, pi in inclusion.items() if prompt % 2 == 0} <= {0.3}
    assert {pi for prompt, pi in inclusion.items() if prompt % 2 == 1} == {1.0}
    assert 1 in inclusion


@pytest.mark.parametrize(
    ("rule", "predictor"), [("threshold", "auto"), ("neyman", "auto"), ("neyman", "record"), ("neyman", "model")]
)
def test_resumed_sampler_draws_what_the_first_would_have(rule: str, predictor: str) -> None:
    """Over several epochs, windows across their ends; the state has travelled through JSON in between."""
    pool = 2 * WINDOW - 7
    accuracy = np.random.default_rng(0).random(pool)
    config = sampler_config(rule=rule, predictor=predictor)
    first = PromptSampler(config, made_up_pool(pool))
    for step in range(5):
        first.remember(rolled_out(first.select(step), accuracy, seed=step))
    resumed = PromptSampler(config, made_up_pool(pool))
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(5, 10):
        selections = first.select(step), resumed.select(step)
        assert_same(*selections)
        for sampler, selection in zip((first, resumed), selections, strict=True):
            sampler.remember(rolled_out(selection, accuracy, seed=step))
    assert first.state_dict() == resumed.state_dict()


def test_what_is_learned_of_a_gradient_has_no_weight_of_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ_i (A_i·c_i·s_i)² with c = 1/L, whatever the chance with which the prompt was drawn; tokens per completion."""
    learned: list[Outcomes] = []
    monkeypatch.setattr(PromptForecast, "judge_and_learn", lambda self, visits: learned.append(visits))
    step = step_metadata(6, SAMPLES, prompt_ids=np.arange(6), prompt_inclusion=np.linspace(0.2, 1.0, 6))
    PromptSampler(sampler_config(), made_up_pool(WINDOW)).remember(step)
    terms = group_advantages(step.rewards, normalise=True) * step.score_norms / step.sampled_lengths
    np.testing.assert_allclose(learned[0].squares, (terms**2).sum(axis=1))
    np.testing.assert_allclose(learned[0].tokens, step.sampled_lengths.mean(axis=1))


@pytest.mark.parametrize("predictor", ["record", "model"])
def test_held_against_the_minibatch_prompts_that_are_never_right_are_worth_a_rollout(predictor: str) -> None:
    """Where most answers are right, theirs are the furthest from the mean. Held against their group they are not."""
    never, mixed = np.arange(6), np.arange(6, 12)
    rewards = np.ones((WINDOW, SAMPLES))
    rewards[never], rewards[mixed, ::2] = 0.0, 0.0
    alike = {"response_lengths": np.full(rewards.shape, 20), "score_norms": np.ones(rewards.shape)}
    for loss, first, second in (("reinforce_pp", never, mixed), ("dr_grpo", mixed, never)):
        config = replace(sampler_config(predictor=predictor), loss=LossConfig(name=loss))
        sampler = PromptSampler(config, made_up_pool(WINDOW))
        sampler.remember(step_metadata(WINDOW, SAMPLES, prompt_ids=np.arange(WINDOW), rewards=rewards, **alike))
        chance = inclusion_by_prompt(sampler.select(1))
        of_first, of_second = ([chance[i] for i in ids.tolist() if i in chance] for ids in (first, second))
        assert of_first and of_second and min(of_first) > max(of_second)


@pytest.mark.parametrize("rule", ["neyman", "threshold", "none"])
def test_who_predicts_is_said_where_it_matters(rule: str) -> None:
    accuracy = np.where(np.arange(8 * WINDOW) % 2 == 0, 1.0, 0.0)
    sampler, said = PromptSampler(sampler_config(rule=rule), made_up_pool(8 * WINDOW)), []
    for step in range(6):
        said += sampler.remember(rolled_out(sampler.select(step), accuracy, seed=step)).notes
    assert any("predicts prompts from now on" in note for note in said) == (rule == "neyman")


def test_a_step_has_draws_of_its_own() -> None:
    """Which places of the window are kept differs from step to step, and is a function of the step alone."""
    order, sampler = PromptOrder([WINDOW], 3), PromptSampler(sampler_config(), made_up_pool(WINDOW))
    places = [np.isin(order.next_window(WINDOW), sampler.select(step).prompt_ids).tobytes() for step in range(8)]
    assert len(set(places)) > 1
    assert_same(*(PromptSampler(sampler_config(), made_up_pool(WINDOW)).select(4) for _ in range(2)))


def test_schedule_of_the_prompts_is_obeyed() -> None:
    """Linear over half of twenty steps down to 0.5, then constant, and nothing is pruned in the last tenth."""
    sampler = PromptSampler(sampler_config(shape="linear", ramp=0.5, off_last=0.1), made_up_pool(4 * WINDOW))
    selections = [sampler.select(step) for step in range(20)]
    kept = [len(selection.prompt_ids) for selection in selections]
    assert kept[:11:2] == [round(WINDOW * share) for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)]
    assert kept[11:18] == [WINDOW // 2] * 7
    assert kept[18:] == [WINDOW] * 2
    assert (selections[0].inclusion == 1.0).all()
    assert {selection.window for selection in selections} == {WINDOW}


def test_pool_smaller_than_a_window_is_refused_before_the_first_step() -> None:
    with pytest.raises(UserError, match=rf"rollout\.prompts_per_step = {WINDOW}"):
        PromptSampler(sampler_config(), made_up_pool(WINDOW - 1))


def refilling(**pruning: object) -> PromptSampler:
    config = sampler_config(rule="dynamic_sampling")
    return PromptSampler(replace(config, pruning=replace(config.pruning, **pruning)), made_up_pool(3 * WINDOW))


def test_a_step_rolls_out_more_prompts_until_it_has_a_window_of_mixed_groups() -> None:
    """A third of the pool is always right: what comes again is what is missing, over what was of use, and no prompt
    comes twice."""
    sampler = refilling()
    accuracy = np.where(np.arange(3 * WINDOW) % 3 == 0, 1.0, 0.5)
    seen = rolled_out(sampler.select(0), accuracy)
    rounds = 1
    while more := sampler.select_more(0, seen, rounds):
        missing = WINDOW - len(mixed(seen))
        assert missing <= len(more.prompt_ids) <= WINDOW
        assert not set(more.prompt_ids) & set(seen.prompt_ids)
        seen = gather_metadata([seen, rolled_out(more, accuracy, seed=rounds)], window=seen.window + more.window)
        rounds += 1
    assert len(mixed(seen)) >= WINDOW and rounds > 1


def test_a_step_gives_up_when_rounds_or_the_pool_are_exhausted() -> None:
    sampler = refilling(max_rounds=2)
    nothing = np.ones(3 * WINDOW)
    seen = rolled_out(sampler.select(0), nothing)
    more = sampler.select_more(0, seen, 1)
    assert more is not None
    assert sampler.select_more(0, seen, 2) is None
    everything = step_metadata(3 * WINDOW, SAMPLES, rewards=np.ones((3 * WINDOW, SAMPLES)))
    assert refilling().select_more(0, everything, 1) is None


def test_no_other_rule_goes_on_rolling_out() -> None:
    for rule in ("none", "threshold", "neyman", "greso"):
        sampler = PromptSampler(sampler_config(rule=rule), made_up_pool(WINDOW))
        assert sampler.select_more(0, rolled_out(sampler.select(0), np.ones(WINDOW)), 1) is None


def test_greso_explores_easy_and_hard_prompts_apart_and_remembers_over_a_resume() -> None:
    """All right: easy prompts come too often, so their p falls by 0.01 a step while that of hard ones rises."""
    sampler = PromptSampler(sampler_config(rule="greso"), made_up_pool(WINDOW))
    for step in range(3):
        selection = sampler.select(step)
        sampler.remember(rolled_out(selection, np.ones(WINDOW), seed=step))
    resumed = PromptSampler(sampler_config(rule="greso"), made_up_pool(WINDOW))
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert_same(sampler.select(3), resumed.select(3))
    assert resumed.state_dict()["history"]["exploration"] == pytest.approx([0.47, 0.53])


def test_a_window_that_grows_past_the_pool_is_refused_in_words() -> None:
    config = sampler_config()
    config = replace(config, pruning=replace(config.pruning, noise=0.5))
    with pytest.raises(UserError, match=f"windows of {2 * WINDOW} with pruning.noise"):
        PromptSampler(config, made_up_pool(WINDOW + 1))


def with_lengths(metadata: StepMetadata) -> StepMetadata:
    """Answers to prompt i have i tokens more than 10."""
    lengths = np.broadcast_to(metadata.prompt_ids[:, None] + 10, metadata.rewards.shape)
    return dataclasses.replace(metadata, response_lengths=lengths, sampled_lengths=lengths)


def test_prompts_are_asked_longest_expected_first_and_drawn_as_before() -> None:
    """Another order of the same prompts with the same probabilities, which stays in the checkpoint."""
    accuracy = np.full(WINDOW, 0.5)
    told, untold = (PromptSampler(sampler_config(rule="none"), made_up_pool(WINDOW)) for _ in range(2))
    for step in range(4):
        selection = told.select(step)
        told.remember(with_lengths(rolled_out(selection, accuracy, seed=step)))
        untold.select(step)
    resumed = PromptSampler(sampler_config(rule="none"), made_up_pool(WINDOW))
    resumed.load_state_dict(json.loads(json.dumps(told.state_dict())))
    longest, plain = told.select(4), untold.select(4)
    assert inclusion_by_prompt(longest) == inclusion_by_prompt(plain)
    assert_same(resumed.select(4), longest)
    places = np.arange(WINDOW)
    assert np.corrcoef(longest.prompt_ids, places)[0, 1] < -0.8 < np.corrcoef(plain.prompt_ids, places)[0, 1]


def test_equal_noise_takes_no_more_prompts_than_every_source_has_a_share_of() -> None:
    """Steps that pruning made 50 times noisier would want hundreds of prompts; the first source has 20, which is a
    quarter."""
    config = sampler_config(rule="none")
    config = replace(config, pruning=replace(config.pruning, noise=1.0))
    prompts = made_up_prompts(120)
    sampler = PromptSampler(config, PromptPool([SourcePool(prompts[:20], 1.0), SourcePool(prompts[20:], 3.0)]))
    for step, window in enumerate((WINDOW, 80)):
        selection = sampler.select(step)
        assert selection.window == window == len(set(selection.prompt_ids.tolist()))
        sampler.remember(rolled_out(selection, np.full(120, 0.5)), inflation=50.0)


def test_a_pool_that_is_too_small_for_the_noise_is_refused_by_its_name() -> None:
    config = sampler_config()
    config = replace(config, pruning=replace(config.pruning, noise=0.5))
    with pytest.raises(UserError, match=f"windows of {2 * WINDOW} with pruning.noise"):
        PromptSampler(config, made_up_pool(2 * WINDOW - 1))
