"""One connection through a `FaultProxy`: a client's socket, the server's, and a way in each direction.

Bytes go over as they come, in their order, changed only by the faults that are asked for again for
every piece. An end or a reset of one side reaches the other one as what it was.
"""

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import Callable
from math import inf
from random import Random
from typing import Final

from servekit.core.call import now
from servekit.testing.faults import Ending, Fault

_PIECE: Final = 64 * 1024
_HELD: Final = 64
"""Pieces of a direction that may be on their way; behind them the sender has to wait."""
_AT_ONCE: Final = struct.pack("ii", 1, 0)


class Way:
    """One direction of a connection.

    Args:
        reader: Where bytes come from.
        writer: Where they go.
        faults: What is done to them now.
        rng: Of the jitter.
        count: Called with the number of bytes that have passed.
        end: Ends the whole connection.

    Attributes:
        cut: A fault has ended it.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        faults: Callable[[], list[Fault]],
        rng: Random,
        count: Callable[[int], None],
        end: Callable[[Ending], None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._faults = faults
        self._rng = rng
        self._count = count
        self._end = end
        self._held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_HELD)
        self._passed = 0
        self._changed = asyncio.Event()
        self.cut = False

    async def run(self) -> None:
        """Carry bytes until they end.

        Raises:
            OSError: The connection broke.
        """
        taking = asyncio.ensure_future(self._take())
        try:
            await self._give()
            await taking
        finally:
            taking.cancel()

    async def _take(self) -> None:
        due, data = 0.0, b"first"
        while data:
            try:
                data = await self._reader.read(_PIECE)
            except OSError:
                data = b""
                self._end("reset")
            delay_s = sum(fault.delay_s(self._rng) for fault in self._faults())
            due = max(due, now() + delay_s)
            await self._held.put((due, data))

    async def _give(self) -> None:
        while True:
            due, data = await self._held.get()
            if (early := due - now()) > 0:
                await asyncio.sleep(early)
            if not data:
                break
            while data and not self.cut:
                data = data[await self._pass_on(data) :]
        while self._room(self._faults()) < 1 and not self.cut:
            await self._wait()
        if not self.cut and self._writer.can_write_eof():
            self._writer.write_eof()

    async def _pass_on(self, data: bytes) -> int:
        """Let the next piece pass; returns its size, 0 if it was none and more may pass now."""
        faults = self._faults()
        count = int(min(len(data), self._room(faults)))
        if count < 1:
            await self._wait()
            return 0
        piece = data[:count]
        for fault in faults:
            piece = fault.changed(piece, self._passed)
        self._writer.write(piece)
        await self._writer.drain()
        self._passed += count
        self._count(count)
        self.end_if_due()
        if count < len(data):
            await asyncio.sleep(sum(fault.pause_s(count) for fault in faults))
        return count

    def _room(self, faults: list[Fault]) -> float:
        return min((fault.most(self._passed) for fault in faults), default=inf)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def end_if_due(self) -> None:
        """Cut it if one of its faults says so here; else let it look at them again."""
        for fault in self._faults():
            how = fault.ending(self._passed)
            if how is not None and not self.cut:
                self.cut = True
                if how == "half-close":
                    self._writer.write_eof()
                else:
                    self._end(how)
        self._changed.set()


class Link:
    """Both directions of one connection.

    Args:
        faults: From a direction, `"server"` or `"client"`, to what is done to its bytes now.
        rng: Of the jitter.
        counts: Bytes that have passed, by direction.

    Attributes:
        ways: Its directions, by where the bytes go; empty until the server has been reached.
    """

    def __init__(
        self, faults: Callable[[str], list[Fault]], rng: Random, counts: Counter[str]
    ) -> None:
        self._faults = faults
        self._rng = rng
        self._counts = counts
        self._writers: list[asyncio.StreamWriter] = []
        self.ways: dict[str, Way] = {}

    async def run(self, client: socket.socket, target: tuple[str, int] | str) -> None:
        """Carry bytes until both sides have ended.

        Raises:
            OSError: The server can't be reached; the client has been hung up on.
        """
        near_reader, near = await asyncio.open_connection(sock=client)
        self._writers.append(near)
        try:
            if isinstance(target, str):
                far_reader, far = await asyncio.open_unix_connection(target)
            else:
                far_reader, far = await asyncio.open_connection(*target)
            self._writers.append(far)
            self.ways["server"] = self._way("server", near_reader, far)
            self.ways["client"] = self._way("client", far_reader, near)
            for way in self.ways.values():
                way.end_if_due()
            await self._carry()
        except BaseException:
            self._close("reset")
            raise

    def _way(self, toward: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Way:
        def count(size: int) -> None:
            self._counts[toward] += size

        return Way(reader, writer, lambda: self._faults(toward), self._rng, count, self._close)

    async def _carry(self) -> None:
        carrying = [asyncio.ensure_future(way.run()) for way in self.ways.values()]
        try:
            await asyncio.gather(*carrying)
            for writer in self._writers:
                writer.close()
                await writer.wait_closed()
        except OSError:  # one side has reset, or both have been
            self._close("reset")
        finally:
            for work in carrying:
                work.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)

    def _close(self, how: Ending) -> None:
        for writer in self._writers:
            if how == "close":
                writer.close()
                continue
            sock = writer.get_extra_info("socket")
            if sock is not None and sock.family != socket.AF_UNIX:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            writer.transport.abort()
