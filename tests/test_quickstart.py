"""The examples are copied whole or not at all, and mistakes are found before the quickstart makes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.cli import main
from megatron_dppo.errors import missing_extra


def test_examples_are_copied_again_but_over_no_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "--copy", str(tmp_path)]) == main(["configs", "--copy", str(tmp_path)]) == 0
    (tmp_path / "configs/quickstart.yaml").unlink()
    (tmp_path / "scripts/slurm/job.sh").write_text("mine\n")
    assert main(["configs", "--copy", str(tmp_path)]) == 2
    assert "job.sh\n  problem  is there already, and differs\n" in capsys.readouterr().err
    assert not (tmp_path / "configs/quickstart.yaml").exists()
    assert main(["configs", "--copy", str(tmp_path / "scripts/slurm/job.sh")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_mistake_in_a_setting_is_found_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", "run.stpes=2"]) == 2
    assert "run.steps" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_package_that_somebody_else_s_module_misses_is_no_matter_of_an_extra() -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        missing_extra(raised.value)
