"""What an app costs while nobody calls it."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.flow.harness import rss_mb, serving, show

WATCH_S = 5.0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
async def test_an_idle_app_sleeps():
    """Five processes at rest use less than a twentieth of a core together."""
    async with serving("graph.py:Root") as app:
        for number in range(200):
            assert (await app.post("/echo", {"x": number})).json == number
        await asyncio.sleep(1.0)  # let what the calls left behind settle
        processes = app.processes()
        assert len(processes) == 6  # the supervisor, the gateway, two replicas of two services
        before = {pid: cpu_s(pid) for pid in processes}
        await asyncio.sleep(WATCH_S)
        used = {pid: cpu_s(pid) - before[pid] for pid in processes}
        for pid, line in processes.items():
            show(f"{used[pid]:5.2f} s CPU, {rss_mb(pid):6.1f} MB  {line}")
        show(f"{100 * sum(used.values()) / WATCH_S:.1f} % of a core")
        assert sum(used.values()) / WATCH_S < 0.05
