"""The hot path: from a request's bytes to a call, and from its reply to bytes.

It looks the path up in a dict, reads the headers once, hands the body on as it came, and sends the
answer as it is. The replica decodes, validates and encodes.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final
from urllib.parse import unquote_to_bytes

import httptools
import msgspec

from servekit.core.call import Handler, now
from servekit.errors import (
    CallError,
    Cancelled,
    ExecutionError,
    MethodNotAllowed,
    Unauthorized,
    is_shed,
)
from servekit.gateway.answer import (
    Framing,
    choose_framing,
    cut_off,
    send_accepted,
    send_error,
    send_stream,
    send_whole,
)
from servekit.gateway.bodies import Bodies, default_limit
from servekit.gateway.compress import Compressor
from servekit.gateway.connections import Connections
from servekit.gateway.cors import Cors, lines_of
from servekit.gateway.edge import PLAIN, Edge
from servekit.gateway.exchange import Exchange
from servekit.gateway.guard import Guard
from servekit.gateway.request import read_call, read_input, request_id_of
from servekit.gateway.routes import Methods, routes_of
from servekit.observe.families import Families
from servekit.observe.log import get_logger
from servekit.spec.app import AppSpec

_log = get_logger("servekit.gateway")

_MAX_FAILURES: Final = 50
_NO_FAILURES: Final = (200, Unauthorized.status)


class Failure(msgspec.Struct, frozen=True):
    """A call that did not end well.

    Attributes:
        at: Seconds since 1970.
        code: HTTP status.
        reason: `CallError.reason`; "" for an error within a stream, and for a client that left.
    """

    at: float
    route: str
    code: int
    reason: str
    caller: str
    request_id: str


class Gateway:
    """Answers all requests for endpoints.

    Args:
        handler: Takes the calls.
        families: Gets the figures.
        edge: What clients may do.
        guard: Lets requests in; None lets in all.

    Attributes:
        routes: By path.
        failures: The latest, without those that the guard did not know: else strangers could push
            out all others.
        leaving: Each answer is its connection's last, so that clients go elsewhere.
        bodies: What their requests take.
        connections: How many they have.
        refused: Counts those that were too many.
    """

    def __init__(
        self,
        handler: Handler,
        families: Families,
        edge: Edge = PLAIN,
        guard: Guard | None = None,
    ) -> None:
        self.handler = handler
        self.families = families
        self.guard = guard
        self.routes: dict[bytes, Methods] = {}
        self.failures: deque[Failure] = deque(maxlen=_MAX_FAILURES)
        self.leaving = False
        self._cors = Cors.of(edge)
        least = edge.gzip_min_bytes
        self._compressor = None if least is None else Compressor(least)
        self.bodies = Bodies(edge.max_bodies or default_limit())
        self.connections = Connections(
            edge.max_connections, per_address=edge.max_connections_per_address
        )
        self.refused = families.connections_refused.labels()

    def serve(self, app: AppSpec) -> None:
        """Answer for this app from now on; calls under way are not touched."""
        self.routes = routes_of(app, self.families)

    def find(self, url: bytes) -> tuple[Methods | None, bytes]:
        """Return the routes of a URL's path, if it has any, and the query.

        Raises:
            HttpParserError: It is no URL.
        """
        if (methods := self.routes.get(url)) is not None:
            return methods, b""
        parsed = httptools.parse_url(url)
        path: bytes = parsed.path or b"/"
        if b"%" in path:
            path = unquote_to_bytes(path)
        return self.routes.get(path), parsed.query or b""

    async def answer(self, exchange: Exchange) -> None:
        """Answer one request."""
        if self._cors is not None and _preflight(exchange, self._cors):
            return
        route = exchange.route
        if route is None:
            self._refuse(exchange)
            return
        started = exchange.started = now()
        code, version, request_id, reason = 500, "", "", ""
        leave: Callable[[], None] | None = None
        try:
            if self.guard is not None:
                guest = self.guard.identify(exchange.headers)
                exchange.caller, exchange.headers = guest.caller, guest.headers
                leave = self.guard.enter(guest, started)
                exchange.admitted = True
            call = read_call(route, exchange.headers, started)
            call.caller = exchange.caller
            request_id = exchange.request_id = call.request_id
            framing = choose_framing(call) if route.stream else Framing
            await read_input(route, exchange, call)
            reply = await self.handler(call)
            version = reply.version
            if route.jobs:
                assert reply.payload is not None
                send_accepted(exchange, call, reply, reply.payload, route.jobs)
                code = 202
            elif (payload := reply.payload) is not None:
                if self._compressor is not None:
                    payload = await self._compressor.pack(exchange, payload)
                send_whole(exchange, call, reply, payload)
                code = 200
            else:
                code = await send_stream(exchange, call, reply, framing)
        except CallError as error:
            code, reason = error.status, error.reason
            request_id = request_id or request_id_of(exchange.headers)
            if is_shed(error):
                route.shed(reason)
            send_error(exchange, error, request_id)
        except asyncio.CancelledError:
            cut = cut_off()
            code, reason = cut.status, cut.reason
            if exchange.disconnected:
                code, reason = Cancelled.status, ""  # nobody is there to see an answer
            elif exchange.begun:
                exchange.abort()
            else:
                request_id = request_id or request_id_of(exchange.headers)
                send_error(exchange, cut, request_id)
        except Exception:  # noqa: BLE001  (the last boundary before the client)
            request_id = request_id or request_id_of(exchange.headers)
            _log.exception("request failed", request_id=request_id, path=route.path)
            masked = ExecutionError("internal error")
            reason = masked.reason
            send_error(exchange, masked, request_id)
        finally:
            if leave is not None:
                leave()
            if exchange.share is not None:
                exchange.share.close()
            route.answered(code, version, now() - started)
            if code not in _NO_FAILURES:
                self.failures.append(
                    Failure(time.time(), route.path, code, reason, exchange.caller, request_id)
                )

    def _refuse(self, exchange: Exchange) -> None:
        """Answer a request whose path has no such method."""
        methods = ", ".join([method.decode() for method in exchange.methods])
        path = next(iter(exchange.methods.values())).path
        error: CallError = MethodNotAllowed(f"{path} takes {methods}")
        error.headers = {"allow": methods}
        if self.guard is not None:
            try:
                self.guard.enter(self.guard.identify(exchange.headers), now())()
            except CallError as refused:
                error = refused
        send_error(exchange, error, request_id_of(exchange.headers))


def _preflight(exchange: Exchange, cors: Cors) -> bool:
    """Answer a browser that asks what it may send; else give the answer what lets it be read."""
    headers = dict(exchange.headers)
    fields = cors.preflight(exchange.method, headers, exchange.methods)
    if fields is None:
        exchange.lines = cors.grant(headers).lines
        return False
    exchange.send_nothing(lines_of(fields))
    return True
