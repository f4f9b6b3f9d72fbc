"""Exchanges over real connections: bodies of all sizes, answers whole and in chunks, held back."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.core.call import BINARY, Payload, Reply
from servekit.errors import Overloaded
from servekit.gateway.exchange import Exchange
from servekit.gateway.http import Gateway
from servekit.observe.families import Families
from servekit.observe.metrics import Metrics
from tests.door import (
    MAX_BODY,
    SPEC,
    Door,
    bytes_of,
    chunked,
    chunks,
    get,
    head,
    loop,  # noqa: F401  (each test runs on either loop)
    post,
    turns,
)

# -- waiting for "100 Continue"

EXPECT = "expect: 100-continue"


@pytest.mark.parametrize("size", [10, 600_000])
@pytest.mark.parametrize("path", ["/echo", "/page"])
async def test_a_client_that_waits_to_send_is_asked_for_its_body(size, path):
    async with Door() as door:
        client = await door.connect()
        body = bytes_of(size)
        assert (await client.ask(post(b"", path, EXPECT, length=size))).status == 100
        answer = await client.ask(body)
        assert (answer.status, answer.headers.get("connection")) == (200, None)
        assert door.bodies == ([body] if path == "/echo" else [])
        await client.lives()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (post(b"here", "/echo", EXPECT), 200),
        (head("GET /find?text=a HTTP/1.1", EXPECT), 200),
        (post(b"", "/echo", EXPECT, length=MAX_BODY + 1), 413),
        (post(b"", "/find", EXPECT, length=10), 405),
    ],
)
async def test_a_body_that_nobody_reads_is_not_asked_for(request_, status):
    async with Door() as door:
        client = await door.connect()
        assert (await client.ask(request_)).status == status


@pytest.mark.parametrize(
    "request_",
    [
        post(b"", "/echo", EXPECT, length=MAX_BODY + 1),
        post(b"", "/find", EXPECT, length=100),
        post(b"", "/echo", EXPECT, "x-servekit-timeout: soon", length=100),
    ],
)
async def test_a_body_that_was_not_asked_for_may_never_come_so_the_connection_ends(request_):
    """Else the client's next request might be taken for that body (RFC 9110, 10.1.1)."""
    async with Door() as door:
        client = await door.connect()
        answer = await client.ask(request_)
        assert answer.status in (400, 405, 413)
        assert answer.headers.get("connection") == "close"
        assert await client.rest() == b""


# -- bodies

SIZES = [0, 1, 16 * 1024, 64 * 1024 + 1, 600_000, 9_000_000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("behind", [b"", post(b"next"), get("text=next"), post(b"n", "/page")])
async def test_the_bytes_of_a_body_arrive(size, behind):
    async with Door() as door:
        client = await door.connect()
        body = bytes_of(size)
        answer = await client.ask(post(body) + behind)
        assert (answer.status, answer.body) == (200, body[:100])
        assert door.bodies[0] == body
        if behind:
            assert (await client.answer()).status == 200
        await client.lives()
        assert len(door.calls) == (3 if b"/page" not in behind and behind else 2)


async def test_many_bodies_over_one_connection():
    async with Door() as door:
        client = await door.connect()
        bodies = [bytes_of(size, seed=size) for size in (600_000, 1, 70_000, 9_000_000, 200_000)]
        for body in bodies:
            assert (await client.ask(post(body))).status == 200
        assert (await client.ask(chunked(*bodies[:2]))).status == 200
        await client.send(b"".join(post(body) for body in bodies))
        for body in bodies:
            assert (await client.answer()).body == body[:100]
        assert door.bodies == [*bodies, b"".join(bodies[:2]), *bodies]
        await client.lives()


@given(st.integers(30_000, 300_000), st.lists(st.integers(1, 400_000), max_size=8))
@settings(max_examples=30)
def test_a_large_body_in_pieces(size, cuts):
    async def case() -> None:
        async with Door() as door:
            client = await door.connect()
            data = post(bytes_of(size)) + post(bytes_of(size, seed=7)) + get("text=a")
            await client.send(data, cuts=[cut % len(data) for cut in cuts])
            assert [(await client.answer()).status for _ in range(3)] == [200] * 3
            assert door.bodies[:2] == [bytes_of(size), bytes_of(size, seed=7)]
            await client.lives()

    asyncio.run(case())


async def test_what_comes_behind_the_last_upload_is_dropped():
    """As it is behind a small body."""
    async with Door() as door:
        client = await door.connect()
        assert (await client.ask(post(bytes_of(600_000)))).status == 200
        answer = await client.ask(post(b"1", "/echo", "connection: close") + post(b"2"))
        assert (answer.status, answer.body) == (200, b"1")
        assert await client.rest() == b""


async def test_a_body_in_line_waits_in_the_clients_hands(until):
    async with Door() as door:
        client = await door.connect()
        door.reply = "hold"
        body = bytes_of(5_000_000)
        sending = asyncio.create_task(client.send(post(b"1") + post(body)))
        await until(lambda: door.calls)
        await turns(500)
        assert not sending.done()
        door.go_on.set()
        assert [(await client.answer()).body for _ in range(2)] == [b"1", body[:100]]
        await sending
        assert door.bodies == [b"1", body]


@pytest.mark.parametrize(
    ("length", "room"),
    [
        ("500000", 500_000),
        (str(8 << 20), 8 << 20),
        (str((8 << 20) + 1), None),  # more than a header alone may reserve
        ("2000", None),  # nearly here
        ("9" * 30, None),
        ("x", None),
        ("", None),
    ],
)
def test_room_for_a_body(length, room):
    gateway = Gateway(None, Families(Metrics()))
    gateway.serve(SPEC)
    methods, query = gateway.find(b"/echo")
    fields = [(b"content-length", length.encode())] if length else []
    wire = SimpleNamespace(share=gateway.bodies.share)
    exchange = Exchange(
        wire, methods, b"POST", query, fields, http10=False, keep_alive=True, expects=False
    )
    exchange.feed(b"a" * 900)
    exchange.feed(b"b" * 100)
    found = exchange.room()
    if found is None:
        assert room is None
    else:
        body, here = found
        assert (len(body), here) == (room, 1000)
        assert body[:1000] == b"a" * 900 + b"b" * 100
        exchange.end()
        assert exchange.room() is None  # all is here
        assert gateway.bodies.held == room  # the buffer is still there
        exchange.fill(body)
        exchange.leave()
    assert gateway.bodies.held == 0


@pytest.mark.parametrize("over", [1, 2_000_000])
@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large_is_refused(over, declared):
    async with Door() as door:
        client = await door.connect()
        body = bytes(MAX_BODY + over)
        parts = [body[i : i + 1_000_000] for i in range(0, len(body), 1_000_000)]
        answer = await client.ask(post(body) if declared else chunked(*parts))
        assert (answer.status, answer.code) == (413, "payload_too_large")
        assert door.calls == []
        await client.lives()  # all of it was read, though nobody wanted it
        assert door.counted() == {"413": 1, "200": 1}


@pytest.mark.parametrize("size", [10, 70_000, 600_000])
async def test_an_answer_before_the_body_is_here(size):
    async with Door() as door:
        client = await door.connect()
        data = post(bytes_of(size), "/echo", "x-servekit-timeout: soon")
        answer = await client.ask(data[: -size // 2])
        assert answer.status == 400
        await client.send(data[-size // 2 :])
        await client.lives()
        assert len(door.calls) == 1


# -- what can end no line

EVIL = "a\r\nx-evil: 1\r\n\r\nHTTP/1.1 200 OK\nx-evil: 1\x00"


@pytest.mark.parametrize("path", ["/echo", "/tokens"])
@pytest.mark.parametrize(
    "reply",
    [
        Reply(Payload(EVIL, (b"1",))),
        Reply(Payload(BINARY, (b"1",)), version=EVIL),
        Reply(Payload(BINARY, (b"1",)), replica=EVIL),
    ],
)
async def test_a_replys_text_is_no_header(path, reply):
    async with Door() as door:
        door.reply = reply
        if path == "/tokens":
            stream = chunks(b"1")
            door.reply = Reply(stream=stream, version=reply.version, replica=reply.replica)
        client = await door.connect()
        answer = await client.ask(post(b"1", path))
        assert answer.status == 200
        assert "x-evil" not in answer.headers
        door.reply = None
        await client.lives()


async def test_an_errors_text_is_no_header():
    async with Door() as door:
        door.reply = Overloaded("full")
        door.reply.headers = {"x-limit": EVIL}
        client = await door.connect()
        answer = await client.ask(post())
        assert answer.status == 429
        assert answer.headers["x-limit"].startswith("a??x-evil")
        assert "x-evil" not in answer.headers
        door.reply = None
        await client.lives()


# -- streams


async def test_each_event_is_a_chunk():
    async with Door() as door:
        client = await door.connect()
        door.stream = chunks(*(b"%d" % number for number in range(300)), b"x" * 300_000)
        answer = await client.ask(post(b"", "/tokens"))
        *events, large, end = answer.chunks
        assert events == [b"data: %d\n\n" % number for number in range(300)]
        assert large == b"data: " + b"x" * 300_000 + b"\n\n"
        assert end == b"event: end\ndata: \n\n"
        await client.lives()


@pytest.mark.parametrize("http", ["HTTP/1.1", "HTTP/1.0"])
async def test_a_raw_stream_that_fails_is_cut_off(http):
    async with Door() as door:
        client = await door.connect()
        door.stream = chunks(b"one", b"two", error=Overloaded("enough"))
        request = post(b"", "/tokens", f"accept: {BINARY}").replace(b"HTTP/1.1", http.encode())
        await client.send(request)
        body = (await client.rest()).partition(b"\r\n\r\n")[2]
        assert body == (b"3\r\none\r\n3\r\ntwo\r\n" if http == "HTTP/1.1" else b"onetwo")
        assert door.counted() == {"429": 1}


async def test_a_slow_reader_holds_its_stream_back(until):
    made = 0

    async def many() -> AsyncIterator[Payload]:
        nonlocal made
        for _ in range(500):
            made += 1
            yield Payload(BINARY, (b"x" * 20_000,))

    async with Door() as door:
        client = await door.connect()
        door.stream = many()
        await client.send(post(b"", "/tokens"))
        await until(lambda: client.protocol.flow.write_paused)
        await turns(1000)
        assert made < 400
        answer = await client.answer()
        assert len(answer.body) == 500 * (20_000 + 8) + len(b"event: end\ndata: \n\n")
        await client.lives()


@pytest.mark.parametrize("behind", [b"", post()])
async def test_a_client_that_leaves_ends_its_stream(until, behind):
    made = 0

    async def long() -> AsyncIterator[Payload]:
        nonlocal made
        for _ in range(3000):
            made += 1
            yield Payload(BINARY, (b"x" * 20_000,))

    async with Door() as door:
        client = await door.connect()
        door.stream = long()
        await client.send(post(b"", "/tokens") + behind)
        await until(lambda: client.protocol.flow.write_paused)
        client.leave()
        await until(lambda: not door.state.tasks)
        assert made < 3000
        assert door.counted() == {"499": 1}


async def test_a_client_that_asks_on_and_on_but_does_not_read_is_held_back():
    async with Door() as door:
        client = await door.connect()
        door.reply = Reply(Payload(BINARY, (bytes(1_000_000),)))
        asking = asyncio.create_task(client.send(post() * 200))
        await turns(3000)
        assert len(door.calls) < 100
        for _ in range(200):
            assert len((await client.answer()).body) == 1_000_000
        await asking
