"""Prompts of a step are drawn from the outcomes of earlier steps, under the schedule, and after a
resume as before."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.config import Config
from megatron_dppo.data.prompts import Pool, PromptPool, SourcePool
from megatron_dppo.errors import UserError
from megatron_dppo.rl.plan import gather_metadata
from megatron_dppo.rl.pruning.forecast import Outcomes, PromptForecast
from megatron_dppo.rl.pruning.schedule import find_nonzero_variance_groups
from megatron_dppo.rl.types import Selection, StepMetadata
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.prompt_sampler import PromptOrder, PromptSampler, check_shares
from tests.rl.plans import made_up_pool, step_metadata

WINDOW, SAMPLES = 24, 8
COMMON = (
    "run.seed=3", "run.steps=20", f"rollout.prompts_per_step={WINDOW}",
    f"rollout.samples_per_prompt={SAMPLES}",
    "pruning.prompts.rule=neyman", "pruning.prompts.keep=0.5", "pruning.prompts.floor=0.1",
)  # fmt: skip


def make_sampler(*overrides: str, pool: int | PromptPool = WINDOW) -> PromptSampler:
    if isinstance(pool, int):
        pool = PromptPool([SourcePool(made_up_pool(pool))])
    return PromptSampler(load_config(None, [*COMMON, *overrides]), pool)


def metadata_of(ids: np.ndarray, rewards: np.ndarray, **fields: np.ndarray) -> StepMetadata:
    """Return metadata of rollouts of 20 tokens of equal surprise."""
    alike = {"response_lengths": np.full(rewards.shape, 20), "score_norms": np.ones(rewards.shape)}
    return step_metadata(len(ids), SAMPLES, prompt_ids=ids, rewards=rewards, **alike, **fields)


def roll_out(selection: Selection, accuracy: np.ndarray, *, seed: int = 0) -> StepMetadata:
    """Return metadata of a selection's rollouts, where prompt i is right with probability
    accuracy[i]."""
    ids = np.sort(selection.prompt_ids)
    draws = np.random.default_rng([seed, *ids.tolist()]).random((len(ids), SAMPLES))
    rewards = (draws < accuracy[ids][:, None]).astype(float)
    return metadata_of(
        ids, rewards, prompt_inclusion=selection.inclusion[np.argsort(selection.prompt_ids)]
    )


def assert_same(one: Selection, other: Selection) -> None:
    np.testing.assert_array_equal(one.prompt_ids, other.prompt_ids)
    np.testing.assert_array_equal(one.inclusion, other.inclusion)
    assert one.window == other.window


def inclusion_by_prompt(selection: Selection) -> dict[int, float]:
    return dict(zip(selection.prompt_ids.tolist(), selection.inclusion.tolist(), strict=True))


@pytest.mark.parametrize("rule", ["threshold", "neyman"])
def test_selection_depends_on_earlier_rewards_alone(rule: str) -> None:
    """Selections are the same until rewards are remembered; selecting by itself teaches nothing."""
    right = np.zeros(WINDOW)
    right[::2] = 1.0
    one, other = (make_sampler(f"pruning.prompts.rule={rule}") for _ in range(2))
    for step in range(2):
        first, again = one.select(step), other.select(step)
        assert_same(first, again)
    one.update_history(roll_out(first, np.full(WINDOW, 0.5)))
    other.update_history(roll_out(again, right))
    assert set(one.select(2).inclusion) != set(other.select(2).inclusion)


def test_paper_rule_scores_normalised_advantages() -> None:
    """Of groups one in eight and four in eight right, |A| is 0.66 and 1, whatever the scale of the
    rewards."""
    sampler = make_sampler("pruning.prompts.rule=threshold", "pruning.prompts.keep=0.3")
    ids = np.arange(WINDOW)
    rewards = (np.arange(SAMPLES) < np.where(ids % 2 == 0, 1, 4)[:, None]).astype(float)
    sampler.update_history(metadata_of(ids, rewards * np.where(ids < 2, 1e-3, 100.0)[:, None]))
    inclusion = inclusion_by_prompt(sampler.select(0))
    assert {pi for prompt, pi in inclusion.items() if prompt % 2 == 0} <= {0.3}
    assert [inclusion[prompt] for prompt in range(1, WINDOW, 2)] == [1.0] * 12


RESUMED = (
    ("pruning.prompts.rule=threshold",),
    (),
    ("pruning.prompts.rule=greso",),
    ("pruning.prompts.rule=none", "pruning.target_noise=0.5"),
)


@pytest.mark.parametrize("words", RESUMED)
def test_resumed_sampler_draws_as_before(words: tuple[str, ...]) -> None:
    """Over several epochs of two sources, with windows across their ends, and windows that grow
    with the variance of pruning."""
    prompts = made_up_pool(2 * WINDOW + 7)
    accuracy = np.random.default_rng(0).random(len(prompts))
    pool = PromptPool([SourcePool(prompts[:20], 1.0), SourcePool(prompts[20:], 2.0)])
    first = make_sampler(*words, pool=pool)
    for step in range(5):
        first.update_history(roll_out(first.select(step), accuracy, seed=step), inflation=3.0)
    resumed = make_sampler(*words, pool=pool)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(5, 10):
        selections = first.select(step), resumed.select(step)
        assert_same(*selections)
        for sampler, selection in zip((first, resumed), selections, strict=True):
            sampler.update_history(roll_out(selection, accuracy, seed=step), inflation=3.0)
    assert first.state_dict() == resumed.state_dict()


def test_remembered_squares_have_no_weight_of_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight answers of 20 tokens half are right: each has the square of an advantage of 1 over
    20."""
    learned: list[Outcomes] = []
    monkeypatch.setattr(
        PromptForecast, "evaluate_and_update", lambda self, visits: learned.append(visits)
    )
    rewards = np.tile([1.0, 0.0], (6, SAMPLES // 2))
    inclusion = np.linspace(0.2, 1.0, 6)
    make_sampler().update_history(metadata_of(np.arange(6), rewards, prompt_inclusion=inclusion))
    np.testing.assert_allclose(learned[0].squares, 8 / 20**2)
    np.testing.assert_allclose(learned[0].tokens, 20)


@pytest.mark.parametrize(("loss", "by_minibatch"), [("reinforce_pp", True), ("dr_grpo", False)])
def test_baseline_of_the_minibatch_favours_wrong_prompts(loss: str, by_minibatch: bool) -> None:
    """Where most answers are right, those of prompts that are never right are the furthest from the
    minibatch's mean. Their own group has no variance."""
    never, some = np.arange(6), np.arange(6, 12)
    rewards = np.ones((WINDOW, SAMPLES))
    rewards[never], rewards[some, ::2] = 0.0, 0.0
    sampler = make_sampler(f"loss.name={loss}")
    sampler.update_history(metadata_of(np.arange(WINDOW), rewards))
    chance = inclusion_by_prompt(sampler.select(1))
    of_never, of_some = ([chance[i] for i in ids.tolist() if i in chance] for ids in (never, some))
    likelier, other = (of_never, of_some) if by_minibatch else (of_some, of_never)
    assert min(likelier) > max(other)


def test_draws_differ_from_step_to_step() -> None:
    """Of the same window."""
    assert len({make_sampler().select(step).prompt_ids.tobytes() for step in range(8)}) > 1


def test_schedule_of_prompts_is_obeyed() -> None:
    """Linear over half of twenty steps down to 0.5, then constant; nothing is pruned in the last
    tenth."""
    words = [
        f"pruning.prompts.schedule.{word}" for word in ("shape=linear", "ramp=0.5", "off_last=0.1")
    ]
    sampler = make_sampler(*words, pool=4 * WINDOW)
    selections = [sampler.select(step) for step in range(20)]
    kept = [len(selection.prompt_ids) for selection in selections]
    assert kept[:11:2] == [round(WINDOW * share) for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)]
    assert kept[11:] == [WINDOW // 2] * 7 + [WINDOW] * 2
    assert (selections[0].inclusion == 1.0).all()
    assert {selection.window for selection in selections} == {WINDOW}


@pytest.mark.parametrize(
    ("pool", "overrides", "problem"),
    [
        (WINDOW - 1, (), rf"rollout\.prompts_per_step = {WINDOW}"),
        (
            2 * WINDOW - 1,
            ("pruning.target_noise=0.5",),
            f"windows of {2 * WINDOW} with pruning.target_noise",
        ),
    ],
)
def test_pool_smaller_than_a_window_is_refused(
    pool: int, overrides: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        make_sampler(*overrides, pool=pool)


SAMPLING = "pruning.prompts.rule=dynamic_sampling"


def test_step_rolls_out_a_window_of_mixed_groups() -> None:
    """A third of the pool is always right: each round has the missing prompts, none of them
    twice."""
    sampler = make_sampler(SAMPLING, pool=3 * WINDOW)
    accuracy = np.where(np.arange(3 * WINDOW) % 3 == 0, 1.0, 0.5)
    seen = roll_out(sampler.select(0), accuracy)
    rounds = 1
    while more := sampler.select_round(0, seen, rounds):
        missing = WINDOW - len(find_nonzero_variance_groups(seen, Config()))
        assert missing <= len(more.prompt_ids) <= WINDOW
        assert not set(more.prompt_ids) & set(seen.prompt_ids)
        seen = gather_metadata(
            [seen, roll_out(more, accuracy, seed=rounds)], window=seen.window + more.window
        )
        rounds += 1
    assert len(find_nonzero_variance_groups(seen, Config())) >= WINDOW
    assert rounds > 1


def test_history_compares_the_rewards_of_gdpo_one_by_one() -> None:
    """The sums of all groups are 1: in even prompts by one reward or the other, in odd prompts by
    one."""
    sampler = make_sampler("loss.advantage=gdpo", "loss.reward_weights={right: 1, short: 0.5}")
    ids = np.arange(WINDOW)
    right = np.where(ids[:, None] % 2 == 0, np.arange(SAMPLES) % 2, 1.0)
    parts = {"reward/right": right, "reward/short": 1.0 - right}
    for _ in range(3):
        metadata = metadata_of(ids, np.ones(right.shape))
        sampler.update_history(dataclasses.replace(metadata, parts=parts))
    history = sampler.history
    np.testing.assert_array_equal(history.count_equal_visits(ids), np.where(ids % 2, 3, 0))
    even, odd = (history.expected_square(ids[at::2], group_size=SAMPLES) for at in (0, 1))
    assert even.min() > odd.max()


def test_rounds_end_with_their_limit_the_pool_or_the_rule() -> None:
    nothing = np.ones(3 * WINDOW)
    sampler = make_sampler(SAMPLING, "pruning.max_rounds=2", pool=3 * WINDOW)
    seen = roll_out(sampler.select(0), nothing)
    assert sampler.select_round(0, seen, 1) is not None
    assert sampler.select_round(0, seen, 2) is None
    everything = step_metadata(3 * WINDOW, SAMPLES, rewards=np.ones((3 * WINDOW, SAMPLES)))
    assert make_sampler(SAMPLING, pool=3 * WINDOW).select_round(0, everything, 1) is None
    for rule in ("neyman", "greso"):
        sampler = make_sampler(f"pruning.prompts.rule={rule}", pool=3 * WINDOW)
        assert sampler.select_round(0, roll_out(sampler.select(0), nothing), 1) is None


def test_longest_expected_prompts_are_requested_first() -> None:
    """Unless ``rollout.longest_first`` is false: the same prompts and probabilities in the order of
    the epoch."""
    samplers = make_sampler(), make_sampler("rollout.longest_first=false")
    for step in range(4):
        ids = np.arange(WINDOW)
        metadata = metadata_of(ids, np.tile([1.0, 0.0], (WINDOW, SAMPLES // 2)))
        lengths = np.broadcast_to(ids[:, None] + 10, metadata.rewards.shape)
        for sampler in samplers:
            sampler.select(step)
            sampler.update_history(
                dataclasses.replace(metadata, response_lengths=lengths, sampled_lengths=lengths)
            )
    longest, plain = (sampler.select(4) for sampler in samplers)
    assert inclusion_by_prompt(longest) == inclusion_by_prompt(plain)
    places = np.arange(len(plain.prompt_ids))
    assert (
        np.corrcoef(longest.prompt_ids, places)[0, 1]
        < -0.8
        < np.corrcoef(plain.prompt_ids, places)[0, 1]
    )


def test_window_of_equal_noise_ends_where_a_source_ends() -> None:
    """Steps with 50 times the variance would need hundreds of prompts; the first source has 20
    prompts, a quarter."""
    prompts = made_up_pool(120)
    pool = PromptPool([SourcePool(prompts[:20], 1.0), SourcePool(prompts[20:], 3.0)])
    sampler = make_sampler("pruning.prompts.rule=none", "pruning.target_noise=1", pool=pool)
    for step, window in enumerate((WINDOW, 80)):
        selection = sampler.select(step)
        assert selection.window == window == len(set(selection.prompt_ids.tolist()))
        sampler.update_history(roll_out(selection, np.full(120, 0.5)), inflation=50.0)


Sources = list[tuple[int, float]]
"""Size and weight of each."""
SOURCE = st.integers(1, 30).flatmap(
    lambda size: st.tuples(st.just([(size, 1.0)]), st.lists(st.integers(1, size), max_size=40))
)
SOURCES = st.lists(
    st.tuples(st.integers(8, 20), st.sampled_from((1.0, 2.0, 0.3, 7.0))), min_size=2, max_size=4
)
CASES = SOURCE | st.tuples(SOURCES, st.lists(st.integers(1, 8), min_size=1, max_size=40))
"""Sources, and the sizes of windows."""


def order_of(sources: Sources, seed: int) -> PromptOrder:
    return PromptOrder([size for size, _ in sources], seed, [weight for _, weight in sources])


@settings(max_examples=120, deadline=None)
@given(CASES, st.integers(0, 2**70))
def test_sources_have_weighted_shares_in_full_passes(
    case: tuple[Sources, list[int]], seed: int
) -> None:
    sources, windows = case
    order = order_of(sources, seed)
    owner = [number for number, (size, _) in enumerate(sources) for _ in range(size)]
    visits = [
        Counter({prompt: 0 for prompt, of in enumerate(owner) if of == number})
        for number in range(len(sources))
    ]
    total = sum(weight for _, weight in sources)
    for n in windows:
        window = order.next_window(n).tolist()
        assert len({*window}) == n == len(window)
        for prompt in window:
            visits[owner[prompt]][prompt] += 1
        waiting = len(order.state_dict()["deferred"])
        drawn = sum(of.total() for of in visits)
        for (_, weight), of in zip(sources, visits, strict=True):
            assert abs(of.total() - weight / total * drawn) < len(sources) + waiting
            assert (
                max(of.values()) - min(of.values()) <= 1
            )  # an epoch begins after equally many visits of all


def test_epochs_seeds_and_sources_differ() -> None:
    order = PromptOrder([50], 1)
    first, second = order.next_window(50).tolist(), order.next_window(50).tolist()
    assert first != second and sorted(first) == sorted(second) == list(range(50))
    assert PromptOrder([50], 2).next_window(50).tolist() != first
    window = PromptOrder([30, 30], 0, [1.0, 1.0]).next_window(60)
    assert window[window < 30].tolist() != (window[window >= 30] - 30).tolist()


def test_a_second_draw_of_a_step_repeats_no_prompt() -> None:
    """Over ends of epochs, and with prompts that an earlier window has deferred. No prompt is
    lost."""
    order = PromptOrder([10], seed=0)
    held = order.next_window(4)
    again = [order.next_window(3, excluded=held) for _ in range(5)]
    later = [order.next_window(5) for _ in range(6)]
    assert all(len({*window.tolist(), *held.tolist()}) == 7 for window in again)
    assert all(len({*window.tolist()}) == 5 for window in later)
    counts = Counter(prompt for window in (held, *again, *later) for prompt in window.tolist())
    assert {counts[prompt] for prompt in range(10)} == {4, 5}, (
        "49 visits are five epochs but for one prompt"
    )


def test_order_of_another_number_of_prompts_is_refused() -> None:
    state = PromptOrder([14], 0).state_dict()
    with pytest.raises(
        UserError, match=r"data\.train = 6 prompts: the checkpoint was written with 14 prompts"
    ):
        PromptOrder([6], 0).load_state_dict(state)


def test_a_source_too_small_for_a_share_is_named() -> None:
    pool = Pool([SourcePool(range(9), 1.0), SourcePool(range(5), 3.0)])
    check_shares(pool, 6)
    with pytest.raises(
        UserError,
        match=r"data\.train\[1\]\.weight = 3: takes 6 prompts of 8 from a source that has 5",
    ):
        check_shares(pool, 8)
