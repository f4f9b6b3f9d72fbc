"""Clients that do not read their answers: a look every so often at what waits for them."""

import asyncio
import socket
import struct
from functools import partial
from typing import Final

_LOOK_EVERY_S: Final = 20.0
_MIN_BYTES_PER_S: Final = 1024
"""What a client must take of an answer on average."""
_RESET: Final = struct.pack("ii", 1, 0)


class UnreadGuard:
    """Hangs up on a client that takes for ever to read its answers: nobody else can.

    Args:
        transport: Its connection.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look from now on."""
        self._waiting = self._transport.get_write_buffer_size()
        self._timer = loop.call_later(_LOOK_EVERY_S, partial(self._look, loop))

    def stop(self) -> None:
        """Look no more: the client reads again, or is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        taken = self._waiting - self._transport.get_write_buffer_size()
        if taken < _MIN_BYTES_PER_S * _LOOK_EVERY_S:
            # With a reset, or the kernel would keep what it could not send for minutes.
            if (sock := self._transport.get_extra_info("socket")) is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()
        else:
            self.start(loop)
