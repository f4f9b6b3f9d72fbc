"""From a reply to an HTTP answer: whole, as events, lines or raw chunks, or an error."""

import asyncio
import re
from functools import lru_cache
from math import ceil
from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from servekit.core.call import BINARY, EVENT_STREAM, JSON, NDJSON, Buffer, Call, Payload, Reply, now
from servekit.errors import CallError, ExecutionError, Unavailable
from servekit.gateway.exchange import Exchange
from servekit.gateway.request import request_id_of
from servekit.observe.log import get_logger
from servekit.wire.streams import IncomingStream

_log = get_logger("servekit.gateway")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
CLOSE_ERROR: Final = 4000
"""A WebSocket that fails is closed with this plus the HTTP status: codes from here on are the
application's own (RFC 6455, 7.4.2)."""
_SILENCE_S: Final = 15.0
"""Proxies and browsers hang up on a connection that is silent for a minute, some for half of it."""
_UNBUFFERED = b"cache-control: no-store\r\nx-accel-buffering: no\r\n"


@lru_cache(maxsize=1024)
def _head(content_type: str, version: str, replica: str) -> tuple[bytes, bytes]:
    """Return the header lines that the answers of one replica share, around the request's id."""
    return _lines(("content-type", content_type)) + b"x-request-id: ", b"\r\n" + _lines(
        ("x-servekit-version", version), ("x-servekit-replica", replica)
    )


def _lines(*headers: tuple[str, str]) -> bytes:
    """Return headers as text; a value can't end its line."""
    return b"".join([b"%b: %b\r\n" % (name.encode(), _plain(value)) for name, value in headers])


def _plain(value: str) -> bytes:
    return _CONTROL.sub("?", value).encode("latin-1", "replace")


def send_whole(exchange: Exchange, call: Call, reply: Reply, payload: Payload) -> None:
    """Send an answer of one piece."""
    before, after = _head(payload.content_type, reply.version, reply.replica)
    exchange.send(200, before + call.request_id.encode() + after, payload.segments[0])


class _Accepted(msgspec.Struct):
    id: str


def send_accepted(
    exchange: Exchange, call: Call, reply: Reply, payload: Payload, jobs: str
) -> None:
    """Send the answer to a submission: the job's status, and where below `jobs` it is."""
    decode = msgspec.json.decode if payload.content_type == JSON else msgspec.msgpack.decode
    job = decode(payload.segments[0], type=_Accepted)
    before, after = _head(payload.content_type, reply.version, reply.replica)
    head = before + call.request_id.encode() + after + _lines(("location", f"{jobs}/{job.id}"))
    exchange.send(202, head, payload.segments[0])


class Framing:
    """How the chunks of a stream are told apart.

    Attributes:
        content_type: Of the answer.
        beat: Sent when there was nothing to send for a while, so that nobody on the way hangs up.
        end: Sent behind the last chunk.
    """

    content_type = EVENT_STREAM
    beat = b": keep-alive\n\n"
    end = b"event: end\ndata: \n\n"

    @staticmethod
    def chunk(data: Buffer) -> Buffer:
        """Return one chunk (HTML standard, 9.2); `data` is JSON, so it has no newline."""
        return b"".join((b"data: ", data, b"\n\n"))

    @staticmethod
    def error(document: bytes) -> bytes:
        """Return what says that the stream failed, as the status is on its way; b"" is to hang up."""
        return b"".join((b"event: error\ndata: ", document, b"\n\n"))


class _Lines(Framing):
    """Newline-delimited JSON; a failure is a last line with an `error`."""

    content_type = NDJSON[0]
    beat = b"\n"
    end = b""

    @staticmethod
    def chunk(data: Buffer) -> Buffer:
        return b"".join((data, b"\n"))

    @staticmethod
    def error(document: bytes) -> bytes:
        return document + b"\n"


class _Bytes(Framing):
    """The chunks' bytes one behind the other; a failure breaks the connection."""

    content_type = BINARY
    beat = b""
    end = b""

    @staticmethod
    def chunk(data: Buffer) -> Buffer:
        return data

    @staticmethod
    def error(document: bytes) -> bytes:  # noqa: ARG004
        return b""


def choose_framing(call: Call) -> type[Framing]:
    """Return how the caller wants a stream, and ask for chunks that go into it."""
    if call.accept.startswith(BINARY):
        return _Bytes
    framing = _Lines if call.accept in NDJSON else Framing
    call.accept = JSON  # of one chunk; the stream around it is this side's affair
    return framing


class _Pulse:
    """Sends a sign of life whenever a stream has been silent for a while."""

    def __init__(self, exchange: Exchange, beat: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self._exchange = exchange
        self._beat = beat
        self._timer: asyncio.TimerHandle | None = None
        self.silent_since = now()
        if beat:
            self._wait(_SILENCE_S)

    def _wait(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        left = self.silent_since + _SILENCE_S - now()
        if left <= 0:
            self._exchange.interject(self._beat)
            self.silent_since, left = now(), _SILENCE_S
        self._wait(left)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


async def send_stream(exchange: Exchange, call: Call, reply: Reply, framing: type[Framing]) -> int:
    """Send the chunks of an answer as they come; those that are there together leave together.

    An error behind the first chunk is said in the stream, as the status is already on its way.

    Returns:
        The status to count: 200, or that of the error.
    """
    before, after = _head(framing.content_type, reply.version, reply.replica)
    exchange.begin(before + call.request_id.encode() + after + _UNBUFFERED)
    pulse = _Pulse(exchange, framing.beat)
    stream = reply.stream
    frame = framing.chunk
    try:
        assert stream is not None
        async for chunk in stream:
            parts = [frame(chunk.segments[0])]
            if isinstance(stream, IncomingStream):
                parts += [frame(c.segments[0]) for c in stream.take_ready()]
            if body := b"".join(parts):
                await exchange.write(body)
                pulse.silent_since = now()
    except (Exception, asyncio.CancelledError) as raised:  # the status is on its way already
        if isinstance(raised, asyncio.CancelledError):
            if exchange.disconnected:
                raise
            error = cut_off()
        elif isinstance(raised, CallError):
            error = raised
        else:
            _log.exception("stream failed", request_id=call.request_id)
            error = ExecutionError("internal error")
        if last := framing.error(error_document(error, call.request_id)):
            exchange.finish(last)
        else:
            exchange.abort()
        return error.status
    finally:
        pulse.stop()
        await reply.aclose()
    exchange.finish(framing.end)
    return 200


def cut_off() -> CallError:
    """Return what becomes of a call that still ran when the gateway had to end."""
    return Unavailable("the server ended before this call did", reason="shutdown")


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
    """Return what says in a body what went wrong."""
    return msgspec.json.encode({"error": error.details() | {"request_id": request_id}})


async def asgi_error(
    error: CallError, scope: Scope, receive: Receive, send: Send, *, hang_up: bool = False
) -> None:
    """Refuse a request that came by ASGI; a WebSocket's handshake has an HTTP answer, too.

    Args:
        error: What it is answered.
        scope: ASGI's, as the next two.
        receive: Not asked for a body.
        send: Gets the answer.
        hang_up: End the connection behind it.
    """
    request_id = request_id_of(scope["headers"])
    body = error_document(error, request_id)
    headers = [(n.encode(), _plain(v)) for n, v in error_headers(error, request_id)]
    headers.append((b"content-length", b"%d" % len(body)))
    kind = "http"
    if scope["type"] == "websocket":
        await receive()  # websocket.connect
        kind = "websocket.http"
        if kind + ".response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": CLOSE_ERROR + error.status})
            return
    elif hang_up or any(name == b"expect" for name, _ in scope["headers"]):
        # A body that was not asked for may come, or may not (RFC 9110, 10.1.1).
        headers.append((b"connection", b"close"))
    start = {"type": f"{kind}.response.start", "status": error.status, "headers": headers}
    await send(start)
    await send({"type": f"{kind}.response.body", "body": body})
