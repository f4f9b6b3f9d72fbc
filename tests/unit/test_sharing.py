"""Large segments in shared memory: over real unix sockets, in one process and in two."""

import asyncio
import contextlib
import ctypes
import gc
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from contextvars import ContextVar
from pathlib import Path

import msgspec
import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.core.call import BINARY, JSON, Call, Handler, Payload, Reply, now
from servekit.errors import CallError, DeadlineExceeded, PayloadTooLarge, ReplicaLost
from servekit.wire import memory, sharing
from servekit.wire.arena import GRANULE, GRANULES, SIZE, Arena, ArenaError, Offer
from servekit.wire.connection import Connection
from servekit.wire.frames import SHARED, SHARED_FROM, FrameReader, Hello, Kind, encode
from servekit.wire.sockets import Address, Listener, connect
from tests.calls import make_call
from tests.peer import Mirror

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")

pack = msgspec.msgpack.encode
LARGE = 300_000


def a_call(*segments, **fields) -> Call:
    return make_call("S", fields.pop("endpoint", "e"), Payload(JSON, (b"{}", *segments)), **fields)


def an_array(size: int = LARGE, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


async def echo(call: Call) -> Reply:
    return Reply(call.payload)


async def small(call: Call) -> Reply:
    return Reply(Payload(JSON, (b"{}",)))


@contextlib.asynccontextmanager
async def paired(handler: Handler = echo):
    """Two connections of this process over a socket pair."""
    loop = asyncio.get_running_loop()
    here, there = socket.socketpair()
    _, server = await loop.create_connection(
        lambda: Connection(Hello(replica="there"), client=False, handler=handler), sock=there
    )
    _, client = await loop.create_connection(
        lambda: Connection(Hello(replica="here"), client=True, handler=handler), sock=here
    )
    await client.greeted()
    await server.greeted()
    try:
        yield client, server
    finally:
        await client.close()
        await server.close()


@contextlib.asynccontextmanager
async def sharing_both_ways(handler: Handler = echo):
    """The same, with both arenas in use."""
    async with paired(handler) as (client, server):
        for one in (client, server):
            await one.call(a_call(an_array()))
            await one.ping()
        assert shares(client)
        assert shares(server)
        yield client, server


def shares(connection: Connection) -> bool:
    return connection._caller.encode == connection._sharing._encode


def lent(connection: Connection) -> int:
    arena = connection._sharing._own
    arena._blocks.reclaim(arena._memory[:GRANULES])
    return len(arena._blocks)


def leave_only(connection: Connection, granules: int) -> None:
    """Lend the rest of a connection's arena to nobody."""
    arena = connection._sharing._own
    assert lent(connection) == 0
    block, _ = arena._blocks.take(GRANULES - 1 - granules)
    arena._memory[block] = 1


def is_shared(segment) -> bool:
    return isinstance(segment, memoryview) and isinstance(segment.obj, ctypes.Array)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text("utf-8").count("/memfd:servekit")


def left_in_shm() -> list[str]:
    return os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []


# -- what goes where


async def test_a_large_segment_is_shared_once_the_peer_has_the_arena():
    got: list[bool] = []

    async def handler(call: Call) -> Reply:
        got.append(is_shared(call.payload.segments[1]))
        return Reply(call.payload)

    async with paired(handler) as (client, server):
        array = an_array()
        for _ in range(3):
            reply = await client.call(a_call(array))
            assert reply.payload.segments[1] == array
            await client.ping()
        assert got == [False, True, True]
        assert shares(client)
        assert shares(server)
        assert is_shared(reply.payload.segments[1])
        assert lent(server) == 1
        del reply
        assert lent(server) == 0
        assert lent(client) == 0


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (0,),
        (100,),
        (SHARED_FROM - 1,),
        (SHARED_FROM,),
        (SHARED_FROM + 1,),
        (0, SHARED_FROM, 0),
        (SHARED_FROM, 5, SHARED_FROM - 1, 3 * SHARED_FROM + 1, 7),
        (SHARED_FROM,) * 100,
        (30_000,) * 5,
        (9 << 20, 1),
    ],
)
async def test_segments_of_all_sizes_arrive_whole_and_in_order(sizes):
    async with sharing_both_ways(Mirror()) as (client, server):
        arrays = [an_array(size, seed) for seed, size in enumerate(sizes)]
        for one in (client, server):
            reply = await one.call(a_call(*arrays))
            assert list(reply.payload.segments[1:]) == arrays[::-1]
            shared = [is_shared(segment) for segment in reply.payload.segments[1:]]
            assert shared == [size >= SHARED_FROM for size in sizes[::-1]]
        del reply
        await client.ping()
        assert lent(client) == lent(server) == 0


async def test_small_segments_make_no_arena():
    async with paired() as (client, server):
        files = open_files()
        await asyncio.gather(*(client.call(a_call(b"x" * 1000)) for _ in range(100)))
        await client.call(a_call(b"x" * (SHARED_FROM - 1)))
        assert client._sharing._own is None
        assert server._sharing._own is None
        assert open_files() == files


async def test_a_receiver_may_write_into_what_it_got():
    async def negate(call: Call) -> Reply:
        array = np.frombuffer(call.payload.segments[1], np.uint8)
        np.negative(array, out=array)
        return Reply(Payload(JSON, (b"{}", array.data)))

    async with sharing_both_ways(negate) as (client, _):
        sent = np.arange(LARGE, dtype=np.uint8)
        replies = await asyncio.gather(*(client.call(a_call(sent.data)) for _ in range(8)))
        for reply in replies:
            array = np.frombuffer(reply.payload.segments[1], np.uint8)
            assert (array == -np.arange(LARGE, dtype=np.uint8)).all()
            array[:] = 0
        assert (sent == np.arange(LARGE, dtype=np.uint8)).all()


async def test_the_chunks_of_a_stream_are_shared():
    sent = [
        Payload(BINARY, (an_array(LARGE, 1),)),
        Payload(BINARY, (an_array(LARGE, 2),)),
        Payload(BINARY, (b"small",)),
        Payload(JSON, (b"{}", an_array(LARGE, 3), b"", an_array(LARGE, 4))),
        Payload(BINARY, (an_array(LARGE, 5),)),
    ]

    async def handler(call: Call) -> Reply:
        async def chunks() -> AsyncIterator[Payload]:
            for chunk in sent:
                yield chunk

        return Reply(stream=chunks()) if call.endpoint == "stream" else Reply(call.payload)

    async with sharing_both_ways(handler) as (client, server):
        reply = await client.call(a_call(endpoint="stream"))
        got = [chunk async for chunk in reply.stream]
        assert [c.content_type for c in got] == [c.content_type for c in sent]
        assert [list(c.segments) for c in got] == [list(c.segments) for c in sent]
        shared = [is_shared(s) for c in got for s in c.segments]
        assert shared == [True, True, False, False, True, False, True, True]
        assert lent(server) == 5
        del got, reply
        assert lent(server) == 0


async def test_the_chunks_of_an_input_are_shared():
    sent = [an_array(LARGE, seed) for seed in range(3)] + [b"small"]

    async def chunks() -> AsyncIterator[Payload]:
        for chunk in sent:
            yield Payload(BINARY, (chunk,))

    got: list[tuple[bytes, bool]] = []

    async def handler(call: Call) -> Reply:
        if call.chunks is not None:
            async for chunk in call.chunks:
                got.append((bytes(chunk.segments[0]), is_shared(chunk.segments[0])))
        return Reply(call.payload)

    async with sharing_both_ways(handler) as (client, _):
        call = a_call()
        call.chunks = chunks()
        await client.call(call)
        assert got == [*((chunk, True) for chunk in sent[:3]), (b"small", False)]
        await client.ping()
        assert lent(client) == 0


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_both_kinds_of_loop(new_loop):
    async def main() -> None:
        async with sharing_both_ways() as (client, server):
            arrays = [an_array(LARGE, seed) for seed in range(8)]
            replies = await asyncio.gather(*(client.call(a_call(array)) for array in arrays))
            assert [reply.payload.segments[1] for reply in replies] == arrays
            assert lent(server) == 8

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


# -- when memory is short, or can't be had


async def test_a_peer_that_keeps_what_it_gets_is_sent_the_rest_over_the_socket():
    mirror = Mirror()
    async with sharing_both_ways(mirror) as (client, _):
        sent = [an_array(5 << 20, seed) for seed in range(20)]
        for array in sent:
            await client.call(a_call(array, endpoint="keep"))
        shared = [is_shared(array) for array in mirror.kept]
        assert shared == [True] * 12 + [False] * 8
        assert mirror.kept == sent
        del mirror.kept[3:5]
        await client.call(a_call(an_array(9 << 20, 99), endpoint="keep"))
        assert is_shared(mirror.kept[-1])
        assert mirror.kept == [*sent[:3], *sent[5:], an_array(9 << 20, 99)]
        mirror.kept.clear()
        assert lent(client) == 0


async def test_a_frame_may_be_shared_in_part():
    async with sharing_both_ways(small) as (client, _):
        leave_only(client, 35)
        segments = [an_array(8 * GRANULE, seed) for seed in range(8)]
        frame = client._caller.encode(Kind.CALL, 1, b"", segments)
        assert [bytes(part) for part in frame if len(part) == 8 * GRANULE] == segments[4:]
        again = client._caller.encode(Kind.CALL, 1, b"", segments)
        assert again == encode(Kind.CALL, 1, b"", segments)  # the arena is full


async def refused(connection: Connection) -> None:
    array = an_array()
    for _ in range(3):
        reply = await connection.call(a_call(array))
        assert reply.payload.segments[1] == array
        assert not is_shared(reply.payload.segments[1])
        await connection.ping()
    assert not shares(connection)
    assert connection._sharing._own is None


async def test_a_peer_that_can_not_map_the_arena_gets_everything_over_the_socket(monkeypatch):
    def fail(*_):
        raise ArenaError("not here")

    files, maps = open_files(), mappings()
    monkeypatch.setattr(sharing, "PeerArena", fail)
    async with paired() as (client, server):
        await refused(client)
        await refused(server)
        assert mappings() == maps
    assert open_files() == files


async def test_a_system_without_arenas_offers_none(monkeypatch):
    def fail():
        raise ArenaError("not here")

    monkeypatch.setattr(sharing, "Arena", fail)
    async with paired() as (client, server):
        await refused(client)
        await refused(server)


@pytest.mark.parametrize("pid", [0, 1 << 30])
async def test_a_peer_in_another_container_is_no_error(pid, monkeypatch):
    monkeypatch.setattr(sharing, "_peer_pid", lambda _: pid)
    async with paired() as (client, _):
        await refused(client)


async def test_tcp_shares_nothing():
    listener = Listener(
        Address("tcp:127.0.0.1:0"), lambda: Connection(Hello(), client=False, handler=echo)
    )
    await listener.open()
    client = await connect(listener.address, lambda: Connection(Hello(), client=True))
    await refused(client)
    await client.close()
    await listener.close()


async def test_an_offer_over_tcp_or_in_memory_is_declined():
    client = Connection(Hello(), client=True)
    server = Connection(Hello(), client=False)
    await memory.join(client, server)
    client._sharing.offer()
    await client.ping()
    assert client._sharing._own is None
    assert server._sharing._peer is None
    await client.ping()
    await client.close()
    await server.close()


async def test_a_call_that_no_frame_can_hold_gives_its_blocks_back():
    async with sharing_both_ways() as (client, _):
        with pytest.raises(PayloadTooLarge):
            await client.call(a_call(an_array(), an_array(), headers=b"h" * 70_000))
        assert lent(client) == 0
        await client.call(a_call(an_array()))


# -- calls that end otherwise


class Gate:
    """Waits, and then answers with what it got."""

    def __init__(self) -> None:
        self.began = 0
        self.open = asyncio.Event()

    async def __call__(self, call: Call) -> Reply:
        if call.endpoint == "wait":
            self.began += 1
            with contextlib.suppress(asyncio.CancelledError):
                await self.open.wait()
        return Reply(call.payload)


@pytest.mark.parametrize("end", ["cancel", "deadline"])
async def test_a_reply_that_nobody_waits_for_gives_its_blocks_back(end, until):
    gate = Gate()
    async with sharing_both_ways(gate) as (client, server):
        deadline = now() + 0.05 if end == "deadline" else None
        tasks = [
            asyncio.create_task(
                client.call(a_call(an_array(LARGE, i), endpoint="wait", deadline=deadline))
            )
            for i in range(8)
        ]
        await until(lambda: gate.began == 8)
        if end == "cancel":
            for task in tasks:
                task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = {asyncio.CancelledError} if end == "cancel" else {DeadlineExceeded}
        assert {type(outcome) for outcome in outcomes} == kinds
        del outcomes, tasks
        await server.drained()
        await client.ping()
        await server.ping()
        gc.collect()
        assert lent(client) == lent(server) == 0


@pytest.mark.parametrize("turns", range(8))
async def test_a_call_that_is_cancelled_at_once_gives_its_blocks_back(turns):
    async with sharing_both_ways() as (client, server):
        task = asyncio.create_task(client.call(a_call(an_array())))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        del task
        for _ in range(3):
            await client.ping()
            await server.ping()
        await server.drained()
        assert lent(client) == lent(server) == 0


async def test_a_stream_that_nobody_reads_any_more_gives_its_blocks_back(until):
    async def handler(call: Call) -> Reply:
        async def chunks() -> AsyncIterator[Payload]:
            while True:
                yield Payload(BINARY, (array,))

        return Reply(stream=chunks()) if call.endpoint == "stream" else Reply(call.payload)

    array = an_array()
    async with sharing_both_ways(handler) as (client, server):
        reply = await client.call(a_call(endpoint="stream"))
        chunk = await anext(reply.stream)
        assert is_shared(chunk.segments[0])
        await reply.aclose()
        await server.drained()
        await until(lambda: lent(server) == 1)
        assert chunk.segments[0] == array
        del chunk
        assert lent(server) == 0


async def test_what_was_received_outlives_its_connection():
    files, maps = open_files(), mappings()
    async with sharing_both_ways() as (client, _):
        array = an_array(LARGE, 5)
        reply = await client.call(a_call(array))
    assert is_shared(reply.payload.segments[1])
    assert reply.payload.segments[1] == array
    assert mappings() == maps + 1
    del reply
    gc.collect()
    assert mappings() == maps
    assert open_files() == files


async def test_a_lost_connection_leaves_nothing_behind():
    files, maps = open_files(), mappings()
    gate = Gate()
    for _ in range(20):
        async with sharing_both_ways(gate) as (client, server):
            calls = [
                asyncio.create_task(client.call(a_call(an_array(), endpoint="wait")))
                for _ in range(4)
            ]
            await client.ping()
            server.abort()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {ReplicaLost}
            del calls, outcomes
            await client.lost
            await server.drained()
            assert client._caller.encode is encode
            with pytest.raises(CallError):
                await client.call(a_call(an_array()))
    del client, server
    gc.collect()
    assert mappings() == maps
    assert open_files() == files


# -- memory at rest


async def test_an_arena_at_rest_has_no_memory(monkeypatch, until):
    monkeypatch.setattr(sharing, "TRIM_S", 0.005)
    async with sharing_both_ways() as (client, server):
        files = [one._sharing._own._file for one in (client, server)]
        for round_ in range(3):
            arrays = [an_array(LARGE, round_ * 8 + i) for i in range(8)]
            replies = await asyncio.gather(*(client.call(a_call(array)) for array in arrays))
            assert [reply.payload.segments[1] for reply in replies] == arrays
            assert all(is_shared(reply.payload.segments[1]) for reply in replies)
            kept = replies[3].payload.segments[1]
            del replies
            await until(lambda: os.fstat(files[1]).st_blocks * 512 <= LARGE + 2 * GRANULE)
            assert kept == arrays[3]
            del kept
            await until(lambda: all(os.fstat(f).st_blocks * 512 <= GRANULE for f in files))
            await until(lambda: client._sharing._trimmer is None)
        await client.call(a_call(arrays[0]))
        assert client._sharing._trimmer is not None
    await asyncio.sleep(0.02)  # in which a trimmer left behind would complain


async def test_the_timer_keeps_nothing_of_the_call_that_set_it():
    seen: list[weakref.ref[object]] = []
    current: ContextVar[object] = ContextVar("current")

    async def handler(call: Call) -> Reply:
        if call.endpoint == "note":
            current.set(call)
            seen.append(weakref.ref(call))
        return Reply(call.payload)

    async with paired(handler) as (client, server):
        for _ in range(3):
            await client.call(a_call(an_array(), endpoint="note", deadline=now() + 60))
            await client.ping()
        assert server._sharing._trimmer is not None
        assert [ref() for ref in seen] == [None] * 3
        assert lent(client) == 0


# -- peers that break the rules


class Raw(asyncio.BufferedProtocol):
    """The bare other end of a connection."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self._reader = FrameReader(1 << 24)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, count: int) -> None:
        self.frames += [
            (kind, bytes(header)) for kind, _, header, _ in self._reader.received(count)
        ]


@contextlib.asynccontextmanager
async def raw(*, offer: bool = True):
    """A server, and a peer whose bytes the test writes; with an arena of its own."""
    loop = asyncio.get_running_loop()
    here, there = socket.socketpair()
    _, server = await loop.create_connection(
        lambda: Connection(Hello(replica="there"), client=False, handler=echo), sock=there
    )
    transport, peer = await loop.create_connection(Raw, sock=here)
    arena = Arena()
    transport.write(frame(Kind.HELLO, 0, Hello()))
    if offer:
        transport.write(frame(Kind.ARENA, 0, arena.offer))
    await server.greeted()
    try:
        yield peer, transport, server, arena
    finally:
        transport.abort()
        await server.close()
        arena.close()


def frame(kind: int, id_: int = 1, header: object = b"", segments=()) -> bytes:
    packed = header if isinstance(header, bytes) else pack(header)
    return b"".join(encode(kind, id_, packed, segments))


CALL = [None, JSON, ["S", "e", "r"]]
REPLY = [JSON, [], 0.0, False]


async def test_a_peer_that_keeps_the_rules(until):
    async with raw() as (peer, transport, server, arena):
        block = arena.place(b"shared", 6)
        places = pack([None, [block, 6], None])
        transport.write(frame(Kind.CALL | SHARED, 1, CALL, [places, b"{}", b"carried"]))
        await until(lambda: any(kind == Kind.REPLY for kind, _ in peer.frames))
        assert (Kind.MAPPED, pack(True)) in peer.frames
        await server.drained()
        assert arena._memory[block] == 0


@pytest.mark.parametrize("kind", [Kind.CALL, Kind.REPLY, Kind.CHUNK, Kind.CHUNKS])
@pytest.mark.parametrize(
    "segments",
    [
        [],
        [b""],
        [b"\xc1"],
        [pack({})],
        [pack([None])],
        [pack([None, None]), b"one"],
        [pack([]), b"one too many"],
        [pack([[1]])],
        [pack([[1, 2, 3]])],
        [pack([[1, -1]])],
        [pack([[-1, 1]])],
        [pack([[0, 1]])],
        [pack([["1", 1]])],
        [pack([[1.5, 1]])],
        [pack([[1, SIZE]])],
        [pack([[GRANULES, 1]])],
        [pack([[GRANULES - 1, GRANULE + 1]])],
        [pack([[2**63, 2**63]])],
        [pack([[1, 100], [4095, 2**64 - 1]])],
        [pack([True])],
        [pack([[None, 1]])],
    ],
)
async def test_a_frame_that_names_what_is_not_there_ends_its_connection(kind, segments, caplog):
    async with raw() as (_, transport, server, _arena):
        header = {Kind.CALL: CALL, Kind.REPLY: REPLY}.get(kind, b"a/b")
        transport.write(frame(kind | SHARED, 1, header, segments))
        await server.lost
        assert "connection closed" in caplog.text
        assert not server._callee._running


@pytest.mark.parametrize(
    "data",
    [
        frame(Kind.MAPPED, 0, True),
        frame(Kind.MAPPED, 0, False),
        frame(Kind.MAPPED, 0, b""),
        frame(Kind.ARENA, 0, b""),
        frame(Kind.ARENA, 0, ["x", 1]),
        frame(Kind.ARENA, 0, [1]),
        frame(SHARED | Kind.CALL, 1, CALL, [pack([[1, 10]])]),
        frame(SHARED, 0),
        frame(SHARED | Kind.ARENA, 0, b"", [pack([])]),
        frame(99),
        frame(255),
    ],
)
async def test_frames_about_arenas_that_are_not_there_end_the_connection(data, caplog):
    async with raw(offer=False) as (_, transport, server, _arena):
        transport.write(data)
        await server.lost
        assert "connection closed" in caplog.text


async def test_a_second_arena_ends_the_connection(caplog):
    async with raw() as (_, transport, server, arena):
        transport.write(frame(Kind.ARENA, 0, arena.offer))
        await server.lost
        assert "second arena" in caplog.text


async def test_a_second_answer_ends_the_connection(caplog):
    async with sharing_both_ways() as (client, server):
        server._outbox.send(encode(Kind.MAPPED, 0, pack(False)))
        await client.lost
        assert "not offered" in caplog.text


@pytest.mark.parametrize("offer", [Offer(0, 0), Offer(-1, 5), Offer(1 << 40, 1), Offer(2, 1 << 60)])
async def test_an_offer_of_nothing_is_declined(offer, until):
    async with raw(offer=False) as (peer, transport, server, _):
        files = open_files()
        transport.write(frame(Kind.ARENA, 0, offer))
        await until(lambda: (Kind.MAPPED, pack(False)) in peer.frames)
        assert not server.lost.done()
        assert open_files() == files


@given(
    places=st.binary(max_size=30)
    | st.builds(
        pack,
        st.lists(
            st.none()
            | st.tuples(
                st.integers(-2, 2**64 - 1) | st.integers(0, GRANULES),
                st.integers(-2, 2**64 - 1) | st.integers(0, 1000),
            ),
            max_size=4,
        ),
    ),
    carried=st.lists(st.binary(max_size=9), max_size=3),
    kind=st.integers(0, 127),
    header=st.sampled_from([pack(CALL), pack(REPLY), b"a/b", b"", b"\xc1"]),
)
@settings(max_examples=150)
def test_any_shared_frame_ends_its_connection_at_most(places, carried, kind, header):
    async def attack() -> None:
        failures: list[dict[str, object]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        async with raw() as (_, transport, server, arena):
            block = arena.place(b"x" * 1000, 1000)
            assert block == 1
            transport.write(frame(kind | SHARED, 1, header, [places, *carried]))
            for _ in range(6):
                await asyncio.sleep(0)
        assert not server._callee._running
        assert server.lost.done()
        assert not failures

    asyncio.run(attack())


# -- whatever order


sizes = st.sampled_from([10, SHARED_FROM - 1, SHARED_FROM, SHARED_FROM + 1, 200_001, 500_000])
calls = st.tuples(st.just("call"), st.lists(sizes, min_size=1, max_size=3))
keeps = st.tuples(st.just("keep"), st.lists(sizes, min_size=1, max_size=3))
drops = st.tuples(st.just("drop"), st.integers(0, 100))
cancels = st.tuples(st.just("cancel"), st.integers(0, 100))
lets = st.tuples(st.just("let"), st.integers(1, 5))
trims = st.tuples(st.just("trim"), st.just(0))


class Traffic:
    """Calls in any order, whose arrays are checked byte for byte where they arrive, and later."""

    def __init__(self, client: Connection, server: Connection, mirror: Mirror) -> None:
        self.ends = client, server
        self.mirror = mirror
        self.tasks: list[asyncio.Task[None]] = []
        self.kept: list[tuple[memoryview, int]] = []
        self.serial = 0

    def call(self, sizes: list[int], endpoint: str = "e") -> None:
        self.tasks.append(asyncio.create_task(self._call(sizes, endpoint)))

    def keep(self, sizes: list[int]) -> None:
        self.call(sizes, "keep")

    async def _call(self, sizes: list[int], endpoint: str) -> None:
        first = self.serial + 1
        self.serial += len(sizes)
        arrays = [filled(size, first + i) for i, size in enumerate(sizes)]
        reply = await self.ends[first % 2].call(a_call(*arrays, endpoint=endpoint))
        for i, segment in enumerate(reply.payload.segments[:0:-1]):
            check(segment, first + i)
            self.kept.append((segment, first + i))

    def drop(self, which: int) -> None:
        if self.kept:
            check(*self.kept.pop(which % len(self.kept)))
        if self.mirror.kept:
            del self.mirror.kept[which % len(self.mirror.kept)]

    def cancel(self, which: int) -> None:
        if self.tasks:
            self.tasks[which % len(self.tasks)].cancel()

    async def let(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    def trim(self, _: int) -> None:
        for end in self.ends:
            end._sharing._own.trim()

    async def end(self) -> None:
        outcomes = await asyncio.gather(*self.tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {type(None), asyncio.CancelledError}
        del outcomes
        self.tasks.clear()
        while self.kept:
            check(*self.kept.pop())
        while self.mirror.kept:
            array = self.mirror.kept.pop()
            check(array, int.from_bytes(array[:8], "little"))
            del array
        for end in self.ends:
            await end.ping()
            await end.drained()
        assert [lent(end) for end in self.ends] == [1, 1]


def filled(size: int, number: int) -> bytes:
    """Return an array that says everywhere whose it is."""
    return number.to_bytes(8, "little") * (size // 8) + bytes(size % 8)


def check(segment, number: int) -> None:
    assert segment == filled(len(segment), number)


@given(steps=st.lists(calls | keeps | drops | cancels | lets | trims, max_size=25))
@settings(max_examples=150)
def test_any_order_of_calls_cancels_and_releases_keeps_every_byte(steps):
    async def main() -> None:
        mirror = Mirror()
        async with sharing_both_ways(mirror) as (client, server):
            for end in (client, server):
                leave_only(end, 100)
            traffic = Traffic(client, server, mirror)
            for name, argument in steps:
                if (step := getattr(traffic, name)(argument)) is not None:
                    await step
            await traffic.end()

    asyncio.run(main())


# -- two processes


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


def start(role: str, path: Path) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.peer", role, str(path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout.readline() == b"ready\n"
    return process


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


async def test_two_processes_share(folder):
    process = start("serve", folder / "s")
    client = await connect(
        Address(f"unix:{folder / 's'}"), lambda: Connection(Hello(), client=True)
    )
    for _ in range(20):
        arrays = [an_array(LARGE, seed) for seed in range(4)]
        replies = await asyncio.gather(*(client.call(a_call(array)) for array in arrays))
        assert [reply.payload.segments[1] for reply in replies] == arrays
    assert all(is_shared(reply.payload.segments[1]) for reply in replies)
    end(process)
    await client.lost
    assert [reply.payload.segments[1] for reply in replies] == arrays


async def ask_for_ever(client: Connection, answers: list[bool]) -> None:
    array = an_array()
    with contextlib.suppress(ReplicaLost):
        while True:
            reply = await client.call(a_call(array))
            answers.append(reply.payload.segments[1] == array)


async def test_a_callee_that_is_killed_leaves_nothing_behind(folder, until):
    files, maps, shm = open_files(), mappings(), left_in_shm()
    answers: list[bool] = []
    for round_ in range(3):
        path = folder / f"s{round_}"
        process = start("serve", path)
        client = await connect(Address(f"unix:{path}"), lambda: Connection(Hello(), client=True))
        answers.clear()
        tasks = [asyncio.create_task(ask_for_ever(client, answers)) for _ in range(4)]
        await until(lambda: len(answers) > 20)
        assert shares(client)
        end(process)
        await asyncio.gather(*tasks)
        await client.lost
        assert all(answers)
        del client, tasks
    gc.collect()
    assert (open_files(), mappings(), left_in_shm()) == (files, maps, shm)


async def test_a_caller_that_is_killed_leaves_nothing_behind(folder, until):
    files, maps, shm = open_files(), mappings(), left_in_shm()
    mirror = Mirror()
    listener = Listener(
        Address(f"unix:{folder / 's'}"), lambda: Connection(Hello(), client=False, handler=mirror)
    )
    await listener.open()
    for _ in range(3):
        process = await asyncio.to_thread(start, "call", folder / "s")
        await until(lambda: any(shares(server) for server in listener.connections))
        end(process)
        await until(lambda: not listener.connections)
    await listener.close()
    gc.collect()
    assert (open_files(), mappings(), left_in_shm()) == (files, maps, shm)
