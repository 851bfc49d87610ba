"""An SGLang router's URL stands for the servers behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dppo.rollout.servers.http import Http, ServerError
from tests.ranks import RankPool
from tests.servers import on_ranks
from tests.servers.on_ranks import PROMPTS, SAMPLES
from tests.servers.real import FIRST_PORT, PYTHONS, RealServer

pytestmark = pytest.mark.servers

AGREES = 1e-4
PORT = FIRST_PORT + 8
WAIT_S = 90.0


@pytest.fixture
def router(sglang_tp1: RealServer, sglang_tp2: RealServer, http: Http, tmp_path: Path) -> Iterator[str]:
    """The URL of a stock router that knows both servers."""
    secret, urls = sglang_tp1.secret, [sglang_tp1.api.url, sglang_tp2.api.url]
    command = [os.environ[PYTHONS["sglang"]], "-m", "sglang_router.launch_router", f"--api-key={secret}"]
    command += ["--host=127.0.0.1", f"--port={PORT}", f"--prometheus-port={PORT + 1}", "--worker-urls", *urls]
    with (tmp_path / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        url, until = f"http://127.0.0.1:{PORT}", time.monotonic() + WAIT_S
        while _workers(http, url, secret) != set(urls):
            assert process.poll() is None and time.monotonic() < until, (tmp_path / "router.log").read_text()
            time.sleep(1.0)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _workers(http: Http, url: str, secret: str) -> set[str]:
    try:
        answer = http.run(http.call("GET", url, "/workers", secret=secret, timeout_s=5.0))
    except ServerError:
        return set()
    return {worker["url"] for worker in answer["workers"]}


def test_every_prompt_is_answered_once_by_the_servers_behind_a_router_and_all_of_them_get_the_weights(
    router: str, sglang_tp1: RealServer, sglang_tp2: RealServer, ranks: RankPool, served_policy: Path, tmp_path: Path
) -> None:
    settings = [
        f"run.dir={tmp_path}",
        f"model.path={served_policy}",
        "layout.tp=2",
        "data.max_prompt_tokens=16",
        "rollout.max_response_tokens=64",
        "rollout.engine=sglang",
        f"rollout.servers=[{router}]",
        "rollout.sync.timeout_s=30",
    ]
    seen = ranks.run(2, on_ranks.updated, settings, sglang_tp1.secret)[0]
    assert seen.answered == list(range(PROMPTS)) and seen.samples == [SAMPLES] * PROMPTS
    assert seen.repeated == 0
    assert (seen.versions, seen.servers) == ({1}, 2)
    assert set(seen.asked) == {sglang_tp1.api.url, sglang_tp2.api.url}, "the servers themselves are asked"
    assert seen.asked.total() == PROMPTS
    assert seen.difference <= AGREES
