"""A task in one replica: takes submissions, answers what is asked about its jobs, and works on them.

Any replica of a service answers for any of its jobs: all that is known of one is in the store. What is
asked is a call of an endpoint of its own, `{task}/jobs/{verb}`, with a `JobQuery` as its body.
"""

from collections.abc import AsyncIterator
from hashlib import sha256
from time import time
from typing import Any, Final

import msgspec

from servekit.core.aio import Pulse
from servekit.core.call import JSON, MSGPACK, Call, Payload, Reply, now
from servekit.core.context import RequestContext
from servekit.core.job import FINAL, JOBS, MAX_LISTED, MAX_WAIT_S, JobQuery
from servekit.errors import (
    BadRequest,
    Conflict,
    InvalidInput,
    NotFound,
    Overloaded,
    Unavailable,
    call_error,
)
from servekit.jobs.job import Job, is_final, new_job, pack_payload, status_of, unpack_payload
from servekit.jobs.store import Store
from servekit.observe.families import Families
from servekit.runtime.endpoints import Endpoint, Runner
from servekit.runtime.meter import Meter
from servekit.runtime.slots import Slots
from servekit.runtime.threads import Threads
from servekit.runtime.worker import POLL_S, Worker
from servekit.spec.body import negotiate
from servekit.spec.definition import EndpointDefinition
from servekit.spec.file import File

MAX_KEY: Final = 255
"""Longest idempotency key, in characters."""
_MAX_WATCHERS: Final = 1000
"""Calls that may wait for jobs in a replica; each looks into the store twice a second."""
_RETRY_AFTER_S: Final = 1.0


class Task(Endpoint):
    """One task.

    Args:
        instance: The service object.
        definition: The task.
        slots: The service's, for the jobs that run.
        threads: Where a sync method runs.
        meter: Gets the figures.
        families: Gets those of jobs.
        store: Keeps the jobs.
        service: Name of the service in the graph.
        replica: Id of the replica.
    """

    def __init__(
        self,
        instance: object,
        definition: EndpointDefinition,
        slots: Slots,
        threads: Threads,
        meter: Meter,
        families: Families,
        store: Store,
        *,
        service: str,
        replica: str,
    ) -> None:
        super().__init__(instance, definition, slots, threads, meter)
        assert definition.task is not None
        self._policy = definition.task
        self._service = service
        self._name = definition.name
        self._store = store
        self._pulse = Pulse()
        self._watchers = 0
        self._draining = False
        self.worker = Worker(
            instance,
            definition,
            store,
            self._pulse,
            slots,
            threads,
            meter,
            families,
            service=service,
            replica=replica,
        )

    def runners(self) -> dict[str, Runner]:
        """Return what answers calls, by the names of their endpoints."""
        jobs = self._name + JOBS
        return {
            self._name: self.submit,
            jobs: self.newest,
            f"{jobs}/get": self.get,
            f"{jobs}/result": self.result,
            f"{jobs}/cancel": self.cancel,
            f"{jobs}/retry": self.retry,
            f"{jobs}/events": self.events,
        }

    def drain(self) -> None:
        """Claim no more jobs, and send those who wait for one to another replica."""
        self._draining = True
        self.worker.drain()

    # -- submissions -------------------------------------------------------------------------

    async def submit(self, call: Call, context: RequestContext) -> Reply:
        """Keep a call as a job; the answer is the job's status.

        Raises:
            CallError: The input is wrong, the queue is full, or the store has failed.
        """
        _media_type(call)  # what can't be answered is not kept
        arguments = call.arguments or self._input.decode(call.payload, internal=call.internal)
        payload, internal = call.payload, call.internal
        if call.arguments is not None or any(
            isinstance(segment, File) for segment in payload.segments
        ):
            payload, internal = self._input.encode(*arguments), True  # as it travels inside
        key = context.headers.get("idempotency-key", "")
        if len(key) > MAX_KEY:
            raise BadRequest(
                f"header idempotency-key: {len(key)} characters; at most {MAX_KEY}", started=False
            )
        packed = pack_payload(payload, internal=internal)
        job = new_job(
            self._service,
            self._name,
            self._policy,
            now=time(),
            key=key,
            digest=sha256(packed).hexdigest() if key else "",
            request_id=call.request_id,
            traceparent=call.traceparent,
        )
        kept = await self._store.submit(job, packed)
        if kept.digest != job.digest:
            # draft-ietf-httpapi-idempotency-key-header-07, section 2.7
            raise InvalidInput(
                f"the idempotency key {key!r} belongs to job {kept.id}, whose arguments differ",
                reason="idempotency_key",
                started=False,
            )
        self._pulse.beat()
        return await self._status(kept, call)

    # -- jobs --------------------------------------------------------------------------------

    async def newest(self, call: Call, _: RequestContext) -> Reply:
        """Answer the statuses of jobs, the newest first."""
        asked = _query(call)
        limit = min(max(asked.limit, 1), MAX_LISTED)
        jobs = await self._store.newest(self._service, self._name, status=asked.status, limit=limit)
        return Reply(_document([status_of(job) for job in jobs], call))

    async def get(self, call: Call, _: RequestContext) -> Reply:
        """Answer the status of a job."""
        return await self._status(await self._job(_query(call).id), call)

    async def cancel(self, call: Call, _: RequestContext) -> Reply:
        """Cancel a job; answers its status."""
        job = await self._job(_query(call).id)
        after = await self._store.cancel(job.id, now=time())
        if after.events != job.events:
            self.worker.count(after)
        self._pulse.beat()
        return await self._status(after, call)

    async def retry(self, call: Call, _: RequestContext) -> Reply:
        """Queue a job again; answers its status."""
        job = await self._job(_query(call).id)
        after = await self._store.retry(job.id, now=time())
        self._pulse.beat()
        return await self._status(after, call)

    async def result(self, call: Call, _: RequestContext) -> Reply:
        """Answer with what the job returned, as an endpoint would have.

        Raises:
            CallError: As the method raised it; `Conflict` if there is no result, or not yet.
        """
        asked = _query(call)
        job = await self._ended(asked.id, min(asked.wait_s, MAX_WAIT_S))
        if job.status == "succeeded":
            payload, _internal = unpack_payload(await self._store.result(job.id))
            if call.internal:
                return Reply(payload)
            return Reply(self._encode(self._output.decode(payload), call))
        if job.status == "failed" and job.error is not None:
            error = job.error
            raise call_error(error.code, error.message, reason=error.reason)
        over = job.status in FINAL
        raise Conflict(
            f"job {job.id} {'was cancelled' if job.status == 'cancelled' else f'is {job.status}'}",
            reason=job.status,
            retry_after_s=None if over else _RETRY_AFTER_S,
            started=False,
        )

    async def events(self, call: Call, _: RequestContext) -> Reply:
        """Answer with the job's events, one a chunk, until it has ended."""
        asked = _query(call)
        await self._job(asked.id)
        return Reply(stream=self._events(asked.id, asked.after))

    # -- parts of the above ------------------------------------------------------------------

    async def _job(self, id_: str) -> Job:
        job = await self._store.get(id_)
        if (job.service, job.task) != (self._service, self._name):
            raise NotFound(f"{self._where} has no job {id_!r}", started=False)
        return job

    async def _status(self, job: Job, call: Call) -> Reply:
        position = await self._store.position(job) if job.status == "queued" else None
        return Reply(_document(status_of(job, position), call))

    async def _ended(self, id_: str, wait_s: float) -> Job:
        """Return a job once it has ended, or `wait_s` seconds have passed."""
        until = now() + wait_s
        while not is_final(job := await self._job(id_)) and (left := until - now()) > 0:
            await self._wait_for_change(min(left, POLL_S))
        return job

    async def _events(self, id_: str, after: int) -> AsyncIterator[Payload]:
        while True:
            events = await self._store.events_after(id_, after)
            for event in events:
                after = event.number
                yield Payload(JSON, (msgspec.json.encode(event),))
            if events:
                continue
            job = await self._store.get(id_)
            if job.events > after:
                continue
            if is_final(job):
                return
            await self._wait_for_change(POLL_S)

    async def _wait_for_change(self, timeout_s: float) -> None:
        if self._draining:
            raise Unavailable("the replica is draining", reason="draining", started=False)
        if self._watchers >= _MAX_WATCHERS:
            raise Overloaded(
                f"{self._where}: {_MAX_WATCHERS} calls wait for jobs, which is the limit",
                reason="queue_full",
                retry_after_s=_RETRY_AFTER_S,
                started=False,
            )
        self._watchers += 1
        try:
            await self._pulse.wait(timeout_s)
        finally:
            self._watchers -= 1


def _query(call: Call) -> JobQuery:
    document = bytes(call.payload.segments[0]) or b"{}"
    try:
        return msgspec.json.decode(document, type=JobQuery)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"jobs: {error}", started=False) from None


def _media_type(call: Call) -> str:
    return JSON if call.internal else negotiate(call.accept, (JSON, MSGPACK))


def _document(value: Any, call: Call) -> Payload:
    if _media_type(call) == JSON:
        return Payload(JSON, (msgspec.json.encode(value),))
    # Times are text in MessagePack, too, so that a document has one form.
    return Payload(MSGPACK, (msgspec.msgpack.encode(msgspec.to_builtins(value)),))
