"""What a container prints: bytes of both streams in, lines out that can be shown.

Secrets are masked as they are written, each line of them on its own; what moves a cursor or paints is
left out. The end of it is kept, for an error.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

TAIL: Final = 40
"""Lines that an error shows."""

_MASK: Final = "***"
_END: Final = re.compile(rb"[\r\n]+")
_CONTROL: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LEAST: Final = 4
"""Characters of a line of a secret with several lines; a shorter one tells nothing: `{`."""


class Output:
    """The output of one container.

    Args:
        values: Secrets that it must not show.
        logged: Called with each line.
    """

    def __init__(self, values: Iterable[str], logged: Callable[[str], None]) -> None:
        found = sorted({text for value in values for text in _parts(value)}, key=len, reverse=True)
        self._secret = re.compile("|".join(map(re.escape, found))) if found else None
        self._logged = logged
        self._open = [b"", b""]
        self.tail: deque[str] = deque(maxlen=TAIL)

    def feed(self, *chunks: bytes | None) -> None:
        """Take what came on stdout and stderr."""
        for stream, chunk in enumerate(chunks):
            if chunk:
                *whole, self._open[stream] = _END.split(self._open[stream] + chunk)
                for line in whole:
                    self._line(line)

    def close(self) -> None:
        """Take lines that did not end."""
        self.feed(b"\n", b"\n")

    def _line(self, raw: bytes) -> None:
        line = _clean(raw.decode(errors="replace")).rstrip()
        if self._secret is not None:
            line = self._secret.sub(_MASK, line)
        if line:
            self.tail.append(line)
            self._logged(line)


def _parts(value: str) -> list[str]:
    lines = [_clean(line).strip() for line in re.split(r"[\r\n]+", value)]
    least = 1 if len(lines) == 1 else _LEAST
    return [line for line in lines if len(line) >= least]


def _clean(text: str) -> str:
    return _CONTROL.sub("", text)
