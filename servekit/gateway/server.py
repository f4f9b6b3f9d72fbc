"""uvicorn, with what we need on top.

A client that leaves ends its call; an answer's head and body leave in one write; signals are ours.
"""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any, cast

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from servekit.core.call import JSON, Buffer
from servekit.errors import BadRequest, CallError, HeadTooLarge
from servekit.gateway.asgi import App
from servekit.gateway.http import TASK

_MAX_HEAD_BYTES = 64 * 1024
_KEEP_ALIVE_S = 75
_JOIN_BYTES = 64 * 1024


class _Corked:
    """A transport that sends what is written in one turn of the loop at once.

    uvicorn writes the head and the body of an answer one by one, which would cost a system call
    and a TCP segment each.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._call_soon = loop.call_soon
        self._parts: list[Buffer] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: Buffer) -> None:
        parts = self._parts
        if not parts:
            self._call_soon(self._flush)
        parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if not parts or self._transport.is_closing():
            return
        if len(parts) == 1:
            self._transport.write(parts[0])
        elif sum(map(len, parts)) < _JOIN_BYTES:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)


class _Protocol(HttpToolsProtocol):
    """One client connection; httptools itself would take headers of any size."""

    _in_head = False
    _head_bytes = 0
    _too_large = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection."""
        corked = _Corked(cast("asyncio.Transport", transport), self.loop)
        super().connection_made(cast("asyncio.Transport", corked))

    def data_received(self, data: bytes) -> None:
        """Take bytes; refuse a head that goes on for too long."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > _MAX_HEAD_BYTES:
            self._too_large = True
            self.send_400_response("")
        elif not self._in_head:
            self._head_bytes = 0

    def on_message_begin(self) -> None:
        """Start to read a head."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Take a request whose head is whole."""
        self._in_head = False
        # Only bytes that may have been a body have to be told from those of the head.
        if self._head_bytes > _MAX_HEAD_BYTES:
            size = sum(len(name) + len(value) for name, value in self.headers) + len(self.url)
            if size > _MAX_HEAD_BYTES:
                self._too_large = True
                raise ValueError("the request's head is too large")
        super().on_headers_complete()

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
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        super().connection_lost(exc)
        if cycle is not None and not cycle.response_complete:
            task = cast("dict[str, object]", cycle.scope).get(TASK)
            if isinstance(task, asyncio.Task):
                task.cancel()


class Server(uvicorn.Server):
    """An HTTP server on a socket that is already bound.

    Args:
        app: The ASGI app.
        listener: The listening socket.
        drain_s: Longest wait for running requests at the end.
    """

    def __init__(self, app: App, listener: socket.socket, *, drain_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            loop="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(drain_s) or 1,
        )
        super().__init__(config)
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process that this server runs in."""
        yield

    async def run_until_drained(self) -> None:
        """Serve; returns when `drain` was called and the running requests have ended."""
        await self.serve(sockets=[self._listener])

    def drain(self) -> None:
        """Take no new connections; finish what runs."""
        self.should_exit = True
