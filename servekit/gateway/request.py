"""From an HTTP request to a `Call`: headers read once, the body handed on as it came."""

import itertools
import os
from collections.abc import AsyncIterator
from math import inf
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from servekit.core.call import BINARY, JSON, NDJSON, Call, Payload
from servekit.core.units import parse_seconds
from servekit.errors import BadRequest, ConfigError, PayloadTooLarge, UnsupportedMedia
from servekit.gateway.exchange import Exchange
from servekit.gateway.inflate import inflate, refuse_coding
from servekit.gateway.routes import Route
from servekit.spec.app import EndpointSpec
from servekit.spec.body import media_type
from servekit.spec.form import document

_pack = msgspec.msgpack.Encoder().encode
_boot = os.urandom(5).hex()
_count = itertools.count(1)


def read_call(route: Route, headers: list[tuple[bytes, bytes]], started: float) -> Call:
    """Make a call from a request's headers; its payload has a media type, and no body yet.

    Raises:
        BadRequest: A header can't be read.
        PayloadTooLarge: The body's declared length is over the route's limit.
    """
    # Without an Accept header anything will do (RFC 9110, 12.5.1).
    call = Call(route.service, route.endpoint, accept="*/*", idempotent=route.spec.idempotent)
    call.payload = Payload("", ())
    timeout_s = route.timeout_s
    for name, value in headers:
        if name == b"content-type":
            call.payload.content_type = value.decode("latin-1")
        elif name == b"accept":
            call.accept = value.decode("latin-1")
        elif name == b"content-length":
            if not value.isdigit():
                raise BadRequest("header content-length: is no number", started=False)
            if len(value) > 18 or int(value) > route.max_body:
                raise _too_large(route)
        elif name == b"x-request-id":
            call.request_id = _request_id(value)
        elif name == b"x-servekit-timeout":
            asked = _timeout(value)
            timeout_s = asked if timeout_s is None else min(asked, timeout_s)
        elif name == b"x-servekit-affinity":
            call.affinity_key = value.decode("latin-1")
        elif name == b"traceparent":
            call.traceparent = value.decode("latin-1")
        elif name == b"idempotency-key":
            call.idempotent = True
        elif name == b"content-encoding":
            call.coding += b", " + value if call.coding else value
    call.headers = _pack(headers)
    if not call.request_id:
        call.request_id = _new_id()
    if timeout_s is not None:
        call.deadline = started + timeout_s
    return call


def request_id_of(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the id of a request that did not become a call."""
    given = dict(headers).get(b"x-request-id", b"")
    return _request_id(given) or _new_id()


def _new_id() -> str:
    return f"{_boot}{next(_count):06x}"


def _too_large(route: Route) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the body is larger than {route.path} takes ({route.max_body} bytes)", started=False
    )


def _request_id(value: bytes) -> str:
    """Take over a client's id if it can do no harm in a log or a header, else return ""."""
    text = value.decode("latin-1")
    return text if len(text) <= 128 and text.isascii() and text.isprintable() else ""


def _timeout(value: bytes) -> float:
    text = value.decode("latin-1")
    try:
        seconds = parse_seconds(float(text) if text.isdecimal() else text, where="")
    except ConfigError:
        seconds = -1.0
    if not 0 < seconds < inf:
        raise BadRequest(
            f"header x-servekit-timeout: {text[:40]!r} is no duration above 0; write it like 5s "
            "or 250ms",
            started=False,
        )
    return seconds


async def read_input(route: Route, exchange: Exchange, call: Call) -> None:
    """Give a call its body: whole, as it comes if it streams, or the query for GET.

    Raises:
        PayloadTooLarge: It grew over the route's limit, also when it was unpacked.
        BadRequest: It can't be unpacked.
        UnsupportedMedia: Its coding is unknown; or it should stream, and is compressed, or of a
            media type that has no chunks.
        Unavailable: All bodies together would be too many.
    """
    exchange.streams = route.streams(call.payload.content_type)
    if exchange.streams:
        _stream_input(route, exchange, call)
    elif route.method == "GET":
        call.payload.segments = (query_document(exchange.query, route.spec.input),)
    else:
        body = await exchange.read(route.max_body)
        if body is not None and call.coding:
            body = await inflate(body, call.coding, limit=route.max_body, count=exchange.count)
            fields = [field for field in exchange.headers if field[0] != b"content-encoding"]
            call.headers, call.coding = _pack(fields), b""
        if body is None:
            raise _too_large(route)
        call.payload.segments = (body,)


def _stream_input(route: Route, exchange: Exchange, call: Call) -> None:
    spec = route.spec
    if call.coding:
        refuse_coding(call.coding)
    call.idempotent = False
    call.chunks = _pieces(route, exchange)
    if spec.inbound is not None:
        call.chunks = _chunks_of(spec, call.payload.content_type, call.chunks)
        call.payload = Payload(JSON, (query_document(exchange.query, spec.input),))
    else:
        call.payload.segments = (b"",)


async def _pieces(route: Route, exchange: Exchange) -> AsyncIterator[Payload]:
    async for piece in exchange.pieces():
        if piece is None:
            raise _too_large(route)
        yield Payload(BINARY, (piece,))


def _chunks_of(
    spec: EndpointSpec, content_type: str, pieces: AsyncIterator[Payload]
) -> AsyncIterator[Payload]:
    """Return the chunks of a body that streams: its lines, or its pieces as they come.

    Raises:
        UnsupportedMedia: Its media type has no chunks.
    """
    inbound = spec.inbound
    assert inbound is not None
    kind = media_type(content_type)
    if kind in NDJSON:
        return _lines(pieces)
    if inbound.raw == "bytes" and kind == BINARY:
        return pieces
    takes = [NDJSON[0]] + [BINARY] * (inbound.raw == "bytes")
    raise UnsupportedMedia(
        f"{spec.name}: {inbound.name!r} streams, so the body is {' or '.join(takes)}, not "
        f"{kind[:100]!r}; or open a WebSocket",
        started=False,
    )


async def _lines(pieces: AsyncIterator[Payload]) -> AsyncIterator[Payload]:
    """Cut newline-delimited JSON; empty lines are nothing."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + bytes(piece.segments[0])).split(b"\n")
        for line in whole:
            if line.strip():
                yield Payload(JSON, (line,))
    if rest.strip():
        yield Payload(JSON, (rest,))


def query_document(query: bytes, schema: dict[str, Any]) -> bytes:
    """Return a query string as the JSON document that a POST would carry."""
    fields = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    only: bytes = document(fields, schema)[0]
    return only
