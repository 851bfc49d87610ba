"""What is drawn is what was measured, and no more than fits."""

from __future__ import annotations

import re

import numpy as np

from megatron_dppo.report.plot import Line, line_plot


def test_line_goes_through_its_values() -> None:
    line = Line("run", "run0", np.array([0.0, 5.0, 10.0]), np.array([0.0, 1.0, 0.5]))
    plot = line_plot("", "", [line], low=0.0, high=1.0)
    (drawn,) = [mark for mark in plot.marks if mark.x]
    assert re.findall(r"[ML]([\d.]+) ([\d.]+)", drawn.path) == [("0", "1000"), ("500", "0"), ("1000", "500")]
    assert (drawn.x, drawn.y) == ("0 5 10", "0 1 0.5")
    assert [(label.x, label.y, label.value) for label in plot.labels] == [(1.0, 0.5, "0.5")]
