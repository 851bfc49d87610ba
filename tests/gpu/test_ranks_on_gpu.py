"""Ranks and commands of tests can use CUDA. A build of torch with CUDA shows it without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.commands import Command
from tests.ranks import RankPool

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="torch is built without CUDA"
)


@pytest.fixture(autouse=True)
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANKS_ARE", raising=False)


def is_in_bad_fork(rank: int, size: int) -> bool:
    return torch.cuda._is_in_bad_fork()


def test_ranks_can_initialise_cuda() -> None:
    assert RankPool().run(1, is_in_bad_fork) == [False]


def test_commands_can_initialise_cuda(tmp_path: Path) -> None:
    program = "import sys, torch; sys.exit(torch.cuda._is_in_bad_fork())"
    assert Command(["python", "-c", program], tmp_path / "log").exit_code() == 0
