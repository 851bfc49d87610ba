"""The picture of pruning shows something in every panel it can, and says in words what it cannot show."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.observe.pruning_picture import draw_pruning
from tests.observe.made_up import Row, made_up_census, made_up_rows
from tests.observe.test_picture import ink

SOME = 0.0005


@pytest.mark.parametrize(("steps", "graded"), [(1, False), (60, False), (3, True)])
def test_every_panel_shows_its_numbers(tmp_path: Path, steps: int, graded: bool) -> None:
    draw_pruning(made_up_rows(steps), made_up_census(steps, graded=graded), tmp_path / "pruning.png")
    assert (ink(tmp_path / "pruning.png") > SOME).all()
    assert [file.name for file in tmp_path.iterdir()] == ["pruning.png"]


def test_without_pruning_there_are_tokens_and_noise_and_no_choice_to_show(tmp_path: Path) -> None:
    draw_pruning(made_up_rows(3), made_up_census(3, rule="none"), tmp_path / "pruning.png")
    (answers, causes), (noise, tokens) = ink(tmp_path / "pruning.png")
    assert max(answers, causes) < SOME < min(noise, tokens)


def test_a_biased_rule_has_no_noise_to_show(tmp_path: Path) -> None:
    rows: list[Row] = [{k: v for k, v in row.items() if "noise" not in k} for row in made_up_rows(3)]
    draw_pruning(rows, made_up_census(3), tmp_path / "pruning.png")
    (answers, causes), (noise, tokens) = ink(tmp_path / "pruning.png")
    assert noise < SOME < min(answers, causes, tokens)


def test_a_run_that_measured_nothing_is_drawn_empty(tmp_path: Path) -> None:
    draw_pruning([], [], tmp_path / "pruning.png", title="nothing")
    assert (ink(tmp_path / "pruning.png") < SOME).all()


def test_the_same_rows_are_the_same_picture(tmp_path: Path) -> None:
    for name in ("once", "again"):
        draw_pruning(made_up_rows(3), made_up_census(3), tmp_path / name)
    assert (tmp_path / "once").read_bytes() == (tmp_path / "again").read_bytes()
