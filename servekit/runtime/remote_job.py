"""Tasks and jobs of a service somewhere else: what a handle has for a `@task`.

Every step is a call of the service (submit, look, wait), so it works over all that calls go over.
What takes several calls is a `Handler` made of them.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from math import inf
from typing import Any, Final, Self

import msgspec

from servekit.core.call import JSON, MSGPACK, Call, Handler, Payload, Reply, new_request_id, now
from servekit.core.context import CURRENT
from servekit.core.job import JOBS, WAIT_S, WAIT_SLACK_S, JobEvent, JobQuery, JobStatus
from servekit.errors import Conflict, DeadlineExceeded, ReplicaLost, Unavailable
from servekit.jobs.follow import follow
from servekit.runtime.handle import RemoteMethod
from servekit.runtime.remote import RemoteCall, RemoteStream
from servekit.spec.body import media_type

_pack = msgspec.msgpack.encode
_AGAIN_S: Final = 0.5
_GIVE_UP_S: Final = 60.0
"""How long nobody may answer before the wait for a result fails."""


class RemoteTask(RemoteMethod):
    """One task of a service somewhere else.

    Attributes:
        key: Idempotency key of its submissions; "" makes one up for each.
        patience_s: Longest wait of `remote` for a result; None has no limit.
    """

    key = ""
    patience_s: float | None = None

    def options(
        self,
        *,
        timeout_s: float | None = None,
        retries: int | None = None,
        priority: int = 0,
        affinity_key: str | None = None,
    ) -> Self:
        """Return this task with other settings for its calls; see `Bound.options`."""
        again = super().options(retries=retries, priority=priority, affinity_key=affinity_key)
        again.key = self.key
        again.patience_s = self.patience_s if timeout_s is None else timeout_s
        return again

    def keyed(self, idempotency_key: str) -> Self:
        """Return this task with a key; see `BoundTask.keyed`."""
        again = self.options()
        again.key = idempotency_key
        return again

    def submit(self, *args: Any, **kwargs: Any) -> RemoteCall:
        """Queue a job; the value of the call is a `RemoteJob`."""
        call, handler = self._submission(args, kwargs)
        return RemoteCall(call, handler, self._job, self._loop)

    def remote(self, *args: Any, **kwargs: Any) -> RemoteCall:
        """Queue a job and wait for its result."""
        served = CURRENT.get()
        deadline = None if served is None else served.deadline
        if self.patience_s is not None:
            deadline = min(now() + self.patience_s, deadline or inf)

        call, handler = self._submission(args, kwargs)

        async def submit_and_wait(call: Call) -> Reply:
            reply = await handler(call)
            assert reply.payload is not None
            return await self._job(reply.payload).wait(deadline)

        return RemoteCall(call, submit_and_wait, self._decode, self._loop)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Queue a job and wait for its result, in the declared form."""
        if self._endpoint.is_async:
            return self._awaited(args, kwargs)
        return self.remote(*args, **kwargs).result()

    async def _awaited(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await self.remote(*args, **kwargs)

    def _submission(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Handler]:
        call, handler = self._call(args, kwargs)
        # With a key of its own a submission may be sent again when its replica is lost.
        call.headers = _pack([["idempotency-key", self.key or os.urandom(16).hex()]])
        call.idempotent = True
        return call, handler

    def query(self, verb: str, query: JobQuery) -> Call:
        """Return a call that asks about jobs."""
        served = CURRENT.get()
        call = Call(
            self._service,
            f"{self._endpoint.name}{JOBS}{verb}",
            request_id=new_request_id() if served is None else served.request_id,
            internal=self._internal,
            idempotent=verb != "/retry",
        )
        call.payload = Payload(JSON, (msgspec.json.encode(query),))
        call.deadline = None if self._timeout_s is None else now() + self._timeout_s
        return call

    def _job(self, payload: Payload) -> "RemoteJob":
        return RemoteJob(_status(payload), self, self._handler, self._decode, self._loop)


class RemoteJob:
    """A job that was submitted; see `servekit.spec.descriptor.Job`.

    Args:
        accepted: Its status when it was kept.
        task: Makes the calls.
        handler: Answers them.
        decode: Turns the answer into the result.
        loop: Where the handler runs.

    Attributes:
        id: The job's id.
    """

    def __init__(
        self,
        accepted: JobStatus,
        task: RemoteTask,
        handler: Handler,
        decode: Callable[[Payload], Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.id = accepted.id
        self._task = task
        self._handler = handler
        self._decode = decode
        self._loop = loop

    def __await__(self) -> Any:
        return self._result().__await__()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result; see `Job.result`."""
        return self._result().result(timeout)

    def status(self) -> RemoteCall:
        """Ask where it is."""
        return self._ask("/get")

    def cancel(self) -> RemoteCall:
        """Drop it if it is queued, else ask it to stop."""
        return self._ask("/cancel")

    def retry(self) -> RemoteCall:
        """Queue it again."""
        return self._ask("/retry")

    def events(self) -> RemoteStream:
        """Read its events."""

        def ask(after: int) -> Call:
            call = self._task.query("/events", JobQuery(id=self.id, after=after))
            call.deadline = None
            return call

        async def read(_: Call) -> Reply:
            return Reply(stream=_chunks(follow(self._handler, ask, give_up_s=_GIVE_UP_S)))

        return RemoteStream(ask(0), read, _event, self._loop)

    async def wait(self, deadline: float | None = None) -> Reply:
        """Return the answer that has the result, on the handler's loop.

        Raises:
            CallError: The job failed, or the deadline passed.
        """
        reached = now()
        while True:
            left = WAIT_S if deadline is None else min(WAIT_S, deadline - now())
            if left <= 0:
                raise DeadlineExceeded(f"job {self.id} goes on; its result was not waited for")
            call = self._task.query("/result", JobQuery(id=self.id, wait_s=left))
            call.deadline = now() + left + WAIT_SLACK_S
            try:
                return await self._handler(call)
            except Conflict as error:
                if error.retry_after_s is None:
                    raise
                reached = now()
            except (Unavailable, ReplicaLost):
                if now() - reached > _GIVE_UP_S or await self._has_failed():
                    raise
                await asyncio.sleep(_AGAIN_S)  # it restarts; its jobs are kept

    async def _has_failed(self) -> bool:
        """Whether such an error is the job's own, and not that of asking for it."""
        try:
            reply = await self._handler(self._task.query("/get", JobQuery(id=self.id)))
        except (Unavailable, ReplicaLost):
            return False
        assert reply.payload is not None
        return _status(reply.payload).status == "failed"

    def _result(self) -> RemoteCall:
        async def wait(_: Call) -> Reply:
            return await self.wait()

        call = self._task.query("/result", JobQuery(id=self.id))
        return RemoteCall(call, wait, self._decode, self._loop)

    def _ask(self, verb: str) -> RemoteCall:
        call = self._task.query(verb, JobQuery(id=self.id))
        return RemoteCall(call, self._handler, _status, self._loop)

    def __repr__(self) -> str:
        return f"<job {self.id}>"


def _status(payload: Payload) -> JobStatus:
    decode = (
        msgspec.msgpack.decode
        if media_type(payload.content_type) == MSGPACK
        else msgspec.json.decode
    )
    return decode(bytes(payload.segments[0]), type=JobStatus)


async def _chunks(events: AsyncGenerator[tuple[int, Payload]]) -> AsyncGenerator[Payload]:
    async with aclosing(events):
        async for _, chunk in events:
            yield chunk


def _event(payload: Payload) -> JobEvent:
    return msgspec.json.decode(bytes(payload.segments[0]), type=JobEvent)
