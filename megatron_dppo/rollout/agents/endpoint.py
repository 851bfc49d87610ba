"""HTTP server of agents on loopback, in the rank's process, on the event loop of conversations.

A rollout is identified by a random key, which is valid while the rollout runs. The server has
OpenAI's ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from megatron_dppo.rollout.agents.requests import MODEL, RefusedError
from megatron_dppo.rollout.agents.session import Body, Session

HOST = "127.0.0.1"
MAX_BODY = 64 * 2**20
"""Most bytes of a request."""
ROUTES = {
    "/v1/chat/completions": Session.complete_chat,
    "/v1/completions": Session.complete_text,
}
MODEL_CARD = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron-dppo"}


class Endpoint:
    """Server of all rollouts of a rank, started with the first rollout."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._port = 0

    async def open(self, session: Session) -> tuple[str, str]:
        """Return the base URL, and the key of a session."""
        async with self._starting:
            if self._runner is None:
                await self._start()
        key = secrets.token_urlsafe(32)
        self._sessions[key] = session
        return f"http://{HOST}:{self._port}/v1", key

    def close_session(self, key: str) -> None:
        """Cancel a session's pending requests, and refuse later requests."""
        self._sessions.pop(key).close()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key) if kind == "Bearer" else None
        try:
            if session is None:
                message = "The key is of no running rollout."
                raise RefusedError(message, code="invalid_api_key", status=401)
            return await self._route(request, session)
        except RefusedError as error:
            return web.json_response(error.body, status=error.status)

    async def _route(self, request: web.Request, session: Session) -> web.StreamResponse:
        path = request.path.rstrip("/")
        if request.method == "GET" and path == "/v1/models":
            return web.json_response({"object": "list", "data": [MODEL_CARD]})
        if request.method == "GET" and path == f"/v1/models/{MODEL}":
            return web.json_response(MODEL_CARD)
        route = ROUTES.get(path) if request.method == "POST" else None
        if route is None:
            served = ", ".join((*ROUTES, "/v1/models"))
            error = RefusedError(
                f"{request.method} {path:.80} is not served, only {served}.",
                code="unknown_url",
                status=404,
            )
            session.refuse(error)
            raise error
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"The request is no JSON ({error}).") from error
        answer = await session.answer(route, body)
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        options = body.get("stream_options") or {}
        for chunk in split_answer(answer, with_usage=bool(options.get("include_usage"))):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def split_answer(answer: Body, *, with_usage: bool) -> Iterator[Body]:
    """Yield a whole answer as the chunks of a stream."""
    (choice,) = answer["choices"]
    base: dict[str, Any] = {key: answer[key] for key in ("id", "created", "model")}
    end = {"index": 0, "finish_reason": choice["finish_reason"]}
    if "message" in choice:
        base["object"] = "chat.completion.chunk"
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        yield {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield {**base, "choices": [{**end, "delta": {}}]}
    else:
        base["object"] = "text_completion"
        yield {**base, "choices": [choice]}
    if with_usage:
        yield {**base, "choices": [], "usage": answer["usage"]}
