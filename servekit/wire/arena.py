"""Memory that two processes of one machine share: one writes blocks, the other uses them in place.

The sending side owns an arena, an anonymous file (`memfd_create`) with no name that could be left
behind: the last process that has it open takes it along, however it ends. The receiving side opens
it as `/proc/PID/fd/N`. The file is sealed against shrinking, so that neither can take away memory
that the other reads.

::

    granule 0       one byte per granule: 1 at a block's start while the receiver may use it
    granule 1 ...   blocks, each from a granule's start

The sender sets a block's byte and sends its place over the socket; the receiver clears the byte
when the last view of the block is gone, on whatever thread. So nothing waits for a release, and
none has to be sent.
"""

import ctypes
import fcntl
import mmap
import os
import sys
from typing import Final

import msgspec

from servekit.core.call import Buffer
from servekit.errors import WireError
from servekit.wire.blocks import Blocks

GRANULE: Final = 16 * 1024
GRANULES: Final = 4096
SIZE: Final = GRANULE * GRANULES
"""Bytes of address space in each arena. It has as much memory as was needed in the last seconds."""

_NAME: Final = "servekit"


class ArenaError(Exception):
    """This system or this peer can't share memory; the socket carries everything."""


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """Where the peer finds an arena: the owner's file descriptor, and the file's inode."""

    descriptor: int
    inode: int


class Arena:
    """The sending side's.

    Raises:
        ArenaError: The system has no such files, or gives none.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise ArenaError("memfd_create is Linux's")
        try:
            self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ArenaError(str(error)) from error
        try:
            os.ftruncate(self._file, SIZE)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
            os.posix_fallocate(self._file, 0, GRANULES)
            self._memory = mmap.mmap(self._file, SIZE)
            self.offer = Offer(self._file, os.fstat(self._file).st_ino)
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise ArenaError(str(error)) from error
        self._blocks = Blocks(GRANULES)

    def place(self, data: Buffer, size: int) -> int | None:
        """Copy `size` bytes into a free block and return it, or None if there is no memory."""
        memory, blocks = self._memory, self._blocks
        blocks.reclaim(memory[:GRANULES])
        count = -(-size // GRANULE)
        taken = blocks.take(count)
        if taken is None:
            return None
        block, backed = taken
        at = block * GRANULE
        if not backed:
            try:
                # Without it, a write to a page that the system can't give would be a SIGBUS.
                os.posix_fallocate(self._file, at, count * GRANULE)
            except OSError:
                memory.madvise(mmap.MADV_REMOVE, at, count * GRANULE)
                blocks.give(block, empty=True)
                return None
        memory[at : at + size] = data
        memory[block] = 1
        return block

    def give(self, block: int) -> None:
        """Take back a block that was not sent."""
        self._memory[block] = 0
        self._blocks.give(block)

    def trim(self) -> bool:
        """Give memory that was not used since the last time to the system; False if none is left."""
        self._blocks.reclaim(self._memory[:GRANULES])
        for start, stop in self._blocks.cool():
            self._memory.madvise(mmap.MADV_REMOVE, start * GRANULE, (stop - start) * GRANULE)
        return self._blocks.backed

    def close(self) -> None:
        """Let go of it; the peer's views stay good."""
        os.close(self._file)
        self._memory.close()


class PeerArena:
    """The receiving side's.

    Args:
        pid: The peer's process.
        offer: What it sent.

    Raises:
        ArenaError: It can't be opened, or is not what it should be.
    """

    def __init__(self, pid: int, offer: Offer) -> None:
        path = f"/proc/{pid}/fd/{offer.descriptor}"
        try:
            # Opening whatever else has that number now might do something.
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # noqa: PTH115
                raise ArenaError(f"{path} is no arena")
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                found = os.fstat(file)
                seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
                if (found.st_ino, found.st_size) != (offer.inode, SIZE):
                    raise ArenaError(f"{path} is another file than was offered")
                if not seals & fcntl.F_SEAL_SHRINK:
                    raise ArenaError(f"{path} may shrink")
                self.memory = mmap.mmap(file, SIZE)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise ArenaError(str(error)) from error
        self.pid = os.getpid()

    def view(self, block: int, size: int) -> memoryview:
        """Return a block's first `size` bytes; it is the sender's again when nobody views them.

        Raises:
            WireError: No block can lie there.
        """
        at = block * GRANULE
        if not 0 < block < GRANULES or not 0 <= size <= SIZE - at:
            raise WireError(f"block {block} of {size} bytes lies outside of its arena")
        holder = _Holder.from_buffer(self.memory)
        holder.arena, holder.block = self, block
        return memoryview(holder)[at : at + size]


class _Byte(ctypes.Union):
    """A byte whose array is a memoryview of format "B"; ctypes' own `c_ubyte` is "<B"."""

    _fields_ = (("value", ctypes.c_ubyte),)


class _Holder(ctypes.Array[_Byte]):
    """What all views of one block hold on to; only Python objects like it tell when they end.

    It spans the whole arena, since the size is a part of a ctypes type, and types are dear.
    """

    # Typeshed has properties here, but this is how ctypes is told.
    _type_ = _Byte  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    _length_ = SIZE  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    __slots__ = ("arena", "block")
    arena: PeerArena
    block: int

    def __del__(self) -> None:
        # A child that user code forked has a copy of this object, but not the say.
        if self.arena.pid == os.getpid():
            self.arena.memory[self.block] = 0
