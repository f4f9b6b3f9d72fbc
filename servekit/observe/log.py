"""Logs: one line an event, from us, the standard library and uvicorn alike.

An event is a name with facts: `log.info("replica ready", replica=id, took_s=1.2)`. It goes through
the standard library's logging, so before `configure` it behaves as any library's does; after it,
all lines are rendered the same way. The id of the call at hand (`CURRENT`) stands on every line
that its task writes, those of other libraries included.
"""

import logging
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from servekit.core.context import CURRENT
from servekit.settings import LogFormat

_BARE = re.compile(r"[\w.:/@%+,;<>()\[\]{}*?!&|^~#$-]+")


class Event:
    """The message of a log record: a name and facts. Its text is the console's form of them."""

    __slots__ = ("facts", "name")

    def __init__(self, name: str, facts: Mapping[str, object]) -> None:
        self.name = name
        self.facts = facts

    def __str__(self) -> str:
        return " ".join([_visible(self.name), *_pairs(self.facts)])


class Logger:
    """Writes events; facts are keyword arguments. Light, so that any module can have one."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **facts: object) -> None:
        """Write what only helps to find a fault."""
        self._write(logging.DEBUG, event, facts)

    def info(self, event: str, /, **facts: object) -> None:
        """Write what an operator expects."""
        self._write(logging.INFO, event, facts)

    def warning(self, event: str, /, **facts: object) -> None:
        """Write what went wrong and was made good."""
        self._write(logging.WARNING, event, facts)

    def error(self, event: str, /, **facts: object) -> None:
        """Write what went wrong."""
        self._write(logging.ERROR, event, facts)

    def exception(
        self, event: str, /, *, error: BaseException | None = None, **facts: object
    ) -> None:
        """Write what went wrong, with the traceback of `error`, or of the one being handled."""
        self._write(logging.ERROR, event, facts, exc_info=error or True)

    def _write(
        self,
        level: int,
        event: str,
        facts: Mapping[str, object],
        *,
        exc_info: BaseException | bool = False,
    ) -> None:
        if self._logger.isEnabledFor(level):
            # Two frames up is the caller, for formatters that show file and line.
            self._logger.log(level, Event(event, facts), exc_info=exc_info, stacklevel=3)


def get_logger(name: str) -> Logger:
    """Return the logger of a module, which passes its `__name__`."""
    return Logger(name)


def configure(
    format: LogFormat,  # noqa: A002  (as the setting is called)
    level: str,
    role: str,
    *,
    stream: TextIO | None = None,
) -> None:
    """Send all logs and warnings of this process through one renderer.

    Args:
        format: `"console"` writes lines for people, `"json"` one object a line.
        level: Least level that is written.
        role: What this process is (`"gateway"`, `"replica Embedder-0"`); stands on each line.
        stream: Where to; None is stderr, so that stdout stays free for output.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_Formatter(role, _json if format == "json" else _console))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(capture=True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.ERROR)  # what else it says, we say or any client can provoke
    logging.getLogger("watchfiles").setLevel(logging.WARNING)


class _Formatter(logging.Formatter):
    """Makes a line's keys, in order, from a log record, and renders them."""

    def __init__(self, role: str, render: Callable[[dict[str, Any]], str]) -> None:
        super().__init__()
        self._role = role
        self._render = render

    def format(self, record: logging.LogRecord) -> str:
        message: object = record.msg
        if isinstance(message, Event):
            name, facts = message.name, message.facts
        else:
            name, facts = record.getMessage(), {}
        head = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "event": name,
        }
        tail: dict[str, object] = {"role": self._role, "logger": record.name}
        if (context := CURRENT.get()) is not None:
            tail["request_id"] = context.request_id
        if record.exc_info:
            tail["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            tail["stack"] = record.stack_info
        # The head comes first, and once more last: a fact can't pose as the level or the time.
        return self._render({**head, **facts, **head, **tail})


def _json(line: dict[str, Any]) -> str:
    # msgspec writes NaN as null, where the standard library would write what is not JSON.
    try:
        return msgspec.json.encode(line, enc_hook=repr).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        # A lone surrogate, a 100-bit integer: the facts lose their types, but the line is kept.
        return msgspec.json.encode({key: _visible(str(line[key])) for key in line}).decode()


def _console(line: dict[str, Any]) -> str:
    time: datetime = line.pop("time")
    blocks = [line.pop(key) for key in ("stack", "exception", "traceback") if key in line]
    head = [
        f"{time.astimezone():%H:%M:%S}.{time.microsecond // 1000:03d}",
        f"{line.pop('level'):<8}",
        _visible(str(line.pop("event"))),
    ]
    return "\n".join([" ".join(head + _pairs(line)), *blocks])


def _pairs(facts: Mapping[str, object]) -> list[str]:
    """Return `key=value` texts; a text that could be misread is quoted."""
    return [
        f"{key}={value if isinstance(value, str) and _BARE.fullmatch(value) else _repr(value)}"
        for key, value in facts.items()
    ]


def _repr(value: object) -> str:
    return _visible(repr(value))


def _visible(text: str) -> str:
    """Return text with line ends and control characters escaped, so that it can't forge a line."""
    return text if text.isprintable() else repr(text)[1:-1]
