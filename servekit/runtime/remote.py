"""Calls and streams under way, from any thread: what `.remote(...)` returns.

The request itself runs on the loop that owns the connections. On that loop it is awaited
directly; on another loop, or in a plain thread, the outcome is handed over.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator, Iterator
from typing import Any, Self

from servekit.core.aio import END, next_or_end, running_loop
from servekit.core.call import Call, Handler, Payload, Reply
from servekit.errors import ServekitError


def _must_not_block(call: Call) -> None:
    if running_loop() is not None:
        raise ServekitError(
            f"{call.service}.{call.endpoint}: waiting here would block the event loop; write "
            "`await ….remote(…)`, or make the calling method a plain `def`"
        )


class Remote:
    """What calls and streams share: the request, and where it runs.

    Args:
        call: The request.
        handler: Answers it.
        decode: Turns an answer, or one chunk, into its value.
        loop: Where the handler runs.
    """

    def __init__(
        self,
        call: Call,
        handler: Handler,
        decode: Callable[[Payload], Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._call = call
        self._handler = handler
        self._decode = decode
        self._loop = loop

    @property
    def request_id(self) -> str:
        """The id under which logs and traces have the call."""
        return self._call.request_id


class RemoteCall(Remote):
    """One call under way: await it on any event loop, or wait for it in any other thread.

    It starts by itself on the loop's next turn. When it is awaited before that, on the loop that
    carries it, it runs within the awaiting task, which saves a task of its own.
    """

    def __init__(
        self,
        call: Call,
        handler: Handler,
        decode: Callable[[Payload], Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(call, handler, decode, loop)
        self._task: asyncio.Task[Any] | None = None
        self._outside: concurrent.futures.Future[Any] | None = None
        self._start: asyncio.Handle | None = None
        if running_loop() is loop:
            self._start = loop.call_soon(self._begin)
        else:
            self._outside = asyncio.run_coroutine_threadsafe(self._run(), loop)

    async def _run(self) -> Any:
        reply = await self._handler(self._call)
        if (payload := reply.payload) is not None:
            return self._decode(payload)
        if reply.stream is None:
            return reply.value
        await reply.aclose()
        raise ServekitError(f"{self._call.service}.{self._call.endpoint} answered a stream")

    def _begin(self) -> None:
        self._start = None
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(_seen)

    def __await__(self) -> Generator[Any, Any, Any]:
        if self._outside is not None:
            return asyncio.wrap_future(self._outside).__await__()
        if asyncio.get_running_loop() is not self._loop:
            raise ServekitError("a call made on one event loop can't be awaited on another")
        if self._start is not None:
            self._start.cancel()
            self._start = None
            return self._run().__await__()
        if self._task is None:
            raise ServekitError(
                f"{self._call.service}.{self._call.endpoint}: a call is awaited twice, or after it "
                "was passed on; keep its value the first time"
            )
        return self._task.__await__()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer, up to `timeout` seconds.

        Raises:
            ServekitError: On a thread that runs an event loop, where waiting would block it.
            TimeoutError: The answer is not there yet; the call goes on.
            CallError: The call failed.
        """
        _must_not_block(self._call)
        if self._outside is None:
            raise ServekitError("the call belongs to an event loop; await it there")
        return self._outside.result(timeout)

    def hand_over(self, handler: Handler) -> Call | None:
        """Return the call for another one to make; None if it has begun, or `handler` has not it."""
        if self._start is None or handler is not self._handler or self._call.chunks is not None:
            return None
        self._start.cancel()
        self._start = None
        return self._call

    def cancel(self) -> bool:
        """Stop the work, wherever it is; False when it is done already."""
        if self._outside is not None:
            return self._outside.cancel()
        if self._start is not None:
            self._start.cancel()
            self._begin()
        return self._task is not None and self._task.cancel()


def _seen(task: "asyncio.Task[Any]") -> None:
    # A call that nobody awaits must not be reported as an exception never retrieved.
    if not task.cancelled():
        task.exception()


class RemoteStream(Remote):
    """The chunks of one call under way, on any event loop or in any other thread.

    It starts with the first chunk that is asked for, and ends with the last one, an error, or by
    being closed; leaving the iteration closes it once nobody refers to it any more.
    """

    _reply: Reply | None = None
    _closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if running_loop() is self._loop:
            return await self._next()
        chunk = await asyncio.wrap_future(self._chunk())
        if chunk is END:
            raise StopAsyncIteration
        return chunk

    async def _next(self) -> Any:
        if self._closed:
            raise StopAsyncIteration
        if self._reply is None:
            self._reply = await self._handler(self._call)
        stream = self._reply.stream
        if stream is None:
            self._closed = True
            raise ServekitError(f"{self._call.service}.{self._call.endpoint} answered no stream")
        return self._decode(await anext(stream))

    def _chunk(self) -> "concurrent.futures.Future[Any]":
        return asyncio.run_coroutine_threadsafe(next_or_end(self), self._loop)

    def iter_sync(self) -> Iterator[Any]:
        """Iterate on a thread that runs no event loop.

        Raises:
            ServekitError: The thread runs one, which waiting would block.
        """
        _must_not_block(self._call)
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        try:
            while (chunk := self._chunk().result()) is not END:
                yield chunk
        finally:
            self.cancel()

    async def aclose(self) -> None:
        """Stop reading; the work behind it is cancelled."""
        if running_loop() is self._loop:
            await self._close()
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._close(), self._loop))

    def cancel(self) -> bool:
        """Stop the work, wherever it is; False when it is closed already."""
        if self._closed or self._loop.is_closed():
            return False
        asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        return True

    async def _close(self) -> None:
        self._closed = True
        if self._reply is not None:
            await self._reply.aclose()
