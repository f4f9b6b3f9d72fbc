"""Jobs over HTTP: requests for the calls that handles of tasks make, and the untyped clients' jobs."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from math import inf
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from servekit.client.channel import Channel
from servekit.client.exchange import answer, value
from servekit.client.request import Outgoing
from servekit.core.call import EVENT_STREAM, JSON, MSGPACK, Call, Payload, now
from servekit.core.context import Headers
from servekit.core.job import JOBS, WAIT_S, WAIT_SLACK_S, JobEvent, JobQuery, JobStatus
from servekit.errors import Conflict
from servekit.spec.definition import ServiceDefinition

KEY_HEADER: Final = "idempotency-key"


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
        make: Makes a call: method, path, time limit in seconds, media type wanted.
        accept: Media types that the client reads best.
    """

    id: str
    endpoint: str
    make: Callable[[str, str, float | None, str], Outgoing]
    accept: str

    def verb(self, method: str, verb: str) -> Outgoing:
        """Return a call whose answer is the job's status."""
        call = self.make(method, f"{self._path}{verb}", None, JSON)
        call.idempotent = verb != "/retry"
        return call

    def result(self, until: float) -> Outgoing:
        """Return a call for the result, to be made again until then.

        Raises:
            TimeoutError: It is past that.
        """
        left = min(WAIT_S, until - now())
        if left <= 0:
            raise TimeoutError("the job goes on; its result was not waited for")
        path = f"{self._path}/result?wait={left:.3f}s"
        call = self.make("GET", path, left + WAIT_SLACK_S, self.accept)
        call.idempotent = True
        return call

    def events(self) -> Outgoing:
        """Return a call for the events."""
        call = self.make("GET", f"{self._path}/events", None, EVENT_STREAM)
        call.deadline, call.idempotent = None, True
        return call

    @property
    def _path(self) -> str:
        return f"{self.endpoint.rstrip('/')}{JOBS}/{self.id}"


def status_of(response: httpx.Response) -> JobStatus:
    """Return the status that a good answer holds."""
    return msgspec.json.decode(answer(response).segments[0], type=JobStatus)


def _events(batch: list[Payload]) -> Iterator[JobEvent]:
    for chunk in batch:
        yield msgspec.json.decode(chunk.segments[0], type=JobEvent)


class ClientJob:
    """A job that a `Client` has submitted.

    Args:
        requests: Makes the calls.
        send: Sends one, and returns its good answer.
        batches: Sends one, and yields the chunks of its answer.

    Attributes:
        id: The job's id.
    """

    def __init__(
        self,
        requests: JobRequests,
        send: Callable[[Outgoing], httpx.Response],
        batches: Callable[[Outgoing], Iterator[list[Payload]]],
    ) -> None:
        self._requests = requests
        self._send = send
        self._batches = batches
        self.id = requests.id

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
            try:
                return value(answer(self._send(self._requests.result(until))))
            except Conflict as error:
                if error.retry_after_s is None:
                    raise

    def events(self) -> Iterator[JobEvent]:
        """Yield its changes of status and progress, from the first on, to the end of the job."""
        for batch in self._batches(self._requests.events()):
            yield from _events(batch)

    def __repr__(self) -> str:
        return f"<job {self.id}>"


class AsyncClientJob:
    """A job that an `AsyncClient` has submitted; see `ClientJob`.

    Args:
        requests: Makes the calls.
        channel: Sends them.

    Attributes:
        id: The job's id.
    """

    def __init__(self, requests: JobRequests, channel: Channel) -> None:
        self._requests = requests
        self._channel = channel
        self.id = requests.id

    async def status(self) -> JobStatus:
        """Ask where it is."""
        return status_of(await self._channel.send(self._requests.verb("GET", "")))

    async def cancel(self) -> JobStatus:
        """Drop it if it is queued, else ask it to stop."""
        return status_of(await self._channel.send(self._requests.verb("POST", "/cancel")))

    async def retry(self) -> JobStatus:
        """Queue it again, if it failed, was cancelled or has expired."""
        return status_of(await self._channel.send(self._requests.verb("POST", "/retry")))

    async def result(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109  (as `ClientJob`)
        """Wait for the result; see `ClientJob.result`."""
        until = now() + (inf if timeout is None else timeout)
        while True:
            try:
                return value(answer(await self._channel.send(self._requests.result(until))))
            except Conflict as error:
                if error.retry_after_s is None:
                    raise

    async def events(self) -> AsyncIterator[JobEvent]:
        """Yield its changes of status and progress; see `ClientJob.events`."""
        call = self._requests.events()
        response = await self._channel.send(call, stream=True)
        async with aclosing(self._channel.batches(response, None)) as batches:
            async for batch in batches:
                for event in _events(batch):
                    yield event

    def __repr__(self) -> str:
        return f"<job {self.id}>"
