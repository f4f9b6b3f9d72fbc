"""Compressed bodies: what they hold comes out, never more than was allowed, and lies are found."""

import asyncio
import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.errors import BadRequest, Unavailable, UnsupportedMedia
from servekit.gateway.inflate import Inflater, inflate
from tests.door import bytes_of

LIMIT = 3_000_000


def unpack(body: bytes, coding: bytes = b"gzip", limit: int = LIMIT, count=lambda _: None):
    return asyncio.run(inflate(body, coding, limit=limit, count=count))


SIZES = [0, 1, 16 * 1024, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 1_500_000, LIMIT]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["noise", "zeros"])
def test_what_was_packed_comes_out(size, kind):
    data = bytes_of(size) if kind == "noise" else bytes(size)
    assert unpack(gzip.compress(data)) == data
    assert unpack(bytearray(gzip.compress(data)), b" X-GZIP") == data
    assert unpack(zlib.compress(data), b"Deflate") == data
    assert unpack(data, b"identity") is data
    assert unpack(data, b"") is data


@pytest.mark.slow
@given(
    st.lists(st.binary(max_size=200) | st.integers(0, 90_000).map(bytes), min_size=1, max_size=5),
    st.integers(1, 100_000),
)
def test_members_and_steps_of_any_size(parts, size):
    packed = b"".join(map(gzip.compress, parts))
    inflater = Inflater(packed, b"gzip")
    while not inflater.done:
        before = len(inflater.out)
        inflater.step(size)
        assert len(inflater.out) - before <= size
    assert inflater.out == b"".join(parts)


@pytest.mark.slow
@pytest.mark.parametrize("over", [1, 100_000_000])
@pytest.mark.parametrize("limit", [0, 1000, 256 * 1024, LIMIT])
@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_bomb_stops_at_the_limit(limit, over, pack):
    body = pack(bytes(limit + over))
    coding = b"gzip" if pack is gzip.compress else b"deflate"
    held = []
    tracemalloc.start()
    try:
        assert unpack(body, coding, limit, held.append) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(held) <= len(body) + limit + 1
    # The buffer grows by an eighth at a time, and is twice there while it is moved.
    assert peak < 2.3 * limit + 3_000_000


def test_what_it_takes_is_counted_as_it_grows():
    body, held = gzip.compress(bytes(LIMIT)), []
    unpack(body, count=held.append)
    assert held[:-1] == sorted(held[:-1])
    assert held[-1] == LIMIT
    assert len(held) > 3


def test_it_ends_when_there_is_no_room():
    def hold(size: int) -> None:
        if size > 1_000_000:
            raise Unavailable("full")

    with pytest.raises(Unavailable):
        unpack(gzip.compress(bytes(LIMIT)), count=hold)


WHOLE = gzip.compress(b"hello" * 100, mtime=0)


@pytest.mark.parametrize(
    ("body", "coding", "what"),
    [
        (b"", b"gzip", "too early"),
        (b"", b"deflate", "too early"),
        (b"hello", b"gzip", "incorrect header check"),
        (WHOLE, b"deflate", "incorrect header check"),
        (zlib.compress(b"x"), b"gzip", "incorrect header check"),
        (zlib.compress(b"x", wbits=-15), b"deflate", ""),  # bare, without zlib's frame
        (WHOLE + b"x", b"gzip", ""),
        (WHOLE + bytes(100), b"gzip", "incorrect header check"),
        (WHOLE + WHOLE[:-1], b"gzip", "too early"),
        (WHOLE + WHOLE[:1], b"gzip", "too early"),
        (zlib.compress(b"x") + b"x", b"deflate", "follows"),
        (zlib.compress(b"x") * 2, b"deflate", "follows"),
        (WHOLE[:-8] + bytes(8), b"gzip", "incorrect data check"),
        (gzip.compress(b"", mtime=0) * 3000, b"gzip", "too many members"),
    ],
)
def test_what_can_not_be_unpacked(body, coding, what):
    with pytest.raises(BadRequest, match=f"no {coding.decode()} data: .*{what}") as caught:
        unpack(body, coding)
    assert not caught.value.started


@pytest.mark.parametrize("size", [100, 500_000])
def test_no_part_of_it_is_enough(size):
    body = gzip.compress(bytes_of(size))
    step = max(1, len(body) // 60)
    for end in [*range(0, len(body), step), len(body) - 1]:
        with pytest.raises(BadRequest, match="too early"):
            unpack(body[:end])


@pytest.mark.slow
@given(st.binary(max_size=300), st.sampled_from([b"gzip", b"deflate"]), st.booleans())
@settings(max_examples=300)
def test_noise_is_unpacked_or_refused(noise, coding, framed):
    if framed:  # past the frame's head, where the decoder is
        noise = (WHOLE[:10] if coding == b"gzip" else b"\x78\x9c") + noise
    try:
        body = unpack(noise, coding, 10_000)
    except BadRequest:
        return
    assert body is None or len(body) <= 10_000


def test_many_members_are_fine_where_each_holds_something():
    parts = [bytes_of(2000, seed=number) for number in range(1200)]
    assert unpack(b"".join(map(gzip.compress, parts))) == b"".join(parts)


def test_a_step_has_an_end_where_nothing_comes_out():
    """Empty blocks: 5 bytes each, as many as one likes."""
    empty = zlib.compressobj(wbits=31)
    head = empty.compress(b"") + empty.flush(zlib.Z_FULL_FLUSH)
    inflater = Inflater(head + b"\x00\x00\x00\xff\xff" * 1_000_000, b"gzip")
    inflater.step(256 * 1024)
    assert len(inflater._left) > 4_000_000
    with pytest.raises(BadRequest, match="too early"):
        while not inflater.done:
            inflater.step(1 << 20)
    assert inflater.out == b""


@pytest.mark.parametrize("coding", [b"br", b"zstd", b"gzip, gzip", b"gzip,identity", b"\xff" * 99])
def test_other_codings_are_refused_with_those_that_are_known(coding):
    with pytest.raises(UnsupportedMedia) as caught:
        unpack(WHOLE, coding)
    assert caught.value.headers == {"accept-encoding": "gzip, deflate"}
    assert len(caught.value.message) < 150
