"""The page shows what was foreseen of a run's groups against what came."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_dppo.report.pruning import brier_chart, reliability_chart
from megatron_dppo.report.run import read_run
from tests.report.made_up import drawn_on_axes, write_run


def test_predicted_chances_are_compared_with_outcomes(tmp_path: Path) -> None:
    """6 groups with 0.9 predicted and 1.2 observed in sum are a point at 0.15 and 0.2, in each of six steps."""
    run = read_run(write_run(tmp_path / "run"), "run")
    axes = drawn_on_axes(reliability_chart(run))
    lines = {str(line.get_label()).split(",")[0]: line for line in axes.lines}
    assert lines.keys() == {"from its text", "as predicted 100.0%"}
    np.testing.assert_allclose(lines["from its text"].get_xydata(), [[0.15, 0.2], [0.84, 0.79]])
    names = drawn_on_axes(brier_chart(run)).get_legend_handles_labels()[1]
    assert {name.rpartition(" ")[0] for name in names} == {"from its text", "all prompts"}
