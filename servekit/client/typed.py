"""`connect`: a running app's service as an object of its class, over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import httpx
import msgspec

from servekit.client.channel import Channel
from servekit.client.exchange import answer
from servekit.client.request import Outgoing, with_query
from servekit.core.background import ThreadLoop, background_loop
from servekit.core.call import EVENT_STREAM, MSGPACK, Call, Payload, Reply
from servekit.errors import ServekitError
from servekit.observe.log import get_logger
from servekit.runtime.handle import Options, ServiceHandle
from servekit.spec.definition import ServiceDefinition, definition

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_log = get_logger("servekit.client")


def connect(
    target: type[T],
    url: str,
    *,
    token: str | None = None,
    timeout_s: float = 60.0,
    retries: int = 2,
) -> "Connected[T]":
    """Call a running service through its class.

    Methods keep their declared form, and `.remote(...)` gives a call to await, to wait for or to
    cancel. Bodies travel as MessagePack, so arrays and bytes are not blown up into text. The object
    may be used by many threads and event loops at once; all share its connections.

    A forked child can't use an object of its parent: there, connect again.

    Args:
        target: The service's class.
        url: Where its app's gateway listens, like `http://127.0.0.1:3000`.
        token: Sent as a bearer token.
        timeout_s: Deadline of each call, over all its attempts; it travels with it.
        retries: How often a call that was not started, or is idempotent, is sent again.

    Returns:
        For `with` as well as `async with`: gives an object with the class's endpoints. Leaving
        ends the calls that still run.

    Raises:
        SpecError: The class is no service.
        ConfigError: The URL is none.
    """
    options = Options(timeout_s=timeout_s, retries=retries)
    return Connected(definition(target), Channel(url, token=token), options)


class Connected(Generic[T_co]):
    """A service that is connected within a `with` or `async with` block; made by `connect`."""

    def __init__(self, service: ServiceDefinition, channel: Channel, options: Options) -> None:
        self._service = service
        self._channel = channel
        self._options = options
        self._loop: ThreadLoop | None = None

    def __enter__(self) -> T_co:
        """Nothing is sent before the first call."""
        service = self._service
        self._loop = background_loop()
        handler = HttpHandler(service, self._channel)
        return cast(
            "T_co",
            ServiceHandle(
                service, service.name, handler, self._loop, self._options, internal=False
            ),
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if (closing := self._close()) is not None:
            closing.result()

    async def __aenter__(self) -> T_co:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if (closing := self._close()) is not None:
            await asyncio.wrap_future(closing)

    def _close(self) -> "Future[None] | None":
        loop = self._loop
        if loop is None or loop.orphaned:
            return None
        return asyncio.run_coroutine_threadsafe(self._channel.close(), loop)


class HttpHandler:
    """A `Handler` that takes calls to a gateway.

    Args:
        service: The service whose endpoints are called.
        channel: Leads to the gateway.
    """

    def __init__(self, service: ServiceDefinition, channel: Channel) -> None:
        self._service = service
        self._channel = channel
        self._told: set[str] = set()
        prefix = (service.prefix or "").rstrip("/")
        self._routes = {
            endpoint.name: (
                endpoint.method,
                prefix + endpoint.path.rstrip("/") or "/",
                endpoint.kind == "stream",
            )
            for endpoint in service.endpoints.values()
        }

    async def __call__(self, call: Call) -> Reply:
        """Answer a call.

        Raises:
            CallError: As the server raised it, or because it was not reached.
        """
        if call.chunks is not None:
            raise ServekitError(
                f"{call.endpoint}: its input streams, which sk.connect does not do yet; open a "
                "WebSocket to its path"
            )
        method, path, streams = self._routes[call.endpoint]
        headers = {
            "accept": EVENT_STREAM if streams else MSGPACK,
            "x-request-id": call.request_id,
        }
        if call.affinity_key:
            headers["x-servekit-affinity"] = call.affinity_key
        if call.traceparent:
            headers["traceparent"] = call.traceparent
        content = cast("bytes", call.payload.segments[0])
        if method == "GET":
            path, content = with_query(path, msgspec.msgpack.decode(content)), b""
        else:
            headers["content-type"] = call.payload.content_type
        response = await self._channel.send(
            Outgoing(method, path, headers, content, call.deadline, call.retries, call.idempotent),
            stream=streams,
        )
        if streams:
            return self._reply(response, stream=self._chunks(response, call.deadline))
        return self._reply(response, payload=answer(response))

    def _reply(self, response: httpx.Response, **content: Any) -> Reply:
        headers = response.headers
        version = headers.get("x-servekit-version", "")
        if version not in (self._service.version, "", *self._told):
            self._told.add(version)
            _log.warning(
                "the server runs another version",
                service=self._service.name,
                server=version,
                client=self._service.version,
            )
        return Reply(**content, version=version, replica=headers.get("x-servekit-replica", ""))

    async def _chunks(
        self, response: httpx.Response, deadline: float | None
    ) -> AsyncIterator[Payload]:
        batches = self._channel.batches(response, deadline)
        try:
            async for batch in batches:
                for chunk in batch:
                    yield chunk
        finally:
            await batches.aclose()
