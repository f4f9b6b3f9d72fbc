"""Memory that two sides share, here both in one process: who owns a block when, and what is left."""

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import sys
import threading

import numpy as np
import pytest

from servekit.errors import WireError
from servekit.wire.arena import GRANULE, GRANULES, SIZE, Arena, ArenaError, Offer, PeerArena

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")

KB = 1024


@contextlib.contextmanager
def joined():
    """Both ends of an arena."""
    arena = Arena()
    yield arena, PeerArena(os.getpid(), arena.offer)
    arena.close()


def pattern(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def lent(arena: Arena) -> int:
    arena._blocks.reclaim(arena._memory[:GRANULES])
    return len(arena._blocks)


def memory(arena: Arena) -> int:
    return os.fstat(arena._file).st_blocks * 512


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("/memfd:servekit" in line for line in maps)


def address(buffer) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


# -- blocks


@pytest.mark.parametrize("size", [1, 100, GRANULE - 1, GRANULE, GRANULE + 1, 602_112, 5 << 20])
def test_what_is_placed_is_seen_by_the_peer(size):
    with joined() as (arena, peer):
        data = pattern(size)
        for kind in (bytes, bytearray, memoryview):
            view = peer.view(arena.place(kind(data), size), size)
            assert view == data
            assert (view.format, view.itemsize, view.nbytes) == ("B", 1, size)
            assert address(view) % mmap.PAGESIZE == 0


def test_a_view_is_as_good_as_a_bytearray():
    with joined() as (arena, peer):
        data = pattern(1000)
        view = peer.view(arena.place(data, 1000), 1000)
        assert view[3] == data[3]
        assert view.cast("I").tolist() == np.frombuffer(data, np.uint32).tolist()
        array = np.frombuffer(view, np.uint8)
        array[:] = 7
        assert bytes(view) == b"\7" * 1000


def test_writing_touches_no_other_block():
    with joined() as (arena, peer):
        views = [peer.view(arena.place(pattern(70 * KB, i), 70 * KB), 70 * KB) for i in range(20)]
        for view in views[::2]:
            np.frombuffer(view, np.uint8)[:] = 255
        for i, view in enumerate(views):
            assert view == (pattern(70 * KB, i) if i % 2 else b"\xff" * 70 * KB)


def slice_of(view: memoryview) -> object:
    return view[10:20]


def cast_of(view: memoryview) -> object:
    return view.cast("H")


def array_on(view: memoryview) -> object:
    return np.frombuffer(view, np.float32)


def view_of_an_array_on(view: memoryview) -> object:
    return np.frombuffer(view, np.float32).reshape(-1, 2)[3:, 1].T


def tensor_on(view: memoryview) -> object:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(np.frombuffer(view, np.float32)).reshape(2, -1)[1]


def cycle_with(view: memoryview) -> object:
    holder: list[object] = [view]
    holder.append(holder)
    return holder


@pytest.mark.parametrize(
    "derive", [slice_of, cast_of, array_on, view_of_an_array_on, tensor_on, cycle_with]
)
def test_a_block_is_lent_until_the_last_view_of_any_kind_is_gone(derive):
    with joined() as (arena, peer):
        view = peer.view(arena.place(pattern(4000), 4000), 4000)
        derived = derive(view)
        del view
        gc.collect()
        assert lent(arena) == 1
        del derived
        gc.collect()
        assert lent(arena) == 0


def test_a_view_may_end_on_any_thread():
    with joined() as (arena, peer):
        views = [peer.view(arena.place(b"x", 1), 1) for _ in range(100)]
        assert lent(arena) == 100
        threads = [
            threading.Thread(target=lambda: [views.pop() for _ in range(25)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert lent(arena) == 0


def test_a_forked_child_gives_nothing_back():
    with joined() as (arena, peer):
        view = peer.view(arena.place(b"mine", 4), 4)
        child = os.fork()
        if child == 0:
            del view
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert lent(arena) == 1
        assert view == b"mine"


def test_a_full_arena_says_so_and_recovers():
    with joined() as (arena, peer):
        size = 1000 * GRANULE
        views = [peer.view(arena.place(bytes(size), size), size) for _ in range(4)]
        assert arena.place(bytes(size), size) is None
        assert arena.place(bytes(95 * GRANULE), 95 * GRANULE) is not None
        assert arena.place(b"x", 1) is None
        del views[2]
        assert arena.place(bytes(size), size) == 2001


@pytest.mark.parametrize("size", [SIZE - GRANULE + 1, SIZE, 2 * SIZE])
def test_what_is_too_large_has_no_place(size):
    with joined() as (arena, _):
        assert arena.place(b"", size) is None
        assert memory(arena) <= GRANULE


def test_a_block_that_was_not_sent_is_free_again():
    with joined() as (arena, _):
        block = arena.place(b"x", 1)
        arena.give(block)
        assert lent(arena) == 0
        assert arena.place(b"x", 1) == block


def test_a_system_without_memory_has_no_place(monkeypatch):
    def fail(*_):
        raise OSError(28, "no space")

    with joined() as (arena, peer):
        first = peer.view(arena.place(pattern(100 * KB), 100 * KB), 100 * KB)
        monkeypatch.setattr(os, "posix_fallocate", fail)
        assert arena.place(bytes(100 * KB), 100 * KB) is None
        assert arena.place(bytes(100 * KB), 100 * KB) is None  # still not
        assert lent(arena) == 1
        del first
        # What has its memory already needs no more.
        assert arena.place(bytes(100 * KB), 100 * KB) is not None
        monkeypatch.undo()
        assert arena.place(bytes(100 * KB), 100 * KB) is not None


def test_a_block_has_memory_to_its_last_granule_s_end():
    with joined() as (arena, _):
        before = memory(arena)
        arena.place(b"x", 1)
        assert memory(arena) == before + GRANULE


@pytest.mark.parametrize(
    ("block", "size"),
    [
        (0, 0),
        (0, 100),
        (-1, 100),
        (GRANULES, 0),
        (GRANULES, 100),
        (1 << 40, 1),
        (1, SIZE - GRANULE + 1),
        (GRANULES - 1, GRANULE + 1),
        (1, -1),
        (1, 1 << 62),
    ],
)
def test_a_block_outside_of_the_arena_is_refused(block, size):
    with joined() as (_, peer), pytest.raises(WireError, match="outside of its arena"):
        peer.view(block, size)


@pytest.mark.parametrize(
    ("block", "size"), [(1, 0), (1, SIZE - GRANULE), (GRANULES - 1, GRANULE), (GRANULES - 1, 0)]
)
def test_the_edges_of_the_arena_may_be_viewed(block, size):
    with joined() as (_, peer):
        assert len(peer.view(block, size)) == size


def test_a_peer_that_clears_and_sets_all_flags_breaks_nothing():
    with joined() as (arena, peer):
        for flags in (bytes(GRANULES), b"\xff" * GRANULES, pattern(GRANULES)):
            for _ in range(5):
                arena.place(b"x" * 70 * KB, 70 * KB)
            peer.memory[:GRANULES] = flags
            arena.trim()
        peer.memory[:GRANULES] = bytes(GRANULES)
        assert lent(arena) == 0
        assert arena.place(b"x", 1) == 1


# -- memory


def test_memory_is_given_up_when_it_was_not_used_for_a_while():
    with joined() as (arena, peer):
        assert memory(arena) <= GRANULE
        size = 1 << 20
        kept = peer.view(arena.place(pattern(size), size), size)
        views = [peer.view(arena.place(bytes(size), size), size) for _ in range(20)]
        assert memory(arena) >= 21 * size
        del views
        assert arena.trim()
        assert memory(arena) >= 21 * size  # just used
        assert arena.trim()
        assert memory(arena) <= size + GRANULE
        assert kept == pattern(size)
        again = peer.view(arena.place(pattern(3 * size, 1), 3 * size), 3 * size)
        assert again == pattern(3 * size, 1)
        del kept, again
        arena.trim()
        assert not arena.trim()
        assert memory(arena) <= GRANULE


def test_views_outlive_both_arenas():
    before = mappings()
    with joined() as (arena, peer):
        assert mappings() == before + 2
        array = np.frombuffer(peer.view(arena.place(pattern(4000), 4000), 4000), np.uint8)
        del peer
    assert mappings() == before + 1
    assert array.tobytes() == pattern(4000)
    array[:] = 1
    del array
    assert mappings() == before


def test_nothing_is_left_of_many():
    files, maps = len(os.listdir("/proc/self/fd")), mappings()
    for _ in range(50):
        with joined() as (arena, peer):
            peer.view(arena.place(b"x", 1), 1)
    del peer
    assert len(os.listdir("/proc/self/fd")) == files
    assert mappings() == maps


# -- what is no arena


def offered(file: int) -> Offer:
    return Offer(file, os.fstat(file).st_ino)


def a_memfd(size: int, seals: int, name: str = "servekit") -> int:
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    if seals:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: a_memfd(SIZE, 0), "may shrink"),
        (lambda: a_memfd(SIZE, fcntl.F_SEAL_GROW), "may shrink"),
        (lambda: a_memfd(SIZE - 1, fcntl.F_SEAL_SHRINK), "another file"),
        (lambda: a_memfd(2 * SIZE, fcntl.F_SEAL_SHRINK), "another file"),
        (lambda: a_memfd(0, fcntl.F_SEAL_SHRINK), "another file"),
        (lambda: a_memfd(SIZE, fcntl.F_SEAL_SHRINK, "other"), "no arena"),
        (lambda: os.open("/dev/null", os.O_RDWR), "no arena"),
        (lambda: os.open(__file__, os.O_RDONLY), "no arena"),
        (lambda: os.eventfd(0), "no arena"),
    ],
)
def test_a_file_that_is_no_arena_is_refused(make, why):
    file = make()
    files = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(ArenaError, match=why):
            PeerArena(os.getpid(), offered(file))
        assert len(os.listdir("/proc/self/fd")) == files
    finally:
        os.close(file)


@pytest.mark.parametrize("pid", [0, -1, 1 << 30])
def test_a_process_that_is_not_there_has_no_arena(pid):
    with joined() as (arena, _), pytest.raises(ArenaError):
        PeerArena(pid, arena.offer)


@pytest.mark.parametrize("descriptor", [-1, 99_999, 1 << 62])
def test_a_descriptor_that_is_not_open_is_no_arena(descriptor):
    with joined() as (arena, _), pytest.raises(ArenaError):
        PeerArena(os.getpid(), Offer(descriptor, arena.offer.inode))


def test_another_arena_than_the_one_that_was_offered_is_refused():
    with joined() as (one, _), joined() as (other, _):
        mixed = Offer(one.offer.descriptor, other.offer.inode)
        with pytest.raises(ArenaError, match="another file"):
            PeerArena(os.getpid(), mixed)


def test_neither_side_can_take_memory_away():
    with joined() as (arena, _):
        for size in (0, SIZE - 1, SIZE + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(arena._file, size)


@pytest.mark.parametrize("name", ["memfd_create", "ftruncate", "posix_fallocate"])
def test_a_system_that_has_no_such_files_has_no_arena(name, monkeypatch):
    def fail(*_):
        raise OSError(38, "not here")

    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(ArenaError, match="not here"):
        Arena()
    assert len(os.listdir("/proc/self/fd")) == files


def test_other_systems_have_no_arena(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ArenaError, match="Linux"):
        Arena()


def test_ctypes_calls_unions_bytes():
    """What `arena._Byte` relies on."""
    from servekit.wire.arena import _Byte

    assert memoryview((_Byte * 4)()).format == "B"
    assert memoryview((ctypes.c_ubyte * 4)()).format == "<B"
