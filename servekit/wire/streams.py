"""Both ends of one stream of chunks, with credit-based back-pressure.

The sender has a `WINDOW` of credit, in bytes; a chunk costs its own bytes and `PER_CHUNK` more. The
reader grants them again as it takes the chunks, half a window at a time. So a slow reader holds the
generator back, and neither many chunks nor large ones pile up in between.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Self

from servekit.core.call import Buffer, Payload
from servekit.errors import CallError

WINDOW: Final = 2 * 1024 * 1024
"""Credit of a sender before the reader has taken a chunk; the last chunk may overdraw it."""
PER_CHUNK: Final = 16 * 1024
"""What each chunk costs beside its bytes, so that at most 128 are under way."""


def cost(chunk: Any) -> int:
    """Return the credit that a chunk takes; a value that needs no wire has no bytes."""
    if not isinstance(chunk, Payload):
        return PER_CHUNK
    segments = chunk.segments
    return PER_CHUNK + (len(segments[0]) if len(segments) == 1 else sum(map(len, segments)))


class IncomingStream:
    """The reading end: an async iterator of payloads, or of values that need no wire.

    Args:
        loop: The loop it is read on.
        grant: Sends that much credit to the sender.
        finish: Called once when the stream is over; True when it was closed before its end, so
            the sender must be told to stop.
        deadline: When it ends with an error, on `now`'s clock; for the caller.
        granted: Credit of the sender before the first chunk is asked for.
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
        self._chunks: deque[Any] = deque()
        self._held = 0  # cost of the chunks that are here
        self._taken = WINDOW - granted
        self._ended = self._finished = False
        self._error: CallError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, value: Any) -> None:
        """Take one chunk as it is, from a sender in this process."""
        if not self._ended:
            self._chunks.append(value)
            self._held += cost(value)
            self._wake()

    def push(self, header: Buffer, segments: list[Buffer]) -> None:
        """Take one chunk of any number of segments from the wire; the header is its media type."""
        self.put(Payload(str(header, "ascii"), segments))

    def push_each(self, header: Buffer, segments: list[Buffer]) -> None:
        """Take as many chunks as there are segments, all of one media type."""
        if not self._ended:
            content_type = str(header, "ascii")
            self._chunks.extend([Payload(content_type, (segment,)) for segment in segments])
            self._held += PER_CHUNK * len(segments) + sum(map(len, segments))
            self._wake()

    def end(self, error: CallError | None = None) -> None:
        """Take the end from the sender; the error, if any, is raised behind the last chunk."""
        if not self._ended:
            self._ended, self._error = True, error
            self._finish_once(closed_early=False)
            self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while not self._chunks:
            self._took(0)
            if self._ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        chunk = self._chunks.popleft()
        self._took(cost(chunk))
        return chunk

    def take_ready(self) -> list[Payload]:
        """Return the chunks that are already here, without waiting."""
        ready = list(self._chunks)
        self._chunks.clear()
        self._took(self._held)
        return ready

    def _took(self, spent: int) -> None:
        self._held -= spent
        self._taken += spent
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


class Window:
    """The sender's view of what the reader has room for.

    Args:
        loop: The loop it is waited for on.
        granted: Credit before the reader asks for more.

    Attributes:
        credit: A chunk of whatever size may be sent while it is above 0.
    """

    __slots__ = ("_loop", "_waiter", "credit")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, granted: int = WINDOW) -> None:
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self.credit = granted

    def grant(self, credit: int) -> None:
        """Take note that the reader has room for `credit` more."""
        self.credit += credit
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, chunk: Any) -> None:
        """Wait until a chunk may be sent, and take its credit; a large one may overdraw it."""
        while self.credit <= 0:
            self._waiter = self._loop.create_future()
            await self._waiter
        self.credit -= cost(chunk)


class OutgoingStream(Window):
    """The sending end: takes credit for each chunk, and joins chunks of one loop turn.

    Args:
        loop: The loop it is written on.
        send: Takes the chunks that leave together; all have one segment and one media type,
            unless there is only one.
        granted: Credit before the reader asks for more.
    """

    __slots__ = ("_ready", "_send")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[list[Payload]], None],
        *,
        granted: int = WINDOW,
    ) -> None:
        super().__init__(loop, granted=granted)
        self._send = send
        self._ready: list[Payload] = []

    async def send_all(
        self, chunks: AsyncIterator[Payload], blocked: Callable[[], asyncio.Future[None] | None]
    ) -> None:
        """Send chunks as they come and the reader wants them.

        Args:
            chunks: What to send; the caller closes it.
            blocked: Returns what to wait for while the peer does not read, else None.
        """
        async for chunk in chunks:
            if self.credit > 0:  # as nearly always: then without a coroutine
                self.credit -= cost(chunk)
            else:
                await self.take(chunk)
            # Within a turn the peer is as it was when the turn's first chunk was made.
            if not self._ready and (blockage := blocked()) is not None:
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
