"""Running one endpoint's calls one by one: whole answers and streams, async and in threads.

A runner decodes the body into the declared types, waits for a slot, runs the user's function, and
encodes the result.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from functools import partial
from typing import Any, Final, Self, TypeAlias

from servekit.core.aio import aclose
from servekit.core.call import EMPTY, JSON, MSGPACK, Call, Payload, Reply, now
from servekit.core.context import RequestContext
from servekit.errors import CallError, Cancelled, DeadlineExceeded, ExecutionError
from servekit.observe.log import get_logger
from servekit.runtime.admission import Admission, still_in_time
from servekit.runtime.form import drop
from servekit.runtime.inbox import inbox
from servekit.runtime.meter import Meter
from servekit.runtime.slots import Slots
from servekit.runtime.threads import Threads
from servekit.spec.body import negotiate
from servekit.spec.definition import EndpointDefinition
from servekit.spec.schema import Arguments

Runner: TypeAlias = Callable[[Call, RequestContext], Awaitable[Reply]]
"""Answers the calls of one endpoint; the context, which is current, is that of the call."""

_NONE_YET: Final = object()
_log = get_logger("servekit.replica")


class NotRun(Exception):
    """Comes from a thread instead of what user code returns or raises, as it was not run at all."""

    def __init__(self, why: CallError) -> None:
        super().__init__(why)
        self.why = why


def masked(error: BaseException, where: str, request_id: str) -> CallError:
    """Return what the caller may see of an exception of user code; the log gets all of it."""
    if isinstance(error, NotRun):
        return error.why
    if isinstance(error, CallError):
        error.started = True  # this call has, though one that it made may not
        return error
    _log.exception("user code raised", error=error, where=where, request_id=request_id)
    return ExecutionError(
        f"{where} raised {type(error).__name__}; the server's log has it under the request id"
    )


class Endpoint:
    """What unary and stream endpoints share.

    Args:
        instance: The service object.
        definition: The endpoint.
        slots: Limits how many calls run at once.
        threads: Where sync functions run.
        meter: Gets the figures.
    """

    def __init__(
        self,
        instance: object,
        definition: EndpointDefinition,
        slots: Slots,
        threads: Threads,
        meter: Meter,
    ) -> None:
        self._fn: Callable[..., Any] = partial(definition.fn, instance)
        self._is_async = definition.is_async
        self._media_type = definition.media_type
        self._where = definition.where
        self._input, self._output = definition.schemas
        self._inbound = self._input.inbound
        self._threads = threads
        self._meter = meter
        self._admission = Admission(slots, meter)

    def _encode(self, value: Any, call: Call) -> Payload:
        media_type = self._media_type
        if not media_type or call.internal:
            return self._output.encode(value, accept=call.accept, internal=call.internal)
        if negotiate(call.accept, (media_type, JSON, MSGPACK)) != media_type:
            return self._output.encode(value, accept=call.accept)
        self._output.encode(value, internal=True)  # it is what was declared: str or bytes
        return Payload(media_type, (value.encode() if isinstance(value, str) else value,))

    def _decode(self, call: Call, given: Arguments | None) -> Arguments:
        """Decode a call that there is room for, unless it brought its arguments as they are."""
        try:
            self._admission.check()
            arguments = given or self._input.decode(call.payload, internal=call.internal)
        except CallError:
            drop(call)
            raise
        # A context may outlive the call, but bodies and files must not.
        if given is None:
            call.payload = EMPTY
        else:
            call.arguments = None
        if self._inbound is not None:
            chunks = inbox(self._inbound, call, is_async=self._is_async, decoded=given is not None)
            arguments[1][self._inbound.name] = chunks
        return arguments

    def _in_thread(self, context: RequestContext, work: Callable[[], Any]) -> "asyncio.Future[Any]":
        """Run sync work in a thread, which holds its slot until it has really ended."""

        def run() -> Any:
            if context.cancelled:
                raise NotRun(Cancelled("the caller left before the call ran", started=False))
            try:
                still_in_time(context.call, "in line for a thread")
            except DeadlineExceeded as error:
                raise NotRun(error) from None
            return work()

        future = self._threads.submit(run)
        future.add_done_callback(self._thread_ended)
        return future

    def _thread_ended(self, future: "asyncio.Future[Any]") -> None:
        self._admission.leave()
        if not future.cancelled():
            future.exception()  # seen, also when nobody waits any more


class Unary(Endpoint):
    """Calls of an endpoint that answers once."""

    async def __call__(self, call: Call, context: RequestContext) -> Reply:
        """Answer one call.

        Raises:
            CallError: The input is wrong, there is no room, time is up, or user code raised.
        """
        given = call.arguments
        args, kwargs = self._decode(call, given)
        admission = self._admission
        waited = 0.0 if admission.enter(call) else await admission.wait(call)
        started = now()
        try:
            if self._is_async:
                try:
                    value = await self._fn(*args, **kwargs)
                finally:
                    self._admission.leave()
            else:
                work = self._in_thread(context, lambda: self._fn(*args, **kwargs))
                value = await asyncio.shield(work)
            self._meter.ran(now() - started, admission.slots.running + 1)
        except asyncio.CancelledError:
            context.cancelled = True
            raise
        except Exception as error:
            raise masked(error, self._where, call.request_id) from error
        if given is not None:
            return Reply(value=value, queue_s=waited)
        return Reply(self._encode(value, call), queue_s=waited)


class Stream(Endpoint):
    """Calls of an endpoint that yields chunks; each holds its slot until it is closed."""

    async def __call__(self, call: Call, context: RequestContext) -> Reply:
        """Start one stream, and return when its first chunk is there.

        So an error before the first chunk is a plain failed call, with a status of its own.

        Raises:
            CallError: The input is wrong, there is no room, time is up, or user code raised.
        """
        given = call.arguments
        args, kwargs = self._decode(call, given)
        admission = self._admission
        waited = 0.0 if admission.enter(call) else await admission.wait(call)
        values: AsyncIterator[Any]
        if self._is_async:
            try:
                values, release = self._fn(*args, **kwargs), admission.leave
            except Exception as error:  # a plain function that returns an iterator
                self._admission.leave()
                raise masked(error, self._where, call.request_id) from error
        else:
            values, release = Pump(partial(self._fn, *args, **kwargs), context), None
            self._in_thread(context, values.run).add_done_callback(values.ended)

        encode = partial(self._output.encode, accept=call.accept, internal=call.internal)
        form = encode if given is None else _as_it_is
        chunks = Chunks(values, form, context, where=self._where, release=release)
        try:
            await chunks.start()
        except BaseException:
            await chunks.aclose()
            raise
        return Reply(stream=chunks, queue_s=waited)


def _as_it_is(value: Any) -> Any:
    return value


class Chunks:
    """The chunks of one stream, encoded; ends its work and gives its slot back when closed."""

    def __init__(
        self,
        values: AsyncIterator[Any],
        encode: Callable[[Any], Any],
        context: RequestContext,
        *,
        where: str,
        release: Callable[[], None] | None,
    ) -> None:
        self._values = values
        self._encode = encode
        self._context = context
        self._where = where
        self._release = release
        self._first: Any = _NONE_YET
        self._closed = False

    async def start(self) -> None:
        """Wait for the first chunk, or the end of an empty stream."""
        try:
            self._first = await anext(self)
        except StopAsyncIteration:
            await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._first is not _NONE_YET:
            first, self._first = self._first, _NONE_YET
            return first
        if self._closed:
            raise StopAsyncIteration
        try:
            return self._encode(await anext(self._values))
        except (StopAsyncIteration, asyncio.CancelledError):
            raise
        except Exception as error:
            raise masked(error, self._where, self._context.request_id) from error

    async def aclose(self) -> None:
        """End the work; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._context.cancelled = True
        try:
            await aclose(self._values)
        finally:
            if self._release is not None:
                self._release()


class Pump:
    """Reads a sync generator in a thread, a bounded number of values ahead of its consumer.

    Args:
        generate: Returns the generator.
        context: Tells when the consumer has left; looked at between two values.
    """

    _AHEAD = 16

    def __init__(self, generate: Callable[[], Iterator[Any]], context: RequestContext) -> None:
        self._loop = asyncio.get_running_loop()
        self._generate = generate
        self._context = context
        self._room = threading.Semaphore(self._AHEAD)
        self._values: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._over: asyncio.Future[Any] | None = None

    def run(self) -> None:
        """Generate; runs in a thread."""
        values = self._generate()
        try:
            for value in values:
                self._values.append(value)
                self._loop.call_soon_threadsafe(self._wake)
                self._room.acquire()
                if self._context.cancelled:
                    return
        finally:
            if isinstance(values, Generator):
                values.close()

    def ended(self, future: "asyncio.Future[Any]") -> None:
        """Take note that the thread has ended."""
        self._over = future
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while not self._values:
            if self._over is not None:
                self._over.result()
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        self._room.release()
        return self._values.popleft()

    async def aclose(self) -> None:
        """Let the thread go on to see that nobody listens."""
        self._room.release()
