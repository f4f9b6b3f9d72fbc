"""The server on TCP, with and without TLS: handshakes, certificates, and clients that do not read."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator

import pytest

from servekit.core.call import BINARY, Payload, Reply
from servekit.engine.front import bind
from servekit.gateway import certificate, server
from servekit.gateway.edge import PLAIN, Edge
from servekit.gateway.server import Server
from tests.door import (
    MAX_BODY,
    Door,
    bytes_of,
    chunked,
    chunks,
    get,
    head,
    loop,  # noqa: F401  (each test runs on either loop)
    page,
    post,
    turns,
)
from tests.pairs import make_pair

pytestmark = pytest.mark.slow


@pytest.fixture
def pair(tmp_path):
    return make_pair(tmp_path)


# -- requests over TLS


@pytest.mark.parametrize("size", [0, 1, 16 * 1024, 64 * 1024 + 1, 600_000, 9_000_000, MAX_BODY])
@pytest.mark.parametrize("behind", [b"", post(b"next"), get("text=next"), post(b"n", "/page")])
async def test_bodies_over_tls(pair, size, behind):
    async with Door(pair=pair) as door:
        client = await door.connect()
        body = bytes_of(size)
        for _ in range(2):
            answer = await client.ask(post(body) + behind)
            assert (answer.status, answer.body) == (200, body[:100])
            if behind:
                assert (await client.answer()).status == 200
        parts = [part for part in (body[: size // 2], body[size // 2 :]) if part]
        assert (await client.ask(chunked(*parts))).status == 200
        assert [b for b in door.bodies if b not in (b"next", b'{"text":"next"}')] == [body] * 3
        await client.lives()


@pytest.mark.parametrize("step", [1, 700, 16_384, 50_000])
async def test_a_body_in_records_of_any_size(pair, step):
    async with Door(pair=pair) as door:
        client = await door.connect()
        size = 300 if step == 1 else 400_000
        data = post(bytes_of(size)) + post(bytes_of(size, seed=1)) + get("text=a")
        await client.send(data, cuts=range(step, len(data), step))
        assert [(await client.answer()).status for _ in range(3)] == [200] * 3
        assert door.bodies[:2] == [bytes_of(size), bytes_of(size, seed=1)]
        await client.lives()


async def test_answers_over_tls(pair):
    async with Door(pair=pair) as door:
        client = await door.connect()
        door.stream = chunks(*(b"%d" % number for number in range(300)), b"x" * 300_000)
        answer = await client.ask(post(b"", "/tokens"))
        assert answer.chunks[-2] == b"data: " + b"x" * 300_000 + b"\n\n"
        large = bytes_of(5_000_000)
        door.reply = Reply(Payload(BINARY, (large,)))
        await client.send(post() * 5)
        for _ in range(5):
            assert (await client.answer()).body == large
        door.reply = None
        await client.lives()
        answer = await client.ask(post(b"1", "/echo", "connection: close"))
        assert answer.body == b"1"
        assert await client.rest() == b""


@pytest.mark.parametrize("behind", [b"", post() * 3, post(bytes_of(600_000))[:-1]])
async def test_a_client_that_leaves_over_tls_ends_its_call(pair, until, behind):
    async with Door(pair=pair) as door:
        door.reply = "hold"
        client = await door.connect()
        sending = asyncio.create_task(client.send(post() + behind))
        await until(lambda: door.calls)
        await turns(20)
        sending.cancel()
        if len(behind) > 100_000:  # what is read behind a request has an end
            client.protocol.transport.abort()
        client.leave()
        await until(lambda: not door.state.tasks)
        assert door.cancelled == 1


async def test_a_client_that_asks_on_and_on_but_does_not_read_is_held_back(pair):
    async with Door(pair=pair) as door:
        client = await door.connect()
        door.reply = Reply(Payload(BINARY, (bytes(1_000_000),)))
        asking = asyncio.create_task(client.send(post() * 200))
        await turns(3000)
        assert len(door.calls) < 100
        for _ in range(200):
            assert len((await client.answer()).body) == 1_000_000
        await asking


# -- the server


class Running:
    """A server on a port of its own, in front of a `Door`'s gateway."""

    def __init__(self, door: Door, port: int, server: Server) -> None:
        self.door = door
        self.port = port
        self.server = server

    async def open(
        self, context: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("localhost", self.port, ssl=context)

    async def status(self, context: ssl.SSLContext | None = None) -> int:
        reader, writer = await self.open(context)
        try:
            writer.write(post(b"1", "/echo", "connection: close"))
            return int((await reader.read()).split()[1])
        finally:
            await close(writer)

    async def plain(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.setblocking(False)
        return sock


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(edge: Edge = PLAIN) -> AsyncIterator[Running]:
    async with Door(edge=edge) as door:
        listener = bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        made = Server(door.gateway, page, listener, drain_s=1.0, edge=edge)
        served = asyncio.create_task(made.run_until_drained())
        try:
            yield Running(door, port, made)
        finally:
            made.drain()
            await served


async def test_a_server_speaks_tls(pair):
    async with serving(pair.edge()) as running:
        assert await running.status(pair.client()) == 200


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_versions_of_tls(pair, version):
    async with serving(pair.edge()) as running:
        client = pair.client()
        client.minimum_version = client.maximum_version = version
        assert await running.status(client) == 200


async def test_a_client_that_speaks_plain_http_to_it_is_hung_up_on(pair, until):
    async with serving(pair.edge()) as running:
        reader, writer = await running.open()
        writer.write(head("GET /page HTTP/1.1", "host: h"))
        with contextlib.suppress(ConnectionError):
            assert not (await reader.read()).startswith(b"HTTP")
        await close(writer)
        assert await running.status(pair.client()) == 200
        await until(lambda: running.door.gateway.connections.count == 0)


@pytest.mark.parametrize(
    "sent", [b"", b"\x16\x03\x01\x02\x00", b"\x16\x03\x01\x40\x00" + bytes(99)]
)
async def test_a_handshake_has_its_time(pair, monkeypatch, sent):
    assert certificate.HANDSHAKE_S == 10.0
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.2)
    async with serving(pair.edge()) as running:
        reader, writer = await running.open()
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            await reader.read()  # ends, as the server hangs up
        await close(writer)
        assert await running.status(pair.client()) == 200


async def test_new_connections_get_the_new_certificate_and_old_ones_go_on(pair, monkeypatch, until):
    monkeypatch.setattr(certificate, "_LOOK_EVERY_S", 0.01)
    async with serving(pair.edge()) as running:
        old = pair.client()
        reader, writer = await running.open(old)
        writer.write(post(b"1"))
        assert b"200" in await reader.readline()
        make_pair(pair.cert.parent)
        new = pair.client()
        for _ in range(500):
            with contextlib.suppress(ssl.SSLCertVerificationError):
                assert await running.status(new) == 200
                break
            await asyncio.sleep(0.01)
        with pytest.raises(ssl.SSLCertVerificationError):
            await running.status(old)
        writer.write(post(bytes_of(600_000), "/echo", "connection: close"))
        assert (await reader.read()).count(b"HTTP/1.1 200") == 1
        await close(writer)


# -- connections


async def test_connections_from_one_address(until):
    async with serving(Edge(max_connections_per_address=2)) as running:
        first = await running.open()
        assert await running.status() == 200
        await until(lambda: running.door.gateway.connections.count == 1)
        second = await running.open()
        await until(lambda: running.door.gateway.connections.count == 2)
        assert await running.status() == 503
        await close(first[1])
        await until(lambda: running.door.gateway.connections.count == 1)
        assert await running.status() == 200
        await close(second[1])


# -- clients that do not read


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such option")
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("kind", ["stream", "whole", "last"])
async def test_a_client_that_does_not_read_is_hung_up_on(pair, monkeypatch, until, kind, tls):
    """Its stream ends, so its slot is free; what a closed connection waits for ends too."""
    assert server._UNREAD_S == 60
    monkeypatch.setattr(server, "_UNREAD_S", 1)

    async def endless() -> AsyncIterator[Payload]:
        while True:
            yield Payload(BINARY, (bytes(50_000),))

    async with serving(pair.edge() if tls else PLAIN) as running:
        door = running.door
        _, writer = await running.open(pair.client() if tls else None)
        if kind == "stream":
            door.stream = endless()
            request = post(b"", "/tokens")
        else:
            door.reply = Reply(Payload(BINARY, (bytes(30_000_000),)))
            request = post(b"", "/echo", *(["connection: close"] * (kind == "last")))
        writer.transport.pause_reading()
        writer.write(request)
        await until(lambda: door.calls)
        state = running.server.server_state
        await until(lambda: not state.connections and not state.tasks)
        assert door.counted() == {"499" if kind == "stream" else "200": 1}
        writer.transport.abort()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such option")
async def test_a_client_that_reads_slowly_gets_all(monkeypatch):
    monkeypatch.setattr(server, "_UNREAD_S", 1)
    async with serving() as running:
        running.door.reply = Reply(Payload(BINARY, (bytes(12_000_000),)))
        reader, writer = await running.open()
        writer.write(post(b"", "/echo", "connection: close"))
        size = 0
        while data := await reader.read(2_000_000):
            size += len(data)
            if size < 10_000_000:
                await asyncio.sleep(0.02)
        assert size > 12_000_000
        await close(writer)
