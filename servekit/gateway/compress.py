"""Answers of one piece, compressed for clients that can take them.

Streams are not: each event would need a flush of its own, which leaves little to gain, and a proxy
that unpacks them holds events back.
"""

import asyncio
import zlib
from typing import Final

from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp

from servekit.core.call import JSON, MSGPACK, NPY, Payload
from servekit.gateway.edge import Edge
from servekit.gateway.exchange import Exchange

_LEVEL: Final = 1
"""The higher ones take two to five times as long, for a tenth less."""
_GZIP: Final = 31
_LARGE: Final = 256 * 1024
"""From this size on, in bytes, a thread does it: the event loop would stand still for too long."""
_TYPES: Final = frozenset({JSON, MSGPACK, NPY, "application/xml", "image/svg+xml"})


class Compressor:
    """Compresses answers.

    Args:
        min_bytes: Least size of one that is worth it.
    """

    def __init__(self, min_bytes: int) -> None:
        self._min_bytes = min_bytes

    async def pack(self, exchange: Exchange, payload: Payload) -> Payload:
        """Return an answer's payload, compressed where that helps and its client allows it."""
        body = payload.segments[0]
        kind = payload.content_type.partition(";")[0].strip().lower()
        if len(body) < self._min_bytes or not (kind.startswith("text/") or kind in _TYPES):
            return payload
        exchange.lines += b"vary: accept-encoding\r\n"
        if not accepts_gzip(dict(exchange.headers).get(b"accept-encoding", b"")):
            return payload
        if len(body) < _LARGE:
            packed = zlib.compress(body, _LEVEL, _GZIP)
        else:
            packed = await asyncio.to_thread(zlib.compress, body, _LEVEL, _GZIP)
        if len(packed) >= len(body):
            return payload
        exchange.lines += b"content-encoding: gzip\r\n"
        return Payload(payload.content_type, (packed,))


def compress_pages(app: ASGIApp, edge: Edge) -> ASGIApp:
    """Return an app whose pages are compressed, if the settings say so."""
    if edge.gzip_min_bytes is None:
        return app
    return GZipMiddleware(app, minimum_size=edge.gzip_min_bytes, compresslevel=_LEVEL)


def accepts_gzip(field: bytes) -> bool:
    """Return whether an `accept-encoding` allows gzip (RFC 9110, 12.5.3)."""
    allowed: dict[str, bool] = {}
    for item in field.decode("latin-1").lower().split(","):
        coding, _, weight = item.partition(";")
        name, _, number = weight.partition("=")
        try:
            allowed[coding.strip()] = name.strip() != "q" or float(number) > 0
        except ValueError:
            allowed[coding.strip()] = False
    return allowed.get("gzip", allowed.get("x-gzip", allowed.get("*", False)))
