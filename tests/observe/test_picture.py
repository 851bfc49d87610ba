"""The picture exists, shows something in every panel it can, and is not half written."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from megatron_dppo.observe.picture import draw_progress
from tests.observe.made_up import made_up_rows


def ink(file: Path) -> np.ndarray:
    """Share of coloured (not grey) pixels in each quarter of the picture, [2, 2]."""
    pixels = matplotlib.image.imread(file)[..., :3]
    coloured = np.ptp(pixels, axis=2) > 0.15
    height, width = coloured.shape[0] // 2, coloured.shape[1] // 2
    return coloured[: 2 * height, : 2 * width].reshape(2, height, 2, width).mean(axis=(1, 3))


@pytest.mark.parametrize("steps", [1, 60])
def test_every_panel_shows_its_numbers(tmp_path: Path, steps: int) -> None:
    draw_progress(made_up_rows(steps, evaluate_every=1), tmp_path / "progress.png")
    assert (ink(tmp_path / "progress.png") > 0.0005).all()
    assert [file.name for file in tmp_path.iterdir()] == ["progress.png"]


def test_a_run_that_measured_nothing_is_drawn_empty(tmp_path: Path) -> None:
    draw_progress([], tmp_path / "progress.png", title="nothing")
    assert (ink(tmp_path / "progress.png") < 0.0005).all()
