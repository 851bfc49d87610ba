"""What is drawn is what was measured, and no more than fits."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_dppo.report.learning import signs
from megatron_dppo.report.parts import Note, Plots
from megatron_dppo.report.plot import Layer, Line, line_plot, stack_plot
from megatron_dppo.report.run import read_runs
from megatron_dppo.report.timing import timing
from tests.report.made_up import write_run


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


def test_a_line_goes_through_its_values() -> None:
    line = Line("run", "run0", np.array([0.0, 5.0, 10.0]), np.array([0.0, 1.0, 0.5]))
    plot = line_plot("", "", [line], low=0.0, high=1.0)
    (drawn,) = [mark for mark in plot.marks if mark.x]
    assert points(drawn.path) == [(0, 1000), (500, 0), (1000, 500)]
    assert (drawn.x, drawn.y) == ("0 5 10", "0 1 0.5")
    assert [(label.x, label.y, label.value) for label in plot.labels] == [(1.0, 0.5, "0.5")]


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors() -> None:
    line = Line("run", "run0", np.arange(4.0), np.array([1e-7, 0.0, 1e-6, 1e-5]))
    plot = line_plot("", "", [line], log=True, limit=(1e-4, "limit"))
    (drawn,) = [mark for mark in plot.marks if mark.x]
    heights = [y for _, y in points(drawn.path)]
    assert np.allclose(heights, [1000, 666.7, 333.3], atol=0.1)  # what is not above 0 has no place
    assert [label.name for label in plot.labels] == ["", "limit"]


def test_stacked_bars_touch_and_end_at_their_sum() -> None:
    layers = [Layer("a", "a", np.full(50, 1.0)), Layer("b", "b", np.full(50, 3.0))]
    plot = stack_plot("", "", np.arange(1.0, 51.0), layers, form="number", top=5.0)
    for mark, bottom, top in zip(plot.marks, (1000.0, 800.0), (800.0, 200.0), strict=True):
        bars = [tuple(map(float, bar)) for bar in re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)", mark.path)]
        assert len(bars) == 50
        assert (bars[0][0], bars[-1][2]) == (0.0, 1000.0)
        assert all(abs(left[2] - right[0]) < 0.2 for left, right in pairwise(bars))
        assert {(bar[1], bar[3]) for bar in bars} == {(bottom, top)}


def test_bars_of_a_long_run_stand_for_their_neighbours_mean() -> None:
    values = np.arange(1000.0)
    plot = stack_plot("", "", values, [Layer("a", "a", values)], form="number", top=1000.0)
    shown = [float(y) for y in plot.marks[0].y.split()]
    assert len(shown) == 112  # of 9 steps each
    assert shown[:2] == [4.0, 13.0]


def test_a_long_name_at_a_line_s_end_keeps_both_its_ends() -> None:
    names = ["short", "pruned_prompts_07_tokens_05_seed_1", "pruned_prompts_07_tokens_05_seed_2"]
    lines = [Line(name, "blue", np.arange(3.0), np.arange(3.0)) for name in names]
    assert [label.short for label in line_plot("", "", lines).labels] == [
        "short",
        "pruned_p…_seed_1",
        "pruned_p…_seed_2",
    ]


def test_many_runs_are_lines_and_nothing_around_them(tmp_path: Path) -> None:
    x = np.arange(10.0)
    lines = [Line(f"run {i}", f"run{i}", x, x + i, x, x + 1, noisy=True) for i in range(4)]
    few, many = (line_plot("", "", lines[:count]) for count in (3, 4))
    assert {mark.css.split()[0] for mark in few.marks} == {"band", "line"}
    assert sum("band" in mark.css or "faint" in mark.css for mark in few.marks) == 6
    assert [mark.css for mark in many.marks] == [f"line run{i}" for i in range(4)]
    assert [label.name for label in few.labels] == ["run 0", "run 1", "run 2"]
    assert [label.name for label in many.labels] == [""] * 4
    assert [key.name for key in many.key] == [line.name for line in lines]


def test_the_use_of_the_machines_is_drawn_where_it_was_measured(tmp_path: Path) -> None:
    without = write_run(tmp_path / "without")
    measured = write_run(tmp_path / "measured", held={"perf/wait_time_ratio": 0.25, "perf/actor_train_tflops": 400.0})
    drawn = timing(read_runs([without, measured])).parts[-1]
    assert isinstance(drawn, Plots)
    assert [plot.title for plot in drawn.plots] == ["without", "measured", "Waiting", "Training rate"]


def test_what_never_happened_is_said_and_not_drawn(tmp_path: Path) -> None:
    quiet = write_run(tmp_path / "quiet", held={"rollout/truncated_ratio": 0.0, "train/pg_clipfrac": 0.0})
    cut = write_run(tmp_path / "cut", held={"rollout/truncated_ratio": 0.5, "train/pg_clipfrac": 0.0})
    parts = signs(read_runs([quiet, cut])).parts
    drawn = [plot.title for part in parts if isinstance(part, Plots) for plot in part.plots]
    assert "Cut off" in drawn and "Clipped" not in drawn
    assert [part.text for part in parts if isinstance(part, Note)] == ["Clipped: 0 at every step."]
