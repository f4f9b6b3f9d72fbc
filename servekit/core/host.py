"""What the operating system says of this machine: cores and memory, within the limits of a container.

A process may use less than the machine has: its cgroup and every one above it can have a limit. Both
versions of cgroups are read; a file that isn't there limits nothing.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Names(NamedTuple):
    """What the files of a version of cgroups are called."""

    limit: str
    used: str
    cache: str


_V2 = _Names("memory.max", "memory.current", "inactive_file")
_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class Host:
    """This machine.

    Args:
        root: Where `/proc` and `/sys` are, for tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def cores(self) -> int:
        """Return how many cores this process may use at once, 1 or more."""
        linux = sys.platform == "linux"
        cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
        for group in self._groups("cpu"):
            quota, period = _numbers(group / "cpu.max")  # "max 100000" without a limit
            if quota is None:
                quota, period = self._quota(group)
            if quota is not None and quota > 0 and period:
                cores = min(cores, math.ceil(quota / period))
        return max(1, cores)

    @staticmethod
    def _quota(group: Path) -> tuple[int | None, int | None]:
        return _numbers(group / "cpu.cfs_quota_us")[0], _numbers(group / "cpu.cfs_period_us")[0]

    def memory(self) -> int:
        """Return the bytes of memory that this process and its children may use; 0 is not known."""
        total = self._meminfo("MemTotal")
        if total is None:
            try:
                total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            except (OSError, ValueError):
                total = 0
        return min([total, *(limit for limit, _ in self._limits())])

    def available(self) -> int | None:
        """Return the bytes of it that could be had now, without swapping; None is not known."""
        free = self._meminfo("MemAvailable")
        if free is None:
            return None
        return max(0, min([free, *(left for _, left in self._limits())]))

    def _limits(self) -> Iterator[tuple[int, int]]:
        """Yield the limit of each cgroup that has one, and what is left of it."""
        for group in self._groups("memory"):
            for names in (_V2, _V1):
                limit, used = _numbers(group / names.limit)[0], _numbers(group / names.used)[0]
                if limit is not None:
                    # What is only there to read files faster is given up when needed.
                    cache = _entry(group / "memory.stat", names.cache) or 0
                    yield limit, limit - (used or 0) + cache

    def _groups(self, controller: str) -> Iterator[Path]:
        """Yield the folders of this process's cgroup and of those above it."""
        for line in _lines(self._root / "proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mount = self._root / "sys/fs/cgroup" / (controllers and controller)
            # In a container the path may be that of the host; then the mount itself is its group.
            group = mount / path.lstrip("/")
            yield group
            yield from (above for above in group.parents if above.is_relative_to(mount))

    def _meminfo(self, name: str) -> int | None:
        kib = _entry(self._root / "proc/meminfo", f"{name}:")
        return None if kib is None else kib * 1024


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _entry(file: Path, name: str) -> int | None:
    """Return the number behind a name, in a file of names and numbers."""
    for line in _lines(file):
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _numbers(file: Path) -> tuple[int | None, int | None]:
    """Return the one or two numbers of a file's only line; None is missing, or a word."""
    words = (_lines(file) or [""])[0].split()
    one, other, *_ = [int(w) if w.lstrip("-").isdecimal() else None for w in words] + [None] * 2
    return one, other
