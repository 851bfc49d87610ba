"""What a killed run has lost or done twice is seen in its ledger: each fault below is put into one that has none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.ledger import DISTINCT, Event, asked_again, faults, trained

ORDER = [[0, 1], [2, 3], [4, 5]]


def _groups(step: int, life: int) -> dict[str, Any]:
    return {
        str(prompt): [{"id": f"{life}-{prompt}-{sample}", "length": DISTINCT, "versions": [0]} for sample in range(2)]
        for prompt in ORDER[step]
    }


def _asked(step: int) -> Event:
    return {"event": "asked", "step": step, "prompts": ORDER[step]}


def _trained(step: int, life: int) -> Event:
    return {"event": "trained", "step": step, "groups": _groups(step, life)}


def _ledger() -> list[Event]:
    """Two steps are asked for beyond the first, whose checkpoint has the second and not the third; the trainer dies
    after the second, which its next life trains once more on the same rollouts."""
    kept = {"1": _groups(1, life=0)}
    return [
        {"event": "began", "step": 0, "in_flight": {}},
        _asked(0),
        _asked(1),
        _trained(0, life=0),
        {"event": "saved", "step": 1, "in_flight": kept},
        _asked(2),
        _trained(1, life=0),
        {"event": "began", "step": 1, "in_flight": copy.deepcopy(kept)},
        _asked(2),
        _trained(1, life=0),
        _trained(2, life=1),
    ]


def test_a_run_that_lost_nothing_has_no_fault_and_what_it_did_again_is_counted() -> None:
    ledger = _ledger()
    assert list(faults(ledger, ORDER, samples=2)) == []
    assert trained(ledger) == {0: _groups(0, 0), 1: _groups(1, 0), 2: _groups(2, 1)}
    assert asked_again(ledger) == len(ORDER[2])


def _lose(ledger: list[Event]) -> None:
    del ledger[-1]["groups"]["4"]


def _shorten(ledger: list[Event]) -> None:
    ledger[-1]["groups"]["4"].pop()


def _double(ledger: list[Event]) -> None:
    ledger[-1]["groups"]["4"] = copy.deepcopy(ledger[-2]["groups"]["2"])


def _skip(ledger: list[Event]) -> None:
    del ledger[-2]


def _roll_out_anew(ledger: list[Event]) -> None:
    ledger[-2]["groups"] = _groups(1, life=1)


def _ask_anew(ledger: list[Event]) -> None:
    ledger.insert(-2, _asked(1))


def _forget(ledger: list[Event]) -> None:
    ledger[-4]["in_flight"] = {}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_lose, "step 2 lost the prompts [4]"),
        (_shorten, "step 2 has groups of [1, 2]"),
        (_double, "completion 0-2-0 was trained 2 times"),
        (_skip, "trained steps [0, 2]"),
        (_roll_out_anew, "step 1 has other rollouts than were kept"),
        (_ask_anew, "step 1 was asked for 2 times"),
        (_forget, "a life began at step 1 with other rollouts than were saved there"),
    ],
)
def test_every_loss_and_every_repetition_is_seen(fault: Callable[[list[Event]], None], words: str) -> None:
    ledger = _ledger()
    fault(ledger)
    assert any(words in said for said in faults(ledger, ORDER, samples=2))
