"""A server that does not answer is named while it is waited for, not only at the end."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_dppo.errors import UserError, error_text
from megatron_dppo.init import write_model
from megatron_dppo.rollout.servers import pool
from megatron_dppo.rollout.servers.http import BusyError, Http, ServerError
from megatron_dppo.rollout.servers.pool import Server, ServerPool
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.settings import load_config
from tests.ranks import RankPool
from tests.servers import on_ranks


def _said(http: Http, folder: Path, *words: str) -> tuple[list[str], UserError]:
    said: list[str] = []
    settings = [f"run.dir={folder}", f"model.path={folder}", "rollout.engine=sglang", "rollout.launch.wait_s=3", *words]
    opened = ServerPool(load_config(None, settings), http, architecture="", secret=None, say=said.append)
    try:
        with pytest.raises(UserError) as failed:
            http.run(opened.open())
    finally:
        opened.close()
    return said, failed.value


def test_servers_that_are_waited_for_are_named(http: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes the connection and is silent, one refuses it, and one is started and never listens."""
    assert pool.SAY_AFTER_S == 10.0
    monkeypatch.setattr(pool, "SAY_AFTER_S", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (silent, gone)]
        gone.close()
        said, failed = _said(http, tmp_path, f"rollout.servers=[{','.join(urls)}]")
    mute, refuses = sorted(said, key=lambda text: urls[1] in text)
    assert mute == f"waiting for 0 s, of rollout.launch.wait_s = 3, for server {urls[0]}: it has given no answer"
    assert f"for server {urls[1]}: server {urls[1]} " in refuses and "no answer" not in refuses
    assert failed.setting == "rollout.servers"

    sleeps = f"rollout.launch.command=[{sys.executable},-c,import time; time.sleep(60)]"
    (started,), failed = _said(http, tmp_path, "rollout.launch.count=1", sleeps)
    assert started.endswith(f"for server 0: its log is {tmp_path}/servers/server-0.log")
    assert failed.setting == "rollout.launch.wait_s"


def test_a_server_that_falls_silent_in_a_run_is_named_before_it_is_taken_out(
    http: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SAY_AFTER_S", 0.2)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        config = load_config(None, [f"run.dir={tmp_path}", "rollout.engine=sglang", f"rollout.servers=[{url}]"])
        serving = ServerPool(config, http, architecture="", secret=None, say=said.append)
        client = SglangClient(url, http)
        serving._serving[Server.of(client, None)] = client
        assert http.run(serving.check(0.5)) == {}, "one miss is no loss"
        named = f"server {url.removeprefix('http://')} is silent: no answer to a health check for 0 s"
        assert said == [f"{named} (rollout.health_timeout_s = 0.5)"]
        assert http.run(serving.check(0.5)) == {url: "did not answer /health_generate within 0.5 s"}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Busy(Handler):
    """Has no room twice, then answers."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        status = {1: 429, 2: 503}.get(self.server.asked, 200) if self.path == "/generate" else 503
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


def test_a_busy_server_is_asked_again_within_the_time_limit(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dppo.rollout.servers.http.AGAIN_S", 0.1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    server.asked = 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = SglangClient(f"http://127.0.0.1:{server.server_port}", http)
    assert http.run(client.post("/generate", {}, timeout_s=20.0)) == {} and server.asked == 3
    began = time.monotonic()
    with pytest.raises(BusyError, match="status 503"):
        http.run(client.post("/never", {}, timeout_s=0.5))
    assert 0.3 < time.monotonic() - began < 5.0
    asked = server.asked
    with pytest.raises(BusyError):  # an order, whose sender has a patience of its own
        http.run(client.post("/never", {}))
    assert server.asked == asked + 1
    server.shutdown()


class Silent(Handler):
    """Answers SGLang's questions but for those of ``server.silent``, which it never answers, and ``server.cut``, at
    which it breaks the connection. Once it was asked for a completion, ``server.then`` are silent, too. It has no
    weights and makes no token.
    """

    def do_GET(self) -> None:
        if self.path in self.server.cut:
            self.close_connection = True
            return
        if self.path == "/generate":
            self.server.silent |= self.server.then
        if self.path in self.server.silent:
            self.server.over.wait(60.0)
            return
        told = {"/model_info": {"model_path": "/m", "weight_version": self.server.version}, "/workers": None}
        told |= {"/server_info": {"tp_size": 1}, "/openapi.json": {"paths": {}}}
        body = json.dumps(told.get(self.path, {"success": True})).encode()
        self.send_response(404 if self.path == "/workers" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.version = asked.get("weight_version", asked.get("new_version", self.server.version))
        self.do_GET()


@contextmanager
def _silent(*silent: str, then: tuple[str, ...] = (), cut: tuple[str, ...] = ()) -> Iterator[str]:
    """The URL of a server that leaves these paths unanswered."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    server.silent, server.then, server.cut, server.version = set(silent), set(then), cut, "0"
    server.over, server.daemon_threads = threading.Event(), True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()


def _ended_with(ranks: RankPool, folder: Path, url: str, *words: str) -> str:
    """The error with which a run of two ranks ends, alike on both."""
    write_model(folder / "policy", hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64, std=0.1)
    settings = [f"run.dir={folder}/run", f"model.path={folder}/policy", f"rollout.servers=[{url}]"]
    settings += ["rollout.sync.transport=disk", "data.max_prompt_tokens=16", "rollout.max_response_tokens=64"]
    said = ranks.run(2, on_ranks.stop_with, [*settings, *words], "")
    assert said[0] == said[1]
    return said[0]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_run_ends_naming_a_server_that_takes_connections_and_never_answers(
    ranks: RankPool, tmp_path: Path, engine: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        said = _ended_with(ranks, tmp_path, url, f"rollout.engine={engine}", "rollout.launch.wait_s=1.5")
    assert said == (
        f"rollout.servers = {url}: cannot generate after 1.5 s: it has given no answer. "
        "Start it, mend the URL, or raise rollout.launch.wait_s."
    )


def test_a_run_ends_naming_the_server_that_is_well_and_gives_no_completion(ranks: RankPool, tmp_path: Path) -> None:
    with _silent("/generate") as url:
        said = _ended_with(ranks, tmp_path, url, "rollout.engine=sglang", "rollout.timeout_s=4")
    assert said == (
        "rollout.timeout_s = 4: no prompt was answered for so long; unanswered: 12 of rank 0, 12 of rank 1; "
        f"requests under way: 24 at server {url}. Look into the servers' logs, or raise it."
    )


def test_a_run_ends_naming_the_servers_that_fell_silent(ranks: RankPool, tmp_path: Path) -> None:
    limits = ("rollout.timeout_s=4", "rollout.health_timeout_s=0.5")
    with _silent("/generate", then=("/health_generate", "/continue_generation")) as url:
        said = _ended_with(ranks, tmp_path, url, "rollout.engine=sglang", *limits)
    assert said == (
        "rollout.timeout_s = 4: no rollout server is left, and none came back in time: "
        f"server {url} did not answer /health_generate within 0.5 s. "
        "Look into the servers' logs, start them again, and run the same command again: it resumes."
    )


def test_a_server_that_says_nothing_of_itself_says_nothing_to_start_it_with(http: Http, tmp_path: Path) -> None:
    with _silent(cut=("/model_info",)) as url:
        _, failed = _said(http, tmp_path, f"rollout.servers=[{url}]")
    assert "broke off at /model_info" in failed.problem
    assert error_text(failed).endswith("Look into its log, or name another server")


def test_the_seconds_of_a_connection_that_is_not_taken_are_those_that_it_was_waited_for(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_dppo.rollout.servers.http.CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first, socket.socket() as second:
        for each in (first, second):  # whoever comes after those is left to wait
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(ServerError, match=r"took no connection within 0\.3 s"):
            http.run(SglangClient(url, http).health(30.0))
