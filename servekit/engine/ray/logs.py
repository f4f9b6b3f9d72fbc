"""What the processes of an app print, kept for a while, so that `servekit logs` can ask for it.

Ray writes it into a file on each node and shows it to the driver that started Serve, which is long
gone. A `Tail` stands in front of stdout and stderr and keeps the last lines in memory.
"""

import io
import sys
import threading
from collections import deque
from typing import Final, TextIO

import msgspec

LINES: Final = 2000
"""Lines that a process keeps."""
_LONGEST: Final = 8192


class Lines(msgspec.Struct, frozen=True):
    """Lines of one process.

    Attributes:
        until: How many there were up to these, for the next question.
        lines: Without line ends.
    """

    until: int = 0
    lines: tuple[str, ...] = ()


class Since(msgspec.Struct, frozen=True):
    """Ask for the lines behind so many."""

    until: int = 0


class Tail:
    """The last lines of a process; any thread may write."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES)
        self._count = 0
        self._lock = threading.Lock()

    def install(self) -> None:
        """Take what is printed from now on."""
        sys.stdout, sys.stderr = _Tee(self, sys.stdout), _Tee(self, sys.stderr)

    def add(self, line: str) -> None:
        """Take a line."""
        with self._lock:
            self._lines.append(line[:_LONGEST])
            self._count += 1

    def since(self, until: int) -> Lines:
        """Return the lines behind so many, as far as they are kept."""
        with self._lock:
            fresh = min(self._count - until, len(self._lines)) if until <= self._count else 0
            return Lines(self._count, tuple(self._lines)[len(self._lines) - fresh :])


class _Tee(io.TextIOBase):
    """A stream that passes on what is written, and gives whole lines to a tail."""

    def __init__(self, tail: Tail, stream: TextIO) -> None:
        self._tail = tail
        self._stream = stream
        self._rest = ""

    def write(self, text: str, /) -> int:
        self._stream.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._tail.add(line)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding
