"""One request for an endpoint, and the way its answer goes back over the client's connection.

The short way around ASGI: no scope, no messages, and an answer leaves as one write. uvicorn's
protocol keeps an `Exchange` where it keeps its own cycle of request and response, so both take
turns on one connection.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

from servekit.core.call import Buffer
from servekit.core.room import room
from servekit.errors import Unavailable
from servekit.gateway.bodies import UNCOUNTED, UNWANTED, Share, declared, too_many_bodies
from servekit.gateway.routes import Route
from servekit.wire.frames import LARGE

_MAX_ROOM: Final = 8 << 20  # what a client may have reserved by a header alone
_MIN_LEFT: Final = 32 * 1024
_MAX_HELD: Final = 256 * 1024
"""Bytes of a body that streams, after which its client has to wait until they are taken."""


class Wire(Protocol):
    """What an exchange needs of the connection it came by."""

    def write(self, data: Buffer) -> None:
        """Send bytes."""
        ...

    def status_line(self, status: int) -> bytes:
        """Return the first line of an answer, with the headers that all answers have."""
        ...

    async def drain(self) -> None:
        """Wait until the client reads again."""
        ...

    def share(self) -> Share:
        """Return an account for a large body."""
        ...

    def pause_reading(self) -> None:
        """Let the client wait with the rest of its body."""
        ...

    def resume_reading(self) -> None:
        """Take more of the body."""
        ...

    def answered(self, *, keep_alive: bool) -> None:
        """Go on with the next request, or hang up."""
        ...

    def abort(self, *, at_once: bool) -> None:
        """Hang up within an answer, with or without what is not sent yet."""
        ...


class Exchange:
    """A request whose head is here, and whose answer is due.

    Args:
        wire: Its connection.
        methods: Routes of its path, by method.
        method: Its method.
        query: Behind the `?` of its URL.
        headers: Names in lower case, with their values.
        http10: The client speaks HTTP/1.0, which knows no chunks.
        keep_alive: The client wants to send more over this connection.
        expects: The client waits for "100 Continue" before it sends the body.
        admitted: Nobody asks who sent it.

    Attributes:
        route: The route of its method; None if the path has no such method.
        admitted: It has been let in; for one that has not, nothing is reserved, and little is read.
        started: When its turn came, on the monotonic clock; 0.0 before.
        request_id: Of the call that it became; "" before its head was found good.
        caller: Whose it is; "" where the gateway asks for no credential.
        streams: The body goes on as it comes, so it is not collected.
        lines: Header lines of its answer, whatever that is.
        share: What its body takes, once that is large.
        response_complete: The answer has been sent; uvicorn's name.
        disconnected: The client is gone; uvicorn's name.
        task: Ended when the client leaves.
    """

    __slots__ = (
        "_body",
        "_chunked",
        "_expects",
        "_held",
        "_http10",
        "_more",
        "_refusal",
        "_size",
        "_waiter",
        "_wire",
        "admitted",
        "caller",
        "disconnected",
        "headers",
        "keep_alive",
        "lines",
        "method",
        "methods",
        "query",
        "request_id",
        "response_complete",
        "route",
        "share",
        "started",
        "streams",
        "task",
    )

    def __init__(
        self,
        wire: Wire,
        methods: Mapping[bytes, Route],
        method: bytes,
        query: bytes,
        headers: list[tuple[bytes, bytes]],
        *,
        http10: bool,
        keep_alive: bool,
        expects: bool,
        admitted: bool = True,
    ) -> None:
        self._wire = wire
        self.methods = methods
        self.method = method
        self.route = methods.get(method)
        self.query = query
        self.headers = headers
        self._http10 = http10
        self.keep_alive = keep_alive
        self._expects = expects
        self.admitted = admitted
        self._body: list[Buffer] = []
        self._size = self._held = 0
        self._more = True
        self.streams = False
        self._waiter: asyncio.Future[None] | None = None
        self._chunked: bool | None = None
        self._refusal: Unavailable | None = None
        self.started = 0.0
        self.request_id = self.caller = ""
        self.share: Share | None = None
        self.lines = b""
        self.response_complete = False
        self.disconnected = False
        self.task: asyncio.Task[Any] | None = None

    def run_asgi(self, app: Callable[["Exchange"], Awaitable[None]]) -> Awaitable[None]:
        """Return the work that answers it; uvicorn's name."""
        return app(self)

    # -- the request, as it comes ------------------------------------------------------------

    def room(self) -> tuple[bytearray, int] | None:
        """Return a buffer of the body's declared size, and how much of it is filled already.

        None when it has no such size, is not admitted or refused, or is nearly here.
        """
        if self.route is None or not self.admitted or self.response_complete or not self._more:
            return None
        headers = dict(self.headers)
        if self._would_stream(headers):
            return None
        size, here = declared(headers), self._size
        if size > min(self.route.max_body, _MAX_ROOM) or size - here < _MIN_LEFT:
            return None
        if not self._admit() or self.share is None:
            return None
        self.share.open_buffer()
        body = room(size)
        body[:here] = b"".join(self._body)
        return body, here

    def fill(self, body: bytearray) -> None:
        """Take the whole body, in place of what was fed of it."""
        if not self.response_complete:
            self._body = [body]
            self._size = len(body)
        if self.share is not None:
            self.share.close_buffer()
        self.end()

    def feed(self, data: bytes) -> None:
        """Take a part of the body; what nobody will read is dropped."""
        self._size += len(data)
        if self.response_complete or self.route is None:
            if not self.admitted and self._size > UNWANTED:
                self._wire.abort(at_once=True)
            return
        if self._size > self.route.max_body:
            self._wake()
        elif self._size <= UNCOUNTED or self._admit():
            self._body.append(data)
            if self.streams:
                self._hold(len(data))

    def _would_stream(self, headers: Mapping[bytes, bytes]) -> bool:
        assert self.route is not None
        return self.route.streams(headers.get(b"content-type", b"").decode("latin-1"))

    def _admit(self) -> bool:
        """Have the body counted, all that is to come of it; returns whether there is room."""
        assert self.route is not None
        if self._refusal is None and not (self.streams and self.share):
            headers = dict(self.headers)
            size = self._size
            if self._would_stream(headers):
                size = _MAX_HELD  # its client keeps the rest
            elif self.admitted:
                size = max(size, min(declared(headers), self.route.max_body))
            try:
                self.count(size)
            except Unavailable as refusal:
                self._refusal = refusal
                self._body.clear()
                self._wake()
        return self._refusal is None

    def count(self, size: int) -> None:
        """Have `size` bytes counted as this request's.

        Raises:
            Unavailable: All bodies together would be too many.
        """
        if self.share is None:
            self.share = self._wire.share()
        if not self.share.hold(size):
            raise too_many_bodies()

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > _MAX_HELD:
            self._wire.pause_reading()
        self._wake()

    def end(self) -> None:
        """Take the end of the body."""
        self._more = False
        self._wake()

    def leave(self) -> None:
        """Take note that the client is gone."""
        if self.share is not None:
            self.share.close_buffer()
            if self.task is None:
                self.share.close()
        if not self.response_complete and not self.disconnected:
            self.disconnected = True
            if self.task is not None:
                # Not at once: a task cancelled before it began never runs, so nobody counts it.
                self.task.get_loop().call_soon(self.task.cancel)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _go_ahead(self) -> None:
        """Count a body that is on its way, now that it is wanted, and ask for it if need be."""
        if not self._more or not (self._expects or self.share):
            return
        if self._admit() and self._expects:
            self._expects = False
            self._wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def read(self, limit: int) -> Buffer | None:
        """Return the whole body, or None once it is larger than `limit` bytes.

        Raises:
            Unavailable: All bodies together would be too many.
        """
        self._go_ahead()
        while self._more and self._size <= limit and self._refusal is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._refusal is not None:
            raise self._refusal
        if self._size > limit:
            return None
        parts = self._body
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def pieces(self) -> AsyncIterator[Buffer | None]:
        """Yield the body as it comes, and None once it is larger than the route takes.

        Raises:
            Unavailable: All bodies together would be too many.
        """
        assert self.route is not None
        self._go_ahead()
        while True:
            held, self._body = self._body, []
            if self._held > _MAX_HELD:
                self._wire.resume_reading()
            self._held = 0
            for piece in held:
                yield piece
            if self._refusal is not None:
                raise self._refusal
            if self._size > self.route.max_body:
                yield None
                return
            if not self._more and not self._body:
                return
            if not self._body:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter

    # -- the answer --------------------------------------------------------------------------

    def send(self, status: int, head: bytes, body: Buffer) -> None:
        """Send an answer of one piece.

        Args:
            status: Status code.
            head: Header lines, each with its line end.
            body: Whole.
        """
        if self.disconnected:
            return
        self._forgo_body()
        start = self._wire.status_line(status)
        close = b"" if self.keep_alive else b"connection: close\r\n"
        length = b"content-length: %d\r\n\r\n" % len(body)
        if self.method == b"HEAD":
            body = b""
        if len(body) < LARGE:
            self._wire.write(b"".join((start, head, self.lines, close, length, body)))
        else:
            self._wire.write(b"".join((start, head, self.lines, close, length)))
            self._wire.write(body)
        self._complete()

    @property
    def begun(self) -> bool:
        """Return whether an answer of many pieces is on its way."""
        return self._chunked is not None

    def send_nothing(self, head: bytes) -> None:
        """Send an answer without content: 204, which has no length either (RFC 9110, 8.6)."""
        if self.disconnected:
            return
        self._forgo_body()
        close = b"" if self.keep_alive else b"connection: close\r\n"
        self._wire.write(b"".join((self._wire.status_line(204), head, close, b"\r\n")))
        self._complete()

    def _forgo_body(self) -> None:
        """Hang up behind an answer if its request's body may come or not, or is too much to drop."""
        if self._more and (
            self._expects or (not self.admitted and declared(dict(self.headers)) > UNWANTED)
        ):
            self.keep_alive = False

    def begin(self, head: bytes) -> None:
        """Start an answer of many pieces; its status is 200."""
        if self.disconnected:
            return
        self._chunked = not self._http10
        parts = [self._wire.status_line(200), head, self.lines]
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n")
        self._wire.write(b"".join(parts))

    async def write(self, data: bytes) -> None:
        """Send a piece, not empty, once the client has read most of those before."""
        await self._wire.drain()
        if not self.disconnected:
            self._wire.write(self._piece(data))

    def interject(self, data: bytes) -> None:
        """Send a piece now, between those of the answer."""
        if not self.disconnected and not self.response_complete:
            self._wire.write(self._piece(data))

    def finish(self, data: bytes = b"") -> None:
        """Send the last piece, and end the answer."""
        if self.disconnected:
            return
        last = self._piece(data) if data else b""
        if self._chunked:
            last += b"0\r\n\r\n"
        if last:
            self._wire.write(last)
        self._complete()

    def _piece(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def abort(self) -> None:
        """End the answer where it is, so that the client sees that it has no end."""
        if not self.response_complete:
            self.response_complete = True
            # Without chunks only a broken connection can be told from the end.
            self._wire.abort(at_once=not self._chunked)

    def _complete(self) -> None:
        self.response_complete = True
        self._body.clear()
        self._wire.answered(keep_alive=self.keep_alive)
