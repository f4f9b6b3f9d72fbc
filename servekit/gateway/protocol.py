"""uvicorn's HTTP protocol, with a shorter way for endpoints.

A request for an endpoint becomes an `Exchange`; everything else goes to the ASGI app as ever.
Added to both: a limit on the size of a head, errors in our form, work that ends when its client
leaves, and one timer per connection instead of one per request.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable
from math import inf
from typing import Any, Final, Protocol

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from servekit.core.call import JSON, Buffer
from servekit.errors import BadRequest, CallError, HeadTooLarge
from servekit.gateway.exchange import Exchange
from servekit.gateway.routes import Methods
from servekit.gateway.upload import Upload

_MAX_HEAD_BYTES: Final = 64 * 1024
_LARGE: Final = 16 * 1024


class Endpoints(Protocol):
    """Who answers the requests for endpoints."""

    def find(self, url: bytes) -> tuple[Methods | None, bytes]:
        """Return the routes of a URL's path, if it has any, and the query."""
        ...

    def answer(self, exchange: Exchange) -> Awaitable[None]:
        """Answer a request."""
        ...


class HttpProtocol(HttpToolsProtocol):
    """One client's connection; httptools itself would take headers of any size.

    Args:
        endpoints: Answers the requests for endpoints.
        config: uvicorn's.
        server_state: uvicorn's.
        app_state: uvicorn's.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop or asyncio.get_running_loop())
        self.parser: Any
        self.cycle: Any = None  # uvicorn's, or an exchange
        self.pipeline: deque[tuple[Any, Any]]
        self._endpoints = endpoints
        self._in_head = False
        self._head_bytes = 0
        self._too_large = False
        self._idle_since = inf
        self._exchange: Exchange | None = None

    # -- bytes -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Take bytes; refuse a head that goes on for too long."""
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head:
            self._head_bytes = 0
            if len(data) >= _LARGE and self._exchange is not None and not self.pipeline:
                self._upload(self._exchange)
        elif self._head_bytes > _MAX_HEAD_BYTES:
            self._too_large = True
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Answer a request that can't be read, and hang up."""
        error: CallError = BadRequest(msg)
        if self._too_large:
            error = HeadTooLarge(f"the request line and headers are over {_MAX_HEAD_BYTES} bytes")
        body = msgspec.json.encode({"error": error.details()})
        head = f"content-type: {JSON}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head.encode() + body)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the work for a client that is gone."""
        for cycle in (self.cycle, *(queued for queued, _ in self.pipeline)):
            if isinstance(cycle, Exchange):
                cycle.leave()
        if isinstance(self.cycle, Exchange):
            self.cycle = None
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()

    # -- the parser's callbacks --------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start to read a head."""
        self._in_head = True
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_headers_complete(self) -> None:
        """Take a request whose head is whole."""
        self._in_head = False
        # Only bytes that may have been a body have to be told from those of the head.
        if self._head_bytes > _MAX_HEAD_BYTES:
            size = sum(len(name) + len(value) for name, value in self.headers) + len(self.url)
            if size > _MAX_HEAD_BYTES:
                self._too_large = True
                raise ValueError("the request's head is too large")
        methods, query = self._endpoints.find(self.url)
        if methods is None:
            self._exchange = None
            self._to_app()
            return
        parser, previous = self.parser, self.cycle
        http10 = parser.get_http_version() == "1.0"
        self.cycle = self._exchange = exchange = Exchange(
            self,
            methods,
            parser.get_method(),
            query,
            self.headers,
            http10=http10,
            keep_alive=not http10 and parser.should_keep_alive(),
            expects=self.expect_100_continue,
        )
        if previous is None or previous.response_complete:
            self._start_asgi_task(exchange, self._endpoints.answer)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self._endpoints.answer))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if isinstance(cycle, Exchange):
            cycle.task = task

    def _to_app(self) -> None:
        """Let uvicorn handle the head, as if it had seen all of it."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        if self._exchange is not None:
            self._exchange.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Take the end of a request."""
        if self._exchange is not None:
            self._exchange.end()
        else:
            super().on_message_complete()

    def _upload(self, exchange: Exchange) -> None:
        """Read the rest of a large body past the parser."""
        body = exchange.room()
        if body is not None and not self.transport.is_closing():
            Upload(self.transport, self, exchange, body, self._uploaded)

    def _uploaded(self) -> None:
        # The old parser still waits for the body, of which it saw only the beginning.
        self.parser = httptools.HttpRequestParser(self)

    # -- what an exchange needs --------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        """Send bytes."""
        self.transport.write(data)

    def status_line(self, status: int) -> bytes:
        """Return the first line of an answer, with the headers that all answers have."""
        return STATUS_LINE[status] + _lines(self.server_state)

    async def drain(self) -> None:
        """Wait until the client reads again."""
        if self.flow.write_paused:
            await self.flow.drain()

    def answered(self, *, keep_alive: bool) -> None:
        """Go on with the next request, or hang up."""
        if not keep_alive:
            self.transport.close()
        self.on_response_complete()

    def abort(self) -> None:
        """Hang up within an answer."""
        self.transport.close()

    # -- idle connections --------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Start the next request, if it is here already."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._watch(self.timeout_keep_alive)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_since = inf

    def _watch(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def timeout_keep_alive_handler(self) -> None:
        """Hang up if the connection has been idle for long enough."""
        self.timeout_keep_alive_task = None
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left <= 0:
            super().timeout_keep_alive_handler()
        elif left < inf:  # a busy one is watched again after its answer
            self._watch(left)


class _Lines:
    source: list[tuple[bytes, bytes]] | None = None
    text = b""


def _lines(state: ServerState) -> bytes:
    """Return uvicorn's default headers (the date) as text, which changes once per second."""
    headers = state.default_headers
    if headers is not _Lines.source:
        _Lines.source = headers
        _Lines.text = b"".join([b"%b: %b\r\n" % header for header in headers])
    return _Lines.text
