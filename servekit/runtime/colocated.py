"""Calls of a service in this process: a `Handler` that behaves like a wire, without the bytes.

Arguments and results are handed over as they are. The rest is as between two processes: the callee
runs in a task and a context of its own, the caller's end (its deadline, or that it leaves) cancels the
callee and doesn't wait for it, errors are what the wire would have made of them, and a stream, in
either direction, is a bounded number of chunks ahead of its reader.
"""

import asyncio
import weakref
from contextvars import copy_context
from functools import partial
from typing import Any

from servekit.core.aio import Tasks, aclose
from servekit.core.call import Call, Handler, Reply
from servekit.errors import (
    BadRequest,
    CallError,
    Cancelled,
    DeadlineExceeded,
    ExecutionError,
    call_error,
)
from servekit.observe.log import get_logger
from servekit.wire.streams import IncomingStream, Window

_log = get_logger("servekit.replica")


class Colocated:
    """The calling side and the serving side of a service beside its caller.

    Args:
        replica: Answers the calls, which bring their `arguments`.
    """

    def __init__(self, replica: Handler) -> None:
        self._replica = replica
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # the callee doesn't see its caller's context variables
        self._tasks = Tasks()

    async def __call__(self, call: Call) -> Reply:
        """Answer a call; cancelling the wait cancels the work.

        Raises:
            CallError: As the replica raised it; `DeadlineExceeded` when the deadline passed first.
        """
        remaining = call.remaining()
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded("the deadline passed before the call was sent", started=False)
        outcome: asyncio.Future[Reply] = self._loop.create_future()
        feed = None if call.chunks is None else _Feed(self._loop, call)
        task = self._tasks.spawn(self._serve(call, outcome), context=self._context.copy())
        if feed is not None:
            task.add_done_callback(feed.stop)
        timer = None
        if remaining is not None:
            timer = self._loop.call_later(remaining, _expire, outcome, task)
        try:
            return await outcome
        except BaseException:
            # Not at once: a task cancelled before it began never runs, and is never counted.
            self._loop.call_soon(_cancel_once, task)
            if feed is not None:
                feed.stop()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def close(self) -> None:
        """Cancel what still runs."""
        await self._tasks.close()

    async def _serve(self, call: Call, outcome: "asyncio.Future[Reply]") -> None:
        try:
            reply = await self._replica(call)
        except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001  (the last boundary)
            if not outcome.done():
                outcome.set_exception(_as_sent(error, call))
            return
        if reply.stream is None:
            if not outcome.done():
                outcome.set_result(reply)
            return
        if outcome.done():
            await reply.aclose()
            return
        window = Window(self._loop)
        task = asyncio.current_task()
        assert task is not None
        stream = IncomingStream(self._loop, window.grant, partial(_left, task), call.deadline)
        timer = None
        if (remaining := call.remaining()) is not None:
            timer = self._loop.call_later(remaining, _expire_stream, weakref.ref(stream), task)
        outcome.set_result(Reply(stream=stream, queue_s=reply.queue_s))
        reader = weakref.ref(stream)
        del outcome, stream  # one that its reader dropped is closed
        failure: CallError | None = None
        try:
            try:
                async for chunk in reply.stream:
                    await window.take(chunk)
                    if (taker := reader()) is not None:
                        taker.put(chunk)
                        del taker
            finally:
                await reply.aclose()
        except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001  (the last boundary)
            failure = _as_sent(error, call)
        finally:
            if timer is not None:
                timer.cancel()
            if (taker := reader()) is not None:
                taker.end(failure)


class _Feed:
    """A call's input: read in a task of the caller's, from when the callee asks for it.

    The call's `chunks` are then what has been read.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Call) -> None:
        assert call.chunks is not None
        self._loop = loop
        self._call = call
        self._chunks = call.chunks
        self._context = copy_context()
        self._window = Window(loop, granted=0)
        self._task: asyncio.Task[None] | None = None
        self._reader = call.chunks = IncomingStream(loop, self._grant, lambda _: None, granted=0)

    def _grant(self, count: int) -> None:
        self._window.grant(count)
        if self._task is None:
            self._task = self._loop.create_task(self._run(), context=self._context)

    def stop(self, *_: object) -> None:
        """Stop reading: nobody wants the rest."""
        self._reader.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            async for chunk in self._chunks:
                await self._window.take(chunk)
                self._reader.put(chunk)
            self._reader.end()
        except CallError as error:
            self._reader.end(_as_sent(error, self._call))
        except Exception as error:  # noqa: BLE001  (whoever made the chunks)
            _log.exception("input failed", error=error, request_id=self._call.request_id)
            self._reader.end(BadRequest("the input broke off", reason="input_failed"))
        finally:
            await aclose(self._chunks)


def _as_sent(error: BaseException, call: Call) -> CallError:
    """Return an error as it comes out of the wire: of the class that its code says, without a cause."""
    if isinstance(error, asyncio.CancelledError):
        return Cancelled("the call was cancelled")
    if not isinstance(error, CallError):
        _log.exception("call failed", error=error, request_id=call.request_id)
        return ExecutionError(f"internal error: {type(error).__name__}")
    return call_error(
        error.code,
        error.message,
        reason=error.reason,
        retry_after_s=error.retry_after_s,
        fields=[dict(field) for field in error.fields],
        started=error.started,
    )


def _expire(outcome: "asyncio.Future[Reply]", task: "asyncio.Task[Any]") -> None:
    if not outcome.done():
        outcome.set_exception(DeadlineExceeded("the deadline passed while the call ran"))
        _cancel_once(task)


def _expire_stream(reader: "weakref.ref[IncomingStream]", task: "asyncio.Task[Any]") -> None:
    if (stream := reader()) is not None:
        stream.end(DeadlineExceeded("the deadline passed while the call ran"))
    _cancel_once(task)


def _left(task: "asyncio.Task[Any]", closed_early: bool) -> None:
    if closed_early:
        _cancel_once(task)


def _cancel_once(task: "asyncio.Task[Any]") -> None:
    """Cancel a task, but not again: that would cut its cleaning up short."""
    if not task.cancelling():
        task.cancel()
