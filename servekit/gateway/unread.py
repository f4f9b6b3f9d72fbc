"""Clients that do not read their answers: a look every so often at what waits for them."""

import asyncio
from functools import partial
from typing import Final

from servekit.core.aio import reset

_LOOK_EVERY_S: Final = 20.0
_MIN_BYTES_PER_S: Final = 1024
"""What a client must take of an answer on average."""


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
            reset(self._transport)  # else the kernel would keep what it could not send for minutes
        else:
            self.start(loop)
