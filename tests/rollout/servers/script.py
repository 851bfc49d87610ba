"""Servers that are scripts: each answers as a function of its requests."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.servers.batch import RequestBatch
from megatron_dppo.rollout.servers.client import GenerateResult
from megatron_dppo.rollout.servers.conversations import Conversations
from megatron_dppo.rollout.servers.dispatch import Dispatcher
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.sglang import SglangClient

SAMPLES = 3
SAMPLING = Sampling(SAMPLES, max_tokens=8, temperature=1.0, stop_token_ids=(0,), seed=1)
VERSION = 5
"""Oldest version that a batch accepts."""


class Request(NamedTuple):
    """Arguments of :meth:`ServerClient.generate`."""

    token_ids: Sequence[int]
    sampling: Sampling


class Script(SglangClient):
    """A server that keeps its requests.

    Args:
        http: in whose thread it answers.
        answer: function of the server and the request.
        name: host in its URL.
        holds: whether a request is not to be answered yet.
    """

    def __init__(
        self,
        http: Http,
        answer: Answer,
        name: str = "a",
        holds: Callable[[Request], bool] | None = None,
    ) -> None:
        super().__init__(f"http://{name}:1", http)
        self._answer, self._holds = answer, holds
        self.requests: list[Request] = []
        self.alive = True
        self.in_flight = self.most_in_flight = 0

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> list[GenerateResult]:
        request = Request(token_ids, sampling)
        self.requests.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        while self._holds and self._holds(request):
            await asyncio.sleep(0.002)
        self.in_flight -= 1
        return self._answer(self, request)

    async def get_version(self) -> str:
        if not self.alive:
            raise ServerError(self.url, "is gone", alive=False)
        return str(VERSION)

    def fail(self, problem: str) -> None:
        raise ServerError(self.url, problem, alive=self.alive)

    def die(self) -> None:
        self.alive = False
        self.fail("broke off")


Answer: TypeAlias = Callable[[Script, Request], list[GenerateResult]]


def result_of(
    tokens: Sequence[int], *, version: str = str(VERSION), reason: str = "stop"
) -> GenerateResult:
    """Return a result whose log-probabilities are the negative token ids."""
    ids = np.array(tokens, np.int32)
    versions = ((version, len(tokens)),) if tokens else ()
    return GenerateResult(ids, -ids.astype(np.float32), versions, reason)


def dispatcher_of(
    http: Http,
    *servers: SglangClient,
    attempts: int = 3,
    max_in_flight: int = 64,
    conversations: Conversations | None = None,
) -> Dispatcher:
    dispatcher = Dispatcher(
        http,
        lambda version: int(version) if version.isdigit() else None,
        first=0,
        max_in_flight=max_in_flight,
        request_timeout_s=20.0,
        attempts=attempts,
        conversations=conversations,
    )
    dispatcher.set_servers(servers)
    return dispatcher


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(i, np.array([i + 1, 7], np.int32), "", "") for i in range(count)]


def request_all(dispatcher: Dispatcher, count: int, sampling: Sampling = SAMPLING) -> RequestBatch:
    """Request completions of ``count`` prompts and wait for them."""
    batch = dispatcher.begin(prompts_of(count), sampling, VERSION)
    batch.wait(20.0)
    return batch


def happens(event: Callable[[], bool]) -> bool:
    """Wait for an event."""
    until = time.monotonic() + 20.0
    while not event() and time.monotonic() < until:
        time.sleep(0.01)
    return event()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, answer = self.server.answer(self.path, json.loads(content or "{}"))
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_: object) -> None: ...


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    handle_error = lambda *_: None  # noqa: E731
    request_queue_size = (
        64  # of all requests at once: beyond 5, a connection would be tried after a second
    )


@contextmanager
def answering(answer: Callable[[str, dict[str, Any]], tuple[int, Any]]) -> Iterator[str]:
    """Serve a function of a request's path and content, which returns status and answer; return the
    URL."""
    with _HttpServer(("127.0.0.1", 0), _Handler) as server:
        server.answer = answer
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
