"""Cores and memory, from files as Linux writes them."""

import os
import sys
from pathlib import Path

import pytest

from servekit.core.host import Host

GIB = 2**30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"
NO_LIMIT = "9223372036854771712\n"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Return `host(cgroup, {file: text})`: a machine of 16 GiB, 8 of them free, and 8 cores."""
    if sys.platform == "linux":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def make(cgroup: str = "0::/\n", files: dict[str, str] | None = None) -> Host:
        given = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup}
        given |= {f"sys/fs/cgroup/{name}": text for name, text in (files or {}).items()}
        for name, text in given.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Host(tmp_path)

    return make


@pytest.mark.parametrize(
    ("cgroup", "files", "total", "available"),
    [
        ("0::/\n", {}, 16, 8),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "1\n"}, 16, 8),
        # A container with a namespace of its own.
        ("0::/\n", {"memory.max": f"{4 * GIB}\n", "memory.current": f"{GIB}\n"}, 4, 3),
        # Files that were read once are not in the way.
        (
            "0::/\n",
            {
                "memory.max": f"{4 * GIB}\n",
                "memory.current": f"{3 * GIB}\n",
                "memory.stat": f"anon 5\nfile 7\ninactive_file {GIB}\n",
            },
            4,
            2,
        ),
        # The narrowest of a group and those above it.
        (
            "0::/a.slice/b.scope\n",
            {
                "a.slice/memory.max": f"{2 * GIB}\n",
                "a.slice/memory.current": f"{GIB}\n",
                "a.slice/b.scope/memory.max": f"{6 * GIB}\n",
                "a.slice/b.scope/memory.current": "0\n",
            },
            2,
            1,
        ),
        # Version 1, and a path that is the host's: the mount itself is the container's group.
        (
            "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/ignored\n",
            {
                "memory/memory.limit_in_bytes": f"{3 * GIB}\n",
                "memory/memory.usage_in_bytes": f"{2 * GIB}\n",
                "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
            },
            3,
            2,
        ),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": NO_LIMIT}, 16, 8),
        # More is used than allowed: nothing is left, not less than nothing.
        ("0::/\n", {"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}, 1, 0),
        ("", {}, 16, 8),
        ("0::/../../elsewhere\n", {}, 16, 8),
        ("0::/\n", {"memory.max": "?!\n", "memory.current": "\n"}, 16, 8),
    ],
)
def test_memory(host, cgroup, files, total, available):
    machine = host(cgroup, files)
    assert (machine.memory() / GIB, machine.available() / GIB) == (total, available)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "1000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        (
            "3:cpu,cpuacct:/x\n",
            {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            4,
        ),
        (
            "3:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            8,
        ),
    ],
)
def test_cores(host, cgroup, files, cores):
    assert host(cgroup, files).cores() == cores


def test_a_machine_without_such_files(tmp_path):
    machine = Host(Path(tmp_path))
    assert machine.available() is None
    assert machine.memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.cores() >= 1


def test_this_machine():
    machine = Host()
    available = machine.available()
    assert machine.memory() > 2**20
    assert available is None or 0 < available <= machine.memory()
