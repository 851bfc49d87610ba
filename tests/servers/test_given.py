"""Servers that run already: with requests in flight, with old weights, slow, of another model, behind a router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.init import write_model
from tests.ranks import RankPool
from tests.servers import on_ranks
from tests.servers.in_flight_on_ranks import LONG, in_flight
from tests.servers.on_ranks import PROMPTS, SAMPLES
from tests.servers.real import RealServer

pytestmark = pytest.mark.servers

AGREES = 1e-4


def _settings(folder: Path, policy: Path, *servers: RealServer) -> list[str]:
    return [
        f"run.dir={folder}",
        f"model.path={policy}",
        "layout.tp=2",
        "data.max_prompt_tokens=16",
        f"rollout.max_response_tokens={LONG}",
        f"rollout.engine={servers[0].config.rollout.engine}",
        f"rollout.servers=[{','.join(server.api.url for server in servers)}]",
        "rollout.sync.timeout_s=30",
        # Well before the ranks' own deadline: a lost answer is asked for again, and a dead server is told in words.
        "rollout.request_timeout_s=60",
        "rollout.timeout_s=100",
    ]


@pytest.fixture(params=["sglang", "vllm"])
def server(request: pytest.FixtureRequest) -> RealServer:
    return request.getfixturevalue(f"{request.param}_tp1")


@pytest.mark.parametrize("mode", ["retract", "keep", "abort"])
def test_an_update_loses_nothing_that_is_in_flight(
    mode: str, server: RealServer, ranks: RankPool, served_policy: Path, tmp_path: Path
) -> None:
    settings = [*_settings(tmp_path, served_policy, server), f"rollout.sync.in_flight={mode}"]
    seen: dict[str, Any] = ranks.run(2, in_flight, settings, server.secret)[0]
    assert seen["samples"] == [SAMPLES] * PROMPTS
    assert (0, 1) in seen["versions"], "the update found nothing in flight"
    assert set(seen["versions"]) <= {(0,), (0, 1), (1,)}
    if mode == "keep":  # its cache is of the old weights, and so are the log-probabilities, in part
        assert seen["difference"] > AGREES
    else:
        assert seen["difference"] <= AGREES


@pytest.mark.parametrize("version", ["default", "another_run-0"])
def test_a_server_that_comes_back_with_other_weights_is_not_listened_to(
    version: str, sglang_tp1: RealServer, sglang_tp2: RealServer, ranks: RankPool, served_policy: Path, tmp_path: Path
) -> None:
    settings = _settings(tmp_path, served_policy, sglang_tp1, sglang_tp2)
    before, meanwhile, after = ranks.run(2, on_ranks.comes_back_old, settings, sglang_tp1.secret, version)[0]
    assert [seen.servers for seen in (before, meanwhile, after)] == [2, 1, 2]
    for seen, current in ((before, 0), (meanwhile, 0), (after, 1)):
        assert seen.answered == list(range(PROMPTS)) and seen.samples == [SAMPLES] * PROMPTS
        assert seen.versions == {current}
    assert any(f"weights of version {version!r}" in said for said in meanwhile.words)


def test_a_server_of_another_size_is_refused_in_words(sglang_tp1: RealServer, ranks: RankPool, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_model(other, hidden=96, heads=4, kv_heads=2, head_dim=32, ffn=128, std=0.2)
    settings = [*_settings(tmp_path / "run", other, sglang_tp1), "rollout.sync.retries=0", "rollout.timeout_s=5"]
    said = ranks.run(2, on_ranks.stop_with, settings, sglang_tp1.secret)[0]
    assert "refused /update_weights_from_distributed" in said and sglang_tp1.api.url in said
