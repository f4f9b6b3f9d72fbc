"""`Client` and `AsyncClient`: call a running app by the names of its endpoints, without its class."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import httpx
import msgspec

from servekit.client.exchange import TIMEOUT_HEADER, EventReader, answer, failure, unreachable
from servekit.client.jobs import (
    ACCEPT,
    KEY_HEADER,
    AsyncClientJob,
    ClientJob,
    JobRequests,
    status_of,
)
from servekit.core.call import BINARY, EVENT_STREAM, JSON, MSGPACK, NPY, Payload, new_request_id
from servekit.errors import CallError, DeadlineExceeded
from servekit.spec.body import media_type, pack, unpack


class _Requests:
    """What both clients share: from arguments to requests, from answers to values."""

    def __init__(self, url: str, *, token: str | None, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._base_headers = {"authorization": f"Bearer {token}"} if token else {}

    def _post(
        self,
        endpoint: str,
        body: tuple[Any, ...],
        arguments: dict[str, Any],
        timeout_s: float | None,
        *,
        accept: str = ACCEPT,
    ) -> dict[str, Any]:
        if len(body) > 1 or (body and arguments):
            raise TypeError(f"{endpoint}: give one body, or arguments by name")
        content_type, content = _encoded(body[0] if body else arguments)
        request = self._request("POST", endpoint, timeout_s, accept)
        request["headers"]["content-type"] = content_type
        return request | {"content": content}

    def _get(
        self, endpoint: str, arguments: dict[str, Any], timeout_s: float | None
    ) -> dict[str, Any]:
        return self._request("GET", endpoint, timeout_s, ACCEPT) | {"params": arguments}

    def _request(
        self, method: str, endpoint: str, timeout_s: float | None, accept: str
    ) -> dict[str, Any]:
        seconds = self._timeout_s if timeout_s is None else timeout_s
        return {
            "method": method,
            "url": f"{self._url}/{endpoint.lstrip('/')}",
            "headers": self._base_headers | {"accept": accept, TIMEOUT_HEADER: f"{seconds:.3f}s"},
            # The server answers 504 at the deadline; the socket's own limit only guards against
            # its silence.
            "timeout": httpx.Timeout(seconds + 1.0),
        }

    def _submission(
        self,
        endpoint: str,
        body: tuple[Any, ...],
        arguments: dict[str, Any],
        timeout_s: float | None,
        key: str,
    ) -> dict[str, Any]:
        request = self._post(endpoint, body, arguments, timeout_s, accept=JSON)
        # With a key of its own a submission may be sent again when its replica is lost.
        request["headers"][KEY_HEADER] = key or new_request_id()
        return request

    def _job(self, endpoint: str, accepted: httpx.Response) -> JobRequests:
        id_ = status_of(accepted).id
        return JobRequests(id_, endpoint, self._request, _value, self._error)

    def _error(self, error: httpx.TransportError) -> CallError:
        if isinstance(error, httpx.ReadTimeout):
            return DeadlineExceeded("the server did not answer in time")
        return unreachable(error, self._url)


def _encoded(body: Any) -> tuple[str, bytes]:
    if isinstance(body, bytes | bytearray):
        return BINARY, bytes(body)
    try:
        return JSON, msgspec.json.encode(body)
    except TypeError:
        return MSGPACK, pack(body)  # it holds arrays


def _value(payload: Payload) -> Any:
    kind, data = media_type(payload.content_type), payload.segments[0]
    if kind == MSGPACK:
        return unpack(data)
    if kind == JSON:
        return msgspec.json.decode(data) if len(data) else None
    if kind == NPY:
        from servekit.spec.tensor import read_npy  # noqa: PLC0415  (numpy comes with it)

        return read_npy(data)
    return bytes(data).decode() if kind.startswith("text/") else bytes(data)


class Client(_Requests):
    """A client for plain code; `AsyncClient` is its twin for event loops.

    Args:
        url: Where the gateway listens, like `http://127.0.0.1:3000`.
        token: Sent as a bearer token.
        timeout_s: Deadline of each call; it travels with it.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 60.0) -> None:
        super().__init__(url, token=token, timeout_s=timeout_s)
        self._http = httpx.Client()

    def call(
        self, endpoint: str, /, *body: Any, timeout_s: float | None = None, **arguments: Any
    ) -> Any:
        """Call an endpoint and return its answer.

        Args:
            endpoint: Its path, like `"predict"` or `"/search/query"`.
            *body: The body itself, for endpoints whose parameter is positional-only: `bytes`
                travel raw, everything else as JSON, or MessagePack if there are arrays in it.
            timeout_s: Deadline; None takes the client's.
            **arguments: Or the arguments by name; a parameter named like one of these two needs
                the body form: `client.call("predict", {"timeout_s": 3})`.

        Raises:
            CallError: As the server raised it, or because it was not reached.
        """
        request = self._post(endpoint, body, arguments, timeout_s)
        try:
            return _value(answer(self._http.request(**request)))
        except httpx.TransportError as error:
            raise self._error(error) from error

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
        request = self._submission(endpoint, body, arguments, timeout_s, idempotency_key)
        try:
            accepted = self._http.request(**request)
        except httpx.TransportError as error:
            raise self._error(error) from error
        return ClientJob(self._http, self._job(endpoint, accepted))

    def get(self, endpoint: str, /, *, timeout_s: float | None = None, **arguments: Any) -> Any:
        """Call an endpoint that was declared with `method="GET"`; see `call`."""
        try:
            return _value(answer(self._http.request(**self._get(endpoint, arguments, timeout_s))))
        except httpx.TransportError as error:
            raise self._error(error) from error

    def stream(
        self, endpoint: str, /, *body: Any, timeout_s: float | None = None, **arguments: Any
    ) -> Iterator[Any]:
        """Call a streaming endpoint and yield its chunks; leaving the loop cancels the work.

        Raises:
            CallError: As for `call`; also in the middle of the stream.
        """
        request = self._post(endpoint, body, arguments, timeout_s, accept=EVENT_STREAM)
        reader = EventReader()
        try:
            with self._http.stream(**request) as response:
                if not response.is_success:
                    raise failure(response.status_code, response.read(), response.headers)
                for data in response.iter_bytes():
                    for chunk in reader.feed(data):
                        yield _value(chunk)
                reader.end()
        except httpx.TransportError as error:
            raise self._error(error) from error

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Requests):
    """A client for event loops; see `Client`."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 60.0) -> None:
        super().__init__(url, token=token, timeout_s=timeout_s)
        self._http = httpx.AsyncClient()

    async def call(
        self, endpoint: str, /, *body: Any, timeout_s: float | None = None, **arguments: Any
    ) -> Any:
        """Call an endpoint and return its answer; see `Client.call`."""
        request = self._post(endpoint, body, arguments, timeout_s)
        try:
            return _value(answer(await self._http.request(**request)))
        except httpx.TransportError as error:
            raise self._error(error) from error

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
        request = self._submission(endpoint, body, arguments, timeout_s, idempotency_key)
        try:
            accepted = await self._http.request(**request)
        except httpx.TransportError as error:
            raise self._error(error) from error
        return AsyncClientJob(self._http, self._job(endpoint, accepted))

    async def get(
        self, endpoint: str, /, *, timeout_s: float | None = None, **arguments: Any
    ) -> Any:
        """Call an endpoint that was declared with `method="GET"`; see `Client.call`."""
        request = self._get(endpoint, arguments, timeout_s)
        try:
            return _value(answer(await self._http.request(**request)))
        except httpx.TransportError as error:
            raise self._error(error) from error

    async def stream(
        self, endpoint: str, /, *body: Any, timeout_s: float | None = None, **arguments: Any
    ) -> AsyncIterator[Any]:
        """Call a streaming endpoint and yield its chunks; see `Client.stream`."""
        request = self._post(endpoint, body, arguments, timeout_s, accept=EVENT_STREAM)
        reader = EventReader()
        try:
            async with self._http.stream(**request) as response:
                if not response.is_success:
                    raise failure(response.status_code, await response.aread(), response.headers)
                async for data in response.aiter_bytes():
                    for chunk in reader.feed(data):
                        yield _value(chunk)
                reader.end()
        except httpx.TransportError as error:
            raise self._error(error) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
