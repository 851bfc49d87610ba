"""Rows, notes and warnings of the console."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest

from megatron_dppo.observe.console import CUT_OFF_STEPS, Console, CutOffGate, LengthGate
from megatron_dppo.process.streams import print_message
from tests.observe.made_up import made_up_rows


def printed(rows: list[dict[str, float]], total: int) -> list[str]:
    file = io.StringIO()
    console = Console(total, file=file)
    for row in rows:
        console.print_step(int(row["step"]), row)
    return file.getvalue().splitlines()


def test_step_is_one_plain_line_without_a_terminal() -> None:
    lines = printed(made_up_rows(2)[1:], 40)
    assert len(lines) == 3
    titles, first, second = (line.split() for line in lines)
    assert "\x1b" not in "".join(lines)
    assert first[0] == "1/40"
    for title, value in (
        ("tokens", "50%"),
        ("noise", "1.25x"),
        ("seconds", "2.00"),
        ("left", "1:18"),
    ):
        assert first[titles.index(title)] == value
    assert (first[titles.index("held-out")], second[titles.index("held-out")]) == ("-", "0.750")
    assert lines[1].endswith("rollout 50%  train 25%  other 25%")


def test_warm_up_has_columns_of_its_own() -> None:
    titles, row = printed(
        [{"step": 1, "train/loss": 2.5, "train/lr": 1e-3, "perf/step_time": 1.0}], 10
    )
    assert "reward" not in titles
    assert "2.500" in row


def test_note_is_printed_once() -> None:
    file = io.StringIO()
    console = Console(3, file=file)
    for _ in range(3):
        console.print_note("a biased rule")
        console.print_note("http://me:x@host is away")
    assert file.getvalue() == "note  a biased rule\nnote  http://***@host is away\n"


def test_text_of_data_sends_no_escapes_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    file, text = io.StringIO(), "\x1b]0;title\a"
    console = Console(3, file=file)
    console.print_note(text)
    console.print_banner(["é", text])
    print_message(text)
    shown = "\\x1b]0;title\\x07"
    assert file.getvalue() == f"note  {shown}\n\n  é\n  {shown}\n\n"
    assert capsys.readouterr().err == f"{shown}\n"


def warned(
    lengths: Sequence[float],
    *,
    truncated: Sequence[float] | None = None,
    bound: float | None = 2.0,
    weight: float = 4.0,
) -> dict[int, str]:
    """Return the warnings of a run by step."""
    gate = LengthGate(bound)
    notes = {}
    for step, (length, cut) in enumerate(
        zip(lengths, truncated or [0.0] * len(lengths), strict=True), start=1
    ):
        row = {
            "rollout/response_len/mean": length,
            "rollout/truncated_ratio": cut,
            "prune/max_weight": weight,
        }
        if note := gate.check(step, row):
            notes[step] = note
    return notes


LEVEL, LOW = [20.0] * 6, [5.0] * 5
WARNINGS = {
    # The running mean of three steps is 15, then 10, then 5: below half of 20 for the first time at
    # step 9.
    "fall": ({"lengths": LEVEL + [5.0] * 20}, [9]),
    "rise": ({"lengths": LEVEL + [60.0] * 6}, [8]),
    "fall, return and fall": ({"lengths": LEVEL + LOW + [20.0] * 5 + LOW}, [9, 19]),
    "within the bounds": ({"lengths": [20.0] * 5 + [10.1] * 9 + [39.9] * 9}, []),
    "one odd step": ({"lengths": LEVEL + [5.0] + [20.0] * 9}, []),
    "more truncation": ({"lengths": [60.0] * 12, "truncated": [0.05] * 6 + [0.5] * 6}, [7]),
    "no bound": ({"lengths": LEVEL + [1.0] * 20, "bound": None}, []),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_length_gate_warns_when_a_bound_is_crossed(case: str) -> None:
    arguments, steps = WARNINGS[case]
    assert list(warned(**arguments)) == steps


def test_length_warnings_name_steps_lengths_and_remedy() -> None:
    fall = warned(LEVEL + LOW)[9]
    assert "fell: 5.0 tokens, mean of steps 7 to 9, against 20.0" in fall
    assert "pruning.completions.keep" in fall
    assert "pruning" not in warned(LEVEL + LOW, weight=1.0)[9]


def test_answers_cut_off_in_five_successive_steps_are_noted() -> None:
    gate = CutOffGate()
    ratios = [1.0, 0.95, 0.5, 1.0, 0.91, 1.0, 0.95, 1.0]
    notes = []
    for ratio in ratios:
        notes.append(gate.check({"rollout/truncated_ratio": ratio}))
        assert gate.check({"eval/accuracy": 0.0}) == notes[-1]
    assert notes[:-1] == [None] * (len(ratios) - 1) and CUT_OFF_STEPS == 5
    assert notes[-1] is not None
    assert "more than 90% of the answers were cut off in 5 successive steps" in notes[-1]
