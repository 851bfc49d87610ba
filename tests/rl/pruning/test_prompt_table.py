"""A table of prompts is what a dictionary of their rows would be."""

from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.rl.pruning.history import PromptTable

UNSEEN = {"one": 0.5, "other": math.nan}
IDS = st.lists(st.integers(0, 60), max_size=12, unique=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(IDS, max_size=8), IDS, st.integers(0, 8))
def test_rows_are_those_that_were_put_last_also_after_a_resume(
    puts: list[list[int]], asked: list[int], cut: int
) -> None:
    table, expected = PromptTable(UNSEEN), {}
    for number, ids in enumerate(puts):
        if number == cut:
            state = json.loads(json.dumps(table.state_dict()))
            table = PromptTable(UNSEEN)
            table.load_state_dict(state)
        one = np.arange(len(ids)) / 3 + number
        table.put(np.array(ids, np.int64), one=one, other=-one)
        expected.update(zip(ids, one.tolist(), strict=True))
    found = table.of(np.array(asked, np.int64))
    assert found["one"].tolist() == [expected.get(prompt, 0.5) for prompt in asked]
    np.testing.assert_array_equal(found["other"], [-expected.get(prompt, math.nan) for prompt in asked])
    assert len(table) == len(expected) and math.fsum(table.seen["one"]) == math.fsum(expected.values())
