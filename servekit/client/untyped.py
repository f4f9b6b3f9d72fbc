"""`Client` and `AsyncClient`: call a running app by the names of its endpoints, without its class."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Final, Self, TypeVar

import httpx

from servekit.client.channel import Channel
from servekit.client.conversation import Conversation, is_stream, messages_of
from servekit.client.exchange import answer, value
from servekit.client.jobs import KEY_HEADER, AsyncClientJob, ClientJob, JobRequests, status_of
from servekit.client.request import Outgoing, encoded, holds_files, with_query
from servekit.core.aio import END, next_or_end
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

    def _submission(
        self,
        endpoint: str,
        body: tuple[Any, ...],
        arguments: Mapping[str, Any],
        timeout_s: float | None,
        key: str,
    ) -> Outgoing:
        call = self._post(endpoint, body, arguments, timeout_s, accept=JSON, idempotent=True)
        if key:
            call.headers[KEY_HEADER] = key
        return call

    def _job(self, endpoint: str, accepted: httpx.Response) -> JobRequests:
        return JobRequests(status_of(accepted).id, endpoint, self._outgoing, _ACCEPT)

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
                if there are arrays in it. Or an iterator, for an endpoint whose input streams: its
                values are sent as they come, over a WebSocket, and never a second time.
            timeout_s: Deadline; None takes the client's.
            idempotent: Running the call twice does no harm, so it is sent again when it was lost.
            **arguments: Or the arguments by name; if there is a `Path` or an open file among them,
                they travel as a form. A parameter named like one of these settings needs the body
                form: `client.call("predict", {"timeout_s": 3})`.

        Raises:
            CallError: As the server raised it, or because it was not reached.
        """
        if is_stream(body):
            *_, last = self._talk(endpoint, body[0], arguments, timeout_s)
            return last
        return self._answer(self._post(endpoint, body, arguments, timeout_s, idempotent=idempotent))

    def submit(
        self,
        endpoint: str,
        /,
        *body: Any,
        timeout_s: float | None = None,
        idempotency_key: str = "",
        **arguments: Any,
    ) -> ClientJob:
        """Queue a job of a task; returns when it is kept.

        Args:
            endpoint: The task's path.
            *body: As for `call`.
            timeout_s: Deadline of the submission; the job has its own.
            idempotency_key: Of the submissions with one key only the first is kept.
            **arguments: As for `call`.

        Raises:
            CallError: As for `call`.
        """
        call = self._submission(endpoint, body, arguments, timeout_s, idempotency_key)
        accepted = self._send(call)
        return ClientJob(self._job(endpoint, accepted), self._send, self._batches)

    def get(self, endpoint: str, /, *, timeout_s: float | None = None, **arguments: Any) -> Any:
        """Call an endpoint that was declared with `method="GET"`; see `call`."""
        return self._answer(self._get(endpoint, arguments, timeout_s))

    def _answer(self, call: Outgoing) -> Any:
        return value(answer(self._send(call)))

    def _send(self, call: Outgoing) -> httpx.Response:
        channel, loop = self._connection()
        return _wait(channel.send(call), loop)

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
        if is_stream(body):
            yield from self._talk(endpoint, body[0], arguments, timeout_s)
            return
        call = self._post(
            endpoint, body, arguments, timeout_s, accept=EVENT_STREAM, idempotent=idempotent
        )
        for batch in self._batches(call):
            for chunk in batch:
                yield value(chunk)

    def _batches(self, call: Outgoing) -> Iterator[list[Payload]]:
        channel, loop = self._connection()
        response = _wait(channel.send(call, stream=True), loop)
        return _iterate(channel.batches(response, call.deadline), loop)

    def _talk(
        self, endpoint: str, stream: Any, arguments: Mapping[str, Any], timeout_s: float | None
    ) -> Iterator[Any]:
        channel, loop = self._connection()
        call = self._get(endpoint, arguments, timeout_s)
        talk = _wait(Conversation.open(channel, call, messages_of(stream)), loop)
        return map(value, _iterate(talk.answers(), loop))

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


def _iterate(parts: AsyncGenerator[T], loop: asyncio.AbstractEventLoop) -> Iterator[T]:
    try:
        while (part := _wait(next_or_end(parts), loop)) is not END:
            yield part
    finally:
        # Not waited for: a garbage collection in the loop's own thread may lead here.
        asyncio.run_coroutine_threadsafe(parts.aclose(), loop)


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
        if is_stream(body):
            talk = await self._talk(endpoint, body[0], arguments, timeout_s)
            return value(await talk.only())
        if holds_files(body, arguments):
            call = await asyncio.to_thread(
                self._post, endpoint, body, arguments, timeout_s, idempotent=idempotent
            )
        else:
            call = self._post(endpoint, body, arguments, timeout_s, idempotent=idempotent)
        return value(answer(await self._channel.send(call)))

    async def submit(
        self,
        endpoint: str,
        /,
        *body: Any,
        timeout_s: float | None = None,
        idempotency_key: str = "",
        **arguments: Any,
    ) -> AsyncClientJob:
        """Queue a job of a task; see `Client.submit`."""
        call = await asyncio.to_thread(
            self._submission, endpoint, body, arguments, timeout_s, idempotency_key
        )
        accepted = await self._channel.send(call)
        return AsyncClientJob(self._job(endpoint, accepted), self._channel)

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
        if is_stream(body):
            talk = await self._talk(endpoint, body[0], arguments, timeout_s)
            async with aclosing(talk.answers()) as answers:
                async for chunk in answers:
                    yield value(chunk)
            return
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

    async def _talk(
        self, endpoint: str, stream: Any, arguments: Mapping[str, Any], timeout_s: float | None
    ) -> Conversation:
        call = self._get(endpoint, arguments, timeout_s)
        return await Conversation.open(self._channel, call, messages_of(stream))

    async def close(self) -> None:
        """Close all connections; calls that other tasks are making fail as cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
