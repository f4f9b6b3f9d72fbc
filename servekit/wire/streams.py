"""Both ends of one stream of chunks, with credit-based back-pressure.

The sender may have `WINDOW` chunks under way; the reader grants more as it takes them, half a
window at a time. So a slow reader holds the generator back, and nothing piles up in between.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Self

from servekit.core.call import Payload
from servekit.errors import CallError

WINDOW = 128
"""Chunks that may be sent before the reader has taken one."""


class IncomingStream:
    """The reading end: an async iterator of payloads.

    Args:
        loop: The loop it is read on.
        grant: Sends credit for that many chunks to the sender.
        finish: Called once when the stream is over; True when it was closed before its end, so
            the sender must be told to stop.
        deadline: When it ends with an error, on `now`'s clock; for the caller.
        granted: Chunks that the sender may send before the first is asked for.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        grant: Callable[[int], None],
        finish: Callable[[bool], None],
        deadline: float | None = None,
        *,
        granted: int = WINDOW,
    ) -> None:
        self._loop = loop
        self._grant = grant
        self._finish = finish
        self.deadline = deadline
        self._chunks: deque[Payload] = deque()
        self._taken = WINDOW - granted
        self._ended = self._finished = False
        self._error: CallError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, chunks: Iterable[Payload]) -> None:
        """Take chunks from the wire."""
        if not self._ended:
            self._chunks.extend(chunks)
            self._wake()

    def end(self, error: CallError | None = None) -> None:
        """Take the end from the wire; the error, if any, is raised behind the last chunk."""
        if not self._ended:
            self._ended, self._error = True, error
            self._finish_once(closed_early=False)
            self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Payload:
        while not self._chunks:
            self._took(0)
            if self._ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        self._took(1)
        return self._chunks.popleft()

    def take_ready(self) -> list[Payload]:
        """Return the chunks that are already here, without waiting."""
        ready = list(self._chunks)
        self._chunks.clear()
        self._took(len(ready))
        return ready

    def _took(self, count: int) -> None:
        self._taken += count
        if self._taken >= WINDOW // 2 and not self._ended:
            self._grant(self._taken)
            self._taken = 0

    async def aclose(self) -> None:
        """Stop reading; the sender's work is cancelled. No error when it has ended."""
        self.cancel()

    def cancel(self) -> None:
        """Stop reading, from the loop's thread."""
        if not self._ended:
            self._ended = True
            self._chunks.clear()
            self._finish_once(closed_early=True)
            self._wake()

    def __del__(self) -> None:
        # An iteration that was left by `break` must not hold a slot in the replica for ever.
        if not self._ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._finish_once, True)

    def _finish_once(self, closed_early: bool) -> None:
        if not self._finished:
            self._finished = True
            self._finish(closed_early)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class OutgoingStream:
    """The sending end: takes credit for each chunk, and joins chunks of one loop turn.

    Args:
        loop: The loop it is written on.
        send: Takes the chunks that leave together; all have one segment and one media type,
            unless there is only one.
        granted: Chunks that may be sent before the reader asks for more.
    """

    __slots__ = ("_loop", "_ready", "_send", "_waiter", "credits")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[list[Payload]], None],
        *,
        granted: int = WINDOW,
    ) -> None:
        self._loop = loop
        self._send = send
        self._ready: list[Payload] = []
        self._waiter: asyncio.Future[None] | None = None
        self.credits = granted

    async def send_all(
        self, chunks: AsyncIterator[Payload], blocked: Callable[[], asyncio.Future[None] | None]
    ) -> None:
        """Send chunks as they come and the reader wants them.

        Args:
            chunks: What to send; the caller closes it.
            blocked: Returns what to wait for while the peer does not read, else None.
        """
        async for chunk in chunks:
            await self.credit()
            if (blockage := blocked()) is not None:
                await asyncio.shield(blockage)
            self.write(chunk)
        self.flush()

    def write(self, chunk: Payload) -> None:
        """Send a chunk, together with those that follow in this turn of the loop."""
        ready = self._ready
        if ready and (
            len(chunk.segments) > 1
            or len(ready[0].segments) > 1
            or chunk.content_type != ready[0].content_type
        ):
            self.flush()
            ready = self._ready
        if not ready:
            self._loop.call_soon(self.flush)
        ready.append(chunk)

    def flush(self) -> None:
        """Send what is held back."""
        if self._ready:
            ready, self._ready = self._ready, []
            self._send(ready)

    def grant(self, count: int) -> None:
        """Take note that the reader wants `count` more chunks."""
        self.credits += count
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def credit(self) -> None:
        """Wait until a chunk may be sent, and take its credit."""
        while self.credits <= 0:
            self._waiter = self._loop.create_future()
            await self._waiter
        self.credits -= 1
