"""What a running method may know about the call it serves, beside its arguments.

The runtime makes one `RequestContext` per call and puts it into `CURRENT` around the user's code.
A batch serves many calls at once, so it has no current one: there `Item.ctx` brings it along.
"""

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

import msgspec

from servekit.core.call import Buffer, Call, now
from servekit.errors import ServekitError


class Headers(Mapping[str, str]):
    """The caller's HTTP headers; names are case-insensitive and iterate in lower case.

    A header that was sent more than once reads as its values joined with `", "` (RFC 9110, 5.3).
    Nothing is decoded before the first look: most methods never look.

    Args:
        encoded: msgpack `[[name, value], ...]`, or b"" for none.

    Attributes:
        encoded: The same, to be sent on.
    """

    __slots__ = ("_table", "encoded")

    def __init__(self, encoded: Buffer = b"") -> None:
        self.encoded = encoded
        self._table: dict[str, str] | None = None

    def _decoded(self) -> dict[str, str]:
        table = self._table
        if table is None:
            table = {}
            if len(self.encoded):
                pairs: list[tuple[_Text, _Text]] = msgspec.msgpack.decode(self.encoded)
                for name, value in pairs:
                    key = _text(name).lower()
                    text = _text(value)
                    table[key] = f"{table[key]}, {text}" if key in table else text
            self._table = table
        return table

    def __getitem__(self, name: str) -> str:
        return self._decoded()[name.lower()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._decoded()

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __len__(self) -> int:
        return len(self._decoded())

    def __repr__(self) -> str:
        # Values may be secrets, and reprs end up in logs.
        return f"Headers({', '.join(self._decoded())})"


_Text: TypeAlias = str | bytes


def _text(value: _Text) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


_NO_CALL = Call("", "")


class RequestContext:
    """One call, as the method that serves it sees it.

    Attributes:
        call: The call itself; for the runtime.
        cancelled: Whether the caller has gone; a long loop should look and stop. Safe in any
            thread.
    """

    __slots__ = ("_headers", "call", "cancelled")

    def __init__(self, call: Call = _NO_CALL) -> None:
        self.call = call
        self.cancelled = False
        self._headers: Headers | None = None

    @property
    def request_id(self) -> str:
        """Stays the same over all hops and attempts."""
        return self.call.request_id

    @property
    def deadline(self) -> float | None:
        """Absolute, on `time.monotonic`'s clock; None waits for ever."""
        return self.call.deadline

    @property
    def traceparent(self) -> str:
        """W3C trace context of the caller, or ""."""
        return self.call.traceparent

    @property
    def caller(self) -> str:
        """Who called from outside: the name of its API key, or its token's subject.

        "" where the gateway asks for no credential. The same deep in a graph.
        """
        return self.call.caller

    @property
    def attempt(self) -> int:
        """0 for the first try."""
        return self.call.attempt

    @property
    def headers(self) -> Mapping[str, str]:
        """The caller's HTTP headers; those of the first hop, also deep in a graph."""
        if self._headers is None:
            self._headers = Headers(self.call.headers)
        return self._headers

    def remaining(self) -> float | None:
        """Seconds left until the deadline (negative when past), or None."""
        return self.call.remaining()

    def __repr__(self) -> str:
        state: dict[str, Any] = {"request_id": self.request_id, "attempt": self.attempt}
        if self.deadline is not None:
            state["remaining_s"] = round(self.deadline - now(), 3)
        if self.cancelled:
            state["cancelled"] = True
        return f"RequestContext({', '.join(f'{k}={v!r}' for k, v in state.items())})"


CURRENT: ContextVar[RequestContext | None] = ContextVar("servekit_request", default=None)
"""Set by the runtime around the user's code; None in a batch and outside of a call."""


def current() -> RequestContext:
    """Return the context of the call that the running method serves.

    Raises:
        ServekitError: There is none: no call is running here, or a whole batch is.
    """
    context = CURRENT.get()
    if context is None:
        raise ServekitError(
            "there is no current request here: current() works inside an endpoint, while it "
            "serves a call; a @batched method serves many at once, so declare list[Item[X]] and "
            "read item.ctx"
        )
    return context
