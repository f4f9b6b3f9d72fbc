"""From a reply to an HTTP answer: whole, as server-sent events, as raw chunks, or an error."""

import re
from functools import lru_cache
from math import ceil

import msgspec

from servekit.core.call import BINARY, EVENT_STREAM, JSON, Buffer, Call, Payload, Reply
from servekit.errors import CallError, ExecutionError
from servekit.gateway.exchange import Exchange
from servekit.observe.log import get_logger
from servekit.wire.streams import IncomingStream

_log = get_logger("servekit.gateway")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_UNBUFFERED = b"cache-control: no-store\r\nx-accel-buffering: no\r\n"


@lru_cache(maxsize=1024)
def _head(content_type: str, version: str, replica: str) -> tuple[bytes, bytes]:
    """Return the header lines that the answers of one replica share, around the request's id."""
    return _lines(("content-type", content_type)) + b"x-request-id: ", b"\r\n" + _lines(
        ("x-servekit-version", version), ("x-servekit-replica", replica)
    )


def _lines(*headers: tuple[str, str]) -> bytes:
    """Return headers as text; a value can't end its line."""
    lines = [f"{name}: {_CONTROL.sub('?', value)}\r\n" for name, value in headers]
    return "".join(lines).encode("latin-1", "replace")


def send_whole(exchange: Exchange, call: Call, reply: Reply, payload: Payload) -> None:
    """Send an answer of one piece."""
    before, after = _head(payload.content_type, reply.version, reply.replica)
    exchange.send(200, before + call.request_id.encode() + after, payload.segments[0])


async def send_stream(exchange: Exchange, call: Call, reply: Reply) -> int:
    """Send the chunks of an answer as they come; those that are there together leave together.

    An error behind the first chunk becomes an `error` event, as the status is already on its way.

    Returns:
        The status to count: 200, or that of the error.
    """
    raw = call.accept.startswith(BINARY)
    before, after = _head(BINARY if raw else EVENT_STREAM, reply.version, reply.replica)
    exchange.begin(before + call.request_id.encode() + after + _UNBUFFERED)
    stream = reply.stream
    try:
        assert stream is not None
        async for chunk in stream:
            chunks = [chunk]
            if isinstance(stream, IncomingStream):
                chunks += stream.take_ready()
            body = b"".join([c.segments[0] if raw else event(c.segments[0]) for c in chunks])
            if body:
                await exchange.write(body)
    except Exception as raised:  # noqa: BLE001  (the status is on its way: no second one can follow)
        if isinstance(raised, CallError):
            error = raised
        else:
            _log.exception("stream failed", request_id=call.request_id)
            error = ExecutionError("internal error")
        if raw:
            exchange.abort()
        else:
            exchange.finish(event(error_document(error, call.request_id), name=b"error"))
        return error.status
    finally:
        await reply.aclose()
    exchange.finish(b"" if raw else event(b"", name=b"end"))
    return 200


def event(data: Buffer, *, name: bytes = b"") -> bytes:
    """Return one server-sent event (HTML standard, 9.2); `data` is JSON, so it has no newline."""
    head = b"event: " + name + b"\ndata: " if name else b"data: "
    return b"".join((head, data, b"\n\n"))


def send_error(exchange: Exchange, error: CallError, request_id: str) -> None:
    """Send an error with its status, a body that says why, and `Retry-After` where it helps."""
    exchange.send(error.status, *error_answer(error, request_id))


def error_answer(error: CallError, request_id: str) -> tuple[bytes, bytes]:
    """Return the header lines and the body of an error's answer."""
    return _lines(*error_headers(error, request_id)), error_document(error, request_id)


def error_headers(error: CallError, request_id: str) -> list[tuple[str, str]]:
    """Return the headers of an error's answer."""
    headers = [("content-type", JSON), ("x-request-id", request_id)]
    if error.retry_after_s is not None:
        headers.append(("retry-after", str(max(1, ceil(error.retry_after_s)))))
    return [*headers, *error.headers.items()]


def error_document(error: CallError, request_id: str) -> bytes:
    """Return the body of an error's answer."""
    return msgspec.json.encode({"error": error.details() | {"request_id": request_id}})
