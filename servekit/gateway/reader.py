"""Reading a client's connection: small requests by way of the parser, large bodies past it.

By way of the parser each byte of a body would be copied three times: out of the event loop's
buffer, out of the parser, and into one piece. So only the beginning of a large body is parsed; the
rest is received straight into the buffer that is sent on.
"""

import asyncio
from typing import Final, cast

from servekit.gateway.protocol import HttpProtocol

_LARGE: Final = 16 * 1024
_SHARED: Final = memoryview(bytearray(64 * 1024))
"""Where all connections read: what is in it is parsed before the next one does."""


class Reader(asyncio.BufferedProtocol):
    """What the event loop knows as a connection's protocol.

    Args:
        protocol: Parses, and answers.
    """

    def __init__(self, protocol: HttpProtocol) -> None:
        self.protocol: HttpProtocol | asyncio.Protocol = protocol
        self._http: HttpProtocol | None = protocol
        protocol.on_upgrade = self._upgrade
        self._release = protocol.release
        self._body: bytearray | None = None
        self._filled = 0

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Return where the next bytes go: in a body up to its end, and no further."""
        if self._body is None:
            return _SHARED
        return memoryview(self._body)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take note that bytes have come."""
        http = self._http
        if http is None:
            self.protocol.data_received(bytes(_SHARED[:nbytes]))
        elif self._body is None:
            http.data_received(_SHARED[:nbytes])
            if nbytes >= _LARGE and self._http and (room := http.room()) is not None:
                self._body, self._filled = room
        else:
            self._filled += nbytes
            http.sender.received += nbytes
            if self._filled == len(self._body):
                body, self._body = self._body, None
                http.body_received(body)

    def _upgrade(self, successor: asyncio.Protocol) -> None:
        """Leave the connection to another protocol."""
        self.protocol, self._http = successor, None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection."""
        self.protocol.connection_made(cast("asyncio.Transport", transport))

    def eof_received(self) -> None:
        """Hang up: a client that will not send any more can't ask any more."""
        self.protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note that the client is gone."""
        self.protocol.connection_lost(exc)
        self._release()

    def pause_writing(self) -> None:
        """Take note that the client does not read."""
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        """Take note that the client reads again."""
        self.protocol.resume_writing()
