"""Which parts of an arena are in use: a first-fit allocator, without I/O.

Sizes and places are counted in granules. The lowest free place is taken first, so that the same
few pages, which are in the processor's cache, serve one call after another.
"""

import re

from servekit.core.call import Buffer

_EMPTY, _COLD, _WARM = b"\0", b"\1", b"\2"
_COOL = bytes([0, 0, 1, *range(3, 256)])
_COLD_RUNS = re.compile(_COLD + b"+")


class Blocks:
    """The blocks of one arena.

    Args:
        count: Granules of the arena. The first is not handed out, so that 0 is no block.
    """

    def __init__(self, count: int) -> None:
        self._used = bytearray(count)
        self._used[0] = 1
        self._heat = bytearray(count)  # has no memory, has some but rests, was used lately
        self._flags = bytearray(count)  # 1 where a block begins
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def take(self, count: int) -> tuple[int, bool] | None:
        """Return where `count` granules are free, and whether all have memory; None if nowhere."""
        start = self._used.find(bytes(count))
        if start < 0:
            return None
        stop = start + count
        backed = self._heat.find(_EMPTY, start, stop) < 0
        self._used[start:stop] = b"\1" * count
        self._heat[start:stop] = _WARM * count
        self._flags[start] = 1
        self._sizes[start] = count
        return start, backed

    def give(self, start: int, *, empty: bool = False) -> None:
        """Take a block back, which may have no memory after all."""
        count = self._sizes.pop(start)
        self._used[start : start + count] = bytes(count)
        self._flags[start] = 0
        if empty:
            self._heat[start : start + count] = bytes(count)

    def reclaim(self, flags: Buffer) -> None:
        """Take back all blocks at whose start `flags` has a 0."""
        if flags != self._flags:
            for start in [start for start in self._sizes if not flags[start]]:
                self.give(start)

    def cool(self) -> list[tuple[int, int]]:
        """Return the ranges with memory that no block had since the last time; they lose it."""
        cold = [match.span() for match in _COLD_RUNS.finditer(self._heat)]
        self._heat = self._heat.translate(_COOL)
        for start, count in self._sizes.items():
            self._heat[start : start + count] = _WARM * count
        return cold

    @property
    def backed(self) -> bool:
        """Whether any granule has memory."""
        return any(self._heat)
