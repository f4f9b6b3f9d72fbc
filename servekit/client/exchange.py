"""The client's side of our HTTP conventions, without I/O: answers, values, errors, events."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx
import msgspec

from servekit.core.call import JSON, MSGPACK, NPY, Payload
from servekit.errors import (
    BadRequest,
    CallError,
    InvalidOutput,
    Overloaded,
    ReplicaLost,
    Unavailable,
    call_error,
)
from servekit.resilience.retry import BROKEN, FOREIGN
from servekit.spec.body import media_type, unpack

TIMEOUT_HEADER: Final = "x-servekit-timeout"


def answer(response: httpx.Response) -> Payload:
    """Return the body of a good answer that was read whole.

    Raises:
        CallError: It is none; as the server raised it.
    """
    if response.is_success:
        return Payload(response.headers.get("content-type", JSON), (response.content,))
    raise failure(response.status_code, response.content, response.headers)


def value(payload: Payload) -> Any:
    """Return what an answer, or one chunk of it, holds, by its media type alone.

    Raises:
        InvalidOutput: It isn't what its media type says.
    """
    kind, data = media_type(payload.content_type), payload.segments[0]
    try:
        if kind == MSGPACK:
            return unpack(data)
        if kind == JSON:
            return msgspec.json.decode(data) if len(data) else None
        if kind == NPY:
            from servekit.spec.tensor import read_npy  # noqa: PLC0415  (numpy comes with it)

            return read_npy(data)
        return bytes(data).decode() if kind.startswith("text/") else bytes(data)
    except (BadRequest, msgspec.DecodeError, ValueError) as error:
        raise InvalidOutput(f"the answer is no {kind}: {error}") from None


# ---- errors


def failure(status: int, body: bytes, headers: Mapping[str, str]) -> CallError:
    """Return the error that an answer with this status stands for."""
    try:
        details = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _foreign(status, body, headers)
    retry_after_s = details.retry_after_s
    return call_error(
        details.code,
        details.message,
        reason=details.reason,
        retry_after_s=_retry_after_s(headers) if retry_after_s is None else retry_after_s,
        fields=details.fields,
        started=details.started,
    )


def _foreign(status: int, body: bytes, headers: Mapping[str, str]) -> CallError:
    """Return the error for an answer of somebody else: a proxy, or another server."""
    text = f"the server answered {status}: {body[:200].decode('utf-8', 'replace')}"
    if 300 <= status < 400:
        place = headers.get("location", "")[:200]
        text = f"the server answered {status}, redirecting to {place!r}; give that address instead"
    kind = {429: Overloaded, 503: Unavailable}.get(status)
    if kind is None:
        return call_error("internal", text, reason=FOREIGN)
    # 429 is a refusal (RFC 6585, 4); a proxy's 503 may as well be a server that failed.
    after = _retry_after_s(headers)
    return kind(text, reason=FOREIGN, retry_after_s=after, started=kind is Unavailable)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of Retry-After (RFC 9110, 10.2.3); its other form, a date, is not read."""
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdecimal() else None


class _Error(msgspec.Struct):
    code: str
    message: str
    reason: str = ""
    retry_after_s: float | None = None
    fields: list[dict[str, object]] = []
    started: bool = True


class _ErrorBody(msgspec.Struct):
    error: _Error


def unreachable(error: httpx.RequestError, url: str) -> CallError:
    """Return the error for a request that got no answer."""
    if isinstance(error, httpx.PoolTimeout):
        return Unavailable(f"all connections to {url} stayed in use", started=False)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        why = str(error) or type(error).__name__
        return Unavailable(f"nothing answers at {url}: {why}", started=False)
    kind = type(error).__name__
    return ReplicaLost(f"the connection to {url} broke: {kind}", reason=BROKEN)


# ---- streams


class EventReader:
    """Cuts a body of server-sent events (HTML standard, 9.2) into chunks."""

    def __init__(self) -> None:
        self._rest = b""
        self._over = False

    def feed(self, data: bytes) -> Iterator[Payload]:
        """Take bytes as they come; yields the chunks that are whole.

        Raises:
            CallError: The stream ended with an error event.
        """
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            name, body = b"", b""
            for line in event.split(b"\n"):
                field, _, value = line.partition(b": ")
                if field == b"event":
                    name = value
                elif field == b"data":
                    body = value
            if name == b"error":
                raise failure(500, body, {})
            if name == b"end":
                self._over = True
            elif not name and body:
                yield Payload(JSON, (body,))

    def end(self) -> None:
        """Take the end of the body.

        Raises:
            ReplicaLost: It came before the end of the stream.
        """
        if not self._over:
            raise ReplicaLost("the stream broke off before its end", reason=BROKEN)
