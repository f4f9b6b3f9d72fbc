"""The frame format, without I/O: bytes in, frames out, and back.

::

    u32 size        bytes that follow this field
    u32 id          of the call that the frame belongs to; chosen by its caller
    u8  kind        see `Kind`
    u8  0
    u16 segments    how many
    u16 header      bytes of the msgpack header
    ...             header; then the segment, if it is one; if they are more, one u32 length
                    for each, and the segments, each starting at a multiple of 8 bytes from
                    the frame's start

All integers are little-endian. Segments of a large frame lie at multiples of 8 bytes in memory, so
that an array in it is used where it was received, without a copy. Whatever breaks these rules
raises `WireError`.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import msgspec

from servekit.core.call import Buffer, Call, Load
from servekit.core.room import room
from servekit.errors import WireError

PROTOCOL = 2
"""Version of this format and of the headers; peers of different versions refuse each other."""

_PREFIX = struct.Struct("<IIBxHH")
_PREFIX_BYTES: Final = _PREFIX.size
_AFTER_SIZE: Final = _PREFIX_BYTES - 4


@lru_cache(maxsize=64)
def _table(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


_PADDING = tuple(bytes(n) for n in range(8))
LARGE: Final = 64 * 1024
"""Frames and segments from this size in bytes are neither joined on sending nor copied on receipt."""
SHARED_FROM: Final = 128 * 1024
"""Segments from this size in bytes go through shared memory, where there is some (`sharing.py`)."""


class Kind:
    """What a frame says.

    The caller sends CALL, CANCEL and CREDIT; the callee REPLY, ERROR, and for a stream CHUNK (one
    chunk of any number of segments), CHUNKS (as many chunks as segments) and END. A call whose input
    streams is OPEN in place of CALL; its caller sends INPUT, INPUTS and INPUT_END as the callee does
    CHUNK, CHUNKS and END, but none before the callee's first INPUT_CREDIT. Both send the rest; ARENA
    offers memory for large segments, MAPPED answers it.
    """

    CALL: Final = 1
    CANCEL: Final = 2
    CREDIT: Final = 3
    REPLY: Final = 4
    ERROR: Final = 5
    CHUNK: Final = 6
    END: Final = 7
    HELLO: Final = 8
    AUTH: Final = 9
    GOAWAY: Final = 10
    PING: Final = 11
    PONG: Final = 12
    CHUNKS: Final = 13
    OPEN: Final = 14
    INPUT: Final = 15
    INPUTS: Final = 16
    INPUT_END: Final = 17
    INPUT_CREDIT: Final = 18
    ARENA: Final = 19
    MAPPED: Final = 20


SHARED: Final = 0x80
"""Added to the kind of a frame that names segments in the sender's arena (`sharing.py`).

Its first segment is a msgpack list with one item for each segment meant: `[block, size]`, or nil
for the next of those that follow.
"""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """First frame of each side: who it is, and its half of the challenge."""

    protocol: int = PROTOCOL
    service: str = ""
    replica: str = ""
    version: str = ""
    nonce: bytes = b""
    proof: bytes = b""


CallHeader: TypeAlias = tuple[float | None, str, Call]
"""Seconds until the deadline (clocks differ between machines), the media type, the call."""

ReplyHeader: TypeAlias = tuple[str, Load, float, bool]
"""Media type, the replica's load, seconds in its queue; and whether a stream of chunks follows."""


class ErrorHeader(msgspec.Struct, array_like=True, frozen=True):
    """A failed call, or the failed end of a stream."""

    code: str
    message: str
    reason: str = ""
    retry_after_s: float | None = None
    fields: list[dict[str, object]] = []
    started: bool = True
    load: Load = Load()


Frame: TypeAlias = tuple[int, int, Buffer, list[Buffer]]
"""Kind, id, header and segments of one frame as received.

The header is a view that holds until the next frame is taken; segments of a large frame are views
of a buffer of its own.
"""

Encode: TypeAlias = Callable[[int, int, bytes, Sequence[Buffer]], list[Buffer]]
"""Returns the buffers of one frame that carries a payload; `encode`, or one that knows an arena."""


def encode(
    kind: int, id_: int, header: bytes = b"", segments: Sequence[Buffer] = ()
) -> list[Buffer]:
    """Return the buffers that make up one frame; all small parts are joined into one.

    Raises:
        WireError: A part is larger than the format can say.
    """
    count, header_size = len(segments), len(header)
    try:
        if count == 1:  # nearly all of them
            segment = segments[0]
            size = len(segment)
            head = _PREFIX.pack(_AFTER_SIZE + header_size + size, id_, kind, 1, header_size)
            return [head + header + segment] if size < LARGE else [head + header, segment]
        if not count:
            return [_PREFIX.pack(_AFTER_SIZE + header_size, id_, kind, 0, header_size) + header]
        sizes = [len(segment) for segment in segments]
        at = _PREFIX_BYTES + header_size + 4 * count
        body: list[Buffer] = []
        for segment, size in zip(segments, sizes, strict=True):
            padding = -at & 7
            body.append(_PADDING[padding])
            body.append(segment)
            at += padding + size
        head = _PREFIX.pack(at - 4, id_, kind, count, header_size) + header
        head += _table(count).pack(*sizes)
    except struct.error:
        raise WireError(
            f"{count} segments behind a header of {header_size} bytes are too large for one frame: "
            "64 KiB of header, 65,535 segments, 4 GiB in all"
        ) from None
    return [b"".join((head, *body))] if at < LARGE else [head, *body]


class FrameReader:
    """Cuts a byte stream into frames; feed it like an `asyncio.BufferedProtocol`.

    Small frames are copied out of one reused buffer. A large one gets a buffer of its own, into
    which the socket writes directly.

    Args:
        max_frame: Largest frame in bytes that a peer may send; may be raised later.
    """

    def __init__(self, max_frame: int) -> None:
        self.max_frame = max_frame
        self._ring = bytearray(2 * LARGE)
        self._view = memoryview(self._ring)
        self._start = self._end = 0
        self._large: bytearray | None = None
        self._shift = self._filled = 0

    def get_buffer(self) -> memoryview:
        """Return where the next bytes go; never empty."""
        if self._large is not None:
            return memoryview(self._large)[self._filled :]
        if self._end == len(self._ring):
            self._compact()
        return self._view[self._end :]

    def received(self, count: int) -> Iterator[Frame]:
        """Take note of `count` bytes in the last buffer; yields every frame that is now whole.

        Raises:
            WireError: The bytes are not frames.
        """
        if (large := self._large) is not None:
            self._filled += count
            if self._filled == len(large):
                self._large = None
                view = memoryview(large)
                start = self._shift
                _, id_, kind, segments, header_size = _PREFIX.unpack_from(large, start)
                at = start + _PREFIX_BYTES + header_size
                header = view[start + _PREFIX_BYTES : at]
                yield kind, id_, header, _cut(view, start, at, len(large), segments)
            return
        ring, view = self._ring, self._view
        start, end = self._start, self._end + count
        self._end = end
        while end - start >= _PREFIX_BYTES:
            size, id_, kind, segments, header_size = _PREFIX.unpack_from(ring, start)
            stop = start + 4 + size
            at = start + _PREFIX_BYTES + header_size
            if size + 4 > self.max_frame or at > stop:
                raise WireError(
                    f"frame of {size + 4} bytes, {header_size} of them header; allowed are "
                    f"{_PREFIX_BYTES} to {self.max_frame}"
                )
            if stop > end:
                if size >= LARGE:
                    self._enlarge(
                        start, 4 + size, -header_size - _PREFIX_BYTES if segments == 1 else 0
                    )
                break
            self._start = stop
            header = view[start + _PREFIX_BYTES : at]
            if segments == 1:  # nearly all of them
                yield kind, id_, header, [ring[at:stop]]
            else:
                yield kind, id_, header, _cut(ring, start, at, stop, segments)
            start = stop
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._ring) - self._start < LARGE:
            self._compact()

    def _enlarge(self, start: int, size: int, before: int) -> None:
        """Give a frame a buffer of its own, in which what is `-before` bytes in lies aligned."""
        self._shift = before & 7
        self._filled = self._shift + self._end - start
        self._large = room(self._shift + size)
        self._large[self._shift : self._filled] = self._view[start : self._end]
        self._start = self._end = 0

    def _compact(self) -> None:
        rest = bytes(self._view[self._start : self._end])
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


def _cut(data: bytearray | memoryview, start: int, at: int, stop: int, count: int) -> list[Buffer]:
    """Return the segments of a frame of `data` from `start` to `stop`, whose header ends at `at`."""
    if count == 1:
        return [data[at:stop]]
    end = at + 4 * count
    if end > stop:
        raise WireError("frame ends within its segment table")
    sizes: tuple[int, ...] = _table(count).unpack_from(data, at)
    segments: list[Buffer] = []
    at = end
    for size in sizes:
        at += -(at - start) & 7
        if at + size > stop:
            raise WireError("segments are longer than their frame")
        segments.append(data[at : at + size])
        at += size
    if at != stop:
        raise WireError("frame has bytes behind its segments")
    return segments
