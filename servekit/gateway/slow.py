"""Clients that are slow: those that take for ever to send a request, or to read its answer."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from servekit.core.aio import reset
from servekit.errors import RequestTimeout

_PATIENCE_S: Final = 10.0
"""A head must be whole after this time, and a body is looked at every so often."""
_LOOK_EVERY_S: Final = 20.0
"""An answer that waits for its client is looked at every so often."""
_MIN_BYTES_PER_S: Final = 1024
"""What a client must send of a body, and take of an answer, on average while it is looked at."""


class SenderGuard:
    """Refuses a request that takes for ever to come.

    Args:
        is_held: Whether it is this side that keeps the client waiting.
        refuse: Called with what the client is told.

    Attributes:
        received: Bytes so far.
    """

    def __init__(
        self,
        *,
        is_held: Callable[[], bool],
        refuse: Callable[[RequestTimeout], None],
    ) -> None:
        self._is_held = is_held
        self._refuse = refuse
        self._timer: asyncio.TimerHandle | None = None
        self._received_then = 0
        self.received = 0

    @property
    def watches(self) -> bool:
        """Whether a request is on its way."""
        return self._timer is not None

    def watch(self, loop: asyncio.AbstractEventLoop, *, in_head: bool) -> None:
        """Look from now on, if it does not yet; a head or a body is not whole."""
        if self._timer is None:
            self._received_then = self.received
            self._timer = loop.call_later(_PATIENCE_S, partial(self._look, loop, in_head=in_head))

    def trust(self) -> None:
        """Look no more: the head or the body is whole, or the client is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop, *, in_head: bool) -> None:
        self._timer = None
        if self._is_held():
            self.watch(loop, in_head=in_head)
        elif in_head:
            self._refuse(RequestTimeout(f"the head was not here after {_PATIENCE_S:.0f} s"))
        elif self.received - self._received_then < _MIN_BYTES_PER_S * _PATIENCE_S:
            self._refuse(RequestTimeout(f"the body came with less than {_MIN_BYTES_PER_S} bytes/s"))
        else:
            self.watch(loop, in_head=False)


class ReaderGuard:
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
