"""The client's side of the HTTP conventions: answers, errors, and event streams however cut."""

from itertools import pairwise

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.client.exchange import EventReader, answer, failure, unreachable
from servekit.core.call import JSON, MSGPACK
from servekit.errors import (
    CallError,
    InvalidInput,
    NotFound,
    Overloaded,
    ReplicaLost,
    Unavailable,
)
from servekit.gateway.answer import Framing

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def body_of(values, *, last: bytes = b"") -> bytes:
    chunks = [Framing.chunk(msgspec.json.encode(value)) for value in values]
    return b"".join(chunks) + (last or Framing.end)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:b] for a, b in pairwise(edges)]


def read(pieces) -> list[object]:
    reader = EventReader()
    got = [
        msgspec.json.decode(bytes(chunk.segments[0]))
        for piece in pieces
        for chunk in reader.feed(piece)
    ]
    reader.end()
    return got


@given(values=st.lists(json_values, max_size=8), places=st.lists(st.integers(0, 9999), max_size=12))
def test_what_the_gateway_writes_is_read_however_it_is_cut(values, places):
    assert read(cut(body_of(values), places)) == values


@given(values=st.lists(json_values, max_size=3))
def test_byte_by_byte(values):
    data = body_of(values)
    assert read([data[i : i + 1] for i in range(len(data))]) == values


@given(values=st.lists(json_values, max_size=4), places=st.lists(st.integers(0, 9999), max_size=6))
def test_an_error_event_is_raised_behind_the_chunks_before_it(values, places):
    error = Overloaded("enough", reason="why", retry_after_s=2.5)
    document = msgspec.json.encode({"error": error.details() | {"request_id": "r"}})
    data = body_of(values, last=Framing.error(document))
    reader, got = EventReader(), []
    with pytest.raises(Overloaded, match="enough") as caught:
        for piece in cut(data, places):
            for chunk in reader.feed(piece):
                got.append(msgspec.json.decode(bytes(chunk.segments[0])))
    assert got == values
    assert caught.value.details() == error.details()


@given(values=st.lists(json_values, max_size=3), keep=st.integers(0, 9999))
def test_a_stream_that_breaks_off_is_never_taken_for_a_whole_one(values, keep):
    data = body_of(values)
    with pytest.raises(ReplicaLost, match="broke off"):
        read([data[: keep % len(data)]])


@given(st.binary(max_size=200), st.lists(st.integers(0, 999), max_size=5))
def test_any_bytes_are_chunks_or_a_call_error(data, places):
    reader = EventReader()
    try:
        for piece in cut(data, places):
            list(reader.feed(piece))
        reader.end()
    except CallError:
        pass


def test_comments_and_unknown_events_are_skipped():
    data = b": keep-alive\n\nevent: ping\ndata: 1\n\ndata: 2\n\nevent: end\ndata: \n\n"
    assert read([data]) == [2]


# -- whole answers


def response(status: int, content: bytes = b"", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, content=content, headers=named)


def test_a_good_answer():
    payload = answer(response(200, b"\x93", content_type=MSGPACK))
    assert (payload.content_type, payload.segments) == (MSGPACK, (b"\x93",))
    assert answer(response(200, b"1")).content_type == JSON


def test_an_error_is_the_one_that_the_server_raised():
    sent = InvalidInput("wrong", fields=[{"path": "a", "message": "m", "type": "t"}])
    document = msgspec.json.encode({"error": sent.details() | {"request_id": "r", "new": [1]}})
    with pytest.raises(InvalidInput) as caught:
        answer(response(422, document))
    assert caught.value.details() == sent.details()


@pytest.mark.parametrize(
    ("body", "headers", "seconds"),
    [
        ({"retry_after_s": 1.25}, {"retry-after": "2"}, 1.25),
        ({}, {"retry-after": "2"}, 2.0),
        ({}, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({}, {}, None),
    ],
)
def test_when_to_come_back(body, headers, seconds):
    document = {"error": {"code": "overloaded", "message": "m"} | body}
    error = failure(429, msgspec.json.encode(document), headers)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == seconds


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>Bad Gateway</html>",
        b"{}",
        b'{"error": "text"}',
        b'{"error": {"code": 3}}',
        b"\xff\xfe",
    ],
)
def test_an_error_of_somebody_else(body):
    error = failure(502, body, {})
    assert type(error) is CallError
    assert "answered 502" in str(error)


def test_a_long_foreign_body_is_cut_short():
    assert len(str(failure(502, b"x" * 10_000, {}))) < 300


def test_who_was_not_reached_and_who_was_lost():
    for kind in (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout):
        error = unreachable(kind("refused"), "http://x:1")
        assert isinstance(error, Unavailable)
        assert not error.started
        assert "http://x:1" in str(error)
    for kind in (httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError):
        error = unreachable(kind("cut"), "http://x:1")
        assert isinstance(error, ReplicaLost)
        assert error.started


def test_a_plain_not_found():
    document = b'{"error": {"code": "not_found", "message": "no route", "reason": "not_found"}}'
    assert isinstance(failure(404, document, {}), NotFound)
