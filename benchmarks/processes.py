"""The processes below this one, however they detach themselves.

A process group is not enough (Ray's daemons and HAProxy outlive the one that started them), nor
is a mark in their environment (`ray::` titles overwrite it). So the benchmark makes itself the
parent of its orphans: what it started stays below it in the tree, and nothing else ever is.
"""

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")


def adopt_orphans() -> None:
    """Make this process the parent of every orphaned descendant."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants() -> dict[int, float]:
    """CPU seconds (user and system, with reaped children) of each process below this one."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text()
        except OSError:  # gone in the meantime
            continue
        fields = stat.rpartition(")")[2].split()
        children.setdefault(int(fields[1]), []).append(int(folder.name))
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / _TICKS
    found: dict[int, float] = {}
    waiting = [os.getpid()]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            found[pid] = seconds[pid]
            waiting.append(pid)
    return found


def end_all(grace: float = 3.0) -> None:
    """End every descendant: SIGTERM, then SIGKILL to each that is left after `grace` seconds."""
    deadline = time.monotonic() + grace
    _signal_all(signal.SIGTERM)
    while _reap() and descendants():
        time.sleep(0.1)
        if time.monotonic() > deadline:
            _signal_all(signal.SIGKILL)


def _signal_all(number: signal.Signals) -> None:
    for pid in descendants():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _reap() -> bool:
    """Collect the dead; returns whether children are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return False
    return True
