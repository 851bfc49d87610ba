"""A chart shows what was measured; its SVG fits the page."""

from __future__ import annotations

import numpy as np

from megatron_dppo.report.charts import Layer, Line, make_line_chart, make_stack_chart
from megatron_dppo.report.render import render_svg
from tests.report.made_up import drawn_on_axes

STEPS = np.array([0.0, 5.0, 10.0])


def test_line_goes_through_its_values() -> None:
    line = Line("run", "run0", STEPS, np.array([0.0, 1.0, 0.5]))
    axes = drawn_on_axes(make_line_chart("", [line], low=0.0, high=1.0))
    assert axes.lines[0].get_xydata().tolist() == [[0.0, 0.0], [5.0, 1.0], [10.0, 0.5]]
    assert [text.get_text() for text in axes.texts] == ["0.5"]


def test_layers_lie_on_each_other_up_to_the_top() -> None:
    layers = [Layer("a", "blue", np.array([1.0, 2.0, 3.0])), Layer("b", "orange", np.ones(3))]
    axes = drawn_on_axes(make_stack_chart("", STEPS, layers, form="count", top=3.5))
    lower, upper = (each.get_paths()[0].get_extents() for each in axes.collections)
    assert (lower.ymin, lower.ymax, upper.ymin, upper.ymax) == (0.0, 3.0, 1.0, 3.5)


def test_svg_has_the_pages_colours_and_no_link() -> None:
    line = Line("$x < y$ & z", "run0", STEPS, STEPS)
    drawn = render_svg(make_line_chart("", [line, Line("b", "run1", STEPS, STEPS)]))
    assert drawn.startswith("<svg") and "var(--run0)" in drawn and "#1d5f9e" not in drawn
    assert "$x &lt; y$ &amp; z 10" in drawn
    assert "http" not in drawn and "url(" not in drawn
