"""A prompt is expected to be as long as its visits were, of late above all; one never seen, as the pool is."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_dppo.rl.pruning.lengths import ResponseLengths


def test_a_prompt_is_expected_to_be_as_long_as_it_was_and_lately_more_so() -> None:
    lengths = ResponseLengths(decay=0.5)
    lengths.update(np.array([4]), np.array([[10, 30]]))
    lengths.update(np.array([4]), np.array([[80, 80]]))
    assert lengths.expected_tokens(np.array([4])) == pytest.approx([(0.5 * 20 + 80) / 1.5])


def test_a_prompt_that_was_never_seen_is_expected_to_be_like_the_others() -> None:
    lengths = ResponseLengths(decay=0.9)
    lengths.update(np.array([4, 5]), np.array([[10, 10], [30, 30]]))
    assert lengths.expected_tokens(np.array([5, 9, 4])) == pytest.approx([30.0, 20.0, 10.0])
    assert ResponseLengths(decay=0.9).expected_tokens(np.array([1, 2])).tolist() == [0.0, 0.0]


def test_what_was_learned_survives_json_bit_for_bit_and_depends_on_no_order() -> None:
    ids, values = np.arange(50), np.random.default_rng(0).integers(1, 1000, (50, 3))
    one, other, restored = (ResponseLengths(decay=0.7) for _ in range(3))
    one.update(ids, values)
    other.update(ids[::-1], values[::-1])
    restored.load_state_dict(json.loads(json.dumps(one.state_dict())))
    asked = np.array([3, 99])
    assert one.expected_tokens(asked).tolist() == other.expected_tokens(asked).tolist()
    assert one.expected_tokens(asked).tolist() == restored.expected_tokens(asked).tolist()
