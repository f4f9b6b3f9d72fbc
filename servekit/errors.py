"""Every error servekit raises, on one page.

::

    ServekitError
    ├── AuthorError                 the app is wrong: found at import, `serve` or `build`
    │   ├── SpecError               a decorator, signature or graph can't work
    │   ├── ConfigError             a setting is unknown or has a bad value
    │   ├── ResourceError           the machine has less than was asked for
    │   └── SetupError              the user's import, __init__ or a lifecycle hook raised
    ├── CallError                   one call failed; has an HTTP status and travels over the wire
    │   ├── BadRequest         400  the body can't be parsed
    │   ├── Unauthorized       401
    │   ├── NotFound           404
    │   ├── MethodNotAllowed   405
    │   ├── PayloadTooLarge    413
    │   ├── UnsupportedMedia   415
    │   ├── InvalidInput       422  a field is wrong; `fields` says which and why
    │   ├── Overloaded         429  shed before it started; `retry_after_s`
    │   ├── HeadTooLarge       431
    │   ├── RequestTimeout     408
    │   ├── Cancelled          499  the caller went away
    │   ├── ExecutionError     500  the user's code raised; the text is masked, the log has it
    │   ├── InvalidOutput      500  the user's code returned what it did not declare
    │   ├── Unavailable        503  no replica is ready; `retry_after_s`
    │   ├── ReplicaLost        503  the replica died with the call on board
    │   └── DeadlineExceeded   504
    └── WireError                   a peer broke the framing; ends that connection only

`retryable` says that the same call may succeed elsewhere or later; `started` says whether user
code may have run, which decides if a retry is safe for a call that is not idempotent.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar


class ServekitError(Exception):
    """Root of all errors that servekit raises on purpose."""


class AuthorError(ServekitError):
    """The app is wrong; its author has to change it."""


class SpecError(AuthorError):
    """A decorator, a signature or the graph can't work as written."""


class ConfigError(AuthorError):
    """A setting is unknown, or its value can't be used."""


class ResourceError(AuthorError):
    """The machine or cluster has less than the app asks for."""


class SetupError(AuthorError):
    """Importing, constructing, or warming up a service raised.

    Args:
        message: What happened, one line.
        trace: The user's exception with its traceback, as text.
    """

    def __init__(self, message: str, *, trace: str = "") -> None:
        super().__init__(f"{message}\n\n{trace}".rstrip())
        self.message = message
        self.trace = trace


class WireError(ServekitError):
    """A peer sent bytes that are not our protocol."""


class CallError(ServekitError):
    """One call failed.

    Args:
        message: What went wrong, safe to show to the caller.
        reason: Machine-readable cause, finer than the class (`"queue_full"`).
        retry_after_s: Seconds after which a new attempt may succeed.
        fields: For `InvalidInput`: one `{"path", "message", "type"}` per wrong field.
        started: Whether user code may have run.

    Attributes:
        headers: More headers for the HTTP answer.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    grpc: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retry_after_s: float | None = None,
        fields: Sequence[Mapping[str, Any]] = (),
        started: bool = True,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.code
        self.retry_after_s = retry_after_s
        self.fields = tuple(fields)
        self.started = started
        self.headers: Mapping[str, str] = {}

    def details(self) -> dict[str, Any]:
        """Return the error's body as callers see it, without the request id."""
        body: dict[str, Any] = {"code": self.code, "reason": self.reason, "message": self.message}
        if self.fields:
            body["fields"] = [dict(field) for field in self.fields]
        if self.retry_after_s is not None:
            body["retry_after_s"] = round(self.retry_after_s, 3)
        if self.retryable:
            body["started"] = self.started
        return body


class BadRequest(CallError):
    """The body or a header can't be parsed."""

    status, code, grpc = 400, "bad_request", "INVALID_ARGUMENT"


class Unauthorized(CallError):
    """Credentials are missing or wrong."""

    status, code, grpc = 401, "unauthorized", "UNAUTHENTICATED"


class NotFound(CallError):
    """No such service or endpoint."""

    status, code, grpc = 404, "not_found", "NOT_FOUND"


class MethodNotAllowed(CallError):
    """The route takes other HTTP methods."""

    status, code, grpc = 405, "method_not_allowed", "UNIMPLEMENTED"


class PayloadTooLarge(CallError):
    """The body is over the endpoint's limit."""

    status, code, grpc = 413, "payload_too_large", "RESOURCE_EXHAUSTED"


class UnsupportedMedia(CallError):
    """The endpoint takes or makes no such media type."""

    status, code, grpc = 415, "unsupported_media_type", "INVALID_ARGUMENT"


class InvalidInput(CallError):
    """The body was parsed, but a field breaks its declared type."""

    status, code, grpc = 422, "invalid_input", "INVALID_ARGUMENT"


class RequestTimeout(CallError):
    """The client took too long to send its request."""

    status, code, grpc = 408, "request_timeout", "DEADLINE_EXCEEDED"


class HeadTooLarge(CallError):
    """The request line and headers are over the limit."""

    status, code, grpc = 431, "head_too_large", "RESOURCE_EXHAUSTED"


class Overloaded(CallError):
    """Shed before it started: a queue is full, or the deadline can't be met."""

    status, code, grpc, retryable = 429, "overloaded", "RESOURCE_EXHAUSTED", True


class Cancelled(CallError):
    """The caller went away."""

    status, code, grpc = 499, "cancelled", "CANCELLED"


class ExecutionError(CallError):
    """User code raised; the log has the traceback under the request id."""

    status, code = 500, "execution_error"


class InvalidOutput(CallError):
    """User code returned something its signature does not declare."""

    status, code = 500, "invalid_output"


class Unavailable(CallError):
    """No replica is ready to take the call."""

    status, code, grpc, retryable = 503, "unavailable", "UNAVAILABLE", True


class ReplicaLost(CallError):
    """The replica died, or its connection broke, with the call on board."""

    status, code, grpc, retryable = 503, "replica_lost", "UNAVAILABLE", True


class DeadlineExceeded(CallError):
    """The call's deadline passed, queued or running."""

    status, code, grpc = 504, "deadline_exceeded", "DEADLINE_EXCEEDED"


def _classes() -> Iterator[type[CallError]]:
    yield CallError
    yield from CallError.__subclasses__()


_BY_CODE = {cls.code: cls for cls in _classes()}


def call_error(code: str, message: str, **details: Any) -> CallError:
    """Rebuild a call error from its `details()`, as it came over the wire.

    An unknown code, from a newer peer, becomes a plain `CallError`.
    """
    return _BY_CODE.get(code, CallError)(message, **details)


def is_shed(error: CallError) -> bool:
    """Return whether a call was refused unstarted for want of room or time, not for its input."""
    return not error.started and isinstance(error, Overloaded | Unavailable | DeadlineExceeded)


def suggest(name: str, known: Sequence[str]) -> str:
    """Return `" Did you mean 'x'?"` for the closest known name, or an empty string."""
    from difflib import get_close_matches  # noqa: PLC0415  (only on the error path)

    close = get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
