"""Connections over the in-memory transport: calls, streams, cancels, deadlines, and leaving."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from contextvars import ContextVar
from math import ceil

import msgspec
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servekit.core.call import BINARY, JSON, Call, Handler, Load, Payload, Reply, now
from servekit.errors import (
    CallError,
    DeadlineExceeded,
    ExecutionError,
    InvalidInput,
    Overloaded,
    ReplicaLost,
    Unavailable,
    WireError,
)
from servekit.wire import memory
from servekit.wire.connection import Connection
from servekit.wire.frames import Frame, FrameReader, Hello, Kind, encode
from servekit.wire.outbox import BURST
from servekit.wire.streams import PER_CHUNK, WINDOW
from tests.calls import make_call
from tests.examples import examples

pack = msgspec.msgpack.encode


def a_call(body: bytes = b"{}", **settings) -> Call:
    return make_call("S", "e", Payload(JSON, (body,)), request_id="r-1", **settings)


@contextlib.asynccontextmanager
async def joined(handler: Handler, back: Handler | None = None, **server_settings):
    client = Connection(Hello(replica="here"), client=True, **({"handler": back} if back else {}))
    server = Connection(
        Hello(replica="there", version="7"), client=False, handler=handler, **server_settings
    )
    await memory.join(client, server)
    try:
        yield client, server
    finally:
        await client.close()
        await server.close()


async def echo(call: Call) -> Reply:
    return Reply(call.payload)


class Producer:
    """A stream of numbers that notes how far it came and how it ended."""

    def __init__(
        self, count: int | None = None, error: Exception | None = None, padding: int = 0
    ) -> None:
        self.count = count
        self.error = error
        self.padding = b" " * padding
        self.made = 0
        self.closed = False

    async def __call__(self, call: Call) -> Reply:
        return Reply(stream=self._chunks())

    async def _chunks(self) -> AsyncIterator[Payload]:
        try:
            while self.count is None or self.made < self.count:
                self.made += 1
                yield Payload(JSON, (b"%d" % self.made, self.padding))
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


class Waiter:
    """A handler that waits until it is told; notes who began and who was cancelled."""

    def __init__(self) -> None:
        self.began = 0
        self.cancelled = 0
        self.go = asyncio.Event()

    async def __call__(self, call: Call) -> Reply:
        self.began += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Reply(call.payload)


def number(chunk: Payload) -> int:
    return int(bytes(chunk.segments[0]))


# -- calls


async def test_a_call_arrives_whole_and_its_answer_says_who_gave_it():
    seen: list[Call] = []

    async def handler(call: Call) -> Reply:
        seen.append(call)
        return Reply(Payload(BINARY, (b"doc", b"x" * 70_000, b"")), queue_s=0.25)

    async with joined(handler, own_load=lambda: Load(3, 0.5)) as (client, server):
        sent = make_call(
            "Embedder",
            "embed",
            Payload("application/msgpack", (b"a", b"", b"b" * 100_000)),
            request_id="id",
            deadline=now() + 60,
            accept="*/*",
            internal=True,
            priority=-2,
            idempotent=True,
            attempt=1,
            affinity_key="k",
            traceparent="00-t",
            headers=b"h",
        )
        reply = await client.call(sent)
        (got,) = seen
        same = ("service", "endpoint", "request_id", "accept", "internal", "priority")
        same += ("idempotent", "attempt", "affinity_key", "traceparent", "headers")
        for name in same:
            assert getattr(got, name) == getattr(sent, name), name
        assert got.deadline == pytest.approx(sent.deadline, abs=5.0)
        assert got.deadline >= sent.deadline - 1e-6
        assert [bytes(s) for s in got.payload.segments] == [b"a", b"", b"b" * 100_000]
        assert got.payload.content_type == "application/msgpack"
        assert (reply.version, reply.replica, reply.queue_s) == ("7", "there", 0.25)
        assert reply.payload is not None
        assert [bytes(s) for s in reply.payload.segments] == [b"doc", b"x" * 70_000, b""]
        assert client.load == Load(3, 0.5)
        assert client.peer.replica == "there"
        assert server.peer.replica == "here"
        assert client.ongoing == 0


async def test_a_call_without_a_deadline_arrives_without_one():
    async def handler(call: Call) -> Reply:
        return Reply(Payload(JSON, (repr(call.deadline).encode(),)))

    async with joined(handler) as (client, _):
        reply = await client.call(a_call())
        assert bytes(reply.payload.segments[0]) == b"None"


async def test_hundreds_of_calls_at_once_are_answered_each_with_its_own():
    async def handler(call: Call) -> Reply:
        for _ in range(len(call.payload.segments[0]) % 7):
            await asyncio.sleep(0)
        return Reply(Payload(JSON, (b"re:" + bytes(call.payload.segments[0]),)))

    async with joined(handler) as (client, _):
        bodies = [b"%d" % i * (1 + i % 50) for i in range(200)]
        replies = await asyncio.gather(*(client.call(a_call(body)) for body in bodies))
        assert [bytes(r.payload.segments[0]) for r in replies] == [b"re:" + b for b in bodies]
        assert client.ongoing == 0


async def test_both_sides_may_call():
    async def there(call: Call) -> Reply:
        return Reply(Payload(JSON, (b"there",)))

    async def here(call: Call) -> Reply:
        return Reply(Payload(JSON, (b"here",)))

    async with joined(there, here) as (client, server):
        one, two = await asyncio.gather(client.call(a_call()), server.call(a_call()))
        assert bytes(one.payload.segments[0]) == b"there"
        assert bytes(two.payload.segments[0]) == b"here"


async def test_a_handler_may_call_back_over_the_same_connection():
    connections: list[Connection] = []

    async def there(call: Call) -> Reply:
        return await connections[0].call(call)

    async with joined(there, echo) as (client, server):
        connections.append(server)
        reply = await client.call(a_call(b"to and fro"))
        assert bytes(reply.payload.segments[0]) == b"to and fro"


async def test_a_side_without_a_handler_refuses_unstarted():
    async with joined(echo) as (_, server):
        with pytest.raises(Unavailable, match="takes no calls") as caught:
            await server.call(a_call())
        assert not caught.value.started


async def test_ping():
    async with joined(echo) as (client, server):
        await asyncio.gather(client.ping(), server.ping(), client.ping())
        assert not client._caller._pings


@pytest.mark.parametrize("count", [1, BURST, 50])
async def test_answers_of_one_turn_leave_together(count, monkeypatch):
    writes = []
    real = memory.MemoryTransport.write
    monkeypatch.setattr(
        memory.MemoryTransport, "write", lambda self, data: (writes.append(data), real(self, data))
    )
    async with joined(echo) as (client, _):
        writes.clear()
        await asyncio.gather(*(client.call(a_call()) for _ in range(count)))
        assert len(writes) == 2 * ceil(count / BURST)


# -- errors


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput(
            "a: wrong", fields=[{"path": "a", "message": "m", "type": "t"}], started=False
        ),
        Overloaded("full", reason="queue_full", retry_after_s=1.25, started=False),
        DeadlineExceeded("late", started=True),
        Unavailable("none", reason="no_replica", retry_after_s=3.0, started=False),
        ExecutionError("E.f raised ValueError"),
        CallError("plain"),
    ],
)
async def test_errors_keep_their_class_and_fields(error):
    async def handler(call: Call) -> Reply:
        raise error

    async with joined(handler, own_load=lambda: Load(9, 0.1)) as (client, _):
        with pytest.raises(CallError) as caught:
            await client.call(a_call())
        got = caught.value
        assert type(got) is type(error)
        for name in ("message", "reason", "retry_after_s", "fields", "started"):
            assert getattr(got, name) == getattr(error, name), name
        assert client.load == Load(9, 0.1)
        assert client.ongoing == 0


async def test_exceptions_in_a_handler_are_masked(caplog):
    async def handler(call: Call) -> Reply:
        raise ValueError("the password is hunter2")

    async with joined(handler) as (client, _):
        with pytest.raises(ExecutionError) as caught:
            await client.call(a_call())
        assert "hunter2" not in str(caught.value)
        assert "hunter2" in caplog.text
        assert "r-1" in caplog.text
        await client.ping()


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput("x" * 100_000, fields=[{"path": "p" * 70_000}]),
        InvalidInput("m", fields=[{"value": object()}]),
        InvalidInput("lone \ud800 surrogate", reason="\ud800"),
        InvalidInput(ValueError("no text")),  # type: ignore[arg-type]
    ],
)
async def test_an_error_that_no_frame_can_hold_is_still_an_answer(error):
    async def handler(call: Call) -> Reply:
        raise error

    async with joined(handler) as (client, server):
        with pytest.raises(InvalidInput):
            await client.call(a_call())
        assert not server._callee._running
        await client.ping()


async def test_a_reply_too_wide_for_a_frame_is_an_error(caplog):
    async def handler(call: Call) -> Reply:
        return Reply(Payload(JSON, (b"",) * 70_000))

    async with joined(handler) as (client, server):
        with pytest.raises(ExecutionError):
            await client.call(a_call())
        assert not server._callee._running


async def test_a_call_that_no_frame_can_hold_is_the_caller_s_error():
    async with joined(echo) as (client, _):
        with pytest.raises(CallError):
            await client.call(a_call(headers=b"h" * 70_000))
        assert client.ongoing == 0
        await client.ping()


# -- cancelling and deadlines


async def test_cancelling_the_wait_cancels_the_work(until):
    handler = Waiter()
    async with joined(handler) as (client, server):
        task = asyncio.create_task(client.call(a_call()))
        await until(lambda: handler.began)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: handler.cancelled)
        assert not server._callee._running
        assert client.ongoing == 0


async def test_a_call_that_is_cancelled_at_once_leaves_nothing_behind(until):
    handler = Waiter()
    async with joined(handler) as (client, server):
        for turns in range(8):
            task = asyncio.create_task(client.call(a_call()))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await client.ping()
        await until(lambda: handler.cancelled == handler.began)
        assert not server._callee._running
        assert client.ongoing == 0
        await server.drained()


async def test_one_cancel_does_not_touch_its_neighbours(until):
    handler = Waiter()
    async with joined(handler) as (client, _):
        tasks = [asyncio.create_task(client.call(a_call(b"%d" % i))) for i in range(20)]
        await until(lambda: handler.began == 20)
        for task in tasks[::2]:
            task.cancel()
        await until(lambda: handler.cancelled == 10)
        handler.go.set()
        replies = await asyncio.gather(*tasks[1::2])
        assert [number(r.payload) for r in replies] == list(range(1, 20, 2))


async def test_a_deadline_ends_the_wait_and_the_work(until):
    handler = Waiter()
    async with joined(handler) as (client, server):
        with pytest.raises(DeadlineExceeded) as caught:
            await client.call(a_call(deadline=now() + 0.02))
        assert caught.value.started
        await until(lambda: handler.cancelled == handler.began)
        assert not server._callee._running
        assert client.ongoing == 0


async def test_a_deadline_that_has_passed_sends_nothing():
    handler = Waiter()
    async with joined(handler) as (client, _):
        with pytest.raises(DeadlineExceeded) as caught:
            await client.call(a_call(deadline=now() - 1))
        assert not caught.value.started
        await client.ping()
        assert handler.began == 0


async def test_the_timer_of_the_deadlines_keeps_nothing_of_a_call():
    current: ContextVar[object] = ContextVar("current")

    async def within(call: Call) -> Reply:
        current.set(call)
        return await client.call(call)

    async with joined(echo) as (client, _):
        call = a_call(deadline=now() + 60)
        gone = weakref.ref(call)
        await asyncio.create_task(within(call))
        del call
        await client.ping()
        assert client._caller._sweeper is not None
        assert gone() is None


async def test_a_connection_that_has_ended_looks_for_no_deadlines():
    async with joined(echo) as (client, _):
        await client.call(a_call(deadline=now() + 60))
        assert client.ongoing == 0
        await client.close()
        assert client._caller._sweeper.cancelled()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_on_a_real_loop_no_deadline_fires_early(new_loop):
    async def main() -> None:
        async def wait(after_s: float) -> None:
            deadline = now() + after_s
            with pytest.raises(DeadlineExceeded):
                await client.call(a_call(deadline=deadline))
            assert now() >= deadline

        async with joined(Waiter()) as (client, server):
            await asyncio.gather(*map(wait, (0.02, 0.001, 0.013, 0.0125, 0.0131, 0.02)))
            await server.drained()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


# -- streams


async def test_a_stream_comes_in_order_and_ends():
    producer = Producer(500)
    async with joined(producer) as (client, server):
        reply = await client.call(a_call())
        assert reply.payload is None
        assert [number(chunk) async for chunk in reply.stream] == list(range(1, 501))
        assert client.ongoing == 0
        await client.ping()
        assert producer.closed
        assert not server._callee._streams


async def test_chunks_of_all_kinds_keep_their_form_and_order():
    sent = [
        Payload(JSON, (b"1",)),
        Payload(JSON, (b"2",)),
        Payload(BINARY, (b"3",)),
        Payload(JSON, (b"4", b"array", b"bytes")),
        Payload(JSON, (b"5", b"array")),
        Payload(JSON, (b"6",)),
        Payload(BINARY, (b"7" * 100_000,)),
        Payload(BINARY, (b"",)),
        Payload(BINARY, (b"9" * 100_000,)),
    ]

    async def handler(call: Call) -> Reply:
        async def chunks() -> AsyncIterator[Payload]:
            for chunk in sent:
                yield chunk

        return Reply(stream=chunks())

    async with joined(handler) as (client, _):
        reply = await client.call(a_call())
        got = [(c.content_type, [bytes(s) for s in c.segments]) async for c in reply.stream]
        assert got == [(c.content_type, list(c.segments)) for c in sent]


async def test_an_empty_stream():
    async with joined(Producer(0)) as (client, _):
        reply = await client.call(a_call())
        assert [chunk async for chunk in reply.stream] == []


async def test_streams_of_many_calls_do_not_mix():
    async def handler(call: Call) -> Reply:
        start = number(call.payload)

        async def chunks() -> AsyncIterator[Payload]:
            for i in range(start, start + 200):
                yield Payload(JSON, (b"%d" % i,))

        return Reply(stream=chunks())

    async with joined(handler) as (client, _):

        async def read(start: int) -> list[int]:
            reply = await client.call(a_call(b"%d" % start))
            return [number(chunk) async for chunk in reply.stream]

        results = await asyncio.gather(*(read(1000 * i) for i in range(10)))
        assert results == [list(range(1000 * i, 1000 * i + 200)) for i in range(10)]


@pytest.mark.parametrize(
    ("padding", "most"), [(0, WINDOW // PER_CHUNK), (100_000, 19), (3_000_000, 1)]
)
async def test_a_slow_reader_holds_the_producer_back(padding: int, most: int):
    """Large chunks cost more, so that 2 MiB are under way, and one more chunk."""
    producer = Producer(padding=padding)
    async with joined(producer) as (client, _):
        reply = await client.call(a_call())
        count = 300 if most > 1 else 10
        for taken in range(count):
            for _ in range(5):
                await client.ping()
            # One more may be made, which then waits for its credit.
            assert producer.made <= taken + most + 1
            assert number(await anext(reply.stream)) == taken + 1
        assert producer.made >= count
        await reply.aclose()


async def test_chunks_that_are_there_are_taken_at_once_and_credited():
    producer = Producer(1000)
    async with joined(producer) as (client, _):
        reply = await client.call(a_call())
        got = []
        async for chunk in reply.stream:
            got.append(number(chunk))
            got += map(number, reply.stream.take_ready())
            await client.ping()
        assert got == list(range(1, 1001))


async def test_a_transport_that_is_full_holds_streams_back():
    producer = Producer()
    async with joined(producer) as (client, server):
        reply = await client.call(a_call())
        server.pause_writing()
        await client.ping()
        made = producer.made
        reply.stream.take_ready()
        for _ in range(5):
            await client.ping()
        assert producer.made <= made + 1
        server.resume_writing()
        await client.ping()
        await client.ping()
        assert producer.made > made + 1
        await reply.aclose()


async def test_an_error_in_a_stream_comes_behind_its_last_chunk():
    producer = Producer(3, Overloaded("enough", reason="why", started=True))
    async with joined(producer) as (client, _):
        reply = await client.call(a_call())
        got = []
        with pytest.raises(Overloaded, match="enough") as caught:
            async for chunk in reply.stream:
                got.append(number(chunk))
        assert got == [1, 2, 3]
        assert caught.value.reason == "why"
        with pytest.raises(StopAsyncIteration):
            await anext(reply.stream)


async def test_an_exception_in_a_stream_is_masked(caplog):
    async with joined(Producer(1, KeyError("hunter2"))) as (client, _):
        reply = await client.call(a_call())
        await anext(reply.stream)
        with pytest.raises(ExecutionError) as caught:
            await anext(reply.stream)
        assert "hunter2" not in str(caught.value)


async def test_closing_a_stream_stops_its_producer(until):
    producer = Producer()
    async with joined(producer) as (client, server):
        reply = await client.call(a_call())
        await anext(reply.stream)
        await reply.aclose()
        await reply.aclose()
        await until(lambda: producer.closed)
        await until(lambda: not server._callee._running)
        assert client.ongoing == 0
        assert [chunk async for chunk in reply.stream] == []
        await client.ping()


async def test_a_stream_that_nobody_holds_any_more_stops_its_producer(until):
    producer = Producer()
    async with joined(producer) as (client, server):
        reply = await client.call(a_call())
        async for _ in reply.stream:
            break
        del reply
        gc.collect()
        await until(lambda: producer.closed)
        await until(lambda: not server._callee._running)
        assert client.ongoing == 0


async def test_cancelling_the_call_while_its_stream_arrives_stops_the_producer(until):
    producer = Producer()
    async with joined(producer) as (client, server):
        for turns in range(10):
            task = asyncio.create_task(client.call(a_call()))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).aclose()
            del task
        await until(lambda: not server._callee._running)
        await until(lambda: client.ongoing == 0)


async def test_a_deadline_ends_a_stream_behind_what_has_come(until):
    producer = Producer()
    async with joined(producer) as (client, server):
        reply = await client.call(a_call(deadline=now() + 0.02))
        got = []
        with pytest.raises(DeadlineExceeded):
            async for chunk in reply.stream:
                got.append(number(chunk))
                await asyncio.sleep(0)
        assert got == list(range(1, len(got) + 1))
        await until(lambda: producer.closed)
        await until(lambda: not server._callee._running)
        assert client.ongoing == 0


async def test_cancelling_a_reader_leaves_the_stream_to_be_closed(until):
    gate = asyncio.Event()
    closed = asyncio.Event()

    async def handler(call: Call) -> Reply:
        async def chunks() -> AsyncIterator[Payload]:
            try:
                yield Payload(JSON, (b"1",))
                await gate.wait()
            finally:
                closed.set()

        return Reply(stream=chunks())

    async with joined(handler) as (client, _):

        async def read() -> None:
            reply = await client.call(a_call())
            try:
                async for _ in reply.stream:
                    reading.set()
            finally:
                await reply.aclose()

        reading = asyncio.Event()
        task = asyncio.create_task(read())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await closed.wait()


# -- leaving


async def test_goaway_lets_old_calls_finish_and_refuses_new_ones(until):
    handler = Waiter()
    async with joined(handler) as (client, server):
        assert client.usable
        old = asyncio.create_task(client.call(a_call(b"old")))
        await until(lambda: handler.began)
        server.goaway()
        server.goaway()
        crossing = asyncio.create_task(client.call(a_call()))
        with pytest.raises(Unavailable, match="draining") as caught:
            await crossing
        assert (caught.value.reason, caught.value.started) == ("draining", False)
        assert not client.usable
        with pytest.raises(ReplicaLost) as lost:
            await client.call(a_call())
        assert not lost.value.started
        drained = asyncio.create_task(server.drained())
        await client.ping()
        assert not drained.done()
        handler.go.set()
        assert bytes((await old).payload.segments[0]) == b"old"
        await drained
        assert handler.began == 1


async def test_several_may_wait_until_it_is_drained(until):
    handler = Waiter()
    async with joined(handler) as (client, server):
        await server.drained()
        task = asyncio.create_task(client.call(a_call()))
        await until(lambda: handler.began)
        waiting = [asyncio.create_task(server.drained()) for _ in range(3)]
        await client.ping()
        waiting[0].cancel()
        await client.ping()
        assert not waiting[1].done()
        handler.go.set()
        await task
        await asyncio.gather(*waiting[1:])


async def test_a_lost_connection_fails_all_that_waits_for_it_and_cancels_all_it_runs(until):
    handler, producer = Waiter(), Producer()

    async def there(call: Call) -> Reply:
        return await (producer if call.endpoint == "stream" else handler)(call)

    async with joined(there) as (client, server):
        ended: list[Connection] = []
        client.on_lost = ended.append
        streaming = make_call("S", "stream", Payload(JSON, (b"",)), request_id="s")
        reply = await client.call(streaming)
        calls = [asyncio.create_task(client.call(a_call())) for _ in range(10)]
        await until(lambda: handler.began == 10)
        client._outbox.flush()
        ping = asyncio.create_task(client.ping())
        await asyncio.sleep(0)
        server._transport.abort()
        outcomes = await asyncio.gather(*calls, ping, return_exceptions=True)
        assert all(isinstance(outcome, ReplicaLost) for outcome in outcomes)
        assert all(outcome.started for outcome in outcomes)
        assert "there" in str(outcomes[0])
        with pytest.raises(ReplicaLost):
            async for _ in reply.stream:
                pass
        await client.lost
        assert ended == [client]
        await until(lambda: handler.cancelled == 10 and producer.closed)
        assert client.ongoing == 0
        assert not server._callee._running
        await server.drained()
        assert not client.usable
        with pytest.raises(ReplicaLost) as caught:
            await client.call(a_call())
        assert not caught.value.started
        await client.close()


async def test_close_sends_what_is_queued_first():
    handler = Waiter()
    async with joined(echo, handler) as (client, server):
        task = asyncio.create_task(server.call(a_call()))
        await asyncio.sleep(0)
        await server.close()
        with pytest.raises(ReplicaLost):
            await task
        await client.lost


# -- peers that break the rules


class Raw(asyncio.Protocol):
    """The bare other end of a connection: sends bytes, and collects frames."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._reader = FrameReader(1 << 20)
        self.get_buffer = lambda _: self._reader.get_buffer()

    def buffer_updated(self, count: int) -> None:
        self.frames += self._reader.received(count)

    def connection_lost(self, exc: Exception | None) -> None:
        pass


@contextlib.asynccontextmanager
async def raw(handler: Handler, *, greet: bool = True, **settings):
    """Join a server with a peer whose bytes the test writes."""
    server = Connection(Hello(replica="there"), client=False, handler=handler, **settings)
    peer = Raw()
    here, there = memory.MemoryTransport(peer), memory.MemoryTransport(server)  # type: ignore[arg-type]
    here.other, there.other = there, here
    server.connection_made(there)
    if greet:
        here.write(b"".join(encode(Kind.HELLO, 0, pack(Hello()))))
        await server.greeted()
    try:
        yield peer, here, server
    finally:
        await server.close()


def frame(kind: int, id_: int = 1, header: object = b"", segments=()) -> bytes:
    packed = header if isinstance(header, bytes) else pack(header)
    return b"".join(encode(kind, id_, packed, segments))


CALL = [None, JSON, ["S", "e", "r"]]


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x00\x80" + bytes(60),
        bytes(64),
        b"\xff" * 64,
        frame(Kind.HELLO, 0, Hello()),
        frame(Kind.AUTH, 0, b"p" * 32),
        frame(0),
        frame(200),
        frame(Kind.CALL, 1, b"not msgpack"),
        frame(Kind.CALL, 1, [None, JSON, ["S"]]),
        frame(Kind.CALL, 1, ["S", "e", "r"]),
        frame(Kind.CALL, 1, [None, JSON, {"service": "S"}]),
        frame(Kind.CALL, 1, b""),
        frame(Kind.CALL, 1, CALL) * 2,
        frame(Kind.REPLY, 1, b"\xc1"),
        frame(Kind.ERROR, 1, b"\xc1"),
    ],
)
async def test_a_peer_that_breaks_the_format_loses_its_connection_only(data, caplog):
    handler = Waiter()
    async with raw(handler) as (_, transport, server), joined(echo) as (other, _server):
        transport.write(data)
        await server.lost
        assert not server._callee._running or handler.began
        assert "connection closed" in caplog.text
        await other.ping()
        reply = await other.call(a_call(b"fine"))
        assert bytes(reply.payload.segments[0]) == b"fine"


@pytest.mark.parametrize(
    "kind", [Kind.CHUNK, Kind.CHUNKS, Kind.CREDIT, Kind.END, Kind.CANCEL, Kind.PONG]
)
async def test_frames_about_calls_that_are_over_are_no_error(kind):
    async with raw(echo) as (peer, transport, server):
        transport.write(frame(kind, 99, pack(5) if kind == Kind.CREDIT else b""))
        transport.write(frame(Kind.REPLY, 99, [JSON, [], 0.0, False]))
        transport.write(frame(Kind.ERROR, 99, ["internal", "m"]))
        transport.write(frame(Kind.PING, 7))
        for _ in range(5):
            await asyncio.sleep(0)
        assert (Kind.PONG, 7) in [frame[:2] for frame in peer.frames]
        assert not server.lost.done()


async def test_a_call_before_the_greeting_is_not_run(caplog):
    handler = Waiter()
    async with raw(handler, greet=False) as (_, transport, server):
        transport.write(frame(Kind.CALL, 1, CALL, [b"{}"]))
        await server.lost
        assert handler.began == 0
        with pytest.raises(WireError):
            await server.greeted()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x80\x04\x95\x1f\x00\x00\x00cos\nsystem\n(S'true'\ntR.",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        frame(Kind.HELLO, 0, b"\xc1"),
        frame(Kind.HELLO, 0, b""),
        frame(Kind.PING, 1),
    ],
)
async def test_what_is_no_greeting_is_hung_up_on(data, caplog):
    async with raw(echo, greet=False, greeting_s=0.5) as (_, transport, server):
        transport.write(data)
        await server.lost
        with pytest.raises(WireError):
            await server.greeted()


async def test_a_large_frame_before_the_greeting_is_refused(caplog):
    async with raw(echo, greet=False) as (_, transport, server):
        transport.write(b"\xff\xff\x00\x00" + bytes(10))
        await server.lost
        assert "allowed are 14 to 4096" in caplog.text


async def test_a_peer_that_never_greets_is_let_go(caplog):
    async with raw(echo, greet=False, greeting_s=0.01) as (_, _transport, server):
        await server.lost
        with pytest.raises(WireError, match="did not greet in time"):
            await server.greeted()


async def test_call_and_cancel_in_one_packet_leave_nothing_behind():
    handler = Waiter()
    async with raw(handler) as (_, transport, server):
        transport.write(frame(Kind.CALL, 1, CALL, [b"{}"]) + frame(Kind.CANCEL, 1))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not server._callee._running
        await server.drained()
        transport.write(frame(Kind.CALL, 1, CALL, [b"{}"]))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not server.lost.done()


@given(
    data=st.binary(max_size=60)
    | st.builds(
        frame,
        st.sampled_from([kind for kind in vars(Kind).values() if isinstance(kind, int)]),
        st.integers(0, 3),
        st.binary(max_size=20)
        | st.just(pack(CALL))
        | st.just(pack([0.001, *CALL[1:]]))
        | st.just(pack(["a", "b"])),
        st.lists(st.binary(max_size=9), max_size=2),
    ),
    again=st.integers(1, 3),
)
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_of_a_greeted_peer_end_its_connection_at_most(data, again):
    async def attack() -> None:
        failures: list[dict[str, object]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        async with raw(echo) as (_, transport, server):
            server._reader.max_frame = 4096  # a greeted peer may send large ones: memory, no more
            for _ in range(again):
                transport.write(data)
            for _ in range(6):
                await asyncio.sleep(0)
            assert not server._callee._running
        assert server.lost.done()
        assert not failures

    asyncio.run(attack())


# -- cleaning up


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("end", ["dropped", "lost"])
async def test_a_generator_may_clean_up_whenever_its_caller_leaves(turns, end):
    log = []

    async def handler(call: Call) -> Reply:
        async def chunks():
            log.append("begun")
            try:
                yield Payload(JSON, (b"1",))
                await asyncio.sleep(10)
            finally:
                await asyncio.sleep(0.01)
                log.append("cleaned up")

        return Reply(stream=chunks())

    async with joined(handler) as (client, server):
        task = asyncio.create_task(client.call(a_call()))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        if end == "lost":
            await asyncio.sleep(0)
            client.abort()
        await asyncio.sleep(0.03)
        await server.drained()
    assert log in ([], ["begun", "cleaned up"])
