"""The page shows what was foreseen of a run's groups against what came."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_dppo.report.pruning import brier_plot, reliability_plot
from megatron_dppo.report.run import read_run
from tests.report.made_up import write_run


def test_predicted_chances_are_compared_with_outcomes(tmp_path: Path) -> None:
    """6 groups with 0.9 predicted and 1.2 observed in sum are a point at 0.15 and 0.2, in each of six steps."""
    run = read_run(write_run(tmp_path / "run"), "run")
    plot = reliability_plot(run)
    assert [key.name for key in plot.key] == ["from its text, 0.050", "its visits, 0.090", "as predicted"]
    model = next(mark for mark in plot.marks if mark.kind == "line" and mark.colour == "good")
    np.testing.assert_allclose(model.shapes[0], [[0.15, 0.2], [0.84, 0.79]])
    assert {key.name for key in brier_plot(run).key} == {"from its text", "its visits", "all prompts"}
