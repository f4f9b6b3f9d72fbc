"""Frames: what was encoded comes out again however it is cut, and nothing else gets through."""

import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.errors import WireError
from servekit.wire.frames import LARGE, Frame, FrameReader, Kind, encode
from tests.examples import examples

MAX = 1 << 20

headers = st.binary(max_size=200)
segments = st.lists(st.binary(max_size=300), max_size=6)
kinds = [kind for kind in vars(Kind).values() if isinstance(kind, int)]
frames = st.tuples(st.sampled_from(kinds), st.integers(0, 2**32 - 1), headers, segments)


def wire(frame: Frame) -> bytes:
    kind, id_, header, parts = frame
    return b"".join(encode(kind, id_, bytes(header), parts))


def feed(reader: FrameReader, pieces: Iterable[bytes]) -> Iterator[Frame]:
    """Hand pieces to a reader as a transport would: as much as its buffer takes at a time."""
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            buffer = reader.get_buffer()
            assert len(buffer) > 0
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            yield from reader.received(count)
            rest = rest[count:]


def same(frame: Frame) -> Frame:
    kind, id_, header, parts = frame
    return kind, id_, bytes(header), [bytes(s) for s in parts]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(sent=st.lists(frames, max_size=8), places=st.lists(st.integers(0, 1 << 16), max_size=20))
def test_round_trip_however_it_is_cut(sent, places):
    data = b"".join(map(wire, sent))
    got = [same(frame) for frame in feed(FrameReader(MAX), cut(data, places))]
    assert got == sent


@given(sent=st.lists(frames, max_size=3))
@settings(max_examples=examples(30))
def test_round_trip_byte_by_byte(sent):
    data = b"".join(map(wire, sent))
    pieces = [data[i : i + 1] for i in range(len(data))]
    assert [same(frame) for frame in feed(FrameReader(MAX), pieces)] == sent


large_sizes = st.sampled_from([LARGE - 40, LARGE - 14, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE + 5])


@given(
    sizes=st.lists(large_sizes | st.integers(0, 64), min_size=1, max_size=4),
    header=headers,
    places=st.lists(st.integers(0, 1 << 20), max_size=6),
)
@settings(max_examples=examples(40))
def test_large_frames_between_small_ones(sizes, header, places):
    parts = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    sent = [(4, 1, b"before", []), (4, 2, header, parts), (4, 3, b"", [b"after"])]
    data = b"".join(map(wire, sent))
    got = [same(frame) for frame in feed(FrameReader(1 << 22), cut(data, places))]
    assert got == sent


def test_hundreds_of_frames_wrap_the_buffer_around():
    sent = [(Kind.CALL, i, b"h" * (i % 97), [b"s" * (i * 37 % 5000)]) for i in range(400)]
    data = b"".join(map(wire, sent))
    assert len(data) > 3 * 4 * LARGE
    got = [same(f) for f in feed(FrameReader(MAX), cut(data, [i * 7001 for i in range(150)]))]
    assert got == sent


@given(sent=st.lists(frames, max_size=8), places=st.lists(st.integers(0, 1 << 16), max_size=20))
def test_segments_outlive_their_frame(sent, places):
    reader = FrameReader(MAX)
    data = b"".join(map(wire, sent))
    kept = [segments for *_, segments in feed(reader, cut(data, places))]
    reader._view[:] = bytes(len(reader._view))
    assert [list(map(bytes, segments)) for segments in kept] == [frame[3] for frame in sent]


def test_a_large_frame_is_used_where_it_was_received():
    parts = [b"x" * 1001, b"", b"y" * (2 * LARGE), b"z" * 13]
    data = wire((Kind.REPLY, 9, b"head", parts))
    reader = FrameReader(MAX)
    (frame,) = feed(reader, cut(data, [100, LARGE]))
    views = frame[3]
    assert [bytes(view) for view in views] == parts
    assert all(isinstance(view, memoryview) for view in views)
    owners = {id(view.obj) for view in views if isinstance(view, memoryview)}
    assert len(owners) == 1
    start = address(views[0].obj)
    assert start % 8 == 0
    assert all((address(view) - start) % 8 == 0 for view in views if len(view))


def address(buffer) -> int:
    import numpy as np

    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


@pytest.mark.parametrize("header", range(9))
@pytest.mark.parametrize("first", [14, 100, LARGE])
def test_a_large_segment_that_is_alone_is_aligned_in_memory(header, first):
    part = bytes(range(256)) * 1024
    data = wire((Kind.CALL, 9, b"h" * header, [part]))
    (frame,) = feed(FrameReader(MAX), cut(data, [first]))
    assert frame[3] == [part]
    assert bytes(frame[2]) == b"h" * header
    assert address(frame[3][0]) % 8 == 0


@given(header=headers, parts=segments)
def test_segments_are_aligned_within_their_frame(header, parts):
    data = wire((1, 2, header, parts))
    if len(parts) == 1:
        assert data == data[:14] + header + parts[0]
        return
    at = 14 + len(header) + 4 * len(parts)
    for part in parts:
        at += -at % 8
        assert data[at : at + len(part)] == part
        at += len(part)
    assert at == len(data) == 4 + struct.unpack_from("<I", data)[0]


def test_large_parts_are_not_joined():
    big = memoryview(bytes(LARGE))
    assert encode(1, 1, b"h", [big])[-1] is big
    assert any(part is big for part in encode(1, 1, b"h", [b"small", big]))
    assert len(encode(1, 1, b"h", [b"small", b"too"])) == 1
    assert len(encode(1, 1, b"h")) == 1


@pytest.mark.parametrize(
    ("header", "count"), [(b"h" * 0x10000, 0), (b"", 65536), (b"h" * 0x10000, 65536)]
)
def test_what_the_format_can_not_say_is_refused(header, count):
    with pytest.raises(WireError, match="too large"):
        encode(Kind.CALL, 1, header, [b""] * count)


def test_the_most_that_the_format_can_say():
    frame = Kind.CALL, 2**32 - 1, b"h" * 0xFFFF, [b""] * 255
    (got,) = feed(FrameReader(MAX), [wire(frame)])
    assert same(got) == frame


class Huge(bytes):
    """Claims to be of a size that no test machine should allocate."""

    def __len__(self) -> int:
        return 1 << 32


@pytest.mark.parametrize("parts", [[Huge()], [b"", Huge()]])
def test_a_frame_over_4_gib_is_refused(parts):
    with pytest.raises(WireError, match="4 GiB"):
        encode(Kind.CALL, 1, b"", parts)


# -- hostile bytes


def read_all(reader: FrameReader, data: bytes) -> list[Frame] | None:
    """Return the frames, or None when the reader refused."""
    try:
        return list(feed(reader, [data]))
    except WireError:
        return None


@given(data=st.binary(max_size=400))
@settings(max_examples=examples(300))
def test_any_bytes_are_frames_or_a_wire_error(data):
    read_all(FrameReader(4096), data)


@pytest.mark.slow
@given(
    frame=frames,
    at=st.integers(0, 10_000),
    flip=st.integers(1, 255),
)
@settings(max_examples=examples(300))
def test_a_changed_byte_gives_other_frames_or_a_wire_error(frame, at, flip):
    data = bytearray(wire(frame))
    data[at % len(data)] ^= flip
    got = read_all(FrameReader(MAX), bytes(data))
    for changed in got or ():
        # Whatever is accepted could have been sent that way, but for padding.
        assert len(wire(changed)) <= len(data)


@given(
    prefix=st.tuples(st.integers(0, 64), st.integers(0, 12), st.integers(0, 4), st.integers(0, 64)),
    rest=st.binary(max_size=80),
)
@settings(max_examples=examples(300))
def test_plausible_prefixes_with_any_rest(prefix, rest):
    size, kind, count, header = prefix
    data = struct.pack("<IIBxHH", size, 1, kind, count, header) + rest
    for frame in read_all(FrameReader(4096), data) or ():
        assert 12 + len(frame[2]) + sum(map(len, frame[3])) <= len(data)


@pytest.mark.parametrize("size", [0, 1, 9, 4096 - 3, 1 << 20, 0xFFFFFFFF])
def test_sizes_out_of_bounds_are_refused_before_anything_is_allocated(size):
    reader = FrameReader(4096)
    with pytest.raises(WireError, match="allowed are 14 to 4096"):
        list(feed(reader, [struct.pack("<IIBxHH", size, 1, 1, 1, 0)]))
    assert reader._large is None


def test_the_limit_itself_is_allowed_and_may_be_raised():
    data = wire((1, 1, b"h" * (4096 - 14), []))
    assert len(list(feed(FrameReader(4096), [data]))) == 1
    longer = wire((1, 1, b"h" * (4096 - 11), []))
    reader = FrameReader(4096)
    reader.max_frame = 8192
    assert len(list(feed(reader, [longer]))) == 1


def test_the_limit_may_be_raised_between_two_frames_of_one_read():
    small, big = wire((8, 1, b"", [])), wire((1, 2, b"h" * 8000, []))
    reader = FrameReader(64)
    buffer = reader.get_buffer()
    buffer[: len(small + big)] = small + big
    got = []
    for frame in reader.received(len(small + big)):
        got.append(frame[1])
        reader.max_frame = MAX
    assert got == [1, 2]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack("<IIBxHH", 11, 1, 1, 0, 0) + b"x", "behind its segments"),
        (struct.pack("<IIBxHH", 10, 1, 1, 0, 5), "5 of them header"),
        (struct.pack("<IIBxHH", 10, 1, 1, 1, 5), "5 of them header"),
        (struct.pack("<IIBxHH", 10, 1, 1, 2, 0), "segment table"),
        (struct.pack("<IIBxHHI", 14, 1, 1, 2, 0, 4), "segment table"),
        (struct.pack("<IIBxHHII", 18, 1, 1, 2, 0, 4, 0), "their frame"),
        (struct.pack("<IIBxHHII", 18, 1, 1, 2, 0, 0, 0xFFFFFFFF), "their frame"),
        (struct.pack("<IIBxHHII", 29, 1, 1, 2, 0, 0, 0) + b"\0" * 6 + b"x" * 5, "behind its"),
    ],
)
def test_what_does_not_add_up_is_refused(data, why):
    with pytest.raises(WireError, match=why):
        list(feed(FrameReader(4096), [data]))
