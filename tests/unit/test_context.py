"""Request contexts: headers, deadlines, and where there is none."""

import contextvars
import time

import msgspec
import pytest

from servekit.core.context import CURRENT, Headers, RequestContext, current
from servekit.errors import ServekitError
from tests.calls import make_call


def encoded(*pairs):
    return msgspec.msgpack.encode([list(pair) for pair in pairs])


def test_headers_are_case_insensitive_and_a_mapping():
    headers = Headers(encoded(("Content-Type", "a"), ("X-Tenant", "b")))
    assert headers["content-type"] == headers["CONTENT-TYPE"] == "a"
    assert "x-tenant" in headers
    assert "x-other" not in headers
    assert 3 not in headers
    assert headers.get("x-other", "none") == "none"
    assert dict(headers) == {"content-type": "a", "x-tenant": "b"}
    with pytest.raises(KeyError):
        headers["x-other"]


def test_repeated_headers_are_joined_and_raw_bytes_read_as_latin_1():
    headers = Headers(encoded((b"Accept", b"a"), (b"accept", b"\xe9")))
    assert headers["accept"] == "a, \xe9"
    assert len(headers) == 1


def test_no_headers():
    assert dict(Headers()) == {}
    assert dict(Headers(memoryview(encoded()))) == {}


def test_headers_keep_values_out_of_logs():
    assert "secret" not in repr(Headers(encoded(("authorization", "secret"))))


def test_a_context_is_that_of_its_call():
    call = make_call(
        "S",
        "f",
        request_id="r1",
        deadline=time.monotonic() + 10,
        attempt=2,
        traceparent="00-ab",
        caller="team-a",
        headers=encoded(("a", "b")),
    )
    context = RequestContext(call)
    assert (context.request_id, context.attempt, context.traceparent) == ("r1", 2, "00-ab")
    assert context.headers["A"] == "b"
    assert context.caller == "team-a"
    assert 9 < context.remaining() <= 10
    assert not context.cancelled
    context.cancelled = True
    assert context.cancelled
    assert "r1" in repr(context)
    assert "cancelled=True" in repr(context)


def test_without_a_deadline_nothing_remains_to_count():
    assert RequestContext().remaining() is None
    assert RequestContext(make_call("S", "f", deadline=time.monotonic() - 1)).remaining() < 0


def test_current_is_what_the_runtime_set():
    context = RequestContext(make_call("S", "f", request_id="r1"))

    def serve():
        CURRENT.set(context)
        return current()

    assert contextvars.copy_context().run(serve) is context
    with pytest.raises(ServekitError, match="no current request"):
        current()
