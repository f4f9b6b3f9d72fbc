"""The narrow waist: everything on the request path takes a `Call` and returns a `Reply`.

Replica, batcher, router, remote stub, gateway target all have the shape of `Handler`, so a policy
can wrap any of them. Nothing here does I/O.
"""

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec

Buffer: TypeAlias = bytes | bytearray | memoryview

JSON = "application/json"
MSGPACK = "application/msgpack"
BINARY = "application/octet-stream"
NPY = "application/x-npy"
EVENT_STREAM = "text/event-stream"

now = time.monotonic
"""The clock of every deadline on this machine, in seconds."""


def new_request_id() -> str:
    """Return a fresh id, 16 hex digits."""
    return os.urandom(8).hex()


class Payload:
    """A body: a media type and buffers.

    `segments[0]` is the document (JSON unless the type says otherwise); the ones behind it are
    arrays and bytes that the document refers to by index, so that they are never copied into it.
    """

    __slots__ = ("content_type", "segments")

    def __init__(self, content_type: str, segments: Sequence[Buffer]) -> None:
        self.content_type = content_type
        self.segments = segments

    @property
    def nbytes(self) -> int:
        """Size of all segments in bytes."""
        return sum(len(s) if not isinstance(s, memoryview) else s.nbytes for s in self.segments)


EMPTY = Payload(JSON, (b"",))


class Call:
    """One request on its way to an endpoint.

    Attributes:
        service: Name of the service in the graph.
        endpoint: Name of the endpoint in the service.
        payload: The arguments, still encoded.
        request_id: Stays the same over all hops and attempts.
        deadline: Absolute, on `now`'s clock; None waits for ever.
        accept: Media type that the caller wants back.
        internal: The caller is a service of the same app, so NaN is legal and types are trusted.
        priority: Higher goes first.
        idempotent: Running it twice does no harm, so a lost call may be sent again.
        attempt: 0 for the first try.
        retries: Attempts that the next hop may make after the first; not sent on.
        affinity_key: Calls with the same key prefer the same replica.
        traceparent: W3C trace context of the caller, or "".
        headers: The caller's HTTP headers, encoded as msgpack `[[name, value], ...]`, or b"".
    """

    __slots__ = (
        "accept",
        "affinity_key",
        "attempt",
        "deadline",
        "endpoint",
        "headers",
        "idempotent",
        "internal",
        "payload",
        "priority",
        "request_id",
        "retries",
        "service",
        "traceparent",
    )

    def __init__(
        self,
        service: str,
        endpoint: str,
        payload: Payload,
        *,
        request_id: str,
        deadline: float | None = None,
        accept: str = JSON,
        internal: bool = False,
        priority: int = 0,
        idempotent: bool = False,
        attempt: int = 0,
        retries: int = 2,
        affinity_key: str = "",
        traceparent: str = "",
        headers: bytes = b"",
    ) -> None:
        self.service = service
        self.endpoint = endpoint
        self.payload = payload
        self.request_id = request_id
        self.deadline = deadline
        self.accept = accept
        self.internal = internal
        self.priority = priority
        self.idempotent = idempotent
        self.attempt = attempt
        self.retries = retries
        self.affinity_key = affinity_key
        self.traceparent = traceparent
        self.headers = headers

    def remaining(self) -> float | None:
        """Seconds left until the deadline (negative when past), or None."""
        return None if self.deadline is None else self.deadline - now()


class Load(msgspec.Struct, array_like=True, frozen=True):
    """A replica's figures, riding on each of its replies.

    Attributes:
        ongoing: Calls on board, queued and running.
        unit_s: Seconds that one more call adds to the wait, in the steady state.
    """

    ongoing: int = 0
    unit_s: float = 0.0


class Reply:
    """The good answer to a call; failures are raised as `CallError`.

    Exactly one of `payload` and `stream` is set. A stream that is not read to its end must be
    closed with `aclose()`, which cancels the work behind it.

    Attributes:
        version: Version label of the service that answered.
        replica: Id of the replica that answered.
        queue_s: Seconds the call waited in the replica before it ran.
    """

    __slots__ = ("payload", "queue_s", "replica", "stream", "version")

    def __init__(
        self,
        payload: Payload | None = None,
        stream: AsyncIterator[Payload] | None = None,
        *,
        version: str = "",
        replica: str = "",
        queue_s: float = 0.0,
    ) -> None:
        self.payload = payload
        self.stream = stream
        self.version = version
        self.replica = replica
        self.queue_s = queue_s

    async def aclose(self) -> None:
        """Stop the stream, if there is one, and the work behind it."""
        if (aclose := getattr(self.stream, "aclose", None)) is not None:
            await aclose()


Handler: TypeAlias = Callable[[Call], Awaitable[Reply]]
