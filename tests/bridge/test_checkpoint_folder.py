"""A checkpoint is found by its parent's tracker, or named itself; whatever else is named is refused with a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.bridge.checkpoint_folder import FORMAT, TRACKER, find_checkpoint, latest_step
from megatron_dppo.errors import UserError


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Two steps and converted weights, the latter step named."""
    folder = tmp_path / "run" / "checkpoints"
    for name in ("iter_0000004", "iter_0000012", "release"):
        (folder / name).mkdir(parents=True)
        (folder / name / FORMAT).write_text("{}")
    (folder / TRACKER).write_text("12\n")
    return folder


def test_the_tracker_names_a_step_or_converted_weights(checkpoints: Path) -> None:
    assert find_checkpoint(checkpoints) == checkpoints / "iter_0000012"
    assert latest_step(checkpoints) == 12
    (checkpoints / TRACKER).write_text("release")
    assert find_checkpoint(checkpoints) == checkpoints / "release"


def test_a_checkpoint_may_be_named_itself(checkpoints: Path) -> None:
    assert find_checkpoint(checkpoints / "iter_0000004") == checkpoints / "iter_0000004"


def _refusal(folder: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        find_checkpoint(folder, "CKPT")
    assert caught.value.setting == "CKPT"
    return caught.value


def test_what_is_no_checkpoint_is_refused_with_what_is_there(checkpoints: Path) -> None:
    assert "has iter_0000004, iter_0000012, release" in _refusal(checkpoints / "iter_0000005" / "deeper").problem
    assert _refusal(checkpoints.parent).remedy == f"Name {checkpoints}"
    (checkpoints / TRACKER).write_text("5")
    error = _refusal(checkpoints)
    assert "names iter_0000005" in error.problem and "iter_0000004, iter_0000012, release" in error.remedy
    (checkpoints / TRACKER).write_text("latest")
    assert "says 'latest'" in _refusal(checkpoints).problem
    (checkpoints / TRACKER).unlink()
    assert f"neither {TRACKER}" in _refusal(checkpoints).problem


def test_a_run_does_not_resume_from_converted_weights(checkpoints: Path) -> None:
    (checkpoints / TRACKER).write_text("release")
    with pytest.raises(UserError, match=r"run\.dir = .*model\.checkpoint="):
        latest_step(checkpoints)


def test_a_folder_without_a_tracker_has_no_step(tmp_path: Path) -> None:
    assert latest_step(tmp_path / "nowhere") is None
