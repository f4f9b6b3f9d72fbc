"""Large segments past the socket: copied once, into memory that the peer uses in place.

Either side of a unix socket offers its arena (`arena.py`) when it has written something large.
Once the peer has mapped it, frames name the blocks of large segments instead of carrying them.
What finds no place goes over the socket as before, so nobody ever waits for memory.
"""

import asyncio
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Final

import msgspec

from servekit.core.call import Buffer
from servekit.errors import WireError
from servekit.observe.log import get_logger
from servekit.wire.arena import Arena, ArenaError, Offer, PeerArena
from servekit.wire.frames import SHARED, SHARED_FROM, Encode, Kind, encode

TRIM_S: Final = 10.0
"""Memory that no call needed for this long goes back to the system, at the latest in as long again."""

_log = get_logger("servekit.wire")
_pack = msgspec.msgpack.Encoder().encode
_unpack_offer = msgspec.msgpack.Decoder(Offer).decode
_unpack_answer = msgspec.msgpack.Decoder(bool).decode
_unpack_places = msgspec.msgpack.Decoder(list[tuple[int, int] | None]).decode
_CREDENTIALS = struct.Struct("3i")


class Sharing:
    """The arenas of one connection: ours, which we write, and the peer's, which we read.

    Args:
        loop: The connection's.
        send: Takes the buffers of a frame.
        encode_by: Takes what makes frames from now on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[Sequence[Buffer]], None],
        encode_by: Callable[[Encode], None],
    ) -> None:
        self._loop = loop
        self._send = send
        self._encode_by = encode_by
        self._sock: socket.socket | None = None
        self._own: Arena | None = None
        self._peer: PeerArena | None = None
        self._mapped = False
        self._trimmer: asyncio.TimerHandle | None = None

    def open(self, sock: socket.socket) -> None:
        """Allow it from now on, with the process at the other end of a unix socket."""
        self._sock = sock

    def offer(self) -> None:
        """Make an arena, if this system can, and tell the peer where it is."""
        try:
            self._own = Arena()
        except ArenaError as error:
            _log.debug("large segments stay on the socket", error=str(error))
        else:
            self._send(encode(Kind.ARENA, 0, _pack(self._own.offer)))

    def on_offer(self, header: Buffer) -> None:
        """Map the peer's arena, if that can be done, and answer whether it was.

        Raises:
            WireError: The peer has offered one before.
        """
        if self._peer is not None:
            raise WireError("a second arena on one connection")
        offer = _unpack_offer(header)
        try:
            self._peer = PeerArena(_peer_pid(self._sock), offer)
        except ArenaError as error:
            _log.debug("large segments stay on the socket", error=str(error))
        self._send(encode(Kind.MAPPED, 0, _pack(self._peer is not None)))

    def on_answer(self, header: Buffer) -> None:
        """Use our arena from now on, or let go of it.

        Raises:
            WireError: None was offered.
        """
        if self._own is None or self._mapped:
            raise WireError("an answer to an arena that was not offered")
        self._mapped = _unpack_answer(header)
        if self._mapped:
            self._encode_by(self._encode)
        else:
            self._own.close()
            self._own = None

    def resolve(self, carried: list[Buffer]) -> list[Buffer]:
        """Return all segments of a frame of which the first carried one tells where the others are.

        Raises:
            WireError: They can't be there.
        """
        if self._peer is None or not carried:
            raise WireError("a frame names segments in an arena, but there is none")
        rest = iter(carried)
        places = _unpack_places(next(rest))
        if places.count(None) != len(carried) - 1:
            raise WireError("a frame carries more or fewer segments than it says")
        view = self._peer.view
        return [next(rest) if place is None else view(*place) for place in places]

    def close(self) -> None:
        """Let go of both arenas. Views of the peer's stay good for as long as there are any."""
        self._encode_by(encode)
        if self._trimmer is not None:
            self._trimmer.cancel()
        if self._own is not None:
            self._own.close()
        self._own = self._peer = None

    def _encode(
        self, kind: int, id_: int, header: bytes, segments: Sequence[Buffer]
    ) -> list[Buffer]:
        """Return the buffers that make up a frame, with large segments in our arena.

        Raises:
            WireError: A part is larger than the format can say.
        """
        for segment in segments:
            if len(segment) >= SHARED_FROM:
                return self._encode_large(kind, id_, header, segments)
        return encode(kind, id_, header, segments)

    def _encode_large(
        self, kind: int, id_: int, header: bytes, segments: Sequence[Buffer]
    ) -> list[Buffer]:
        own = self._own
        assert own is not None
        places: list[tuple[int, int] | None] = []
        carried: list[Buffer] = [b""]
        for segment in segments:
            size = len(segment)
            if size >= SHARED_FROM and (block := own.place(segment, size)) is not None:
                places.append((block, size))
            else:
                places.append(None)
                carried.append(segment)
        if len(carried) > len(segments):
            return encode(kind, id_, header, segments)
        if self._trimmer is None:
            self._trim_later()
        carried[0] = _pack(places)
        try:
            return encode(kind | SHARED, id_, header, carried)
        except WireError:
            for place in places:
                if place is not None:
                    own.give(place[0])
            raise

    def _trim_later(self) -> None:
        # In a context of its own: that of a call would keep the call's arrays, time after time.
        self._trimmer = self._loop.call_later(TRIM_S, self._trim, context=Context())

    def _trim(self) -> None:
        assert self._own is not None
        self._trimmer = None
        if self._own.trim():
            self._trim_later()


def _peer_pid(sock: socket.socket | None) -> int:
    """Return the process at the other end, as the kernel tells; 0 is one in another container."""
    if sys.platform != "linux" or sock is None:
        raise ArenaError("no way to know the peer's process")
    option = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(option)[0])
