"""Mutated bodies at the parsers, mutated conversations at a connection: an error, and no more."""

import asyncio
import sys
from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servekit.core.call import JSON, Call, Payload, Reply
from servekit.errors import CallError
from servekit.gateway.request import query_document
from servekit.spec.definition import definition
from servekit.spec.describe import describe
from servekit.wire import connection, memory
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello, Kind, encode
from tests.corpus import PARSERS, Parser
from tests.examples import examples
from tests.flow.harness import APPS


@pytest.fixture(scope="module")
def app():
    """Return the class that the corpus is written for."""
    sys.path.insert(0, str(APPS))
    try:
        from tests.flow.apps.kinds import Http

        return Http
    finally:
        sys.path.remove(str(APPS))


def parse(app: type, parser: Parser, body: bytes) -> object:
    """Do what a replica does with a body; a query becomes a document first, as in the gateway."""
    payload = Payload(parser.media, (body,))
    if not parser.media:
        [spec] = [e for e in describe(app).service("Http").endpoints if e.name == parser.endpoint]
        payload = Payload(JSON, (query_document(body, spec.input),))
    reads, _ = definition(app).endpoints[parser.endpoint].schemas
    return reads.decode(payload)


@pytest.mark.parametrize("name", PARSERS)
def test_every_nasty_is_refused(app, name):
    parser = PARSERS[name]
    parse(app, parser, parser.good)
    for nasty in parser.nasties:
        with pytest.raises(CallError) as caught:
            parse(app, parser, nasty.body)
        paths = [field["path"] for field in caught.value.fields]
        assert (caught.value.status, *paths[:1]) == (
            (400,) if nasty.field is None else (422, nasty.field)
        ), nasty.name
        assert len(str(caught.value)) < 1000


def mutate(data: bytes, rng: Random, others: list[bytes]) -> bytes:
    """Change bytes in ways that parsers dislike: flip, cut, repeat, insert, splice."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(changed))
        match rng.randint(0, 5):
            case 0 if changed:
                changed[at - 1] ^= 1 << rng.randint(0, 7)
            case 1:
                del changed[at : at + rng.choice([1, 2, 8, len(changed)])]
            case 2:
                changed[at:at] = changed[at : at + rng.randint(1, 40)] * rng.randint(1, 3)
            case 3:
                changed[at:at] = rng.choice(
                    [b"\xff" * 4, b"\0" * 4, b"[", b"{", b"9" * 20, b"\xc1"]
                )
            case 4 if changed:
                changed[at - 1] = rng.choice(b'\x00\x7f\x80\xff"[]{}:,eE-.')
            case _:
                other = rng.choice(others)
                changed[at:] = other[rng.randint(0, len(other)) :]
    return bytes(changed)


@pytest.mark.slow
@given(name=st.sampled_from(sorted(PARSERS)), pick=st.integers(0, 10_000), seed=st.integers(0))
@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")
def test_mutated_bodies_are_taken_or_refused(app, name, pick, seed):
    """Nothing but a call error with 4xx comes out, and it is short."""
    parser = PARSERS[name]
    bodies = [parser.good, *(nasty.body for nasty in parser.nasties if len(nasty.body) < 4000)]
    body = mutate(bodies[pick % len(bodies)], Random(seed), bodies)
    try:
        parse(app, parser, body)
    except CallError as error:
        assert error.status in (400, 415, 422)
        assert len(str(error)) < 1000


# -- the wire


def frame(kind: int, id_: int, header: object = b"", segments=()) -> bytes:
    packed = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    return b"".join(encode(kind, id_, packed, segments))


CALL = [1.0, JSON, ["S", "e", "r"]]
TALK = {
    "client": [
        frame(Kind.CALL, 1, CALL, [b"{}"]),
        frame(Kind.CALL, 2, CALL, [b"{}", b"x" * 300, b""]),
        frame(Kind.CANCEL, 1),
        frame(Kind.CREDIT, 2, 64),
        frame(Kind.PING, 3),
    ],
    "server": [
        frame(Kind.REPLY, 1, [JSON, [1, 0.5], 0.1, False], [b"{}"]),
        frame(Kind.REPLY, 2, [JSON, [1, 0.5], 0.1, True]),
        frame(Kind.CHUNK, 2, JSON.encode(), [b"1"]),
        frame(Kind.CHUNKS, 2, JSON.encode(), [b"2", b"3"]),
        frame(Kind.END, 2),
        frame(Kind.ERROR, 3, ["internal", "m"]),
        frame(Kind.PONG, 3),
        frame(Kind.GOAWAY, 0),
    ],
}
"""What each side may say, by who says it."""
GREETING = frame(Kind.HELLO, 0, Hello(replica="peer"))


async def stream() -> object:
    for number in range(3):
        yield Payload(JSON, (b"%d" % number,))


async def handle(call: Call) -> Reply:
    return Reply(stream=stream()) if call.request_id == "s" else Reply(call.payload)


class Peer(asyncio.BufferedProtocol):
    """Throws away what it gets."""

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(bytearray(1 << 16))

    def buffer_updated(self, nbytes: int) -> None:
        pass

    def connection_lost(self, exc: Exception | None) -> None:
        pass


async def converse(speaker: str, data: bytes, cuts: list[int]) -> None:
    """Say something to a connection that waits for answers, in pieces."""
    complaints: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    own = Connection(Hello(), client=speaker == "server", handler=handle, greeting_s=0.05)
    peer = Peer()
    here, there = memory.MemoryTransport(peer), memory.MemoryTransport(own)  # type: ignore[arg-type]
    here.other, there.other = there, here
    own.connection_made(there)
    calls = [asyncio.ensure_future(own.call(Call("S", "e"))) for _ in range(3)]
    await asyncio.sleep(0)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        here.write(data[begin:end])
        await asyncio.sleep(0)
    for _ in range(8):
        await asyncio.sleep(0)
        held = own._reader._large
        assert held is None or len(held) <= connection.MAX_FRAME + 8
    here.close()
    async with asyncio.timeout(5):
        await own.lost
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, Reply | CallError | connection.WireError), outcome
        if isinstance(outcome, Reply):
            await outcome.aclose()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not own._callee._running
    assert not complaints
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left


@given(
    speaker=st.sampled_from(["client", "server"]),
    order=st.lists(st.integers(0, 20), max_size=12),
    seed=st.integers(0),
    mutations=st.integers(0, 3),
    cuts=st.lists(st.integers(0, 4000), max_size=6),
)
@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mutated_conversation_ends_its_connection_at_most(
    monkeypatch, caplog, speaker, order, seed, mutations, cuts
):
    """Calls are answered or fail; nothing hangs, nothing is left, and no buffer is over the limit."""
    monkeypatch.setattr(connection, "MAX_FRAME", 1 << 20)
    frames = TALK[speaker]
    said = [GREETING, *(frames[number % len(frames)] for number in order)]
    rng = Random(seed)
    for _ in range(mutations):
        at = rng.randrange(len(said))
        said[at] = mutate(said[at], rng, frames)
    asyncio.run(converse(speaker, b"".join(said), cuts))
