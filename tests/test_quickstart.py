"""The examples are copied whole or not at all, and mistakes are found before the quickstart makes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.cli import main
from megatron_dppo.config import Config
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


def test_the_warm_up_is_run_until_it_has_succeeded_and_then_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What trains is stood in for: tests/test_wheel.py runs the training, scripts/quickstart.sh also the warm-up."""
    codes, begun = [1, 0, 0, 0], list[tuple[str, Config]]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_dppo.launch.start.run", lambda *given: begun.append(given) or codes.pop(0))
    words = ["quickstart", "loss.name=dapo", "sft.steps=9"]
    assert main(words) == 1 and main(words) == 0
    assert [command for command, _ in begun] == ["sft", "sft", "train"]
    warm_up, train = begun[1][1], begun[2][1]
    assert (warm_up.sft.steps, warm_up.loss.name, train.loss.name) == (9, "grpo", "dapo")
    assert (Path(str(warm_up.model.path)) / "model.safetensors").is_file()
    assert warm_up.sft.out == train.model.path == "runs/quickstart/warm"
    Path("runs/quickstart/warm").mkdir()
    Path("runs/quickstart/warm/config.json").touch()
    assert main(words) == 0 and [command for command, _ in begun[2:]] == ["train", "train"]


def test_a_package_that_somebody_else_s_module_misses_is_no_matter_of_an_extra() -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        missing_extra(raised.value)
