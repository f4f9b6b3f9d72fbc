"""`connect`: a running app's root service as an object of its class, over HTTP."""

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import httpx

from servekit.client.exchange import TIMEOUT_HEADER, EventReader, answer, failure, unreachable
from servekit.client.jobs import job_request
from servekit.core.call import EVENT_STREAM, MSGPACK, Call, Payload, Reply
from servekit.errors import DeadlineExceeded
from servekit.runtime.handle import Options, ServiceHandle
from servekit.spec.definition import ServiceDefinition, definition

T = TypeVar("T")


@contextmanager
def connect(
    target: type[T], url: str, *, token: str | None = None, timeout_s: float = 60.0
) -> Generator[T, None, None]:
    """Call a running service through its class.

    Methods keep their declared form, and `.remote(...)` gives a call to await, to wait for or to
    cancel. Bodies travel as MessagePack, so arrays and bytes are not blown up into text.

    Args:
        target: The service's class.
        url: Where its app's gateway listens, like `http://127.0.0.1:3000`.
        token: Sent as a bearer token.
        timeout_s: Deadline of each call; it travels with it.

    Yields:
        An object with the class's endpoints.
    """
    found = definition(target)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="servekit-client", daemon=True)
    thread.start()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    handler = HttpHandler(found, url, headers)
    options = Options(timeout_s=timeout_s, retries=0)
    try:
        yield cast("T", ServiceHandle(found, found.name, handler, loop, options, internal=False))
    finally:
        asyncio.run_coroutine_threadsafe(handler.close(), loop).result(5.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class HttpHandler:
    """A `Handler` that takes calls to a gateway.

    Args:
        service: The service whose endpoints are called.
        url: Where the gateway listens.
        headers: Sent with each call.
    """

    def __init__(self, service: ServiceDefinition, url: str, headers: Mapping[str, str]) -> None:
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers=headers,
            timeout=None,  # noqa: S113  (each call has its own deadline)
        )
        self._url = url
        self._service = service
        prefix = (service.prefix or "").rstrip("/")
        self._routes: dict[str, tuple[str, str, bool]] = {
            endpoint.name: (endpoint.method, prefix + endpoint.path, endpoint.kind == "stream")
            for endpoint in service.endpoints.values()
            if endpoint.task is None
        }

    async def __call__(self, call: Call) -> Reply:
        """Answer a call.

        Raises:
            CallError: As the server raised it, or because it was not reached.
        """
        payload = call.payload
        more: Mapping[str, str] = {}
        if (route := self._routes.get(call.endpoint)) is not None:
            method, path, streams = route
        else:
            method, path, streams, more, payload = job_request(self._service, call)
        headers = {
            "accept": EVENT_STREAM if streams else MSGPACK,
            "content-type": payload.content_type,
            "x-request-id": call.request_id,
            **more,
        }
        if call.affinity_key:
            headers["x-servekit-affinity"] = call.affinity_key
        if call.traceparent:
            headers["traceparent"] = call.traceparent
        remaining = call.remaining()
        if remaining is not None:
            if remaining <= 0:
                raise DeadlineExceeded("the deadline passed before the call was sent")
            headers[TIMEOUT_HEADER] = f"{remaining:.3f}s"
        request = self._request(method, path, headers, payload)
        try:
            async with asyncio.timeout(remaining):
                response = await self._client.send(request, stream=True)
                if streams and response.is_success:
                    return _reply(response, stream=_chunks(response, self._url))
                body = await response.aread()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the call ran") from None
        except httpx.TransportError as error:
            raise unreachable(error, self._url) from error
        if not response.is_success:
            raise failure(response.status_code, body, response.headers)
        return _reply(response, payload=answer(response))

    def _request(
        self, method: str, path: str, headers: dict[str, str], payload: Payload
    ) -> httpx.Request:
        if method == "GET":
            import msgspec  # noqa: PLC0415

            arguments: dict[str, Any] = msgspec.msgpack.decode(payload.segments[0])
            del headers["content-type"]
            return self._client.build_request(method, path, params=arguments, headers=headers)
        body = bytes(payload.segments[0])
        return self._client.build_request(method, path, content=body, headers=headers)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


def _reply(response: httpx.Response, **content: Any) -> Reply:
    headers = response.headers
    return Reply(
        **content,
        version=headers.get("x-servekit-version", ""),
        replica=headers.get("x-servekit-replica", ""),
    )


async def _chunks(response: httpx.Response, url: str) -> AsyncIterator[Payload]:
    reader = EventReader()
    try:
        async for data in response.aiter_bytes():
            for chunk in reader.feed(data):
                yield chunk
        reader.end()
    except httpx.TransportError as error:
        raise unreachable(error, url) from error
    finally:
        await response.aclose()
