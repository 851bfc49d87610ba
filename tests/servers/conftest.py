"""Real servers, started once for all tests that share them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dppo.init import write_model
from megatron_dppo.rollout.servers.http import Http
from tests.servers.real import CANARY, PYTHONS, RealServer, RealServers


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("servers") and not any(name in os.environ for name in PYTHONS.values()):
        pytest.skip("needs real servers: scripts/test.sh --servers")


@pytest.fixture(scope="session")
def http() -> Iterator[Http]:
    http = Http()
    yield http
    http.close()


@pytest.fixture(scope="session")
def served_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the shared servers are started with: heads of 32, the least that vLLM takes on CPU."""
    folder = tmp_path_factory.mktemp("policy") / "qwen3"
    write_model(folder, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128, std=0.2)
    return folder


@pytest.fixture(scope="session", autouse=True)
def canary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Fails the session if a server has ever called a placeholder, even where it swallowed the exception."""
    place = tmp_path_factory.mktemp("canary") / "calls"
    os.environ[CANARY] = str(place)
    yield place
    del os.environ[CANARY]
    assert not place.exists(), f"SGLang's servers called what is not there:\n{place.read_text(encoding='utf-8')}"


@pytest.fixture(scope="session")
def real_servers(
    served_policy: Path, tmp_path_factory: pytest.TempPathFactory, http: Http, canary: Path
) -> Iterator[RealServers]:
    servers = RealServers(served_policy, tmp_path_factory.mktemp("servers"), http)
    yield servers
    servers.stop()


@pytest.fixture
def sglang_tp1(real_servers: RealServers) -> RealServer:
    return real_servers.get("sglang", 1)


@pytest.fixture
def sglang_tp2(real_servers: RealServers) -> RealServer:
    return real_servers.get("sglang", 2)


@pytest.fixture
def vllm_tp1(real_servers: RealServers) -> RealServer:
    return real_servers.get("vllm", 1)
