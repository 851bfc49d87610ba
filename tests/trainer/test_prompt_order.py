"""The order of prompts: full passes, distinct windows, sources by their shares, and a resume that changes nothing."""

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

Sources = list[tuple[int, float]]
"""Size and weight of each."""
SOURCE = st.integers(1, 30).flatmap(
    lambda size: st.tuples(st.just([(size, 1.0)]), st.lists(st.integers(1, size), max_size=40))
)
SOURCES = st.lists(st.tuples(st.integers(8, 20), st.sampled_from((1.0, 2.0, 0.3, 7.0))), min_size=2, max_size=4)
CASES = SOURCE | st.tuples(SOURCES, st.lists(st.integers(1, 8), min_size=1, max_size=40))
"""Sources, and the sizes of windows."""


def order_of(sources: Sources, seed: int) -> PromptOrder:
    return PromptOrder([size for size, _ in sources], seed, [weight for _, weight in sources])


@settings(max_examples=120, deadline=None)
@given(CASES, st.integers(0, 2**70))
def test_sources_have_weighted_shares_in_full_passes(case: tuple[Sources, list[int]], seed: int) -> None:
    sources, windows = case
    order = order_of(sources, seed)
    owner = [number for number, (size, _) in enumerate(sources) for _ in range(size)]
    visits = [Counter({prompt: 0 for prompt, of in enumerate(owner) if of == number}) for number in range(len(sources))]
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
            assert max(of.values()) - min(of.values()) <= 1  # an epoch begins after equally many visits of all


@settings(max_examples=100, deadline=None)
@given(CASES, st.data())
def test_a_resumed_order_is_the_undisturbed_order(case: tuple[Sources, list[int]], data: st.DataObject) -> None:
    sources, windows = case
    cut = data.draw(st.integers(0, len(windows)))
    whole, first, second = (order_of(sources, 5) for _ in range(3))
    expected = [whole.next_window(n).tolist() for n in windows]
    before = [first.next_window(n).tolist() for n in windows[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + [second.next_window(n).tolist() for n in windows[cut:]] == expected


def test_epochs_seeds_and_sources_differ() -> None:
    order = PromptOrder([50], 1)
    first, second = order.next_window(50).tolist(), order.next_window(50).tolist()
    assert first != second and sorted(first) == sorted(second) == list(range(50))
    assert PromptOrder([50], 2).next_window(50).tolist() != first
    window = PromptOrder([30, 30], 0, [1.0, 1.0]).next_window(60)
    assert window[window < 30].tolist() != (window[window >= 30] - 30).tolist()


def test_a_single_source_has_the_order_of_earlier_versions() -> None:
    epochs = [generator(3, epoch, Purpose.ORDER).permutation(5).tolist() for epoch in (0, 1)]
    order, resumed = PromptOrder([5], 3), PromptOrder([5], 3)
    assert [order.next_window(5).tolist() for _ in epochs] == epochs
    resumed.load_state_dict({"size": 5, "seed": 3, "epoch": 1, "position": 0, "deferred": []})  # of such a version
    assert resumed.next_window(5).tolist() == epochs[1]


def test_a_second_draw_of_a_step_repeats_no_prompt() -> None:
    """Over ends of epochs, and with prompts that an earlier window has deferred. No prompt is lost."""
    order = PromptOrder([10], seed=0)
    held = order.next_window(4)
    again = [order.next_window(3, besides=held) for _ in range(5)]
    later = [order.next_window(5) for _ in range(6)]
    assert all(len({*window.tolist(), *held.tolist()}) == 7 for window in again)
    assert all(len({*window.tolist()}) == 5 for window in later)
    counts = Counter(prompt for window in (held, *again, *later) for prompt in window.tolist())
    assert {counts[prompt] for prompt in range(10)} == {4, 5}, "49 visits are five epochs but for one prompt"


def test_other_pools_seeds_and_sizes_are_refused() -> None:
    with pytest.raises(UserError, match=r"rollout\.prompts_per_step = 6: is more than the 5 prompts"):
        PromptOrder([5], 0).next_window(6)
    state = PromptOrder([14], 0).state_dict()
    for order, words in (
        (PromptOrder([6], 0), r"data\.train"),
        (PromptOrder([9, 5], 0, [1.0, 3.0]), "2 sources"),
        (PromptOrder([14], 1), r"run\.seed"),
    ):
        with pytest.raises(UserError, match=words):
            order.load_state_dict(state)


def test_a_source_too_small_for_a_share_is_named() -> None:
    pool = Pool([SourcePool(range(9), 1.0), SourcePool(range(5), 3.0)])
    check_shares(pool, 6)
    with pytest.raises(UserError, match=r"data\.train\[1\]\.weight = 3: takes 6 prompts of 8 from a source that has 5"):
        check_shares(pool, 8)
