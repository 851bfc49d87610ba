"""Lock on every route: vLLM's own lock does not protect routes for changing weights."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any


class Lock:
    """ASGI middleware that requires the secret in VLLM_API_KEY with every request.

    Raises:
        RuntimeError: the secret is missing.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ.get('VLLM_API_KEY', '')}".encode()
        if self._wanted == b"Bearer ":
            raise RuntimeError(
                "the lock requires a secret in the environment variable VLLM_API_KEY"
            )

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        shown = dict(scope.get("headers", ())).get(b"authorization", b"")
        # Lifespan events come from the server itself, without headers.
        if scope["type"] == "lifespan" or secrets.compare_digest(shown, self._wanted):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            body = b'{"error": "a secret is required with every request"}'
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "websocket.close", "code": 1008})
