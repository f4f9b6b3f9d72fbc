"""Large bodies: the socket writes straight into the buffer that is sent on.

By way of the parser each byte would be copied three times: out of the event loop's buffer, out of
the parser, and into one piece.
"""

import asyncio
from collections.abc import Callable

from servekit.gateway.exchange import Exchange


class Upload(asyncio.BufferedProtocol):
    """Stands in for a connection's protocol until the rest of a body is here.

    Args:
        transport: The connection.
        protocol: Whose place this takes.
        exchange: Whose body it is.
        body: As large as the body, filled with what is here of it.
        done: Called when all of it is, and `protocol` is back in its place.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        protocol: asyncio.Protocol,
        exchange: Exchange,
        body: bytearray,
        done: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._protocol = protocol
        self._exchange = exchange
        self._body = body
        self._view = memoryview(body)
        self._filled = exchange.size
        self._done = done
        self._change_to(self)

    def _change_to(self, protocol: asyncio.BaseProtocol) -> None:
        # Reading goes on in the way in which it was started.
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)
        self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Return where the next bytes go: up to the end of the body, and no further."""
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take note that bytes have come."""
        self._filled += nbytes
        if self._filled == len(self._body):
            self._view.release()
            self._change_to(self._protocol)
            self._exchange.fill(self._body)
            self._done()

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on."""
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass it on."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._protocol.resume_writing()
