"""How much memory the bodies of all requests may take at one time: an account, without I/O.

A body of up to 16 KiB is not counted: it came in one read, and the limit on connections bounds how
many there are. A larger one is counted by its declared length at once, or as it grows, up to where
its answer has been sent.
"""

from collections.abc import Mapping
from typing import Final

from servekit.core.host import Host
from servekit.errors import Unavailable

UNCOUNTED: Final = 16 * 1024
"""Bodies up to this size in bytes are not counted."""
UNWANTED: Final = 1 << 20
"""What is read of a body that nobody will: a client that sends less finds its answer in any case."""
_MOST: Final = 2 << 30


class Bodies:
    """The account.

    Args:
        limit: Bytes at one time.

    Attributes:
        held: Bytes now.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def share(self) -> "Share":
        """Return what one request holds: nothing yet."""
        return Share(self)


class Share:
    """What one request holds; given back once, when nobody is left who uses it.

    Its work uses it from the start until `close`. A buffer that the connection fills may outlive
    that work, if it was refused at once: it counts from `open_buffer` to `close_buffer`.
    """

    __slots__ = ("_bodies", "_buffer", "_size", "_work")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0
        self._work = True
        self._buffer = False

    def hold(self, size: int) -> bool:
        """Hold so many bytes from now on, unless they would be too many or it was closed.

        Whoever is alone may hold any number: one that no limit ever takes would be asked for again
        and again, and its endpoint has a limit of its own.
        """
        bodies, others = self._bodies, self._bodies.held - self._size
        if not self._work or (size > self._size and others and others + size > bodies.limit):
            return False
        bodies.held = others + size
        self._size = size
        return True

    def open_buffer(self) -> None:
        """Keep it while the connection fills a buffer."""
        self._buffer = self._work

    def close_buffer(self) -> None:
        """Take note that the buffer is full, or that the client is gone."""
        self._buffer = False
        self._give_back()

    def close(self) -> None:
        """Take note that the request has been answered, or will never be."""
        self._work = False
        self._give_back()

    def _give_back(self) -> None:
        if not self._work and not self._buffer:
            self._bodies.held -= self._size
            self._size = 0


def too_many_bodies() -> Unavailable:
    """Return what a request is answered whose body has no room."""
    return Unavailable(
        "the server holds as many bytes of request bodies as it may",
        reason="too_many_bodies",
        retry_after_s=1.0,
        started=False,
    )


def declared(headers: Mapping[bytes, bytes]) -> int:
    """Return a body's length as its header says, or 0."""
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() and len(length) < 19 else 0


def much_may_come(headers: Mapping[bytes, bytes]) -> bool:
    """Whether more than `UNWANTED` may follow a head: there is no knowing with chunks."""
    return b"transfer-encoding" in headers or declared(headers) > UNWANTED


def default_limit() -> int:
    """Return a quarter of the memory that this process may use, at most 2 GiB."""
    return min((Host().memory() or _MOST) // 4, _MOST)
