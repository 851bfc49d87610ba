"""HTTP beside the trainer: one event loop in a thread of its own, one connection pool, orjson.

Only HTTP lives in that thread. Collectives and tensors stay on the main thread, which waits for
futures.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_dppo.process.event_loop import EventLoop

if TYPE_CHECKING:  # a plan needs no client, and what runs servers no Megatron
    import aiohttp

    from megatron_dppo.parallel.world import World

T = TypeVar("T")

CLOSE_S = 10.0
"""How long closing may take where something in the loop never ends."""
CONNECT_S = 10.0
"""Most seconds until a server has taken a connection."""
EXCHANGE_S = 1.0
"""Most seconds between two exchanges of ranks that wait."""
BUSY = (429, 503)
"""Statuses that ask for patience: too many requests, and no service now."""
AGAIN_S = 1.0
"""Seconds until a busy server is asked again, if more than so many are left."""
MAX_ERROR_CHARS = 600
"""Characters of a server's error that are repeated."""


def format_url_host(host: str | None) -> str:
    """A host as URLs have it: addresses of IPv6 in brackets."""
    return f"[{host}]" if host and ":" in host else host or ""


class ServerError(Exception):
    """A server did not do what it was asked to: it refused, broke off, or said nothing in time.

    Args:
        url: of the server.
        problem: what happened, to stand after "server URL".
        alive: whether it answered at all; true even for an error response.
    """

    def __init__(self, url: str, problem: str, alive: bool) -> None:
        self.url = url
        self.problem = problem
        self.alive = alive
        super().__init__(url, problem, alive)  # all of them, so that it can be sent to other ranks

    def __str__(self) -> str:
        return f"server {self.url} {self.problem}"


async def run_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all of it; if one fails, the rest is cancelled."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class BusyError(ServerError):
    """A server answered that it has no room now. The same request may succeed later."""


async def wrap_errors(url: str, answer: Awaitable[T]) -> T:
    """Await ``answer``.

    Raises:
        ServerError: as ``answer`` does; also if the answer of the server at ``url`` lacks
            something.
    """
    try:
        return await answer
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"gave an answer that cannot be used ({type(error).__name__}: {error})"
        raise ServerError(url, problem, alive=True) from error


async def _ignore_unretrieved(work: Coroutine[Any, Any, T]) -> T:
    """Have asyncio not complain where whoever waited has given up, and the work has failed
    since."""
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await work


class Http:
    """The loop, its thread and its connections. Close it, or it ends with the process."""

    def __init__(self) -> None:
        self._loop = EventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        self._session: aiohttp.ClientSession | None = None

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(_ignore_unretrieved(work), self._loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine in the loop and wait for it, from any other thread; it is cancelled at
        the timeout."""
        future = self.start(work)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def run_on_rank0(self, world: World, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the leader's coroutine; its result on every rank. Collective.

        Args:
            world: the ranks.
            work: makes the coroutine; called on the leader alone. Its errors, and the coroutine's,
                are raised on every rank.
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
        """One request; what came back, read as JSON (None where there was nothing).

        Raises:
            ServerError: no connection, no answer within ``timeout_s``, an answer that is no JSON,
                or one of another status than 200.
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
            said = content[:MAX_ERROR_CHARS].decode(errors="replace")
            kind = BusyError if status in BUSY else ServerError
            raise kind(url, f"refused {path} with status {status}: {said}", alive=True)
        try:
            return orjson.loads(content) if content else None
        except orjson.JSONDecodeError:
            return None  # some routes say in plain words that all is well

    async def call_with_retries(
        self, method: str, url: str, path: str, *, timeout_s: float, **rest: Any
    ) -> Any:
        """:meth:`call`, again and again while the server is busy, within ``timeout_s`` in all.

        Raises:
            ServerError: as :meth:`call`; the last refusal, if the server stays busy.
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
        """Drop all connections and end the thread. Requests under way end as cancelled."""
        if self._loop.is_closed():
            return
        try:
            self.run(self._close(), CLOSE_S)
        except TimeoutError:
            return  # a user's function blocks the loop; the thread ends with the process
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:  # within the loop, as aiohttp wants it
            import aiohttp

            # Servers close idle connections after 5 s: one that is reused just then would look like
            # a death.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
            # A proxy of the environment has no business between a trainer and its servers.
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._session

    async def _close(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
