"""What all tests share: ranks, a disk that is soon full, and the settings of hypothesis."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import hypothesis
import pytest

from tests.ranks import RankPool

LONGEST = [
    Path(__file__).parent / name
    for name in (
        "rehearsal/test_rehearsal.py",
        "trainer/test_checkpoint.py",
        "docs/test_commands.py",
        "test_split_invariance.py",
        "test_real_gradients.py",
        "test_ahead.py",
        "models/test_actor.py",
        "data/test_reasoning_gym.py",
        "rewards/test_workers.py",
        "estimate/test_memory_real.py",
        "trainer/test_resume.py",
        "servers/test_sender.py",
        "docs/test_notebook.py",
        "observe/test_loggers.py",
        "data/test_verifiers.py",
        "bridge/test_stream.py",
        "models/test_logits.py",
        "trainer/test_routing_replay.py",
    )
]
"""Files that take longest. They begin first, so that none of them is what everyone waits for in the end."""

# A shell has what it starts in the background ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("repeatable", derandomize=True)
if os.environ.get("CI"):  # people look for new cases, a change that is about to land is held against known ones
    hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path) if item.path in LONGEST else len(LONGEST))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 9 MiB."""
    place = tmp_path / "small-disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return RankPool()
