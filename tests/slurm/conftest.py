"""One cluster for the whole session."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dppo.init import write_model
from tests.servers.conftest import SIZES
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.jobs import Submitter

WANTED = "SLURM_LOOPBACK"
"""Environment variable that asks for these tests."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slurm") and WANTED not in os.environ:
        pytest.skip("needs Slurm: scripts/test.sh --slurm")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "qwen3"
    write_model(folder, **SIZES, ffn=128)
    return folder


@pytest.fixture
def submit(cluster: Cluster, policy: Path, tmp_path: Path) -> Iterator[Submitter]:
    """Submits jobs; what a failed test leaves of them is cancelled."""
    yield Submitter(cluster, tmp_path, policy)
    cluster.call("scancel", "--user=root")
    wait_for(lambda: not cluster.call("squeue", "-h").stdout, 30, "end of all jobs")
