"""From an HTTP request to a `Call`: headers read once, the body handed on as it came."""

import itertools
import os
from math import inf
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from servekit.core.call import BINARY, JSON, Buffer, Call, Payload
from servekit.core.units import parse_seconds
from servekit.errors import BadRequest, ConfigError, PayloadTooLarge
from servekit.gateway.exchange import Exchange
from servekit.gateway.routes import Route

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
    call.headers = _pack(headers)
    if not call.request_id:
        call.request_id = _new_id()
    if timeout_s is not None:
        call.deadline = started + timeout_s
    if route.stream and not call.accept.startswith(BINARY):
        call.accept = JSON  # of one chunk; the stream around it is this side's affair
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


async def read_body(route: Route, exchange: Exchange) -> Buffer:
    """Return the whole body, or the query as a document for GET.

    Raises:
        PayloadTooLarge: It grew over the route's limit.
    """
    if route.method == "GET":
        return query_document(exchange.query, route.spec.input)
    body = await exchange.read(route.max_body)
    if body is None:
        raise _too_large(route)
    return body


def query_document(query: bytes, schema: dict[str, Any]) -> bytes:
    """Return a query string as the JSON document that a POST would carry.

    Text becomes a number, boolean or null where the schema says so; what doesn't fit stays text,
    for the replica to refuse with the field's path. A repeated name makes an array.
    """
    properties: dict[str, Any] = schema.get("properties", {})
    definitions: dict[str, Any] = schema.get("$defs", {})
    document: dict[str, Any] = {}
    for name, text in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        declared = properties.get(name, {})
        if declared.get("type") == "array":
            items: list[Any] = document.setdefault(name, [])
            items.append(_scalar(text, _kinds(declared.get("items", {}), definitions)))
        else:
            document[name] = _scalar(text, _kinds(declared, definitions))
    return msgspec.json.encode(document)


def _kinds(schema: dict[str, Any], definitions: dict[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; enums are behind a reference."""
    if "$ref" in schema:
        schema = definitions.get(schema["$ref"].rpartition("/")[2], {})
    kinds = {schema.get("type", "")}
    return kinds.union(*(_kinds(part, definitions) for part in schema.get("anyOf", ())))


def _scalar(text: str, kinds: set[str]) -> Any:
    if "string" in kinds and text != "null":
        return text
    if kinds & {"integer", "number", "boolean", "null"}:
        try:
            value = msgspec.json.decode(text.encode())
        except (msgspec.DecodeError, RecursionError):
            return text
        return value if isinstance(value, int | float | bool | None) else text
    return text
