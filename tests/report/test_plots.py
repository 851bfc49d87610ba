"""What is drawn is what was measured, and no more than fits."""

from __future__ import annotations

import re

import numpy as np

from megatron_dppo.report.plot import Layer, Line, line_plot, stack_plot


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


def test_line_goes_through_its_values() -> None:
    line = Line("run", "run0", np.array([0.0, 5.0, 10.0]), np.array([0.0, 1.0, 0.5]))
    plot = line_plot("", "", [line], low=0.0, high=1.0)
    (drawn,) = [mark for mark in plot.marks if mark.x]
    assert points(drawn.path) == [(0, 1000), (500, 0), (1000, 500)]
    assert (drawn.x, drawn.y) == ("0 5 10", "0 1 0.5")
    assert [(label.x, label.y, label.value) for label in plot.labels] == [(1.0, 0.5, "0.5")]


def test_bars_of_a_long_run_are_means_of_neighbours() -> None:
    values = np.arange(1000.0)
    plot = stack_plot("", "", values, [Layer("a", "a", values)], form="number", top=1000.0)
    shown = [float(y) for y in plot.marks[0].y.split()]
    assert len(shown) == 112  # of 9 steps each
    assert shown[:2] == [4.0, 13.0]
