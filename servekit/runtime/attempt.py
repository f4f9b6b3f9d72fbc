"""One attempt at a job: runs the method, keeps the lease, reports progress, and stores the outcome.

An attempt is stopped when its job is cancelled, when its time is up, when the lease went to another
worker, or when the replica has to leave. An async method is cancelled then, a sync one sees
`job.cancelled`; its thread can't be ended from outside, so it goes on for as long as it does.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from functools import partial
from random import random
from time import time
from typing import Any, Final, Literal, TypeAlias

from servekit.core.aio import Pulse
from servekit.core.call import Call, Payload, now
from servekit.core.context import CURRENT, RequestContext
from servekit.core.job import RUNNING_JOB, JobError, RunningJob
from servekit.errors import (
    CallError,
    Cancelled,
    DeadlineExceeded,
    InvalidOutput,
    Unavailable,
)
from servekit.jobs.job import LEASE_S, Job, pack_payload, unpack_payload
from servekit.jobs.store import Store
from servekit.observe.log import get_logger
from servekit.runtime.endpoints import masked
from servekit.runtime.threads import Threads
from servekit.spec.definition import EndpointDefinition

Why: TypeAlias = Literal["", "cancelled", "timeout", "lost", "leaving"]

MAX_RESULT_BYTES: Final = 512 << 20
_TICK_S: Final = 0.25
"""How often progress is stored, and cancellation looked for."""
_RENEW_S: Final = LEASE_S / 3
_GRACE_S: Final = 1.0
"""What a method whose time is up gets to end by itself before the attempt counts as failed."""
_log = get_logger("servekit.replica")


class Attempt:
    """One attempt at a job.

    Args:
        job: As it was claimed.
        arguments: As they were kept.
        definition: The task.
        instance: The service object.
        threads: Where a sync method runs.
        store: Keeps the job.
        pulse: Beaten when something was stored.
    """

    def __init__(
        self,
        job: Job,
        arguments: bytes,
        definition: EndpointDefinition,
        instance: object,
        threads: Threads,
        store: Store,
        pulse: Pulse,
    ) -> None:
        self._job = job
        self._arguments = arguments
        self._definition = definition
        self._fn: Callable[..., Any] = partial(definition.fn, instance)
        self._threads = threads
        self._store = store
        self._pulse = pulse
        call = Call(
            job.service,
            job.task,
            request_id=job.request_id,
            traceparent=job.traceparent,
            internal=True,
            attempt=job.attempt - 1,
        )
        assert definition.task is not None
        self._timeout_s = definition.task.timeout_s
        call.deadline = None if self._timeout_s is None else now() + self._timeout_s
        self._context = RequestContext(call)
        self._running = RunningJob(job.id, job.attempt, self._context)
        self._lease_until = now() + LEASE_S
        self._work: asyncio.Future[Any] | None = None
        self._why: Why = ""

    async def run(self) -> Job | None:
        """Make the attempt; returns when the method has really ended.

        Returns:
            The job as it is then; None if it is another's by now.
        """
        if self._why:  # the replica left before it began
            return await self._store_outcome(self._give_back)
        try:
            payload, internal = unpack_payload(self._arguments)
            args, kwargs = self._definition.schemas[0].decode(payload, internal=internal)
        except Exception as error:  # noqa: BLE001  (they were fine: the signature has changed)
            shown = masked(error, self._definition.where, self._job.request_id)
            return await self._store_outcome(partial(self._fail, shown, permanent=True))
        self._work = work = self._begin(args, kwargs)
        await self._watch(work)
        try:
            return await self._end(work)
        finally:
            await asyncio.wait([work])
            if not work.cancelled():
                work.exception()  # seen, also where it came too late to count

    def leave(self) -> None:
        """Stop, and give the job back."""
        self._stop("leaving")

    # -- the method --------------------------------------------------------------------------

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "asyncio.Future[Any]":
        scope = contextvars.copy_context()
        scope.run(CURRENT.set, self._context)
        scope.run(RUNNING_JOB.set, self._running)
        if self._definition.is_async:
            loop = asyncio.get_running_loop()
            return loop.create_task(
                self._fn(*args, **kwargs), name=f"job {self._job.id}", context=scope
            )
        return scope.run(self._threads.submit, lambda: self._fn(*args, **kwargs))

    def _stop(self, why: Why) -> None:
        if self._why or (self._work is not None and self._work.done()):
            return
        self._why = why
        self._context.cancelled = True
        if self._definition.is_async and self._work is not None:
            self._work.cancel()

    async def _watch(self, work: "asyncio.Future[Any]") -> None:
        """Keep the lease until the method has ended, or nobody waits for that any more."""
        deadline = self._context.deadline
        until = None
        while self._why not in ("lost", "leaving"):
            done, _ = await asyncio.wait([work], timeout=_TICK_S)
            try:
                await self._report()
            except CallError as error:
                _log.warning("job not renewed", job=self._job.id, why=error.message)
            if done or (until is not None and now() >= until):
                return
            if deadline is not None and now() >= deadline:
                self._stop("timeout")
                until = until or now() + _GRACE_S  # also of one that was cancelled and goes on

    async def _report(self) -> None:
        """Store progress or renew the lease, and look whether the job goes on."""
        store, job, time_ = self._store, self._job, time()
        if steps := self._running.take_progress():
            current = await store.progress(job.id, job.attempt, steps, now=time_)
            self._pulse.beat()
        elif now() >= self._lease_until - LEASE_S + _RENEW_S:
            current = await store.renew(job.id, job.attempt, now=time_)
        else:
            current = await store.get(job.id)
            if current.status != "running" or current.attempt != job.attempt:
                current = None
        if current is None:
            _log.error("job was lost to another worker", job=job.id, attempt=job.attempt)
            self._stop("lost")
            return
        if current.due is not None:
            self._lease_until = now() + current.due - time_
        if current.cancelling:
            self._stop("cancelled")

    # -- the outcome -------------------------------------------------------------------------

    async def _end(self, work: "asyncio.Future[Any]") -> Job | None:
        if self._why == "lost":
            return None
        if self._why == "leaving":
            return await self._store_outcome(self._give_back)
        if self._why == "timeout" or not work.done():
            error = DeadlineExceeded(f"the attempt took over {self._timeout_s:g} s")
            return await self._store_outcome(partial(self._fail, error))
        return await self._store_outcome(self._write_for(work))

    def _write_for(self, work: "asyncio.Future[Any]") -> Callable[[], Awaitable[Job | None]]:
        """Return what stores the outcome of a method that has ended."""
        where = self._definition.where
        if work.cancelled():
            return partial(self._fail, Cancelled(f"{where} was cancelled"))
        error = work.exception()
        if error is None:
            try:
                payload = self._definition.schemas[1].encode(work.result(), internal=True)
                return partial(self._succeed, _checked(payload, where))
            except Exception as problem:  # noqa: BLE001  (user classes encode themselves)
                error = problem
        shown = masked(error, where, self._job.request_id)
        # Whoever raises the caller's kind of error says that it is the arguments' fault.
        permanent = shown.status < 500 and not shown.retryable and not isinstance(shown, Cancelled)
        return partial(self._fail, shown, permanent=permanent)

    async def _succeed(self, payload: Payload) -> Job | None:
        result = pack_payload(payload, internal=True)
        return await self._store.succeed(self._job.id, self._job.attempt, result, now=time())

    async def _fail(self, error: CallError, *, permanent: bool = False) -> Job | None:
        shown = JobError(error.code, error.message, error.reason)
        return await self._store.fail(
            self._job.id,
            self._job.attempt,
            shown,
            now=time(),
            jitter=random(),  # noqa: S311
            permanent=permanent,
        )

    async def _give_back(self) -> Job | None:
        return await self._store.give_back(self._job.id, self._job.attempt, now=time())

    async def _store_outcome(self, write: Callable[[], Awaitable[Job | None]]) -> Job | None:
        """Store the outcome, again and again while the job is ours; then it is made anew."""
        while True:
            try:
                job = await write()
            except Unavailable as error:
                _log.error("outcome not stored", job=self._job.id, why=error.message)
                if now() > self._lease_until:
                    return None
                await asyncio.sleep(1.0)
                continue
            if job is None:
                _log.error("outcome dropped: the job is another's", job=self._job.id)
            self._pulse.beat()
            return job


def _checked(payload: Payload, where: str) -> Payload:
    size = sum(len(segment) for segment in payload.segments)
    if size > MAX_RESULT_BYTES:
        raise InvalidOutput(
            f"{where} returned {size} bytes; a result has at most {MAX_RESULT_BYTES}. Store large "
            "ones elsewhere, and return where"
        )
    return payload
