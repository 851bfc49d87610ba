"""What people read while a run goes on, and when it warns that lengths leave where they began."""

from __future__ import annotations

import io
from collections.abc import Sequence

from megatron_dppo.observe.console import FIRST, RECENT, Console, LengthGate
from tests.observe.made_up import made_up_rows


def printed(rows: list[dict[str, float]], total: int) -> list[str]:
    file = io.StringIO()
    console = Console(total, file=file)
    for row in rows:
        console.step(int(row["step"]), row)
    return file.getvalue().splitlines()


def test_a_step_is_one_plain_line_under_its_titles_where_there_is_no_terminal() -> None:
    lines = printed(made_up_rows(2)[1:], 40)
    assert len(lines) == 3
    titles, first, second = (line.split() for line in lines)
    assert "\x1b" not in "".join(lines)
    assert first[0] == "1/40"
    for title, value in (
        ("prompts", "75%"),
        ("tokens", "50%"),
        ("noise", "1.25x"),
        ("fill", "98%"),
        ("seconds", "2.00"),
        ("left", "1:18"),
    ):
        assert first[titles.index(title)] == value
    assert (first[titles.index("held-out")], second[titles.index("held-out")]) == ("-", "0.750")
    assert lines[1].endswith("rollout 50%  train 25%  other 25%")


def test_a_warm_up_has_the_columns_it_can_fill() -> None:
    titles, row = printed([{"step": 1, "train/loss": 2.5, "train/lr": 1e-3, "perf/step_time": 1.0}], 10)
    assert "reward" not in titles
    assert "2.500" in row


def test_numbers_stand_under_their_titles() -> None:
    titles, row = printed(made_up_rows(1)[1:], 1000)
    assert titles.index("left") + len("left") == row.index("33:18") + len("33:18")
    for title, value in (("tokens", "50%"), ("noise", "1.25x"), ("grad", "1.50")):
        assert titles.index(title) + len(title) >= row.index(value) + len(value) > titles.index(title)


def test_words_are_said_once() -> None:
    file = io.StringIO()
    console = Console(3, file=file)
    for _ in range(3):
        console.note("a biased rule")
    assert file.getvalue() == "note  a biased rule\n"


def warned(
    lengths: Sequence[float],
    *,
    truncated: Sequence[float] | None = None,
    bound: float | None = 2.0,
    weight: float = 4.0,
) -> dict[int, str]:
    """What a gate says of a run, by step."""
    gate = LengthGate(bound)
    notes = {}
    for step, (length, cut) in enumerate(zip(lengths, truncated or [0.0] * len(lengths), strict=True), start=1):
        row = {"rollout/response_len/mean": length, "rollout/truncated_ratio": cut, "prune/max_weight": weight}
        if note := gate.look(step, row):
            notes[step] = note
    return notes


def test_a_fall_is_said_once_with_step_lengths_and_remedy() -> None:
    notes = warned([20.0] * 6 + [5.0] * 20)
    # The running mean of three steps is 15, then 10, then 5: below half of 20 for the first time at the third.
    assert list(notes) == [9]
    assert "steps 7 to 9" in notes[9] and "fell: 5.0 tokens" in notes[9] and "against 20.0" in notes[9]
    assert "pruning.completions.keep" in notes[9] and "pruning.max_weight" in notes[9]


def test_a_rise_is_said_too() -> None:
    notes = warned([20.0] * 6 + [60.0] * 6)
    assert list(notes) == [8]
    assert "rose: 46.7 tokens" in notes[8] and "rollout.max_response_tokens" in notes[8]


def test_it_speaks_again_only_after_the_length_had_come_back() -> None:
    there_and_back = [20.0] * 6 + [5.0] * 5 + [20.0] * 5 + [5.0] * 5
    assert len(warned(there_and_back)) == 2
    assert len(warned([20.0] * 6 + [5.0] * 5 + [90.0] * 5)) == 2  # across both bounds


def test_within_the_bounds_nothing_is_said() -> None:
    assert not warned([20.0] * 5 + [10.1] * 9 + [39.9] * 9)


def test_one_odd_step_says_nothing() -> None:
    assert not warned([20.0] * 6 + [5.0] + [20.0] * 9)


def test_growth_that_the_response_limit_hides_shows_in_what_is_cut_off() -> None:
    lengths, cut = [60.0] * 12, [0.05] * 6 + [0.5] * 6
    notes = warned(lengths, truncated=cut)
    assert len(notes) == 1 and "cut off, against 5%" in next(iter(notes.values()))


def test_without_pruning_the_note_does_not_speak_of_it() -> None:
    (note,) = warned([20.0] * 6 + [5.0] * 6, weight=1.0).values()
    assert "pruning" not in note and "held-out accuracy" in note


def test_without_a_bound_it_is_silent() -> None:
    assert not warned([20.0] * 6 + [1.0] * 20, bound=None)


def test_rows_of_evaluations_do_not_count_as_steps() -> None:
    gate = LengthGate(2.0)
    assert gate.look(0, {"eval/accuracy": 0.5}) is None
    lengths = [20.0] * FIRST + [5.0] * RECENT
    notes = [gate.look(step, {"rollout/response_len/mean": length}) for step, length in enumerate(lengths, start=1)]
    assert notes[-1] is not None and not any(notes[:-1])
