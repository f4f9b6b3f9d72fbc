"""Writing: the frames of one turn of the event loop leave together, and a long turn leaves in parts.

One system call and one wake-up of the peer per frame would cost more than most calls. But with
all that a turn produces held back to its end, the processes of a graph work in turns, each one
idle while the others do all calls at hand.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from servekit.core.call import Buffer
from servekit.wire.frames import LARGE, SHARED_FROM

BURST: Final = 8
"""Buffers after which a turn's frames so far are sent, so that the peer can begin with them."""


class Outbox:
    """The way out of one connection.

    Args:
        loop: The loop whose turns are meant.

    Attributes:
        on_large: Called once, when a buffer that could have been shared was written.
    """

    __slots__ = ("_buffers", "_loop", "_transport", "on_large")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.WriteTransport | None = None
        self._buffers: list[Buffer] = []
        self.on_large: Callable[[], None] | None = None

    def open(self, transport: asyncio.WriteTransport) -> None:
        """Write to this transport from now on."""
        self._transport = transport

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send buffers behind those before; after the transport has ended they are dropped."""
        held = self._buffers
        if not held:
            self._loop.call_soon(self.flush)
        held += buffers
        if len(held) >= BURST:
            self.flush()

    def flush(self) -> None:
        """Send what is held back."""
        held, self._buffers = self._buffers, []
        transport = self._transport
        if not held or transport is None or transport.is_closing():
            return
        if len(held) == 1:
            transport.write(held[0])
        elif sum(map(len, held)) < LARGE:
            transport.write(b"".join(held))
        else:
            transport.writelines(held)
            if (on_large := self.on_large) is not None and max(map(len, held)) >= SHARED_FROM:
                self.on_large = None
                on_large()
