"""Input that streams: from a caller's chunks to the handler at the other end of a connection."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from servekit.core.call import BINARY, JSON, Call, Handler, Payload, Reply
from servekit.errors import BadRequest, CallError, PayloadTooLarge, ReplicaLost
from servekit.wire import memory
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.streams import PER_CHUNK, WINDOW
from tests.calls import make_call

MOST = WINDOW // PER_CHUNK
"""Chunks of nearly no bytes that are under way."""


class Source:
    """Chunks that note how many were taken, and whether they were closed."""

    def __init__(self, count: int | None, error: Exception | None = None, size: int = 1) -> None:
        self.count = count
        self.error = error
        self.size = size
        self.taken = 0
        self.closed = False

    def __aiter__(self) -> AsyncIterator[Payload]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[Payload]:
        try:
            while self.count is None or self.taken < self.count:
                self.taken += 1
                yield Payload(BINARY, (b"%d" % self.taken * self.size,))
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def call_with(source: object) -> Call:
    call = make_call("S", "e", Payload(JSON, (b"{}",)), idempotent=True)
    call.chunks = source if source is None else aiter(source)  # type: ignore[call-overload]
    return call


@contextlib.asynccontextmanager
async def joined(handler: Handler):
    client = Connection(Hello(replica="here"), client=True)
    server = Connection(Hello(replica="there"), client=False, handler=handler)
    await memory.join(client, server)
    try:
        yield client, server
    finally:
        await client.close()
        await server.close()


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def gather(call: Call) -> Reply:
    parts = [bytes(chunk.segments[0]) async for chunk in call.chunks]
    return Reply(Payload(BINARY, (b",".join(parts),)))


@pytest.mark.parametrize("count", [0, 1, 2, MOST - 1, MOST, MOST + 1, 3 * MOST + 7])
async def test_all_chunks_arrive_once_and_in_order(count: int):
    source = Source(count)
    async with joined(gather) as (client, _):
        reply = await client.call(call_with(source))
    assert bytes(reply.payload.segments[0]) == b",".join(b"%d" % (n + 1) for n in range(count))
    assert source.closed


async def test_large_chunks_arrive_whole():
    source = Source(5, size=100_000)
    async with joined(gather) as (client, _):
        reply = await client.call(call_with(source))
    assert bytes(reply.payload.segments[0]) == b",".join(
        b"%d" % (n + 1) * 100_000 for n in range(5)
    )


@pytest.mark.parametrize(("size", "most"), [(1, MOST + 1), (50_000, 24), (4_000_000, 3)])
async def test_nothing_is_read_before_the_handler_asks_and_then_no_more_than_a_window(size, most):
    source = Source(None, size=size)
    go, ended = asyncio.Event(), asyncio.Event()

    async def handler(call: Call) -> Reply:
        await go.wait()
        await anext(call.chunks)
        await ended.wait()
        return Reply(call.payload)

    async with joined(handler) as (client, _):
        call = call_with(source)
        asking = asyncio.ensure_future(client.call(call))
        for _ in range(50):
            await asyncio.sleep(0)
        assert source.taken == 0
        assert call.idempotent
        go.set()
        await until(lambda: source.taken >= most - 1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert source.taken <= most
        assert not call.idempotent  # what was read can't be sent again
        ended.set()
        await asking
        await until(lambda: source.closed)


async def test_input_and_answer_stream_at_the_same_time():
    async def handler(call: Call) -> Reply:
        async def double() -> AsyncIterator[Payload]:
            async for chunk in call.chunks:
                yield Payload(BINARY, (bytes(chunk.segments[0]) * 2,))

        return Reply(stream=double())

    sent: list[int] = []
    got: list[bytes] = []

    async def one_at_a_time() -> AsyncIterator[Payload]:
        for n in range(10):
            await until(lambda n=n: len(got) == n)  # the answer to the last one is here
            sent.append(n)
            yield Payload(BINARY, (b"%d" % n,))

    async with joined(handler) as (client, _):
        reply = await client.call(call_with(one_at_a_time()))
        async for chunk in reply.stream:
            got.append(bytes(chunk.segments[0]))
    assert got == [b"%d" % n * 2 for n in range(10)]


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(PayloadTooLarge("over the limit"), PayloadTooLarge), (ValueError("secret"), BadRequest)],
)
async def test_what_breaks_the_input_is_raised_where_it_is_read(raised: Exception, seen: type):
    errors: list[CallError] = []

    async def handler(call: Call) -> Reply:
        chunks = 0
        try:
            async for _ in call.chunks:
                chunks += 1
        except CallError as error:
            errors.append(error)
            assert chunks == 3
            raise
        raise AssertionError("the input had an end")

    async with joined(handler) as (client, _):
        with pytest.raises(seen) as caught:
            await client.call(call_with(Source(3, raised)))
    assert [type(error) for error in errors] == [seen]
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("how", ["answer", "raise", "stream"])
async def test_a_handler_that_has_enough_ends_the_reading(how: str):
    async def handler(call: Call) -> Reply:
        await anext(call.chunks)
        if how == "raise":
            raise BadRequest("no")
        if how == "answer":
            return Reply(call.payload)

        async def one() -> AsyncIterator[Payload]:
            yield Payload(BINARY, (b"1",))

        return Reply(stream=one())

    source = Source(None)
    async with joined(handler) as (client, _):
        if how == "raise":
            with pytest.raises(BadRequest):
                await client.call(call_with(source))
        else:
            reply = await client.call(call_with(source))
            if reply.stream is not None:
                assert [bytes(c.segments[0]) async for c in reply.stream] == [b"1"]
        await until(lambda: source.closed)
        assert not client._caller._feeds
        assert (await client.call(call_with(Source(2)))) is not None if how == "answer" else True


@pytest.mark.parametrize("who", ["caller", "connection"])
async def test_leaving_ends_both_ends(who: str):
    cancelled = asyncio.Event()

    async def handler(call: Call) -> Reply:
        try:
            async for _ in call.chunks:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    source = Source(None)
    async with joined(handler) as (client, server):
        asking = asyncio.ensure_future(client.call(call_with(source)))
        await until(lambda: source.taken > 10)
        if who == "caller":
            asking.cancel()
        else:
            client.abort()
        with pytest.raises((asyncio.CancelledError, ReplicaLost)):
            await asking
        await until(lambda: source.closed and cancelled.is_set())
        assert not server._callee._inputs


async def test_a_reader_that_left_its_input_still_answers():
    async def handler(call: Call) -> Reply:
        async for _ in call.chunks:
            break
        await call.chunks.aclose()
        for _ in range(100):
            await asyncio.sleep(0)
        return Reply(call.payload)

    source = Source(None)
    async with joined(handler) as (client, _):
        assert (await client.call(call_with(source))).payload is not None
        await until(lambda: source.closed)
