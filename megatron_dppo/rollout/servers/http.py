"""HTTP beside the trainer: an event loop in a separate thread, a connection pool, orjson.

The main thread keeps collectives and tensors, and waits for futures.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_dppo.process.event_loop import EventLoop

# A plan needs no aiohttp, and processes that only run servers have no Megatron.
if TYPE_CHECKING:
    import aiohttp

    from megatron_dppo.parallel.world import World

T = TypeVar("T")

CLOSE_S = 10.0
"""Timeout in seconds for closing, in case a task never ends."""
CONNECT_S = 10.0
"""Timeout in seconds for a connection to a server."""
EXCHANGE_S = 1.0
"""Most seconds between two exchanges of waiting ranks."""
BUSY = (429, 503)
"""Status codes of busy servers: too many requests, and service unavailable."""
AGAIN_S = 1.0
"""Seconds until a request to a busy server is repeated."""
MAX_ERROR_CHARS = 600
"""Most characters quoted from a server's error."""


def format_url_host(host: str | None) -> str:
    """Format a host for a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if host and ":" in host else host or ""


class ServerError(Exception):
    """Failure of a request: refusal, broken connection or timeout.

    Args:
        url: URL of the server.
        problem: description of the failure, worded to follow "server URL".
        alive: whether the server answered; true even for an error response.
    """

    def __init__(self, url: str, problem: str, alive: bool) -> None:
        self.url = url
        self.problem = problem
        self.alive = alive
        # All arguments, because the error is pickled for other ranks.
        super().__init__(url, problem, alive)

    def __str__(self) -> str:
        return f"server {self.url} {self.problem}"


async def run_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return the results; if a coroutine fails, cancel the rest."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class BusyError(ServerError):
    """Refusal of a busy server. The same request may succeed later."""


async def wrap_errors(url: str, answer: Awaitable[T]) -> T:
    """Await ``answer``, and turn a malformed answer into a ServerError.

    Raises:
        ServerError: raised by ``answer``, or the answer lacks a part.
    """
    try:
        return await answer
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"gave an answer that cannot be used ({type(error).__name__}: {error})"
        raise ServerError(url, problem, alive=True) from error


async def _ignore_unretrieved(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` without asyncio's warning about an unretrieved error."""
    # The caller may have stopped waiting.
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await work


class Http:
    """HTTP client: event loop, thread and connections. Without ``close``, the thread ends with the
    process."""

    def __init__(self) -> None:
        self._loop = EventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        self._session: aiohttp.ClientSession | None = None

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(_ignore_unretrieved(work), self._loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine in the loop and wait, from another thread; cancel at the timeout."""
        future = self.start(work)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def run_on_rank0(self, world: World, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run rank 0's coroutine; return the result on every rank. Collective.

        Args:
            work: function that creates the coroutine; called on rank 0 only. Errors are raised on
                every rank.
        """
        futures: list[Future[T]] = []

        def check_result() -> tuple[T] | None:
            if not futures:
                futures.append(self.start(work()))
            wait(futures, EXCHANGE_S)
            return (futures[0].result(),) if futures[0].done() else None

        return world.poll(check_result)[0]

    async def call(
        self,
        method: str,
        url: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        secret: str | None = None,
        timeout_s: float,
    ) -> Any:
        """Send a request; return the answer parsed as JSON, None for an answer that is no JSON.

        Raises:
            ServerError: no connection, no answer within ``timeout_s``, or a status other than 200.
        """
        import aiohttp
        import orjson

        headers = {"Content-Type": "application/json"} if body is not None else {}
        if secret is not None:
            headers["Authorization"] = f"Bearer {secret}"
        connect_s = min(timeout_s, CONNECT_S)
        try:
            async with self._get_session().request(
                method,
                url + path,
                data=orjson.dumps(body) if body is not None else None,
                params=query,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s),
            ) as answer:
                content = await answer.read()
                status = answer.status
        except aiohttp.ConnectionTimeoutError:
            raise ServerError(
                url, f"took no connection within {connect_s:g} s", alive=False
            ) from None
        except TimeoutError:
            raise ServerError(
                url, f"did not answer {path} within {timeout_s:g} s", alive=False
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(url, f"broke off at {path} ({reason})", alive=False) from None
        if status != 200:
            message = content[:MAX_ERROR_CHARS].decode(errors="replace")
            kind = BusyError if status in BUSY else ServerError
            raise kind(url, f"refused {path} with status {status}: {message}", alive=True)
        try:
            return orjson.loads(content) if content else None
        except orjson.JSONDecodeError:
            # Several routes confirm success in plain text.
            return None

    async def call_with_retries(
        self,
        method: str,
        url: str,
        path: str,
        *,
        timeout_s: float,
        **rest: Any,
    ) -> Any:
        """Repeat :meth:`call` while the server is busy, within ``timeout_s`` in total.

        Raises:
            ServerError: see :meth:`call`; the last refusal, if the server stays busy.
        """
        until = time.monotonic() + timeout_s
        while True:
            left_s = max(until - time.monotonic(), 0.1)
            try:
                return await self.call(method, url, path, timeout_s=left_s, **rest)
            except BusyError:
                if time.monotonic() + AGAIN_S > until:
                    raise
                await asyncio.sleep(AGAIN_S)

    def close(self) -> None:
        """Drop all connections and end the thread; pending requests are cancelled."""
        if self._loop.is_closed():
            return
        try:
            self.run(self._close(), CLOSE_S)
        except TimeoutError:
            # A user's function blocks the loop.
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _get_session(self) -> aiohttp.ClientSession:
        # aiohttp requires creation within the loop.
        if self._session is None:
            import aiohttp

            # Servers close idle connections after 5 s, and a reused connection could then look like
            # a dead server.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
            # Ignore proxies of the environment: trainer and servers communicate directly.
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._session

    async def _close(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
