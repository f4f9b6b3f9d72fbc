"""From HTTP to WebSocket: a connection is left to another protocol."""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def is_websocket(http: HttpToolsProtocol) -> bool:
    """Whether the head that is here opens a WebSocket."""
    parser: Any = http.parser
    upgrade = dict(http.headers).get(b"upgrade", b"")
    return upgrade.lower() == b"websocket" and parser.get_method() == b"GET"


def to_websocket(
    http: HttpToolsProtocol, rest: bytes, on_upgrade: Callable[[asyncio.Protocol], None]
) -> None:
    """Leave a connection to uvicorn's protocol for WebSockets, which gets the head again.

    Args:
        http: Has had it until now.
        rest: What came behind the head.
        on_upgrade: Called with its successor.
    """
    from uvicorn.protocols.websockets.websockets_sansio_impl import (  # noqa: PLC0415  (50 ms)
        WebSocketsSansIOProtocol,
    )

    http.connections.discard(http)
    successor = WebSocketsSansIOProtocol(http.config, http.server_state, http.app_state, http.loop)
    on_upgrade(successor)
    successor.connection_made(http.transport)
    lines = [b"%b: %b\r\n" % header for header in http.headers]
    head = b"".join((b"GET ", http.url, b" HTTP/1.1\r\n", *lines, b"\r\n"))
    successor.data_received(head + rest)
