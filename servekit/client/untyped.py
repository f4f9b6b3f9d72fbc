"""`Client` and `AsyncClient`: call a running app by the names of its endpoints, without its class."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any, Final, Self, TypeVar

import httpx

from servekit.client.channel import Channel
from servekit.client.exchange import answer, value
from servekit.client.request import Outgoing, encoded, holds_files, with_query
from servekit.core.background import ThreadLoop, background_loop
from servekit.core.call import EVENT_STREAM, JSON, MSGPACK, Payload, new_request_id, now

T = TypeVar("T")

_ACCEPT: Final = f"{MSGPACK}, {JSON};q=0.9, */*;q=0.5"


class _Settings:
    """What both clients share: how arguments become calls.

    Args:
        url: Where the gateway listens, like `http://127.0.0.1:3000`.
        token: Sent as a bearer token.
        timeout_s: Deadline of each call, over all its attempts; it travels with it.
        retries: How often a call that was not started, or is idempotent, is sent again.

    Raises:
        ConfigError: The URL is none.
    """

    def __init__(
        self, url: str, *, token: str | None = None, timeout_s: float = 60.0, retries: int = 2
    ) -> None:
        self._url = url
        self._token = token
        self._timeout_s = timeout_s
        self._retries = retries
        self._channel = self._new_channel()

    def _new_channel(self) -> Channel:
        return Channel(self._url, token=self._token)

    def _post(
        self,
        endpoint: str,
        body: tuple[Any, ...],
        arguments: Mapping[str, Any],
        timeout_s: float | None,
        *,
        accept: str = _ACCEPT,
        idempotent: bool = False,
    ) -> Outgoing:
        if len(body) > 1 or (body and arguments):
            raise TypeError(f"{endpoint}: give one body, or arguments by name")
        content_type, content = encoded(body, arguments)
        call = self._outgoing("POST", endpoint, timeout_s, accept)
        call.headers["content-type"] = content_type
        call.content = content
        if idempotent:
            call.idempotent = True
            call.headers["idempotency-key"] = call.headers["x-request-id"]
        return call

    def _get(
        self, endpoint: str, arguments: Mapping[str, Any], timeout_s: float | None
    ) -> Outgoing:
        call = self._outgoing("GET", endpoint, timeout_s, _ACCEPT)
        call.path = with_query(call.path, arguments)
        call.idempotent = True
        return call

    def _outgoing(
        self, method: str, endpoint: str, timeout_s: float | None, accept: str
    ) -> Outgoing:
        seconds = self._timeout_s if timeout_s is None else timeout_s
        return Outgoing(
            method,
            f"/{endpoint.lstrip('/')}",
            {"accept": accept, "x-request-id": new_request_id()},
            deadline=now() + seconds,
            retries=self._retries,
        )


class Client(_Settings):
    """A client for plain code; `AsyncClient` is its twin for event loops.

    Many threads may share one. It works in a forked child, too, with connections of its own.

    Args:
        url: Where the gateway listens, like `http://127.0.0.1:3000`.
        token: Sent as a bearer token.
        timeout_s: Deadline of each call, over all its attempts; it travels with it.
        retries: How often a call that was not started, or is idempotent, is sent again.

    Raises:
        ConfigError: The URL is none.
    """

    _loop: ThreadLoop | None = None
    _dropped: "weakref.finalize[..., Any] | None" = None

    def call(
        self,
        endpoint: str,
        /,
        *body: Any,
        timeout_s: float | None = None,
        idempotent: bool = False,
        **arguments: Any,
    ) -> Any:
        """Call an endpoint and return its answer.

        Args:
            endpoint: Its path, like `"predict"` or `"/search/query"`.
            *body: The body itself, for endpoints whose parameter is positional-only: `bytes`, a
                `Path` and an open file travel as they are, everything else as JSON, or MessagePack
                if there are arrays in it.
            timeout_s: Deadline; None takes the client's.
            idempotent: Running the call twice does no harm, so it is sent again when it was lost.
            **arguments: Or the arguments by name; if there is a `Path` or an open file among them,
                they travel as a form. A parameter named like one of these settings needs the body
                form: `client.call("predict", {"timeout_s": 3})`.

        Raises:
            CallError: As the server raised it, or because it was not reached.
        """
        return self._answer(self._post(endpoint, body, arguments, timeout_s, idempotent=idempotent))

    def get(self, endpoint: str, /, *, timeout_s: float | None = None, **arguments: Any) -> Any:
        """Call an endpoint that was declared with `method="GET"`; see `call`."""
        return self._answer(self._get(endpoint, arguments, timeout_s))

    def _answer(self, call: Outgoing) -> Any:
        channel, loop = self._connection()
        return value(answer(_wait(channel.send(call), loop)))

    def stream(
        self,
        endpoint: str,
        /,
        *body: Any,
        timeout_s: float | None = None,
        idempotent: bool = False,
        **arguments: Any,
    ) -> Iterator[Any]:
        """Call a streaming endpoint and yield its chunks; leaving the loop cancels the work.

        The deadline covers the whole stream. It is sent again only before its first chunk.

        Raises:
            CallError: As for `call`; also in the middle of the stream.
        """
        call = self._post(
            endpoint, body, arguments, timeout_s, accept=EVENT_STREAM, idempotent=idempotent
        )
        channel, loop = self._connection()
        batches = channel.batches(_wait(channel.send(call, stream=True), loop), call.deadline)
        try:
            while (batch := _wait(_next(batches), loop)) is not None:
                for chunk in batch:
                    yield value(chunk)
        finally:
            # Not waited for: a garbage collection in the loop's own thread may lead here.
            asyncio.run_coroutine_threadsafe(batches.aclose(), loop)

    def _connection(self) -> tuple[Channel, asyncio.AbstractEventLoop]:
        loop = background_loop()
        if self._loop is not loop:
            if self._loop is not None:
                self._channel = self._new_channel()  # this is a forked child
            self._loop = loop
            self._dropped = weakref.finalize(self, _close_later, self._channel, loop)
            self._dropped.atexit = False
        return self._channel, loop

    def close(self) -> None:
        """Close all connections; calls that other threads are making fail as cancelled."""
        loop = self._loop
        if loop is not None and not loop.orphaned and self._dropped is not None:
            self._dropped.detach()
            _wait(self._channel.close(), loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wait(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Run work on a loop in another thread; an interrupt here cancels it there."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _next(batches: AsyncIterator[list[Payload]]) -> list[Payload] | None:
    return await anext(batches, None)


def _close_later(channel: Channel, loop: ThreadLoop) -> None:
    if not loop.orphaned:
        asyncio.run_coroutine_threadsafe(channel.close(), loop)


class AsyncClient(_Settings):
    """A client for event loops; see `Client`. It belongs to the loop of its first call."""

    async def call(
        self,
        endpoint: str,
        /,
        *body: Any,
        timeout_s: float | None = None,
        idempotent: bool = False,
        **arguments: Any,
    ) -> Any:
        """Call an endpoint and return its answer; see `Client.call`."""
        if holds_files(body, arguments):
            call = await asyncio.to_thread(
                self._post, endpoint, body, arguments, timeout_s, idempotent=idempotent
            )
        else:
            call = self._post(endpoint, body, arguments, timeout_s, idempotent=idempotent)
        return value(answer(await self._channel.send(call)))

    async def get(
        self, endpoint: str, /, *, timeout_s: float | None = None, **arguments: Any
    ) -> Any:
        """Call an endpoint that was declared with `method="GET"`; see `Client.call`."""
        return value(answer(await self._channel.send(self._get(endpoint, arguments, timeout_s))))

    async def stream(
        self,
        endpoint: str,
        /,
        *body: Any,
        timeout_s: float | None = None,
        idempotent: bool = False,
        **arguments: Any,
    ) -> AsyncIterator[Any]:
        """Call a streaming endpoint and yield its chunks; see `Client.stream`."""
        call = self._post(
            endpoint, body, arguments, timeout_s, accept=EVENT_STREAM, idempotent=idempotent
        )
        response: httpx.Response = await self._channel.send(call, stream=True)
        batches = self._channel.batches(response, call.deadline)
        try:
            async for batch in batches:
                for chunk in batch:
                    yield value(chunk)
        finally:
            await batches.aclose()

    async def close(self) -> None:
        """Close all connections; calls that other tasks are making fail as cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
