"""Requests that offer to go on in another protocol (`Upgrade: h2c`), which nobody here speaks.

Java's client and `curl --http2` make this offer with every first request. A server may ignore it
(RFC 9110, 7.8), but httptools stops at the end of such a head and takes what follows for the other
protocol. So a new parser is shown the head again, without the offer.
"""

from collections.abc import Iterable
from typing import Final, Protocol

_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})


class Callbacks(Protocol):
    """What a parser calls."""

    def on_message_begin(self) -> None: ...  # noqa: D102
    def on_url(self, url: bytes) -> None: ...  # noqa: D102
    def on_header(self, name: bytes, value: bytes) -> None: ...  # noqa: D102
    def on_headers_complete(self) -> None: ...  # noqa: D102
    def on_body(self, body: bytes) -> None: ...  # noqa: D102
    def on_message_complete(self) -> None: ...  # noqa: D102


def head_without_upgrade(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the least of a head that tells a parser how the body is framed."""
    lines = [b"%b: %b\r\n" % field for field in headers if field[0] in _FRAMING]
    return b"".join((b"POST / HTTP/1.1\r\n", *lines, b"\r\n"))


class Continuation:
    """Keeps a head from callbacks that have seen it already.

    Args:
        callbacks: Get everything that follows the head.
    """

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._after_head = False
        self.on_body = callbacks.on_body
        self.on_message_complete = callbacks.on_message_complete

    def on_message_begin(self) -> None:
        """Pass on what begins behind the head."""
        if self._after_head:
            self._callbacks.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Pass on what is behind the head."""
        if self._after_head:
            self._callbacks.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Pass on what is behind the head."""
        if self._after_head:
            self._callbacks.on_header(name, value)

    def on_headers_complete(self) -> None:
        """Take the end of the head, or pass on that of another."""
        if self._after_head:
            self._callbacks.on_headers_complete()
        self._after_head = True
