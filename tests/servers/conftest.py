"""Real servers, started once for all tests that share them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.init import write_model
from megatron_dppo.rollout.servers.http import Http
from tests.servers.real import CANARY, PYTHONS, RealServers, Run

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "std": 0.2}
"""Of all policies here: heads of 32 are the least that vLLM takes on CPU."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("servers") and not any(
        name in os.environ for name in PYTHONS.values()
    ):
        pytest.skip("needs real servers: scripts/test.sh --servers")


@pytest.fixture(scope="session")
def served_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that shared servers are started with."""
    folder = tmp_path_factory.mktemp("policy") / "qwen3"
    write_model(folder, **SIZES, ffn=128)
    return folder


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of four experts a layer."""
    folder = tmp_path_factory.mktemp("mixture") / "qwen3"
    write_model(
        folder, **SIZES, ffn=64, experts=4, experts_per_token=2, tie=False
    )  # SGLang ties none of these
    return folder


@pytest.fixture(scope="session", autouse=True)
def canary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the session if a server has ever called a placeholder, even if the exception was
    swallowed."""
    place = tmp_path_factory.mktemp("canary") / "calls"
    os.environ[CANARY] = str(place)
    yield
    del os.environ[CANARY]
    assert not place.exists(), (
        f"SGLang's servers called what is not there:\n{place.read_text(encoding='utf-8')}"
    )


@pytest.fixture(scope="session")
def real_servers(
    served_policy: Path, tmp_path_factory: pytest.TempPathFactory, http: Http, canary: None
) -> Iterator[RealServers]:
    servers = RealServers(served_policy, tmp_path_factory.mktemp("servers"), http)
    yield servers
    servers.stop()


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start a run in ``tmp_path / name``, or resume it. Whatever a failed test leaves is killed."""
    runs = []

    def train(policy: Path, *settings: str, name: str = "run", **more: Any) -> Run:
        runs.append(Run(tmp_path / name, policy, *settings, **more))
        return runs[-1]

    yield train
    for run in runs:
        if run.process.is_alive():
            run.kill()
