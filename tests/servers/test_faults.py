"""Servers die, hang, come back and are updated; no group is lost or doubled, and none has tokens of other weights."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dppo.init import write_model
from megatron_dppo.rollout.servers.http import Http, ServerError
from tests.ranks import RankPool
from tests.servers import on_ranks
from tests.servers.conftest import SIZES
from tests.servers.on_ranks import LONG, PROMPTS, SAMPLES, Round
from tests.servers.real import AGREES, FIRST_PORT, PYTHONS, Kind, RealServers, given, launch_settings

pytestmark = pytest.mark.servers


def settings_of(folder: Path, policy: Path, *more: str) -> list[str]:
    plain = f"""
    run.dir={folder / "run"} model.path={policy} data.max_prompt_tokens=16 rollout.max_response_tokens={LONG}
    layout.tp=2 rollout.sync.timeout_s=20 rollout.health_timeout_s=5 rollout.timeout_s=300
    """
    return [*plain.split(), *more]


def own_servers(folder: Path, *more: str) -> list[str]:
    """Return settings of two servers of the run's own, with a policy of several buckets."""
    write_model(policy := folder / "policy", **SIZES | {"hidden": 256}, ffn=1024)
    launch = launch_settings("sglang", (1, 1))
    return settings_of(folder, policy, *launch, "rollout.launch.restarts=20", "rollout.sync.bucket_mib=1", *more)


def check_answered(*rounds: Round) -> None:
    for seen in rounds:
        assert seen.answered == list(range(PROMPTS)) and seen.samples == [SAMPLES] * PROMPTS
        assert seen.repeated == 0


@pytest.fixture(scope="module")
def rounds(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, canary: None) -> dict[str, Round]:
    return ranks.run(2, on_ranks.faults, own_servers(tmp_path_factory.mktemp("faults")), timeout=900.0)[0]


@pytest.mark.parametrize(
    ("fault", "version", "servers", "words"),
    [
        ("none", 0, 2, ""),
        ("killed while generating", 0, 1, "is taken out"),
        ("after it was killed", 1, 1, ""),
        ("once it is back", 1, 2, "is back"),
        ("hung while generating", 1, 1, "is taken out"),
        ("killed in a sync", 3, None, "is tried again"),
        ("both killed", 3, None, "is taken out"),
        ("at the end", 3, 2, ""),
    ],
)
def test_a_fault_loses_no_group_and_mixes_no_weights(
    rounds: dict[str, Round], fault: str, version: int, servers: int | None, words: str
) -> None:
    seen = rounds[fault]
    check_answered(seen)
    assert seen.versions == {version}
    assert servers in (None, seen.servers)
    assert words in "\n".join(seen.words)
    assert (seen.metrics["rollout/resubmitted"] > 0) == ("killed while" in fault or fault.startswith(("hung", "both")))
    assert seen.metrics["rollout/sync_retries"] == (fault == "killed in a sync")
    if "while generating" not in fault and fault != "both killed":
        assert seen.difference <= AGREES


def test_colocated_servers_sleep_through_each_step(ranks: RankPool, tmp_path: Path, canary: None) -> None:
    """Also one that is started again: starting during a step, it would take the memory that the step needs."""
    more = ["rollout.colocated=true", "rollout.sync.transport=disk", "rollout.health_timeout_s=20"]
    rounds, requests = ranks.run(2, on_ranks.colocated, own_servers(tmp_path, *more), timeout=600.0)[0]
    check_answered(*rounds)
    for version, seen in enumerate(rounds):
        assert seen.versions == {version} and seen.difference <= AGREES
    wakes = ["release_memory", "regain_weights", "begin_update", "end_update", "regain_cache", "resume"]
    assert requests == [[wakes, wakes]] * 3
    assert [seen.servers for seen in rounds] == [2, 1, 2]


KEEPS_ADAPTER = "a request that comes between a pause and the unloading has the removed adapter, and ends vLLM's engine"
LORA = ("model.lora.rank=4", "rollout.sync.adapter=true", "model.lora.targets=[q_proj,v_proj,o_proj]")


@pytest.mark.parametrize(
    ("kind", "tp", "mode", "adapters"),
    [
        ("sglang", 1, "retract", ()),
        ("sglang", 1, "keep", ()),
        ("sglang", 1, "abort", ()),
        ("sglang", 2, "abort", LORA),
        ("vllm", 1, "retract", ()),
        pytest.param("vllm", 1, "abort", LORA, marks=pytest.mark.xfail(reason=KEEPS_ADAPTER, strict=False)),
    ],
)
def test_an_update_loses_nothing_in_flight(
    real_servers: RealServers,
    ranks: RankPool,
    served_policy: Path,
    tmp_path: Path,
    kind: Kind,
    tp: int,
    mode: str,
    adapters: tuple[str, ...],
) -> None:
    server = real_servers.get(kind, tp, *adapters)
    more = [*given(server), *adapters, f"rollout.sync.in_flight={mode}", "rollout.request_timeout_s=60"]
    settings = settings_of(tmp_path, served_policy, *more, "rollout.ahead=1", "rollout.timeout_s=100")
    seen = ranks.run(2, on_ranks.in_flight, settings, server.secret)[0]
    assert seen["samples"] == [SAMPLES] * PROMPTS
    assert (0, 1) in seen["versions"], "the update found nothing in flight"
    assert set(seen["versions"]) <= {(0,), (0, 1), (1,)}
    # A kept cache is of the old weights, and the log-probabilities are so in part.
    assert (seen["difference"] <= AGREES) == (mode != "keep")


def test_a_restarted_given_server_serves_after_an_update(
    real_servers: RealServers, ranks: RankPool, served_policy: Path, tmp_path: Path
) -> None:
    servers = real_servers.get("sglang", 1), real_servers.get("sglang", 2)
    settings = settings_of(tmp_path, served_policy, *given(*servers))
    rounds = ranks.run(2, on_ranks.restarted, settings, servers[0].secret, "default")[0]
    check_answered(*rounds)
    assert [seen.servers for seen in rounds] == [2, 1, 2]
    assert [seen.versions for seen in rounds] == [{0}, {0}, {1}]
    assert any("weights of version 'default'" in said for said in rounds[1].words)


def test_a_server_of_another_size_is_refused(real_servers: RealServers, ranks: RankPool, tmp_path: Path) -> None:
    write_model(other := tmp_path / "other", **SIZES | {"hidden": 96}, ffn=128)
    server = real_servers.get("sglang", 1)
    settings = settings_of(tmp_path, other, *given(server), "rollout.sync.retries=0", "rollout.timeout_s=5")
    said = ranks.run(2, on_ranks.stop_with, settings, server.secret)[0]
    assert "refused /update_weights_from_distributed" in said and server.api.url in said


@pytest.fixture
def router(real_servers: RealServers, http: Http, tmp_path: Path) -> Iterator[str]:
    """The URL of a stock router before two servers."""
    servers = real_servers.get("sglang", 1), real_servers.get("sglang", 2)
    secret, urls = servers[0].secret, [server.api.url for server in servers]
    port = FIRST_PORT + 36
    command = [os.environ[PYTHONS["sglang"]], "-m", "sglang_router.launch_router", f"--api-key={secret}"]
    command += ["--host=127.0.0.1", f"--port={port}", f"--prometheus-port={port + 1}", "--worker-urls", *urls]
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 90.0

    def workers() -> set[str]:
        try:
            answer = http.run(http.call("GET", url, "/workers", secret=secret, timeout_s=5.0))
        except ServerError:
            return set()
        return {worker["url"] for worker in answer["workers"]}

    with (tmp_path / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        while workers() != set(urls):
            assert process.poll() is None and time.monotonic() < until, (tmp_path / "router.log").read_text()
            time.sleep(1.0)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_servers_behind_a_router_get_the_weights(
    router: str, real_servers: RealServers, ranks: RankPool, served_policy: Path, tmp_path: Path
) -> None:
    servers = real_servers.get("sglang", 1), real_servers.get("sglang", 2)
    settings = settings_of(tmp_path, served_policy, "rollout.engine=sglang", f"rollout.servers=[{router}]")
    seen = ranks.run(2, on_ranks.updated, settings, servers[0].secret)[0]
    check_answered(seen)
    assert (seen.versions, seen.servers) == ({1}, 2)
    assert set(seen.requests) == {server.api.url for server in servers}, "the router itself is asked nothing"
    assert seen.requests.total() == PROMPTS
    assert seen.difference <= AGREES
