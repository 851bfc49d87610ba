"""``--check`` finds what is wrong with a run for so many ranks, and says how far the run is."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo import cli
from megatron_dppo.init import write_model

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    write_model(tmp_path / "policy", hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96)
    return ["train", str(QUICKSTART), f"model.path={tmp_path}/policy", f"run.dir={tmp_path}/run", "run.steps=7"]


def test_a_run_that_can_start_is_checked_in_a_line_and_leaves_no_trace(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked in (["--check"], ["--check", "4"]):
        assert cli.main([*words, *asked]) == 0
        assert capsys.readouterr().out == f"{tmp_path}/run: 0 of 7 steps are done\n"
    assert not (tmp_path / "run").exists()


def test_ranks_that_the_layout_does_not_divide_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--check", "3"]) == 2
    assert "does not divide the 3 ranks" in capsys.readouterr().err
