"""A busy server is asked again in time, and a full one is named."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_dppo.rollout.servers.http import BusyError, Http, ServerError
from megatron_dppo.rollout.servers.sglang import SglangClient


class Busy(BaseHTTPRequestHandler):
    """Has no room for the first two requests of a completion, nor for any other request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        status = {1: 429, 2: 503}.get(self.server.asked, 200) if self.path == "/generate" else 503
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None: ...


def test_a_busy_server_is_asked_again_within_the_time_limit(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dppo.rollout.servers.http.AGAIN_S", 0.1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    server.asked = 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = SglangClient(f"http://127.0.0.1:{server.server_port}", http)
    assert http.run(client.post("/generate", {}, timeout_s=20.0)) == {} and server.asked == 3
    with pytest.raises(BusyError, match="status 503"):
        http.run(client.post("/never", {}, timeout_s=0.5))
    asked = server.asked
    assert asked > 4, "patiently"
    with pytest.raises(BusyError):
        http.run(client.post("/never", {}))
    assert server.asked == asked + 1, "an order without a time limit is given once"
    server.shutdown()


def test_a_full_server_is_named_after_the_seconds_waited(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dppo.rollout.servers.http.CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first, socket.socket() as second:
        for each in (first, second):  # further connections wait
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(ServerError, match=r"took no connection within 0\.3 s"):
            http.run(SglangClient(url, http).health(30.0))
