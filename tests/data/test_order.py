"""The order of prompts: full passes, distinct windows, and a resume that changes nothing."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.data.prompts import Pool, SourcePool
from megatron_dppo.errors import UserError
from megatron_dppo.rl.seeds import Purpose, generator
from megatron_dppo.trainer.prompt_sampler import PromptOrder, check_shares

SIZES = st.integers(1, 30).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(1, size), max_size=40)))


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(0, 2**70))
def test_no_window_repeats_a_prompt_and_every_epoch_is_a_full_pass(case: tuple[int, list[int]], seed: int) -> None:
    size, windows = case
    order, visits = PromptOrder([size], seed), Counter({prompt: 0 for prompt in range(size)})
    for n in windows:
        window = order.next_window(n)
        assert len(set(window.tolist())) == n == len(window)
        visits.update(window.tolist())
        assert max(visits.values()) - min(visits.values()) <= 1  # an epoch begins where all were visited equally often
    assert set(visits) <= set(range(size))


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(0, 99), st.data())
def test_resumed_order_goes_on_as_if_nothing_had_happened(
    case: tuple[int, list[int]], seed: int, data: st.DataObject
) -> None:
    size, windows = case
    cut = data.draw(st.integers(0, len(windows)))
    whole, first, second = PromptOrder([size], seed), PromptOrder([size], seed), PromptOrder([size], seed)
    expected = [whole.next_window(n).tolist() for n in windows]
    before = [first.next_window(n).tolist() for n in windows[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + [second.next_window(n).tolist() for n in windows[cut:]] == expected


def test_epochs_and_seeds_differ() -> None:
    order = PromptOrder([50], 1)
    first, second = order.next_window(50).tolist(), order.next_window(50).tolist()
    assert first != second and sorted(first) == sorted(second) == list(range(50))
    assert PromptOrder([50], 2).next_window(50).tolist() != first


def test_window_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout\.prompts_per_step = 6: is more than the 5 prompts"):
        PromptOrder([5], 0).next_window(6)


def test_state_of_another_pool_or_seed_is_refused() -> None:
    state = PromptOrder([5], 0).state_dict()
    with pytest.raises(UserError, match=r"data\.train"):
        PromptOrder([6], 0).load_state_dict(state)
    with pytest.raises(UserError, match=r"run\.seed"):
        PromptOrder([5], 1).load_state_dict(state)


def test_a_step_that_draws_again_gets_no_prompt_that_it_has() -> None:
    """Over ends of epochs, and with prompts that an earlier window has put off; none of them is lost."""
    order = PromptOrder([10], seed=0)
    held = order.next_window(4)
    again = [order.next_window(3, besides=held) for _ in range(5)]
    later = [order.next_window(5) for _ in range(6)]
    assert all(len({*window.tolist(), *held.tolist()}) == 7 for window in again)
    assert all(len(set(window.tolist())) == 5 for window in later)
    counts = Counter(prompt for window in (held, *again, *later) for prompt in window.tolist())
    assert {counts[prompt] for prompt in range(10)} == {4, 5}, "49 visits are five epochs but for one prompt"


SOURCES = st.lists(st.tuples(st.integers(8, 20), st.sampled_from((1.0, 2.0, 0.3, 7.0))), min_size=2, max_size=4)
WINDOWS = st.lists(st.integers(1, 8), min_size=1, max_size=40)


def of_sources(sources: list[tuple[int, float]], seed: int) -> PromptOrder:
    return PromptOrder([size for size, _ in sources], seed, [weight for _, weight in sources])


@settings(max_examples=60, deadline=None)
@given(SOURCES, WINDOWS)
def test_sources_have_their_shares_at_every_moment_and_epochs_of_their_own(
    sources: list[tuple[int, float]], windows: list[int]
) -> None:
    order = of_sources(sources, 3)
    owner = [number for number, (size, _) in enumerate(sources) for _ in range(size)]
    visits = [Counter({prompt: 0 for prompt, of in enumerate(owner) if of == number}) for number in range(len(sources))]
    total = sum(weight for _, weight in sources)
    for n in windows:
        window = order.next_window(n).tolist()
        assert len(set(window)) == n
        for prompt in window:
            visits[owner[prompt]][prompt] += 1
        waiting = len(order.state_dict()["deferred"])
        drawn = sum(of.total() for of in visits)
        for (_, weight), of in zip(sources, visits, strict=True):
            assert abs(of.total() - weight / total * drawn) < len(sources) + waiting
            assert max(of.values()) - min(of.values()) <= 1


@settings(max_examples=40, deadline=None)
@given(SOURCES, WINDOWS, st.data())
def test_the_resumed_order_of_several_sources_goes_on(
    sources: list[tuple[int, float]], windows: list[int], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(windows)))
    whole, first, second = (of_sources(sources, 5) for _ in range(3))
    expected = [whole.next_window(n).tolist() for n in windows]
    before = [first.next_window(n).tolist() for n in windows[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + [second.next_window(n).tolist() for n in windows[cut:]] == expected


def test_one_source_comes_in_the_order_that_earlier_versions_gave_it() -> None:
    order, epochs = (
        PromptOrder([5], 3),
        [generator(3, epoch, Purpose.ORDER).permutation(5).tolist() for epoch in (0, 1)],
    )
    assert [order.next_window(5).tolist() for _ in epochs] == epochs
    resumed = PromptOrder([5], 3)
    resumed.load_state_dict({"size": 5, "seed": 3, "epoch": 1, "position": 0, "deferred": []})  # of such a version
    assert resumed.next_window(5).tolist() == epochs[1]


def test_sources_that_are_alike_come_in_orders_of_their_own() -> None:
    window = PromptOrder([30, 30], 0, [1.0, 1.0]).next_window(60)
    assert (window[window < 30]).tolist() != (window[window >= 30] - 30).tolist()


def test_a_source_that_is_too_small_for_its_share_is_named() -> None:
    pool = Pool([SourcePool(range(9), 1.0), SourcePool(range(5), 3.0)])
    check_shares(pool, 6)
    with pytest.raises(UserError, match=r"data\.train\[1\]\.weight = 3: takes 6 prompts of 8 from a source that has 5"):
        check_shares(pool, 8)
    with pytest.raises(UserError, match="2 sources"):
        PromptOrder([9, 5], 0, [1.0, 3.0]).load_state_dict(PromptOrder([14], 0).state_dict())
