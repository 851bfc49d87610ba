"""Runs of earlier versions are resumed.

``run_VERSION.tar.xz`` is the folder of a run with a checkpoint after step 3, with the policy and
the reward function, and ``expected.jsonl``, the metrics of a resume by the version itself. Record
the folder of a new version by ``python -m tests.runs.test_earlier_versions NEW_FOLDER``, before the release.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from megatron_dppo import __version__
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.small_runs import MIXED, REWARD, SAVED, die, live, rows, small_run

HERE = Path(__file__).parent
RUN = Path("run")
POLICY = Path("policy")
EXPECTED = "expected.jsonl"
COMPARED = ("train/grad_norm", "rollout/raw_reward", "prune/variance_inflation", "eval/accuracy")


def resume(rank: int, size: int, folder: Path) -> None:
    """Run to the last step. Paths in a stored run are relative."""
    os.chdir(folder)
    live(rank, size, small_run(POLICY, RUN))


def record(rank: int, size: int, folder: Path) -> None:
    os.chdir(folder)
    write_policy(POLICY / "hf", layers=1)
    (POLICY / "mixed.py").write_text(REWARD.format(reward=MIXED))
    die(rank, size, small_run(POLICY, RUN))


@pytest.mark.parametrize("stored", sorted(HERE.glob("run_*.tar.xz")), ids=lambda file: file.name)
def test_run_of_an_earlier_version_is_resumed(
    stored: Path, ranks: RankPool, tmp_path: Path
) -> None:
    with tarfile.open(stored) as archive:
        archive.extractall(tmp_path, filter="data")
    ranks.run(1, resume, tmp_path)
    expected = (tmp_path / EXPECTED).read_text().splitlines()
    resumed = [row for row in rows(tmp_path / RUN) if row["step"] > SAVED]
    assert len(resumed) == len(expected) == 2
    for row, line in zip(resumed, expected, strict=True):
        then = json.loads(line)
        for key in COMPARED:
            # Versions of torch and Megatron-Core differ by rounding.
            assert row.get(key) == pytest.approx(then.get(key), rel=1e-3)


def main(folder: Path) -> None:
    folder.mkdir()
    pool = RankPool()
    pool.run(1, record, folder)
    shutil.copytree(folder, folder / "whole")
    pool.run(1, resume, folder / "whole")
    later = [row for row in rows(folder / "whole" / RUN) if row["step"] > SAVED]
    shutil.rmtree(folder / "whole")
    # Host and process, and a log that no resume reads.
    (folder / RUN / ".lock").unlink()
    shutil.rmtree(folder / RUN / "tensorboard")
    (folder / EXPECTED).write_text("".join(json.dumps(row) + "\n" for row in later))
    with tarfile.open(HERE / f"run_{__version__}.tar.xz", "w:xz") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, file.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
