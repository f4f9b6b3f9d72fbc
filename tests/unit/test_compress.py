"""Which answers are compressed, and for whom."""

import gzip
from types import SimpleNamespace

import pytest

from servekit.core.call import BINARY, JSON, MSGPACK, NPY, Payload
from servekit.gateway.compress import Compressor, accepts_gzip

TEXT = b'{"word": "again and again"}' * 100


async def packed(kind=JSON, body=TEXT, accept=b"gzip", least=1000):
    exchange = SimpleNamespace(headers=[(b"accept-encoding", accept)], lines=b"")
    payload = await Compressor(least).pack(exchange, Payload(kind, (body,)))
    assert payload.content_type == kind
    return payload.segments[0], exchange.lines


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize(
    "kind", [JSON, MSGPACK, NPY, "text/markdown; charset=utf-8", "TEXT/html", "image/svg+xml"]
)
async def test_text_and_numbers_are_compressed(kind, times):
    body, lines = await packed(kind, memoryview(TEXT * times))
    assert gzip.decompress(body) == TEXT * times
    assert lines == b"vary: accept-encoding\r\ncontent-encoding: gzip\r\n"


@pytest.mark.parametrize("kind", [BINARY, "image/png", "application/pdf", ""])
async def test_what_is_compressed_already_or_unknown_is_not(kind):
    assert await packed(kind) == (TEXT, b"")


async def test_a_small_answer_is_not_worth_it():
    assert await packed(body=TEXT[:999]) == (TEXT[:999], b"")
    assert (await packed(body=TEXT[:1000]))[0] != TEXT[:1000]


async def test_a_cache_is_told_that_others_might_get_another_answer():
    assert await packed(accept=b"") == (TEXT, b"vary: accept-encoding\r\n")


async def test_what_would_grow_stays_as_it_is():
    assert await packed(body=b"ab", least=0) == (b"ab", b"vary: accept-encoding\r\n")


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        (b"", False),
        (b"gzip", True),
        (b"deflate, br;q=1.0, GZIP;q=0.8, *;q=0.1", True),
        (b"gzip;q=0", False),
        (b"gzip; q=0.000, *", False),
        (b"gzip;q=0.001", True),
        (b"*", True),
        (b"*;q=0", False),
        (b"*;q=0, gzip", True),
        (b"x-gzip", True),
        (b"identity", False),
        (b"br, zstd", False),
        (b"gzip;q=much", False),
        (b"gzip;q=nan", False),
        (b";;,,=q;", False),
        (b"\xff\x00", False),
    ],
)
def test_who_takes_gzip(field, allowed):
    assert accepts_gzip(field) == allowed
