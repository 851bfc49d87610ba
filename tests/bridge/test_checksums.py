"""A checkpoint's checksums: every byte of every file is in one, and what changes it is named."""

from __future__ import annotations

import io
import json
import random
import shutil
import zlib
from pathlib import Path

import pytest
import torch

from megatron_dppo.bridge.checkpoint_folder import CHECKSUMS, BlockWriter, Checksums, DamagedError
from tests.damage import DAMAGE, flip

TENSORS = (torch.arange(300_000), torch.zeros(0), torch.ones(3, 5, dtype=torch.bfloat16))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of three tensors and two small files, one of them in a folder."""
    file = BlockWriter(tmp_path / "__0_0.distcp")
    for tensor in TENSORS:
        torch.save(tensor, file)
        file.end_block()
    file.close()
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/step.npz").write_bytes(b"groups")
    (tmp_path / "common.pt").write_bytes(b"common")
    Checksums(tmp_path, {"__0_0.distcp": file.blocks}).write()
    return tmp_path


def read(folder: Path) -> Checksums:
    found = Checksums.read(folder)
    assert found is not None
    return found


def test_what_is_written_through_it_is_what_torch_writes(written: Path) -> None:
    data = (written / "__0_0.distcp").read_bytes()
    blocks = json.loads((written / CHECKSUMS).read_text())["files"]["__0_0.distcp"]
    start = 0
    for tensor, (end, crc) in zip(TENSORS, blocks, strict=True):
        assert torch.equal(torch.load(io.BytesIO(data[start:end])), tensor)
        assert zlib.crc32(data[start:end]) == crc
        start = end
    assert start == len(data)


def test_whole_files_pass_and_so_does_every_share_of_them(written: Path) -> None:
    read(written).check()
    for share in range(3):
        read(written).check(share=share, of=3)


def test_a_folder_of_an_earlier_version_has_none(tmp_path: Path) -> None:
    assert Checksums.read(tmp_path) is None


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_happens_to_a_file_is_noticed_and_the_file_named(written: Path, tmp_path: Path, damage: str) -> None:
    rng = random.Random(damage)
    for name in ("__0_0.distcp", "rollouts/step.npz", "common.pt", CHECKSUMS):
        for attempt in range(20 if damage in ("flipped", "truncated") else 1):
            if (name, damage) == (CHECKSUMS, "missing"):
                continue
            copy = tmp_path / "copies" / f"{name.replace('/', '-')}-{attempt}"
            shutil.copytree(written, copy, ignore=shutil.ignore_patterns("copies"))
            DAMAGE[damage](copy / name, rng)
            if (name, damage) == (CHECKSUMS, "longer"):
                continue  # one more space does not change what a file of JSON says
            with pytest.raises(DamagedError) as caught:
                read(copy).check()
            assert str(caught.value).startswith(name)


def test_a_block_is_checked_alone(written: Path) -> None:
    checksums = read(written)
    end = json.loads((written / CHECKSUMS).read_text())["files"]["__0_0.distcp"][0][0]
    flip(written / "__0_0.distcp", 8 * (end + 100))
    checksums.check_block("__0_0.distcp", 0)
    with pytest.raises(DamagedError, match=rf"__0_0.distcp is damaged: bytes {end:,} to"):
        checksums.check_block("__0_0.distcp", end)
    with pytest.raises(DamagedError, match="no tensor at byte 5"):
        checksums.check_block("__0_0.distcp", 5)
