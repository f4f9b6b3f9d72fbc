"""Compressed request bodies, unpacked: at most so many bytes, in steps, whatever they claim to be.

`gzip` is RFC 1952, with any number of members; `deflate` is the zlib format of RFC 1950, as RFC
9110, 8.4.1.2 has it. A step reads and makes at most 1 MiB. The first, of 256 KiB, is made where it
is asked for, which is all that most bodies need; the others in a thread.
"""

import asyncio
import zlib
from collections.abc import Callable
from typing import Final

from servekit.core.call import Buffer
from servekit.errors import BadRequest, UnsupportedMedia

_WINDOW: Final = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
"""zlib's name for each format."""
_NONE: Final = (b"", b"identity")
_INPUT: Final = 16 * 1024
"""What is given to zlib at once: it copies what it leaves, once for each member."""
_FIRST: Final = 256 * 1024
_STEP: Final = 1 << 20
_MEMBERS: Final = 64
"""Members in a step; each costs about what a KiB does."""


class Inflater:
    """One body on its way.

    Args:
        body: Packed.
        coding: `gzip` or `deflate`.

    Attributes:
        out: What there is of it.
        done: That is all.
    """

    def __init__(self, body: Buffer, coding: bytes) -> None:
        self._window = _WINDOW[coding]
        self._coding = coding.decode()
        self._left = memoryview(body)
        self._rest = b""
        self._member = zlib.decompressobj(self._window)
        self._members_left = _MEMBERS + len(self._left) // 1024
        self.out = bytearray()
        self.done = False

    def step(self, size: int) -> None:
        """Unpack at most `size` bytes more, 1 or more, from about as many.

        Raises:
            BadRequest: The data is corrupt, ends too early, or goes on behind its end.
        """
        until = len(self.out) + size
        reads, members = max(size // _INPUT, 1), _MEMBERS
        while not self.done and len(self.out) < until and reads and members:
            if self._member.eof:
                if not self._next_member():
                    self.done = True
                    return
                members -= 1
            data = self._rest
            if not data:
                data = self._take()
                reads -= 1
            try:
                made = self._member.decompress(data, until - len(self.out))
            except zlib.error as error:
                raise self._corrupt(str(error).rpartition(": ")[2]) from None
            if not (data or made or self._member.eof):
                raise self._corrupt("it ends too early")
            self.out += made
            self._rest = self._member.unconsumed_tail or self._member.unused_data

    def _take(self) -> bytes:
        data, self._left = self._left[:_INPUT], self._left[_INPUT:]
        return bytes(data)

    def _next_member(self) -> bool:
        """Go on behind the end of a member; returns whether there is anything."""
        if not self._rest and not self._left:
            return False
        if self._window != _WINDOW[b"gzip"]:
            raise self._corrupt("something follows its end")
        if not self._members_left:
            raise self._corrupt("it has too many members")
        self._members_left -= 1
        self._member = zlib.decompressobj(self._window)
        return True

    def _corrupt(self, what: str) -> BadRequest:
        return BadRequest(f"the body is no {self._coding} data: {what}", started=False)


async def inflate(
    body: Buffer, coding: bytes, *, limit: int, count: Callable[[int], None]
) -> Buffer | None:
    """Return a body unpacked, or None once it is larger than `limit` bytes.

    Args:
        body: Packed.
        coding: The request's `content-encoding`.
        limit: In bytes, unpacked.
        count: Called with the bytes that it takes from now on; may refuse them by raising.

    Raises:
        BadRequest: It can't be unpacked.
        UnsupportedMedia: The coding is unknown.
    """
    coding = coding.strip().lower()
    if coding in _NONE:
        return body
    if coding not in _WINDOW:
        raise _unsupported(coding, "is none of gzip and deflate, once", "gzip, deflate")
    packed = len(body)
    inflater = Inflater(body, coding)
    # One more than the limit shows that it is over.
    count(packed + min(_FIRST, limit + 1))
    inflater.step(min(_FIRST, limit + 1))
    while not inflater.done and (room := limit + 1 - len(inflater.out)) > 0:
        step = min(_STEP, room)
        count(packed + len(inflater.out) + step)
        await asyncio.to_thread(inflater.step, step)
    if len(inflater.out) > limit:
        return None
    count(len(inflater.out))
    return inflater.out


def refuse_coding(coding: bytes) -> None:
    """Refuse a body that is packed where nobody unpacks it.

    Raises:
        UnsupportedMedia: It is.
    """
    if coding.strip().lower() not in _NONE:
        raise _unsupported(coding, "does not go with a body that streams", "identity")


def _unsupported(coding: bytes, why: str, instead: str) -> UnsupportedMedia:
    text = coding.decode("latin-1")[:40]
    error = UnsupportedMedia(f"content-encoding: {text!r} {why}", started=False)
    error.headers = {"accept-encoding": instead}  # RFC 9110, 15.5.16
    return error
