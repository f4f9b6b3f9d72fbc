"""The routes of jobs: `{task}/jobs`, `{task}/jobs/{id}` and what is below it.

They are not the hot path, so they go through Starlette. Each is one call, of any replica of the
task's service. The events of a job go on when the replica that told them is lost: another one is asked
for those that are missing.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, cast, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from servekit.core.call import EVENT_STREAM, JSON, Call, Handler, Payload, now
from servekit.core.job import JOBS, MAX_LISTED, MAX_WAIT_S, JobQuery, JobState
from servekit.core.units import parse_seconds
from servekit.errors import BadRequest, CallError, ConfigError
from servekit.gateway.answer import Framing, error_document, error_headers
from servekit.gateway.request import request_id_of
from servekit.jobs.follow import follow
from servekit.spec.app import AppSpec

_CALL_S: Final = 30.0
"""Longest time for a call, beside what it is to wait."""
_HEARTBEAT_S: Final = 15.0

_Answer = Callable[["_Asked"], Awaitable[Response]]


class _Asked:
    """A request about the jobs of one task."""

    def __init__(self, request: Request, service: str, task: str) -> None:
        self.query = request.query_params
        self.headers = request.headers
        self.request_id = request_id_of(request.scope["headers"])
        self.id: str = request.path_params.get("id", "")
        self._service = service
        self._task = task

    def call(self, verb: str, query: JobQuery, *, timeout_s: float | None = _CALL_S) -> Call:
        """Return the call that answers it."""
        call = Call(
            self._service,
            f"{self._task}{JOBS}{verb}",
            request_id=self.request_id,
            accept=self.headers.get("accept", "*/*"),
            idempotent=verb != "/retry",
        )
        call.payload = Payload(JSON, (msgspec.json.encode(query),))
        call.deadline = None if timeout_s is None else now() + timeout_s
        return call


class JobRoutes:
    """The job routes of one gateway.

    Args:
        handler: Takes the calls.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """End the event streams; their clients come again, with the number of the last event."""
        self._leaving.set()

    def of(self, app: AppSpec) -> list[Route]:
        """Return the routes of all tasks of an app."""
        answers = (
            ("", "GET", self._newest),
            ("/{id}", "GET", self._verb("/get")),
            ("/{id}/result", "GET", self._result),
            ("/{id}/events", "GET", self._events),
            ("/{id}/cancel", "POST", self._verb("/cancel")),
            ("/{id}/retry", "POST", self._verb("/retry")),
        )
        return [
            Route(
                f"{service.prefix.rstrip('/')}{endpoint.path.rstrip('/')}{JOBS}{below}",
                _answering(service.name, endpoint.name, answer),
                methods=[method],
            )
            for service in app.services
            if service.prefix is not None
            for endpoint in service.endpoints
            if endpoint.task is not None and not endpoint.internal
            for below, method, answer in answers
        ]

    async def _send(self, call: Call) -> Response:
        reply = await self._handler(call)
        assert reply.payload is not None
        headers = {
            "content-type": reply.payload.content_type,
            "x-request-id": call.request_id,
            "x-servekit-version": reply.version,
            "x-servekit-replica": reply.replica,
        }
        return Response(bytes(reply.payload.segments[0]), headers=headers)

    def _verb(self, verb: str) -> _Answer:
        async def answer(asked: _Asked) -> Response:
            return await self._send(asked.call(verb, JobQuery(id=asked.id)))

        return answer

    async def _newest(self, asked: _Asked) -> Response:
        status, limit = asked.query.get("status"), asked.query.get("limit", "50")
        if status is not None and status not in get_args(JobState):
            known = ", ".join(get_args(JobState))
            raise BadRequest(f"query status={status[:40]!r}: is none of {known}", started=False)
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LISTED:
            raise BadRequest(f"query limit={limit[:40]!r}: need 1 to {MAX_LISTED}", started=False)
        query = JobQuery(status=cast("JobState | None", status), limit=int(limit))
        return await self._send(asked.call("", query))

    async def _result(self, asked: _Asked) -> Response:
        try:
            wait_s = parse_seconds(asked.query.get("wait", "0s"), where="query wait")
        except ConfigError as error:
            raise BadRequest(str(error), started=False) from None
        wait_s = min(wait_s, MAX_WAIT_S)
        query = JobQuery(id=asked.id, wait_s=wait_s)
        sending = asyncio.ensure_future(
            self._send(asked.call("/result", query, timeout_s=wait_s + _CALL_S))
        )
        try:
            if not wait_s or await self._before_leaving(sending, wait_s + _CALL_S):
                return await sending
        finally:
            sending.cancel()
        return await self._send(asked.call("/result", JobQuery(id=asked.id)))

    async def _before_leaving(self, work: asyncio.Future[Any], timeout_s: float) -> bool:
        """Wait for work; returns whether it was done in time, and before this gateway leaves."""
        leaving = asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait(
                {work, leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            leaving.cancel()
        return work.done()

    # -- events ------------------------------------------------------------------------------

    async def _events(self, asked: _Asked) -> Response:
        after = asked.headers.get("last-event-id") or "0"
        if not after.isdecimal() or len(after) > 18:
            raise BadRequest(f"header last-event-id: {after[:40]!r} is no number", started=False)
        look = asked.call("/get", JobQuery(id=asked.id))
        look.accept = JSON
        await self._handler(look)  # that it is not there has a status of its own
        headers = {
            "content-type": EVENT_STREAM,
            "cache-control": "no-store",
            "x-accel-buffering": "no",
            "x-request-id": asked.request_id,
        }
        return StreamingResponse(self._told(asked, int(after)), headers=headers)

    async def _told(self, asked: _Asked, after: int) -> AsyncIterator[bytes]:
        """Yield a job's events as text, with a comment now and then while there are none."""

        def ask(after: int) -> Call:
            return asked.call("/events", JobQuery(id=asked.id, after=after), timeout_s=None)

        events = follow(self._handler, ask, after=after)
        upcoming: asyncio.Future[tuple[int, Payload]] | None = None
        try:
            while not self._leaving.is_set():
                upcoming = upcoming or asyncio.ensure_future(anext(events))
                if await self._before_leaving(upcoming, _HEARTBEAT_S):
                    told, upcoming = upcoming, None
                    number, chunk = told.result()
                    yield b"".join((b"id: %d\n" % number, Framing.chunk(chunk.segments[0])))
                elif not self._leaving.is_set():
                    yield Framing.beat
        except StopAsyncIteration:
            yield Framing.end
        except CallError as error:
            yield Framing.error(error_document(error, asked.request_id))
        finally:
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.wait([upcoming])
            await events.aclose()


def _answering(
    service: str, task: str, answer: _Answer
) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        asked = _Asked(request, service, task)
        try:
            return await answer(asked)
        except CallError as error:
            return Response(
                error_document(error, asked.request_id),
                error.status,
                headers=dict(error_headers(error, asked.request_id)),
            )

    return respond
