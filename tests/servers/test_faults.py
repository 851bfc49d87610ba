"""Servers die, hang, come back and are updated; no group is lost or doubled, and none has tokens of
other weights."""

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
from megatron_dppo.rollout.servers.pool import ServerPool
from megatron_dppo.settings import load_config
from tests.ranks import RankPool
from tests.servers import on_ranks
from tests.servers.conftest import SIZES
from tests.servers.on_ranks import LONG, PROMPTS, SAMPLES, Round
from tests.servers.real import (
    AGREES,
    FIRST_PORT,
    LORA,
    PYTHONS,
    Kind,
    RealServers,
    given,
    launch_settings,
)

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
    return settings_of(
        folder, policy, *launch, "rollout.launch.restarts=20", "rollout.sync.bucket_mib=1", *more
    )


def check_answered(*rounds: Round) -> None:
    for seen in rounds:
        assert seen.answered == list(range(PROMPTS)) and seen.samples == [SAMPLES] * PROMPTS


@pytest.fixture(scope="module")
def rounds(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, canary: None
) -> dict[str, Round]:
    return ranks.run(
        2, on_ranks.faults, own_servers(tmp_path_factory.mktemp("faults")), timeout=900.0
    )[0]


@pytest.mark.parametrize(
    ("fault", "version", "servers"),
    [
        ("none", 0, 2),
        ("killed while generating", 0, 1),
        ("after it was killed", 1, 1),
        ("once it is back", 1, 2),
        ("hung while generating", 1, 1),
        ("killed in a sync", 3, None),
        ("both killed", 3, None),
        ("at the end", 3, 2),
    ],
)
def test_a_fault_loses_no_group_and_mixes_no_weights(
    rounds: dict[str, Round], fault: str, version: int, servers: int | None
) -> None:
    seen = rounds[fault]
    check_answered(seen)
    assert seen.versions == {version}
    assert servers in (None, seen.servers)
    assert (seen.metrics["rollout/resubmitted"] > 0) == (
        "killed while" in fault or fault.startswith(("hung", "both"))
    )
    assert seen.metrics["rollout/sync_retries"] == (fault == "killed in a sync")
    if "while generating" not in fault and fault != "both killed":
        assert seen.difference <= AGREES


def test_colocated_servers_sleep_through_each_step(
    ranks: RankPool, tmp_path: Path, canary: None
) -> None:
    """Also one that is started again: starting during a step, it would take the memory that the
    step needs."""
    more = ["rollout.colocated=true", "rollout.sync.transport=disk", "rollout.health_timeout_s=20"]
    rounds, requests = ranks.run(
        2, on_ranks.colocated, own_servers(tmp_path, *more), timeout=600.0
    )[0]
    check_answered(*rounds)
    for version, seen in enumerate(rounds):
        assert seen.versions == {version} and seen.difference <= AGREES
    wakes = [
        "release_memory",
        "resume_weights",
        "begin_update",
        "end_update",
        "resume_kv_cache",
        "resume",
    ]
    assert requests == [[wakes, wakes]] * 3
    assert [seen.servers for seen in rounds] == [2, 1, 2]


@pytest.mark.parametrize(
    ("kind", "tp", "mode", "adapters"),
    [
        ("sglang", 1, "retract", ()),
        ("sglang", 1, "keep", ()),
        ("sglang", 2, "abort", LORA),
        ("vllm", 1, "retract", ()),
        ("vllm", 1, "keep", ()),
        # Not adapters of vLLM: a request between a pause and the unloading has the removed one, and
        # ends the engine.
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
    more = [
        *given(server),
        *adapters,
        f"rollout.sync.in_flight={mode}",
        "rollout.request_timeout_s=60",
    ]
    settings = settings_of(
        tmp_path, served_policy, *more, "rollout.ahead=1", "rollout.timeout_s=100"
    )
    seen = ranks.run(2, on_ranks.in_flight, settings, server.secret)[0]
    assert seen["samples"] == [SAMPLES] * PROMPTS
    assert (0, 1) in seen["versions"], "the update found nothing in flight"
    assert set(seen["versions"]) <= {(0,), (0, 1), (1,)}
    # A kept cache is of the old weights, and the log-probabilities are so in part.
    assert (seen["difference"] <= AGREES) == (mode != "keep")


@pytest.fixture
def router(real_servers: RealServers, http: Http) -> Iterator[str]:
    """The URL of a stock router before two servers."""
    servers = real_servers.get("sglang", 1), real_servers.get("sglang", 2)
    secret, urls = servers[0].secret, [server.api.url for server in servers]
    port = FIRST_PORT + 36
    command = [
        os.environ[PYTHONS["sglang"]],
        "-m",
        "sglang_router.launch_router",
        f"--api-key={secret}",
    ]
    command += [
        "--host=127.0.0.1",
        f"--port={port}",
        f"--prometheus-port={port + 1}",
        "--worker-urls",
        *urls,
    ]
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 90.0

    def workers() -> set[str]:
        try:
            answer = http.run(http.call("GET", url, "/workers", secret=secret, timeout_s=5.0))
        except ServerError:
            return set()
        return {worker["url"] for worker in answer["workers"]}

    process = subprocess.Popen(command, start_new_session=True)
    try:
        while workers() != set(urls):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(1.0)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_servers_behind_a_router_serve(
    router: str, real_servers: RealServers, http: Http, served_policy: Path, tmp_path: Path
) -> None:
    """The run asks them from then on, and the router nothing."""
    servers = real_servers.get("sglang", 1), real_servers.get("sglang", 2)
    settings = settings_of(
        tmp_path, served_policy, "rollout.engine=sglang", f"rollout.servers=[{router}]"
    )
    secret = servers[0].secret
    pool = ServerPool(
        load_config(None, settings), http, architecture="Qwen3ForCausalLM", secret=secret, log=print
    )
    http.run(pool.open())
    assert {server.url for server in pool.servers} == {server.api.url for server in servers}
