"""The pictures exist, show something in every chart that has numbers, and say in words what they
cannot show."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from megatron_dppo.report.render import draw_pictures
from megatron_dppo.report.run import read_run
from tests.commands import Command
from tests.observe.made_up import made_up_census
from tests.report.made_up import write_lines, write_run

SOME = 0.0005


def drawn(run: Path) -> dict[str, np.ndarray]:
    """Share of coloured (not grey) pixels in each quarter of both pictures, [2, 2]."""
    out = run / "pictures"
    out.mkdir()
    draw_pictures(read_run(run, "run"), out)
    assert sorted(file.name for file in out.iterdir()) == ["progress.png", "pruning.png"]
    found = {}
    for file in out.iterdir():
        coloured = np.ptp(matplotlib.image.imread(file)[..., :3], axis=2) > 0.15
        height, width = coloured.shape[0] // 2, coloured.shape[1] // 2
        found[file.stem] = (
            coloured[: 2 * height, : 2 * width].reshape(2, height, 2, width).mean(axis=(1, 3))
        )
    return found


@pytest.mark.parametrize(("steps", "graded"), [(60, False), (4, True)])
def test_every_chart_shows_its_numbers(tmp_path: Path, steps: int, graded: bool) -> None:
    run = write_run(tmp_path / "run", steps)
    write_lines(run / "pruning.jsonl", made_up_census(steps, graded=graded))
    assert all((ink > SOME).all() for ink in drawn(run).values())


def test_run_without_measurements_is_drawn_empty(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "pruning.jsonl", "answers.jsonl"):
        (run / name).write_text("")
    assert all((ink < SOME).all() for ink in drawn(run).values())


def test_ranks_do_not_import_matplotlib(tmp_path: Path) -> None:
    modules = "megatron_dppo.trainer.run_logger, megatron_dppo.report.page"
    program = (
        f"import sys; del sys.modules['matplotlib']; import {modules}; assert 'matplotlib' "
        "not in sys.modules"
    )
    command = Command(
        ["python", "-c", program], tmp_path / "log", package=Path(__file__).parents[2]
    )
    assert command.exit_code() == 0, (tmp_path / "log").read_text()
