"""What the verbs print: errors on stderr, tables, and the spinners of services that load.

For a terminal it is coloured, by rich, which is imported only then; for a pipe or a file it is the
same text without colour and movement.
"""

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Self, TextIO, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

Line: TypeAlias = Sequence[tuple[str, str]]
"""Pieces of a line: text and its rich style."""

_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAME_S: Final = 0.08
_LOG_LINES: Final = 6


def is_terminal(stream: TextIO | None = None) -> bool:
    """Return whether a person looks at a stream (stdout by default)."""
    looked_at = stream or sys.stdout
    return looked_at.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def fail(message: str, *, hint: str = "") -> None:
    """Write what went wrong to stderr, the short of it first.

    Args:
        message: One line; a traceback may follow behind an empty line.
        hint: What to do next.
    """
    head, _, rest = message.partition("\n")
    write([("error: ", "bold red"), (head, "")], stream=sys.stderr)
    if rest.strip():
        print(rest.rstrip("\n"), file=sys.stderr)  # noqa: T201
    if hint:
        write([(hint, "dim")], stream=sys.stderr)


def write(*lines: Line, stream: TextIO | None = None) -> None:
    """Write lines, in colour where somebody sees it; long ones wrap by themselves."""
    sink = stream or sys.stdout
    sink.write("".join(f"{text}\n" for text in _rendered(lines, sink)))
    sink.flush()


def rows(table: Sequence[Line], *, indent: str = "") -> Iterator[Line]:
    """Yield lines with cells padded to columns; the last cell of a line is not padded."""
    filled = [
        row[: max((i + 1 for i, cell in enumerate(row) if cell[0]), default=0)] for row in table
    ]
    columns = max((len(row) for row in filled), default=0)
    widths = [
        max(len(row[index][0]) for row in filled if index < len(row)) for index in range(columns)
    ]
    for row in filled:
        line = [(indent, "")]
        for (text, style), width in zip(row, widths, strict=False):
            line += [(text, style), (" " * (width - len(text) + 2), "")]
        yield line[:-1] if row else []


def _rendered(lines: Sequence[Line], stream: TextIO, *, width: int | None = None) -> list[str]:
    """Return lines as text for a stream; a width cuts them there."""
    if not is_terminal(stream):
        return ["".join(text for text, _ in line) for line in lines]
    from rich.text import Text  # noqa: PLC0415

    console = _console(stream)
    rendered: list[str] = []
    for line in lines:
        text = Text.assemble(*line)
        if width is not None:
            text.truncate(width, overflow="ellipsis")
        with console.capture() as capture:
            console.print(text, soft_wrap=True, highlight=False, end="")
        rendered.append(capture.get())
    return rendered


def _console(stream: TextIO) -> "Console":
    from rich.console import Console  # noqa: PLC0415

    return Console(file=stream)


class Spinner:
    """Lines that move while something goes on, below all that others write meanwhile.

    They are drawn below the cursor, which stays on an empty line above them. So a log line of this
    or of another process lands there, whole, and the next frame draws the lines anew below it.

    Args:
        lines: Returns the lines of now; gets the frame's mark.
    """

    def __init__(self, lines: Callable[[str], Sequence[Line]]) -> None:
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        sys.stdout.write("\x1b[?25l")
        self._draw()

    def _draw(self) -> None:
        mark = _FRAMES[int(time.monotonic() / _FRAME_S) % len(_FRAMES)]
        width = os.get_terminal_size(sys.stdout.fileno()).columns - 1
        lines = _rendered(self._lines(mark), sys.stdout, width=width)
        text = "".join(f"\n{line}" for line in lines)
        sys.stdout.write(f"\r\x1b[J{text}\x1b[{len(lines)}A\r")
        sys.stdout.flush()
        self._timer = self._loop.call_later(_FRAME_S, self._draw)

    def close(self) -> None:
        """Take the lines away."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            sys.stdout.write("\r\x1b[J\x1b[?25h")
            sys.stdout.flush()


class Steps:
    """One line that tells what goes on, for a person who waits, and below it what that prints last.

    Where nobody looks, there is only what it prints: plain lines, on stderr.
    """

    def __init__(self) -> None:
        self._status: Status | None = None
        self._text = ""
        self._log: deque[str] = deque(maxlen=_LOG_LINES)

    def __enter__(self) -> Self:
        if is_terminal(sys.stderr):
            self._status = _console(sys.stderr).status("")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def step(self, text: str) -> None:
        """Tell what begins now."""
        self._text = text
        self._log.clear()
        self._show(text)

    def progress(self, done: int, total: int) -> None:
        """Tell how many bytes of it are done."""
        if total:
            share = f"{100 * done // total} % of {total / 2**20:.0f} MiB"
            self._show(f"{self._text}  {share}")

    def log(self, line: str) -> None:
        """Show a line that it prints."""
        if self._status is None:
            write([(line, "")], stream=sys.stderr)
        self._log.append(line)
        self._show(self._text)

    def _show(self, text: str) -> None:
        if self._status is None:
            return
        from rich.console import Group  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        lines = (Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in self._log)
        self._status.update(Group(Text(text), *lines))


def print_json(document: bytes) -> None:
    """Print a JSON document, indented."""
    import msgspec  # noqa: PLC0415

    text = msgspec.json.format(document, indent=2).decode()
    if is_terminal():
        from rich.highlighter import JSONHighlighter  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        coloured = Text(text)
        JSONHighlighter().highlight(coloured)
        _console(sys.stdout).print(coloured, soft_wrap=True)
    else:
        print(text)  # noqa: T201
