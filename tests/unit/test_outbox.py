"""The way out of a connection: what leaves together, when, and in which order."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.wire.frames import LARGE, Kind, encode
from servekit.wire.outbox import BURST, Outbox


class Transport(asyncio.WriteTransport):
    """Notes what is written, and in how many calls."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[list[object]] = []
        self.closing = False

    def write(self, data) -> None:
        assert not self.closing
        self.writes.append([data])

    def writelines(self, list_of_data) -> None:
        assert not self.closing
        self.writes.append(list(list_of_data))

    def is_closing(self) -> bool:
        return self.closing

    @property
    def data(self) -> bytes:
        return b"".join(part for parts in self.writes for part in parts)


def opened() -> tuple[Outbox, Transport]:
    outbox, transport = Outbox(asyncio.get_running_loop()), Transport()
    outbox.open(transport)
    return outbox, transport


async def test_a_single_frame_leaves_on_the_next_turn_as_it_is():
    outbox, transport = opened()
    frame = b"frame"
    outbox.send([frame])
    assert transport.writes == []
    await asyncio.sleep(0)
    assert transport.writes == [[frame]]
    assert transport.writes[0][0] is frame
    await asyncio.sleep(0)
    assert len(transport.writes) == 1


async def test_the_frames_of_a_turn_leave_in_one_write():
    outbox, transport = opened()
    for frame in (b"a", b"b", b"c")[: BURST - 1]:
        outbox.send([frame])
    await asyncio.sleep(0)
    assert transport.writes == [[b"abc"[: BURST - 1]]]


async def test_a_burst_leaves_within_the_turn():
    outbox, transport = opened()
    for n in range(BURST - 1):
        outbox.send([b"%d" % n])
    assert transport.writes == []
    outbox.send([b"last"])
    assert len(transport.writes) == 1
    outbox.send([b"after"])
    assert len(transport.writes) == 1
    await asyncio.sleep(0)
    assert len(transport.writes) == 2
    assert transport.data == b"".join(b"%d" % n for n in range(BURST - 1)) + b"lastafter"


async def test_flush_sends_at_once_and_leaves_nothing_for_later():
    outbox, transport = opened()
    outbox.flush()
    outbox.send([])
    outbox.send([b"a"])
    outbox.flush()
    assert transport.writes == [[b"a"]]
    await asyncio.sleep(0)
    assert transport.writes == [[b"a"]]


@pytest.mark.parametrize("segments", [[bytes(LARGE)], [b"x", memoryview(bytes(2 * LARGE)), b"y"]])
async def test_large_buffers_are_not_copied(segments):
    outbox, transport = opened()
    outbox.send([b"before"])
    frame = encode(Kind.REPLY, 1, b"head", segments)
    outbox.send(frame)
    outbox.send([b"behind"])
    await asyncio.sleep(0)
    written = [part for parts in transport.writes for part in parts]
    assert transport.data == b"before" + b"".join(frame) + b"behind"
    large = [segment for segment in segments if len(segment) >= LARGE]
    assert [part for part in written if len(part) >= LARGE] == large
    assert all(any(part is segment for part in written) for segment in large)


sizes = st.integers(0, 40) | st.sampled_from([LARGE - 41, LARGE - 1, LARGE, LARGE + 1])
turns = st.lists(st.lists(st.lists(sizes, max_size=3), max_size=2 * BURST + 1), max_size=5)


@given(turns=turns)
@settings(max_examples=60)
def test_bytes_leave_in_the_order_they_were_sent(turns):
    async def main() -> None:
        outbox, transport = opened()
        sent = bytearray()
        for turn in turns:
            for frame in turn:
                buffers = [bytes([(len(sent) + i) % 251]) * n for i, n in enumerate(frame)]
                sent += b"".join(buffers)
                outbox.send(buffers)
            await asyncio.sleep(0)
            assert transport.data == sent
        assert all(len(parts) for parts in transport.writes)

    asyncio.run(main())


@pytest.mark.parametrize("count", [1, BURST, BURST + 1])
async def test_nothing_is_written_to_a_transport_that_has_ended(count):
    outbox, transport = opened()
    outbox.send([b"held"])
    transport.closing = True
    await asyncio.sleep(0)
    for _ in range(count):
        outbox.send([b"late"])
    await asyncio.sleep(0)
    outbox.flush()
    assert transport.writes == []


async def test_what_is_sent_in_the_turn_before_the_transport_comes_is_kept():
    outbox, transport = Outbox(asyncio.get_running_loop()), Transport()
    outbox.send([b"early "])
    outbox.open(transport)
    outbox.send([b"later"])
    await asyncio.sleep(0)
    assert transport.data == b"early later"


@pytest.mark.parametrize("count", [1, BURST])
async def test_what_no_transport_comes_for_is_dropped(count):
    outbox, transport = Outbox(asyncio.get_running_loop()), Transport()
    for _ in range(count):
        outbox.send([b"lost"])
    await asyncio.sleep(0)
    outbox.open(transport)
    outbox.send([b"kept"])
    await asyncio.sleep(0)
    assert transport.data == b"kept"
