"""The frame format, without I/O: bytes in, frames out, and back.

::

    u32 size        bytes that follow this field
    u32 id          of the call that the frame belongs to; chosen by its caller
    u8  kind        see `Kind`
    u8  0
    u16 segments    how many
    u16 header      bytes of the msgpack header
    ...             header, then one u32 length per segment, then the segments,
                    each starting at a multiple of 8 bytes from the frame's start

All integers are little-endian. Segments are aligned, so that an array in a large frame is used
where it was received, without a copy. Whatever breaks these rules raises `WireError`.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import msgspec

from servekit.core.call import Buffer, Call, Load
from servekit.errors import WireError

PROTOCOL = 1
"""Version of this format and of the headers; peers of different versions refuse each other."""

_PREFIX = struct.Struct("<IIBxHH")
_PREFIX_BYTES = _PREFIX.size
_SIZE = struct.Struct("<I")


@lru_cache(maxsize=64)
def _table(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


_PADDING = tuple(bytes(n) for n in range(8))
_MAX_HEADER = 0xFFFF
LARGE: Final = 64 * 1024
"""Frames and segments from this size in bytes are neither joined on sending nor copied on receipt."""


class Kind:
    """What a frame says.

    The caller sends CALL, CANCEL and CREDIT; the callee REPLY, ERROR, and for a stream CHUNK (one
    chunk of any number of segments), CHUNKS (as many chunks as segments) and END; both the rest.
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


def encode(
    kind: int, id_: int, header: bytes = b"", segments: Sequence[Buffer] = ()
) -> list[Buffer]:
    """Return the buffers that make up one frame; all small parts are joined into one.

    Raises:
        WireError: A part is larger than the format can say.
    """
    count, header_size = len(segments), len(header)
    if header_size > _MAX_HEADER or count > 0xFFFF:
        raise WireError(f"frame header of {header_size} bytes with {count} segments is too large")
    if not count:
        return [_PREFIX.pack(_PREFIX_BYTES - 4 + header_size, id_, kind, 0, header_size) + header]
    offset = _PREFIX_BYTES + header_size + 4 * count
    if count == 1:
        segment = segments[0]
        size = len(segment) if not isinstance(segment, memoryview) else segment.nbytes
        padding = -offset & 7
        total = offset + padding + size
        if total > 0xFFFFFFFF:
            raise WireError(f"frame of {total} bytes is over 4 GiB")
        head = (
            _PREFIX.pack(total - 4, id_, kind, 1, header_size)
            + header
            + _SIZE.pack(size)
            + _PADDING[padding]
        )
        return [head + segment] if size < LARGE else [head, segment]
    sizes = [s.nbytes if isinstance(s, memoryview) else len(s) for s in segments]
    body: list[Buffer] = []
    at = offset
    for segment, size in zip(segments, sizes, strict=True):
        padding = -at & 7
        body.append(_PADDING[padding])
        body.append(segment)
        at += padding + size
    if at > 0xFFFFFFFF:
        raise WireError(f"frame of {at} bytes is over 4 GiB")
    head = _PREFIX.pack(at - 4, id_, kind, count, header_size) + header + _table(count).pack(*sizes)
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
        self._ring = bytearray(4 * LARGE)
        self._view = memoryview(self._ring)
        self._start = self._end = 0
        self._large: bytearray | None = None
        self._filled = 0

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
        if self._large is not None:
            self._filled += count
            if self._filled < len(self._large):
                return
            large, self._large = self._large, None
            view = memoryview(large)
            yield _parse(large, view, view, 0, len(large))
            return
        self._end += count
        ring, view = self._ring, self._view
        while (available := self._end - self._start) >= 4:
            total = 4 + _SIZE.unpack_from(ring, self._start)[0]
            if total > self.max_frame or total < _PREFIX_BYTES:
                raise WireError(
                    f"frame of {total} bytes; allowed are {_PREFIX_BYTES} to {self.max_frame}"
                )
            if available >= total:
                start, self._start = self._start, self._start + total
                yield _parse(ring, view, ring, start, total)
            elif total >= LARGE:
                self._large = bytearray(total)
                self._large[:available] = view[self._start : self._end]
                self._filled = available
                self._start = self._end = 0
                return
            else:
                break
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._ring) - self._start < LARGE:
            self._compact()

    def _compact(self) -> None:
        rest = bytes(self._view[self._start : self._end])
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


def _parse(
    data: bytearray, view: memoryview, segments_of: bytearray | memoryview, start: int, total: int
) -> Frame:
    """Cut up one frame of `data`, which `view` shows; slices of `segments_of` are its segments."""
    prefix: tuple[int, int, int, int, int] = _PREFIX.unpack_from(data, start)
    _, id_, kind, count, header_size = prefix
    end = start + total
    at = start + _PREFIX_BYTES + header_size
    header = view[start + _PREFIX_BYTES : at]
    if not count:
        if at != end:
            raise WireError("frame has bytes behind its header")
        return kind, id_, header, []
    if at + 4 * count > end:
        raise WireError("frame ends within its segment table")
    if count == 1:  # nearly all of them
        (size,) = _SIZE.unpack_from(data, at)
        at += 4 + (-(at + 4 - start) & 7)
        if at + size != end:
            raise WireError("the segment is longer or shorter than its frame")
        return kind, id_, header, [segments_of[at:end]]
    sizes: tuple[int, ...] = _table(count).unpack_from(data, at)
    at += 4 * count
    segments: list[Buffer] = []
    for size in sizes:
        at += -(at - start) & 7
        if at + size > end:
            raise WireError("segments are longer than their frame")
        segments.append(segments_of[at : at + size])
        at += size
    if at != end:
        raise WireError("frame has bytes behind its segments")
    return kind, id_, header, segments
