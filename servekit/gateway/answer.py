"""From a reply to an HTTP answer: whole, as server-sent events, as raw chunks, or an error."""

from math import ceil

import msgspec

from servekit.core.call import BINARY, EVENT_STREAM, JSON, Buffer, Call, Payload, Reply
from servekit.errors import CallError, ExecutionError
from servekit.gateway.asgi import Send
from servekit.observe.log import get_logger
from servekit.wire.streams import IncomingStream

_log = get_logger("servekit.gateway")


def _headers(call: Call, reply: Reply, content_type: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-type", content_type.encode("latin-1")),
        (b"x-request-id", call.request_id.encode("latin-1")),
        (b"x-servekit-version", reply.version.encode("latin-1")),
        (b"x-servekit-replica", reply.replica.encode("latin-1")),
    ]


async def send_whole(send: Send, call: Call, reply: Reply, payload: Payload) -> None:
    """Send an answer of one piece."""
    body = payload.segments[0]
    headers = _headers(call, reply, payload.content_type)
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_stream(send: Send, call: Call, reply: Reply) -> int:
    """Send the chunks of an answer as they come; those that are there together leave together.

    An error behind the first chunk becomes an `error` event, as the status is already on its way.

    Returns:
        The status to count: 200, or that of the error.
    """
    raw = call.accept.startswith(BINARY)
    headers = _headers(call, reply, BINARY if raw else EVENT_STREAM)
    headers.append((b"cache-control", b"no-store"))
    headers.append((b"x-accel-buffering", b"no"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    stream, status = reply.stream, 200
    try:
        assert stream is not None
        async for chunk in stream:
            chunks = [chunk]
            if isinstance(stream, IncomingStream):
                chunks += stream.take_ready()
            body = b"".join([c.segments[0] if raw else event(c.segments[0]) for c in chunks])
            await send({"type": "http.response.body", "body": body, "more_body": True})
        last = b"" if raw else event(b"", name=b"end")
    except Exception as raised:  # noqa: BLE001  (the status is on its way: no second one can follow)
        if isinstance(raised, CallError):
            error = raised
        else:
            _log.exception("stream failed", request_id=call.request_id)
            error = ExecutionError("internal error")
        status = error.status
        if raw:
            return status  # without an end, so that the client sees the connection cut
        last = event(_document(error, call.request_id), name=b"error")
    finally:
        await reply.aclose()
    await send({"type": "http.response.body", "body": last})
    return status


def event(data: Buffer, *, name: bytes = b"") -> bytes:
    """Return one server-sent event (HTML standard, 9.2); `data` is JSON, so it has no newline."""
    head = b"event: " + name + b"\ndata: " if name else b"data: "
    return b"".join((head, data, b"\n\n"))


async def send_error(send: Send, error: CallError, request_id: str) -> None:
    """Send an error with its status, a body that says why, and `Retry-After` where it helps."""
    body = _document(error, request_id)
    headers = [
        (b"content-type", JSON.encode()),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id.encode("latin-1")),
    ]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, ceil(error.retry_after_s))))
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _document(error: CallError, request_id: str) -> bytes:
    return msgspec.json.encode({"error": error.details() | {"request_id": request_id}})
