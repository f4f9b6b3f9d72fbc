"""The client's side of our HTTP conventions, without I/O: answers, errors, and event streams."""

from collections.abc import Iterator, Mapping

import httpx
import msgspec

from servekit.core.call import JSON, Payload
from servekit.errors import CallError, ReplicaLost, Unavailable, call_error

TIMEOUT_HEADER = "x-servekit-timeout"


def answer(response: httpx.Response) -> Payload:
    """Return the body of a good answer that was read whole.

    Raises:
        CallError: It is none; as the server raised it.
    """
    if response.is_success:
        return Payload(response.headers.get("content-type", JSON), (response.content,))
    raise failure(response.status_code, response.content, response.headers)


def failure(status: int, body: bytes, headers: Mapping[str, str]) -> CallError:
    """Return the error that an answer with this status stands for."""
    try:
        details = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        text = body[:200].decode("utf-8", "replace")
        return call_error("internal", f"the server answered {status}: {text}")
    retry_after_s = details.retry_after_s
    if retry_after_s is None and headers.get("retry-after", "").isdecimal():
        retry_after_s = float(headers["retry-after"])
    return call_error(
        details.code,
        details.message,
        reason=details.reason,
        retry_after_s=retry_after_s,
        fields=details.fields,
    )


class _Error(msgspec.Struct):
    code: str
    message: str
    reason: str = ""
    retry_after_s: float | None = None
    fields: list[dict[str, object]] = []


class _ErrorBody(msgspec.Struct):
    error: _Error


def unreachable(error: httpx.TransportError, url: str) -> CallError:
    """Return the error for a request that got no answer."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return Unavailable(f"nothing answers at {url}: {error}", started=False)
    return ReplicaLost(f"the connection to {url} broke: {type(error).__name__}")


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
            raise ReplicaLost("the stream broke off before its end")
