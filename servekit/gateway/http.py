"""The hot path: from a request's bytes to a call, and from its reply to bytes.

It looks the path up in a dict, reads the headers once, hands the body on as it came, and sends the
answer as it is. The replica decodes, validates and encodes.
"""

import asyncio
from urllib.parse import unquote_to_bytes

import httptools

from servekit.core.call import Handler, now
from servekit.errors import CallError, Cancelled, ExecutionError, MethodNotAllowed, is_shed
from servekit.gateway.answer import (
    Framing,
    choose_framing,
    cut_off,
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
from servekit.gateway.request import read_call, read_input, request_id_of
from servekit.gateway.routes import Methods, routes_of
from servekit.observe.families import Families
from servekit.observe.log import get_logger
from servekit.spec.app import AppSpec

_log = get_logger("servekit.gateway")


class Gateway:
    """Answers all requests for endpoints.

    Args:
        handler: Takes the calls.
        families: Gets the figures.
        edge: What clients may do.

    Attributes:
        routes: By path.
        leaving: Each answer is its connection's last, so that clients go elsewhere.
        bodies: What their requests take.
        connections: How many they have.
        refused: Counts those that were too many.
    """

    def __init__(self, handler: Handler, families: Families, edge: Edge = PLAIN) -> None:
        self.handler = handler
        self.families = families
        self.routes: dict[bytes, Methods] = {}
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
            _refuse(exchange)
            return
        started = now()
        code, version, request_id = 500, "", ""
        try:
            call = read_call(route, exchange.headers, started)
            request_id = call.request_id
            framing = choose_framing(call) if route.stream else Framing
            exchange.streams = route.streams(call.payload.content_type)
            await read_input(route, exchange, call)
            reply = await self.handler(call)
            version = reply.version
            if reply.payload is not None:
                payload = reply.payload
                if self._compressor is not None:
                    payload = await self._compressor.pack(exchange, payload)
                send_whole(exchange, call, reply, payload)
                code = 200
            else:
                code = await send_stream(exchange, call, reply, framing)
        except CallError as error:
            code = error.status
            if is_shed(error):
                route.shed(error.reason)
            send_error(exchange, error, request_id or request_id_of(exchange.headers))
        except asyncio.CancelledError:
            cut = cut_off()
            code = cut.status
            if exchange.disconnected:
                code = Cancelled.status  # nobody is there to see an answer
            elif exchange.begun:
                exchange.abort()
            else:
                send_error(exchange, cut, request_id or request_id_of(exchange.headers))
        except Exception:  # noqa: BLE001  (the last boundary before the client)
            _log.exception("request failed", request_id=request_id, path=route.path)
            masked = ExecutionError("internal error")
            send_error(exchange, masked, request_id or request_id_of(exchange.headers))
        finally:
            if exchange.share is not None:
                exchange.share.close()
            route.answered(code, version, now() - started)


def _preflight(exchange: Exchange, cors: Cors) -> bool:
    """Answer a browser that asks what it may send; else give the answer what lets it be read."""
    headers = dict(exchange.headers)
    fields = cors.preflight(exchange.method, headers, exchange.methods)
    if fields is None:
        exchange.lines = cors.grant(headers).lines
        return False
    exchange.send_nothing(lines_of(fields))
    return True


def _refuse(exchange: Exchange) -> None:
    """Answer a request whose path has no such method."""
    methods = ", ".join([method.decode() for method in exchange.methods])
    path = next(iter(exchange.methods.values())).path
    error = MethodNotAllowed(f"{path} takes {methods}")
    error.headers = {"allow": methods}
    send_error(exchange, error, request_id_of(exchange.headers))
