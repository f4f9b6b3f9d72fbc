"""The narrow waist: everything on the request path takes a `Call` and returns a `Reply`.

Replica, batcher, router, remote stub, gateway target all have the shape of `Handler`, so a policy
can wrap any of them. Nothing here does I/O.
"""

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes; a view is one of single bytes, so that its length is its size."""

JSON = "application/json"
MSGPACK = "application/msgpack"
BINARY = "application/octet-stream"
NPY = "application/x-npy"
EVENT_STREAM = "text/event-stream"
NDJSON = ("application/x-ndjson", "application/ndjson", "application/jsonl")
FORM = "multipart/form-data"

now = time.monotonic
"""The clock of every deadline on this machine, in seconds."""


def new_request_id() -> str:
    """Return a fresh id, 16 hex digits."""
    return os.urandom(8).hex()


class Payload(msgspec.Struct, eq=False):
    """A body: a media type and buffers.

    `segments[0]` is the document (JSON unless the type says otherwise); the ones behind it are
    arrays and bytes that the document refers to by index, so that they are never copied into it.
    """

    content_type: str
    segments: Sequence[Buffer]


EMPTY = Payload(JSON, (b"",))


class _OnThisSide:
    """What belongs to a call, but is not in its header on the wire."""

    payload: Payload = EMPTY
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    coding: bytes = b""
    chunks: AsyncIterator[Payload] | None = None
    deadline: float | None = None
    retries: int = 2


class Call(_OnThisSide, msgspec.Struct, array_like=True, dict=True, eq=False):
    """One request on its way to an endpoint.

    Its fields are its header on the wire, so that a call that arrives is decoded in place. What is
    set beside them travels in another form, or not at all.

    Attributes:
        service: Name of the service in the graph.
        endpoint: Name of the endpoint in the service.
        request_id: Stays the same over all hops and attempts.
        accept: Media type that the caller wants back.
        internal: The caller is a service of the same app, so NaN is legal and types are trusted.
        idempotent: Running it twice does no harm, so a lost call may be sent again.
        priority: Higher goes first.
        attempt: 0 for the first try.
        affinity_key: Calls with the same key prefer the same replica.
        traceparent: W3C trace context of the caller, or "".
        headers: The caller's HTTP headers, encoded as msgpack `[[name, value], ...]`, or b"".
        promises: Calls whose results are arguments of this one, for the callee to make, encoded by
            `runtime/promise.py`, or b""; their payloads' segments lie behind this one's.
        caller: Who called from outside, as the gateway found out; "" if it does not ask.
        payload: The arguments, still encoded.
        arguments: The arguments themselves, in place of a payload: the callee is in this process.
            Then the answer's values, too, are handed over as they are.
        coding: The content coding of their body while it is packed, else b"".
        chunks: What follows the payload, as it comes, for input that streams; it is read once, so
            a call can't be sent again after that.
        deadline: Absolute, on `now`'s clock; None waits for ever. Travels as the time left.
        retries: Attempts that the next hop may make after the first; not sent on.
    """

    service: str
    endpoint: str
    request_id: str = ""
    accept: str = JSON
    internal: bool = False
    idempotent: bool = False
    priority: int = 0
    attempt: int = 0
    affinity_key: str = ""
    traceparent: str = ""
    headers: bytes = b""
    promises: bytes = b""
    caller: str = ""

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


class Reply(msgspec.Struct, eq=False):
    """The good answer to a call; failures are raised as `CallError`.

    Either `payload` or `stream` is set, or neither: then `value` is the answer to a call that
    brought `arguments`. A stream that is not read to its end must be closed with `aclose()`,
    which cancels the work behind it.

    Attributes:
        payload: The whole answer.
        stream: Its chunks, as they come; values where the call brought `arguments`.
        queue_s: Seconds the call waited in the replica before it ran.
        version: Version label of the service that answered.
        replica: Id of the replica that answered.
        value: The whole answer, not encoded.
    """

    payload: Payload | None = None
    stream: AsyncIterator[Any] | None = None
    queue_s: float = 0.0
    version: str = ""
    replica: str = ""
    value: Any = None

    async def aclose(self) -> None:
        """Stop the stream, if there is one, and the work behind it."""
        if (aclose := getattr(self.stream, "aclose", None)) is not None:
            await aclose()


Handler: TypeAlias = Callable[[Call], Awaitable[Reply]]
