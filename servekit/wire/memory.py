"""Two connections joined in memory: the real protocol, without a socket, for `local` and tests."""

import asyncio
from collections.abc import Iterable
from typing import Any

from servekit.core.call import Buffer
from servekit.wire.connection import Connection


class MemoryTransport(asyncio.Transport):
    """Hands what is written to the other side's protocol on the loop's next turn."""

    def __init__(self, own: Connection) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._own = own
        self._closing = False
        self.other: MemoryTransport | None = None

    def write(self, data: Buffer) -> None:
        """Queue bytes for the other side."""
        if not self._closing and self.other is not None:
            self._loop.call_soon(self.other.receive, data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Queue several buffers."""
        for data in list_of_data:
            self.write(data)

    def receive(self, data: Buffer) -> None:
        """Take bytes from the other side."""
        view = memoryview(data).cast("B")
        while len(view) and not self._closing:
            buffer = self._own.get_buffer(len(view))
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            self._own.buffer_updated(count)
            view = view[count:]

    def is_closing(self) -> bool:
        """Return whether this side is closed or about to be."""
        return self._closing

    def close(self) -> None:
        """Close both sides once what is queued has arrived."""
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._own.connection_lost, None)
            if self.other is not None:
                self._loop.call_soon(self.other.close)

    def abort(self) -> None:
        """Close."""
        self.close()


async def join(client: Connection, server: Connection) -> None:
    """Connect two connections of this loop and wait for their greeting.

    Raises:
        WireError: They refuse each other.
    """
    here, there = MemoryTransport(client), MemoryTransport(server)
    here.other, there.other = there, here
    client.connection_made(here)
    server.connection_made(there)
    await client.greeted()
    await server.greeted()
