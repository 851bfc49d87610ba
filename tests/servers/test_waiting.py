"""A server that does not answer is named while it is waited for, not only at the end."""

from __future__ import annotations

import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.servers import pool
from megatron_dppo.rollout.servers.http import BusyError, Http
from megatron_dppo.rollout.servers.pool import Pool, Server
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.settings import load_config


def _said(http: Http, folder: Path, *words: str) -> tuple[list[str], UserError]:
    said: list[str] = []
    settings = [f"run.dir={folder}", f"model.path={folder}", "rollout.engine=sglang", "rollout.launch.wait_s=3", *words]
    opened = Pool(load_config(None, settings), http, architecture="", secret=None, say=said.append)
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
    assert mute == f"waiting for 0 s, of rollout.launch.wait_s = 3, for server {urls[0]}: nobody said anything"
    assert f"for server {urls[1]}: server {urls[1]} " in refuses and "nobody" not in refuses
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
        serving = Pool(config, http, architecture="", secret=None, say=said.append)
        client = SglangClient(url, http)
        serving._serving[Server.of(client, None)] = client
        assert http.run(serving.check(0.5)) == {}, "one miss is no loss"
        named = f"server {url.removeprefix('http://')} is silent: no answer to a health check for 0 s"
        assert said == [f"{named} (rollout.health_timeout_s = 0.5)"]
        assert http.run(serving.check(0.5)) == {url: "did not answer /health_generate within 0.5 s"}


class Busy(BaseHTTPRequestHandler):
    """Has no room twice, then answers."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        status = {1: 429, 2: 503}.get(self.server.asked, 200) if self.path == "/generate" else 503
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


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
