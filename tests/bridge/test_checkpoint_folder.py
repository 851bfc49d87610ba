"""The checkpoint that a setting names, and the checksums of a checkpoint's files."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from megatron_dppo.bridge.checkpoint_folder import (
    CHECKSUMS,
    FORMAT,
    METADATA,
    TRACKER,
    Checksums,
    CorruptCheckpointError,
    find_checkpoint,
    find_latest_step,
)
from megatron_dppo.errors import UserError
from tests.damage import DAMAGE


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Two steps and converted weights. The tracker names step 12."""
    folder = tmp_path / "run" / "checkpoints"
    for name in ("iter_0000004", "iter_0000012", "release"):
        (folder / name).mkdir(parents=True)
        for file in (FORMAT, METADATA):
            (folder / name / file).write_text("{}")
    (folder / TRACKER).write_text("12\n")
    return folder


def test_tracker_names_a_step_or_converted_weights(checkpoints: Path) -> None:
    assert find_checkpoint(checkpoints) == checkpoints / "iter_0000012"
    assert find_checkpoint(checkpoints / "iter_0000004") == checkpoints / "iter_0000004"
    assert find_latest_step(checkpoints) == 12
    (checkpoints / TRACKER).write_text("release")
    assert find_checkpoint(checkpoints) == checkpoints / "release"
    with pytest.raises(UserError, match=r"run\.dir = .*model\.checkpoint="):
        find_latest_step(checkpoints)


def test_other_folders_are_refused_with_a_hint(checkpoints: Path) -> None:
    def refuse(folder: Path) -> str:
        with pytest.raises(UserError) as caught:
            find_checkpoint(folder, "CKPT")
        assert caught.value.setting == "CKPT"
        return str(caught.value)

    assert "has iter_0000004, iter_0000012, release" in refuse(
        checkpoints / "iter_0000005" / "deeper"
    )
    (checkpoints / TRACKER).write_text("5")
    assert "names iter_0000005" in refuse(checkpoints)
    (checkpoints / TRACKER).unlink()
    assert f"neither {TRACKER}" in refuse(checkpoints)


TENSORS = (torch.arange(300_000), torch.zeros(0), torch.ones(3, 5, dtype=torch.bfloat16))
SHARDS = "__0_0.distcp"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return a folder with a file of three tensors and two small files, one of them in a folder."""
    folder = tmp_path / "written"
    (folder / "rollouts").mkdir(parents=True)
    with (folder / SHARDS).open("wb") as file:
        for tensor in TENSORS:
            torch.save(tensor, file)
    (folder / "rollouts/step.npz").write_bytes(b"groups")
    (folder / "common.pt").write_bytes(b"common")
    Checksums(folder, {}).write()
    return folder


def read(folder: Path) -> Checksums:
    found = Checksums.read(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_and_the_file_named(written: Path, tmp_path: Path, damage: str) -> None:
    rng = random.Random(damage)
    read(written).check()
    for name in (SHARDS, "rollouts/step.npz", "common.pt", CHECKSUMS):
        # A space behind JSON changes nothing, and an earlier version has written no checksums.
        if name == CHECKSUMS and damage in ("missing", "longer"):
            continue
        for _ in range(20 if damage in ("flipped", "truncated") else 1):
            copy = shutil.copytree(written, tmp_path / "copy")
            DAMAGE[damage](copy / name, rng)
            with pytest.raises(CorruptCheckpointError) as caught:
                read(copy).check()
            assert str(caught.value).startswith(name)
            shutil.rmtree(copy)


def test_checksums_of_an_earlier_version_are_not_compared(written: Path) -> None:
    (written / CHECKSUMS).write_text('{"format":1,"crc32":0,"files":{"common.pt":[[6,0]]}}')
    assert Checksums.read(written) is None
