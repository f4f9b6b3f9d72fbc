"""uvicorn's HTTP protocol, with a shorter way for endpoints.

A request for an endpoint becomes an `Exchange`; everything else goes to the ASGI app as ever.
Added to both: limits on what precedes and follows a body, errors in our form and in their turn,
work that ends when its client leaves, clients that must read before they may ask again, and one
timer per connection instead of one per request.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Final

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from servekit.core.call import Buffer, new_request_id
from servekit.errors import BadRequest, CallError, HeadTooLarge
from servekit.gateway.answer import error_answer
from servekit.gateway.continuation import Continuation, head_without_upgrade
from servekit.gateway.exchange import Exchange
from servekit.gateway.http import Gateway
from servekit.gateway.outflow import Outflow
from servekit.gateway.slow import ReaderGuard, SenderGuard
from servekit.gateway.upgrade import is_websocket, to_websocket

_MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_FIELDS: Final = 256
_MAX_BEHIND: Final = 64 * 1024
"""What is read behind a request that runs: only who reads on sees that the client has left."""
_FRESH_S: Final = 1
"""What a client that has just connected gets to begin a request when the gateway ends."""


class HttpProtocol(Outflow):
    """One client's connection; httptools itself would take headers of any size.

    Args:
        gateway: Answers the requests for endpoints.
        config: uvicorn's.
        server_state: uvicorn's.
        app_state: uvicorn's.
        _loop: The loop it belongs to; None is the running one.
    """

    def __init__(
        self,
        gateway: Gateway,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop or asyncio.get_running_loop())
        self._gateway = gateway
        self.parser: Any
        # The request that is parsed: uvicorn's cycle, or an exchange.
        self.cycle: Any = None
        self._exchange: Exchange | None = None
        self._in_head = self._in_body = self._upgrades = self._is_websocket = False
        # Bytes since the last that belonged to a body or ended a head; in the packet at hand; in
        # the packet in which the head began.
        self._loose_bytes = self._packet = self._first_packet = 0
        # The one that is answered, and those behind it.
        self._running: Any = None
        self.pipeline: deque[tuple[Any, Any]]
        self._behind = 0  # bytes that came while others were in line
        self._entered = False
        self._refusal: bytes | None = None
        self._held = False
        self._idle_since = inf
        self.on_upgrade: Callable[[asyncio.Protocol], None]
        self.sender = SenderGuard(is_held=lambda: self.flow.read_paused, refuse=self._refuse)
        self._reader: ReaderGuard

    # -- bytes -------------------------------------------------------------------------------

    def data_received(self, data: Buffer) -> None:
        """Take bytes; refuse what goes on for too long without being a body."""
        if self._refusal is not None:
            return
        self._packet = len(data)
        self._loose_bytes += len(data)
        self.sender.received += len(data)
        self._feed(data)
        if self._loose_bytes > _MAX_HEAD_BYTES:
            self._refuse(_too_large())
        if self._in_head or self._in_body:
            self.sender.watch(self.loop, in_head=self._in_head)
        if self.pipeline:
            self._hold_back(len(data))

    def _hold_back(self, size: int) -> None:
        """Read on behind a request that runs, but only so far."""
        self._behind += size
        if self._behind > _MAX_BEHIND or self._refusal is not None or self._held:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()  # uvicorn pauses behind a page

    def _feed(self, data: Buffer) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self._is_websocket:
                self.sender.trust()
                if self.timeout_keep_alive_task is not None:
                    self.timeout_keep_alive_task.cancel()
                to_websocket(self, bytes(data[stop.args[0] :]), self.on_upgrade)
                return
            # Nobody here speaks anything else, so the request goes on as what it is.
            self.parser = _parser(Continuation(self))
            self._upgrades = False
            self._feed(head_without_upgrade(self.headers) + data[stop.args[0] :])
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, CallError) else BadRequest("bad request"))
        except httptools.HttpParserError as error:
            self._refuse(BadRequest(f"this is no HTTP request: {str(error)[:100]}"))

    def room(self) -> tuple[bytearray, int] | None:
        """Return a buffer for the rest of a large body, and how much of it is filled already."""
        exchange = self._exchange
        if exchange is None or self.pipeline or self.transport.is_closing():
            return None
        return exchange.room()

    def body_received(self, body: bytearray) -> None:
        """Take a whole body of whose end the parser knows nothing."""
        self.parser = _parser(self)
        self._in_body = False
        self.sender.trust()
        if self._exchange is not None:
            self._exchange.fill(body)

    def _refuse(self, error: CallError) -> None:
        """Answer bytes that are no request, in their turn, and hang up."""
        if self._refusal is not None:
            return
        head, body = error_answer(error, new_request_id())
        end = b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._refusal = self.status_line(error.status) + head + end + body
        if self._in_body:  # then they are what was to be its body
            if self.cycle is not self._running and self.pipeline:
                self._abandon(self.pipeline.popleft()[0])
            else:
                if self._running is None or not self._abandon(self._running):
                    self._refusal = b""  # it has been answered
                self._running = None
        if self._running is None:
            self._hang_up()
        else:
            self.flow.pause_reading()

    def _hang_up(self) -> None:
        if self._refusal and not self.transport.is_closing():
            self.transport.write(self._refusal)
        self.transport.close()

    @staticmethod
    def _abandon(cycle: Any) -> bool:
        """End the work on a request; returns whether another answer may take its place."""
        if isinstance(cycle, Exchange):
            cycle.leave()
            return True
        cycle.disconnected = True
        cycle.message_event.set()
        return not cycle.response_started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, unless it is one too many."""
        super().connection_made(transport)
        self._reader = ReaderGuard(transport)
        refusal = self._gateway.connections.enter(self._address)
        if refusal is not None:
            self._gateway.refused.inc()
            self._refuse(refusal)
            return
        self._entered = True
        self._idle_since = self.loop.time()
        self._watch(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the work for a client that is gone."""
        for cycle in (self._running, self._exchange, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None:
                self._abandon(cycle)
        self.pipeline.clear()
        self.cycle = None
        super().connection_lost(exc)
        self._reader.stop()
        self.sender.trust()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()

    def release(self) -> None:
        """Count the connection no longer."""
        if self._entered:
            self._entered = False
            self._gateway.connections.leave(self._address)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    # -- the parser's callbacks --------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start to read a head."""
        self._in_head = True
        self._first_packet = self._packet
        self._idle_since = inf
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; fields behind a body are dropped."""
        if not self._in_head:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Take a request whose head is whole."""
        # Only where other bytes came with it, its own have to be counted.
        if self._loose_bytes + self._first_packet > _MAX_HEAD_BYTES:
            size = sum(len(name) + len(value) for name, value in self.headers) + len(self.url)
            if size > _MAX_HEAD_BYTES:
                raise _too_large()
        if len(self.headers) > _MAX_FIELDS:
            raise HeadTooLarge(f"{len(self.headers)} header fields are over {_MAX_FIELDS}")
        methods, query = self._gateway.find(self.url)
        self._in_head, self._in_body = False, True
        self._loose_bytes = 0
        self.sender.trust()
        parser, previous = self.parser, self.cycle
        self._upgrades = parser.should_upgrade()
        if self._upgrades and self._running is None and is_websocket(self):
            self._is_websocket = True
            return
        if methods is None:
            self._exchange = None
            self._to_app()
            return
        http10 = parser.get_http_version() == "1.0"
        stays = not (http10 or self._gateway.leaving)
        self.cycle = self._exchange = exchange = Exchange(
            self,
            methods,
            parser.get_method(),
            query,
            self.headers,
            http10=http10,
            keep_alive=stays and parser.should_keep_alive(),
            expects=self.expect_100_continue,
            admitted=self._gateway.guard is None,
        )
        if previous is None or previous.response_complete:
            self._start_asgi_task(exchange, self._gateway.answer)
        else:
            self.pipeline.appendleft((exchange, self._gateway.answer))

    def _to_app(self) -> None:
        """Let uvicorn handle the head, as if it had seen all of it."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()
        if self._gateway.leaving:
            self.leave()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._loose_bytes = 0
        if self._exchange is not None:
            self._exchange.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Take the end of a request."""
        if self._upgrades:
            return  # the end of its head only
        self._in_body = False
        self._loose_bytes = 0
        self.sender.trust()
        if self._exchange is not None:
            self._exchange.end()
        else:
            super().on_message_complete()

    # -- one after the other -----------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if isinstance(cycle, Exchange):
            cycle.task = task

    def on_response_complete(self) -> None:
        """Go on with the next request, once the client reads."""
        self.server_state.total_requests += 1
        self._running = None
        if self.flow.write_paused:
            self._held = True
            self.flow.pause_reading()
        else:
            self._go_on()

    def pause_writing(self) -> None:
        """Take note that the client does not read."""
        super().pause_writing()
        self._reader.start(self.loop)

    def resume_writing(self) -> None:
        """Take note that the client reads again."""
        super().resume_writing()
        self._reader.stop()
        if self._held:
            self._held = False
            self._go_on()

    def _go_on(self) -> None:
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal is not None:
            self._hang_up()
        else:
            self._idle_since = self.loop.time()
            if self.timeout_keep_alive_task is None:
                self._watch(self.timeout_keep_alive)
        if not self.pipeline and self._refusal is None:
            self._behind = 0
            self.flow.resume_reading()

    def _unset_keepalive_if_required(self) -> None:
        """Leave the timer: one connection has one."""

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

    # -- the end -----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Hang up, unless a request is on its way; a client that has just connected will send one."""
        if self._in_head:
            return  # its answer is the last one
        if self.cycle is None and self.loop.time() - self._idle_since < _FRESH_S:
            self.timeout_keep_alive = _FRESH_S
            if self.timeout_keep_alive_task is not None:
                self.timeout_keep_alive_task.cancel()
            self._watch(_FRESH_S)
        else:
            super().shutdown()

    def leave(self) -> None:
        """Hang up behind the answer that is due now; those that come later do so by themselves."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    @property
    def running(self) -> Exchange | str | None:
        """The request that is answered now: for an endpoint, or the path of any other."""
        running = self._running
        if running is None or isinstance(running, Exchange):
            return running
        path: str = running.scope["path"]
        return path


def _parser(callbacks: object) -> Any:
    """Return a parser that is as lenient as uvicorn's own."""
    parser: Any = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the request line and headers are over {_MAX_HEAD_BYTES} bytes")
