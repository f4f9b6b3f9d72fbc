"""The gateway's limits and codings on real sockets and loops, against clients that mean no good."""

import asyncio
import gzip
import zlib
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from servekit.core.call import BINARY, JSON, Call, Payload, Reply
from servekit.errors import ConfigError
from servekit.gateway.bodies import default_limit
from servekit.gateway.compress import compress_pages
from servekit.gateway.edge import PLAIN, Edge
from servekit.settings import Settings
from tests.door import (
    MAX_BODY,
    Door,
    bytes_of,
    chunked,
    get,
    head,
    loop,  # noqa: F401  (each test runs on either loop)
    post,
    turns,
)
from tests.pairs import make_pair

MIB = 1 << 20

# -- settings


def test_settings_become_what_the_gateway_needs(tmp_path):
    assert Edge.of(Settings(max_bodies=7)) == Edge(max_bodies=7)
    pair = make_pair(tmp_path)
    files = {"tls_cert": pair.cert, "tls_key": pair.key}
    edge = Edge.of(Settings(**files, cors_origins=("*",), max_bodies=7))
    assert edge == pair.edge(cors_origins=("*",), max_bodies=7)
    assert (edge.scheme, PLAIN.scheme) == ("https", "http")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(edge), type=Edge) == edge


def test_paths_are_those_of_the_folder_that_it_was_started_in(tmp_path, monkeypatch):
    pair = make_pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    edge = Edge.of(Settings(tls_cert=pair.cert.relative_to(tmp_path), tls_key=pair.key))
    assert (edge.tls_cert, edge.tls_key) == (str(pair.cert), str(pair.key))


def test_gateways_share_the_memory_for_bodies():
    [one, four] = [Edge.of(Settings(gateway_workers=count)) for count in (1, 4)]
    assert one.max_bodies == default_limit()
    assert four.max_bodies == default_limit() // 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tls_cert"}, "tls_cert is set without tls_key"),
        ({"tls_key"}, "tls_key is set without tls_cert"),
        ({"cors"}, r"cors_origins = \* with cors_credentials: .*list the origins"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, given, message):
    pair = make_pair(tmp_path)
    values = {"tls_cert": pair.cert, "tls_key": pair.key}
    values = {name: value for name, value in values.items() if name in given}
    if "cors" in given:
        values |= {"cors_origins": ("*",), "cors_credentials": True}
    with pytest.raises(ConfigError, match=message):
        Edge.of(Settings(**values))


# -- compressed requests


@pytest.mark.parametrize("size", [0, 10, 70_000, 600_000, MAX_BODY])
@pytest.mark.parametrize("kind", ["noise", "zeros"])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("send", [post, chunked])
async def test_a_compressed_body_arrives_unpacked(size, kind, coding, send):
    if kind == "noise":
        size = min(size, 9_000_000)  # it grows a little
    body = bytes_of(size) if kind == "noise" else bytes(size)
    packed = gzip.compress(body) if coding == "gzip" else zlib.compress(body)
    async with Door() as door:
        client = await door.connect()
        line = f"content-encoding: {coding}"
        sent = post(packed, "/echo", line) if send is post else chunked(packed, lines=(line,))
        answer = await client.ask(sent + get("text=a"))
        assert answer.status == 200
        assert door.bodies[0] == body
        headers = dict(msgspec.msgpack.decode(door.calls[0].headers))
        assert b"content-encoding" not in headers
        assert headers[b"host" if send is post else b"transfer-encoding"]
        assert (await client.answer()).status == 200
        await client.lives()


PACKED = gzip.compress(bytes_of(1000), mtime=0)


@pytest.mark.parametrize(
    ("body", "coding", "status"),
    [
        (gzip.compress(bytes(MAX_BODY + 1), mtime=0), "gzip", 413),
        (gzip.compress(bytes(50 * MAX_BODY), mtime=0), "gzip", 413),
        (zlib.compress(bytes(MAX_BODY + 1)), "deflate", 413),
        (PACKED[:-1], "gzip", 400),
        (PACKED + b"x", "gzip", 400),
        (b'{"n":1}', "gzip", 400),
        (PACKED, "deflate", 400),
        (PACKED, "br", 415),
        (gzip.compress(PACKED, mtime=0), "gzip, gzip", 415),
    ],
)
async def test_a_compressed_body_that_is_refused(body, coding, status):
    async with Door() as door:
        client = await door.connect()
        answer = await client.ask(post(body, "/echo", f"content-encoding: {coding}"))
        assert answer.status == status
        wanted = "gzip, deflate" if status == 415 else None
        assert answer.headers.get("accept-encoding") == wanted
        assert door.calls == []
        await client.lives()


async def test_codings_in_fields_of_their_own_are_a_list_too():
    async with Door() as door:
        client = await door.connect()
        lines = ("content-encoding: gzip", "content-encoding: gzip")
        assert (await client.ask(post(gzip.compress(PACKED), "/echo", *lines))).status == 415
        await client.lives()


async def test_a_client_that_leaves_while_its_body_is_unpacked(until):
    async with Door() as door:
        client = await door.connect()
        body = b"".join(gzip.compress(bytes(900_000)) for _ in range(11))
        await client.send(post(body, "/echo", "content-encoding: gzip"))
        await until(lambda: door.gateway.bodies.held > 300_000)
        client.leave()
        await until(lambda: not door.state.tasks)
        assert door.calls == []
        assert door.counted() == {"499": 1}


FORM = "content-type: multipart/form-data; boundary=x"


async def test_a_body_that_streams_is_not_unpacked():
    async with Door() as door:
        client = await door.connect()
        answer = await client.ask(post(PACKED, "/echo", FORM, "content-encoding: gzip"))
        assert (answer.status, answer.headers["accept-encoding"]) == (415, "identity")
        assert (await client.ask(post(b"", "/echo", FORM, "content-encoding: identity"))).status
        await client.lives()


# -- compressed answers

TEXT = b'{"word":"again and again"}' * 1000
PACK = "accept-encoding: gzip"


@pytest.mark.parametrize("times", [1, 30])
async def test_an_answer_is_compressed_for_who_wants_it(times):
    async with Door(edge=Edge(gzip_min_bytes=1000, cors_origins=("*",))) as door:
        client = await door.connect()
        door.reply = Reply(Payload(JSON, (memoryview(TEXT * times),)), version="7")
        answer = await client.ask(post(b"", "/echo", PACK))
        assert gzip.decompress(answer.body) == TEXT * times
        assert len(answer.body) < 30_000
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.headers["vary"] == "accept-encoding"
        assert answer.headers["content-type"] == JSON
        assert answer.headers["access-control-allow-origin"] == "*"
        answer = await client.ask(post(b""))
        assert answer.body == TEXT * times
        assert "content-encoding" not in answer.headers
        assert answer.headers["vary"] == "accept-encoding"
        door.reply = None
        await client.lives()


async def test_streams_and_errors_are_not_compressed():
    async with Door(edge=Edge(gzip_min_bytes=0)) as door:
        client = await door.connect()
        for path, status in (("/tokens", 200), ("/find", 405)):
            answer = await client.ask(post(b"ab" * 2000, path, PACK))
            assert answer.status == status
            assert "content-encoding" not in answer.headers
        await client.lives()


async def test_nothing_is_compressed_unless_told():
    async with Door() as door:
        client = await door.connect()
        door.reply = Reply(Payload(JSON, (TEXT,)))
        answer = await client.ask(post(b"", "/echo", PACK))
        assert answer.body == TEXT
        assert "vary" not in answer.headers


async def test_pages_are_compressed():
    async def text(_) -> PlainTextResponse:
        return PlainTextResponse(TEXT)

    site = compress_pages(Starlette(routes=[Route("/page", text)]), Edge(gzip_min_bytes=1000))
    async with Door(app=site) as door:
        client = await door.connect()
        answer = await client.ask(head("GET /page HTTP/1.1", PACK))
        assert gzip.decompress(answer.body) == TEXT
        assert (await client.ask(head("GET /page HTTP/1.1"))).body == TEXT


async def test_raw_answers_stay_as_they_are():
    async with Door(edge=Edge(gzip_min_bytes=0)) as door:
        client = await door.connect()
        answer = await client.ask(post(bytes_of(100), "/echo", PACK))
        assert answer.headers["content-type"] == BINARY
        assert answer.body == bytes_of(100)


# -- connections


async def test_a_connection_too_many_is_told_so_and_hung_up_on(until):
    async with Door(edge=Edge(max_connections=2)) as door:
        one, two = [await door.connect() for _ in range(2)]
        for _ in range(3):
            more = await door.connect()
            await more.send(post(bytes_of(100_000)))
            answer = await more.answer()
            assert (answer.status, answer.code) == (503, "unavailable")
            assert msgspec.json.decode(answer.body)["error"]["reason"] == "too_many_connections"
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["connection"] == "close"
            assert await more.rest() == b""
        await one.lives()
        await two.lives()
        assert len(door.calls) == 2
        one.leave()
        await until(lambda: door.gateway.connections.count == 1)
        await (await door.connect()).lives()
        [family] = [f for f in door.metrics.snapshot() if "connections" in f.name]
        assert [sample.value for sample in family.samples] == [3]


# -- all bodies together


def full(door: Door, *, left: int = 0):
    """Have all room taken but some."""
    share = door.gateway.bodies.share()
    assert share.hold(door.gateway.bodies.limit - left)
    return share


EDGE = Edge(max_bodies=11 * MIB)


@pytest.mark.parametrize(
    "request_",
    [
        post(bytes_of(17_000)),
        post(bytes_of(600_000)),
        post(bytes_of(9_000_000)),
        chunked(bytes_of(600_000)),
        chunked(*(bytes_of(10_000) for _ in range(60))),
        post(gzip.compress(bytes(9_000_000), mtime=0), "/echo", "content-encoding: gzip"),
        post(b"", "/echo", "expect: 100-continue", length=600_000),
    ],
)
async def test_a_body_without_room_is_refused(request_):
    async with Door(edge=EDGE) as door:
        share = full(door, left=16 * 1024)
        client = await door.connect()
        answer = await client.ask(request_)
        assert (answer.status, answer.code) == (503, "unavailable")
        assert msgspec.json.decode(answer.body)["error"]["reason"] == "too_many_bodies"
        assert answer.headers["retry-after"] == "1"
        assert door.calls == []
        assert door.gateway.bodies.held == door.gateway.bodies.limit - 16 * 1024
        if b"expect" in request_:  # a body that was not asked for may come, or may not
            assert await client.rest() == b""
            client = await door.connect()
        await client.lives()  # small ones have room
        share.close()
        assert (await client.ask(post(bytes_of(9_000_000)))).status == 200
        [family] = [f for f in door.metrics.snapshot() if f.name == "servekit_shed_total"]
        assert [s.labels for s in family.samples] == [("App", "echo", "too_many_bodies")]


async def test_what_was_declared_is_held_from_the_beginning(until):
    """So that a body which was begun also fits."""
    async with Door(edge=EDGE) as door:
        first, second = await door.connect(), await door.connect()
        body = bytes_of(6_000_000)
        await first.send(post(body)[:50_000])
        await until(lambda: door.gateway.bodies.held == len(body))
        assert (await second.ask(post(body))).status == 503
        assert (await first.ask(post(body)[50_000:])).status == 200
        assert (await second.ask(post(body))).status == 200


async def test_a_body_counts_until_its_answer(until):
    async with Door(edge=EDGE) as door:
        door.reply = "hold"
        client = await door.connect()
        await client.send(post(bytes_of(600_000)))
        await until(lambda: door.calls)
        assert door.gateway.bodies.held == 600_000
        door.go_on.set()
        assert (await client.answer()).status == 200
        await until(lambda: not door.state.tasks)
        assert door.gateway.bodies.held == 0


async def test_a_buffer_counts_for_as_long_as_it_is_there(until):
    """A request that is refused at once still has one, which its client fills."""
    async with Door(edge=EDGE) as door:
        client = await door.connect()
        data = post(bytes_of(6_000_000), "/echo", "x-servekit-timeout: soon")
        await client.send(data[:60_000])
        assert (await client.answer()).status == 400
        assert door.gateway.bodies.held == 6_000_000
        await client.send(data[60_000:-1])
        assert door.gateway.bodies.held == 6_000_000
        await client.send(data[-1:])
        await client.lives()
        assert door.gateway.bodies.held == 0


async def test_a_larger_body_than_all_may_be_fits_if_its_endpoint_takes_it():
    async with Door(edge=Edge(max_bodies=MIB)) as door:
        client = await door.connect()
        assert (await client.ask(post(bytes_of(MAX_BODY)))).status == 200
        await client.lives()


async def drink(door: Door, call: Call) -> Reply:
    """Answer once all of a body that streams is here."""
    await door.go_on.wait()
    size = 0
    async for chunk in call.chunks:
        size += len(chunk.segments[0])
    return Reply(Payload(BINARY, (b"%d" % size,)))


@pytest.mark.parametrize("send", [post, chunked])
async def test_a_body_that_streams_counts_for_what_is_kept_of_it(until, send):
    async with Door(edge=EDGE) as door:
        door.gateway.handler = partial(drink, door)
        share = full(door, left=300_000)
        client = await door.connect()
        body = bytes_of(5_000_000)
        request_ = post(body, "/echo", FORM) if send is post else chunked(body, lines=(FORM,))
        sending = asyncio.create_task(client.send(request_))
        await until(lambda: client.protocol.flow.read_paused)
        assert door.gateway.bodies.held - (door.gateway.bodies.limit - 300_000) == 256 * 1024
        door.go_on.set()
        assert (await client.answer()).body == b"5000000"
        await sending
        share.close()


async def test_a_body_that_streams_needs_room_too():
    async with Door(edge=EDGE) as door:
        door.gateway.handler = partial(drink, door)
        door.go_on.set()
        share = full(door, left=100_000)
        client = await door.connect()
        answer = await client.ask(post(bytes_of(600_000), "/echo", FORM))
        assert (answer.status, answer.code) == (503, "unavailable")
        assert (await client.ask(post(bytes_of(10_000), "/echo", FORM))).body == b"10000"
        share.close()


ACTS = st.sampled_from(["whole", "half", "leave", "abort", "refused", "inline", "packed", "large"])


@pytest.mark.slow
@given(st.lists(ACTS, min_size=1, max_size=6), st.booleans())
@settings(max_examples=40)
def test_whatever_clients_do_nothing_stays_held(acts, hold):
    """`Door` looks at the end of each."""

    async def act(door: Door, name: str) -> None:
        client = await door.connect()
        body = bytes_of(200_000)
        if name in ("whole", "inline"):
            await client.send(post(body) * (3 if name == "inline" else 1))
        elif name in ("half", "leave", "abort"):
            await client.send((post(body) + post(body))[:300_000])
        elif name == "refused":
            await client.send(post(body, "/echo", "x-servekit-timeout: soon")[:-5])
        elif name == "large":
            await client.send(chunked(*(body for _ in range(60))))
        else:
            packed = gzip.compress(bytes(MAX_BODY + 1))
            await client.send(post(packed, "/echo", "content-encoding: gzip"))
        await turns(3)
        if name == "leave":
            client.leave()
        elif name == "abort":
            client.protocol.transport.abort()

    async def case() -> None:
        async with Door(edge=Edge(max_bodies=MAX_BODY)) as door:
            door.reply = "hold" if hold else None
            work = [asyncio.create_task(act(door, name)) for name in acts]
            await asyncio.wait(work, timeout=0.05)
            door.go_on.set()
            await turns(20)
            for task in work:
                task.cancel()
            await asyncio.wait(work)

    asyncio.run(case())
