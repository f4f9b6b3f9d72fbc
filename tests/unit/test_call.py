"""Calls, replies, payloads, and the context that a method sees."""

import msgspec
import pytest

from servekit.core import call as call_module
from servekit.core.call import EMPTY, JSON, Call, Payload, Reply, new_request_id
from servekit.core.context import CURRENT, Headers, RequestContext, current
from servekit.errors import ServekitError
from tests.calls import make_call


def a_call(**settings):
    return make_call("S", "e", Payload(JSON, (b"{}",)), request_id="r", **settings)


def test_request_ids_are_fresh_and_hex():
    ids = {new_request_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(id_) == 16 and int(id_, 16) >= 0 for id_ in ids)


def test_remaining(monkeypatch):
    monkeypatch.setattr(call_module, "now", lambda: 100.0)
    assert a_call().remaining() is None
    assert a_call(deadline=101.5).remaining() == 1.5
    assert a_call(deadline=99.0).remaining() == -1.0


def test_a_call_is_its_header_and_what_is_set_beside_it_stays():
    sent = a_call(deadline=5.0, retries=7, priority=3, headers=b"h")
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Call)
    assert [getattr(got, name) for name in got.__struct_fields__] == [
        getattr(sent, name) for name in sent.__struct_fields__
    ]
    fresh = Call("S", "e")
    for call in (got, fresh):
        assert (call.payload, call.deadline, call.retries) == (EMPTY, None, 2)


async def test_closing_a_reply_closes_its_stream():
    closed = []

    async def chunks():
        try:
            yield Payload(JSON, (b"1",))
            yield Payload(JSON, (b"2",))
        finally:
            closed.append(True)

    reply = Reply(stream=chunks())
    await anext(reply.stream)
    await reply.aclose()
    await reply.aclose()
    assert closed == [True]
    await Reply(Payload(JSON, (b"1",))).aclose()


def test_headers_read_as_text_in_any_case():
    encoded = msgspec.msgpack.encode(
        [
            [b"X-Tenant", b"a"],
            [b"accept", b"b"],
            [b"x-tenant", b"c"],
            ["name", "\xe9"],
            [b"l", b"\xe9"],
        ]
    )
    headers = Headers(encoded)
    assert headers["X-TENANT"] == "a, c"
    assert headers["name"] == headers["l"] == "é"
    assert "x-tenant" in headers
    assert "X-Tenant" in headers
    assert 7 not in headers
    assert list(headers) == ["x-tenant", "accept", "name", "l"]
    assert len(headers) == 4
    assert headers.get("missing", "-") == "-"
    with pytest.raises(KeyError):
        headers["missing"]


def test_no_headers():
    assert dict(Headers()) == {}
    assert "x" not in Headers(b"")


def test_values_of_headers_stay_out_of_logs():
    headers = Headers(msgspec.msgpack.encode([[b"authorization", b"Bearer secret"]]))
    assert "secret" not in repr(headers)
    assert "authorization" in repr(headers)


def test_a_context_is_that_of_its_call():
    call = a_call(
        deadline=5.0, traceparent="00-1", attempt=2, headers=msgspec.msgpack.encode([["a", "b"]])
    )
    context = RequestContext(call)
    assert (context.request_id, context.deadline, context.traceparent) == ("r", 5.0, "00-1")
    assert (context.attempt, context.headers["a"], context.cancelled) == (2, "b", False)
    context.cancelled = True
    assert context.cancelled
    assert "cancelled=True" in repr(context)


def test_there_is_no_current_context_outside_of_a_call():
    with pytest.raises(ServekitError, match="no current request"):
        current()
    context = RequestContext(a_call())
    token = CURRENT.set(context)
    assert current() is context
    CURRENT.reset(token)
