"""Jobs over HTTP: requests for the calls that handles of tasks make, and the untyped clients' jobs."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from servekit.client.exchange import EventReader, answer, failure
from servekit.core.call import EVENT_STREAM, JSON, MSGPACK, Call, Payload, now
from servekit.core.context import Headers
from servekit.core.job import JOBS, JobEvent, JobQuery, JobStatus
from servekit.errors import CallError, Conflict
from servekit.spec.definition import ServiceDefinition

KEY_HEADER: Final = "idempotency-key"
ACCEPT: Final = f"{MSGPACK}, {JSON};q=0.9, */*;q=0.5"
"""What the untyped clients read best: arrays and bytes as they are."""
_WAIT_S: Final = 20.0
"""How long one request waits for a result before the next one does."""
_SLACK_S: Final = 10.0
_SILENCE_S: Final = 60.0
"""How long a stream of events may be silent; the server sends something every 15 s."""


class JobRequest(NamedTuple):
    """What asks over HTTP what a call asks.

    Attributes:
        method: HTTP method.
        path: Without its query.
        streams: The answer is a stream of events.
        headers: Beside those that all calls have.
        payload: The body, or the arguments of the query as MessagePack.
    """

    method: str
    path: str
    streams: bool
    headers: dict[str, str]
    payload: Payload


def job_request(service: ServiceDefinition, call: Call) -> JobRequest:
    """Return the request for a call of a task, or of its jobs."""
    name, jobs, verb = call.endpoint.partition(JOBS)
    path = (service.prefix or "").rstrip("/") + service.endpoints[name].path.rstrip("/")
    if not jobs:
        key = Headers(call.headers)[KEY_HEADER]
        return JobRequest("POST", path or "/", False, {KEY_HEADER: key}, call.payload)
    query = msgspec.json.decode(call.payload.segments[0], type=JobQuery)
    arguments = {"wait": f"{query.wait_s:.3f}s"} if query.wait_s else {}
    return JobRequest(
        method="POST" if verb in ("/cancel", "/retry") else "GET",
        path=f"{path}{JOBS}/{query.id}{'' if verb == '/get' else verb}",
        streams=verb == "/events",
        headers={"last-event-id": str(query.after)} if query.after else {},
        payload=Payload(MSGPACK, (msgspec.msgpack.encode(arguments),)),
    )


@dataclass(frozen=True)
class JobRequests:
    """How a client asks for one job.

    Attributes:
        id: The job's id.
        endpoint: Path of its task.
        make: Makes a request: method, path, time limit in seconds, media type wanted.
        value: Turns a body into its value.
        error: Turns what httpx raised into our error.
    """

    id: str
    endpoint: str
    make: Callable[[str, str, float | None, str], dict[str, Any]]
    value: Callable[[Payload], Any]
    error: Callable[[httpx.TransportError], CallError]

    def verb(self, method: str, verb: str) -> dict[str, Any]:
        """Return a request whose answer is the job's status."""
        return self.make(method, f"{self._path}{verb}", None, JSON)

    def result(self, wait_s: float) -> dict[str, Any]:
        """Return a request for the result."""
        path = f"{self._path}/result?wait={wait_s:.3f}s"
        return self.make("GET", path, wait_s + _SLACK_S, ACCEPT)

    def events(self) -> dict[str, Any]:
        """Return a request for the events."""
        return self.make("GET", f"{self._path}/events", _SILENCE_S, EVENT_STREAM)

    @property
    def _path(self) -> str:
        return f"{self.endpoint.rstrip('/')}{JOBS}/{self.id}"


def status_of(response: httpx.Response) -> JobStatus:
    """Return the status that an answer holds.

    Raises:
        CallError: It is an error.
    """
    return msgspec.json.decode(answer(response).segments[0], type=JobStatus)


def _left(until: float) -> float:
    """Return how long to wait for a result next.

    Raises:
        TimeoutError: Not any more.
    """
    left = min(_WAIT_S, until - now())
    if left <= 0:
        raise TimeoutError("the job goes on; its result was not waited for")
    return left


def _events(reader: EventReader, data: bytes) -> Iterator[JobEvent]:
    for chunk in reader.feed(data):
        yield msgspec.json.decode(chunk.segments[0], type=JobEvent)


class ClientJob:
    """A job that a `Client` has submitted.

    Attributes:
        id: The job's id.
    """

    def __init__(self, http: httpx.Client, requests: JobRequests) -> None:
        self._http = http
        self._requests = requests
        self.id = requests.id

    def _send(self, request: dict[str, Any]) -> httpx.Response:
        try:
            return self._http.request(**request)
        except httpx.TransportError as error:
            raise self._requests.error(error) from error

    def status(self) -> JobStatus:
        """Ask where it is."""
        return status_of(self._send(self._requests.verb("GET", "")))

    def cancel(self) -> JobStatus:
        """Drop it if it is queued, else ask it to stop."""
        return status_of(self._send(self._requests.verb("POST", "/cancel")))

    def retry(self) -> JobStatus:
        """Queue it again, if it failed, was cancelled or has expired."""
        return status_of(self._send(self._requests.verb("POST", "/retry")))

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result.

        Raises:
            TimeoutError: It is not there after `timeout` seconds.
            CallError: The job failed; `Conflict` if it was cancelled or has expired.
        """
        until = now() + (inf if timeout is None else timeout)
        while True:
            response = self._send(self._requests.result(_left(until)))
            try:
                return self._requests.value(answer(response))
            except Conflict as error:
                if error.retry_after_s is None:
                    raise

    def events(self) -> Iterator[JobEvent]:
        """Yield its changes of status and progress, from the first on, to the end of the job."""
        reader = EventReader()
        try:
            with self._http.stream(**self._requests.events()) as response:
                if not response.is_success:
                    raise failure(response.status_code, response.read(), response.headers)
                for data in response.iter_bytes():
                    yield from _events(reader, data)
                reader.end()
        except httpx.TransportError as error:
            raise self._requests.error(error) from error

    def __repr__(self) -> str:
        return f"<job {self.id}>"


class AsyncClientJob:
    """A job that an `AsyncClient` has submitted; see `ClientJob`."""

    def __init__(self, http: httpx.AsyncClient, requests: JobRequests) -> None:
        self._http = http
        self._requests = requests
        self.id = requests.id

    async def _send(self, request: dict[str, Any]) -> httpx.Response:
        try:
            return await self._http.request(**request)
        except httpx.TransportError as error:
            raise self._requests.error(error) from error

    async def status(self) -> JobStatus:
        """Ask where it is."""
        return status_of(await self._send(self._requests.verb("GET", "")))

    async def cancel(self) -> JobStatus:
        """Drop it if it is queued, else ask it to stop."""
        return status_of(await self._send(self._requests.verb("POST", "/cancel")))

    async def retry(self) -> JobStatus:
        """Queue it again, if it failed, was cancelled or has expired."""
        return status_of(await self._send(self._requests.verb("POST", "/retry")))

    async def result(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109  (as `ClientJob`)
        """Wait for the result; see `ClientJob.result`."""
        until = now() + (inf if timeout is None else timeout)
        while True:
            response = await self._send(self._requests.result(_left(until)))
            try:
                return self._requests.value(answer(response))
            except Conflict as error:
                if error.retry_after_s is None:
                    raise

    async def events(self) -> AsyncIterator[JobEvent]:
        """Yield its changes of status and progress; see `ClientJob.events`."""
        reader = EventReader()
        try:
            async with self._http.stream(**self._requests.events()) as response:
                if not response.is_success:
                    raise failure(response.status_code, await response.aread(), response.headers)
                async for data in response.aiter_bytes():
                    for event in _events(reader, data):
                        yield event
                reader.end()
        except httpx.TransportError as error:
            raise self._requests.error(error) from error

    def __repr__(self) -> str:
        return f"<job {self.id}>"
