"""What every child process of the supervisor does: answer its verbs, and end when it is gone.

The child gets two file descriptors: its end of the control connection, and a lifeline, a pipe that
closes when the supervisor dies, however it dies. Then the child ends by itself, with everything
that it started; no process or socket file stays behind.
"""

import asyncio
import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import msgspec
import uvloop

from servekit.core.aio import Tasks
from servekit.engine.control import Nothing, Verb, ask, handler
from servekit.errors import CallError
from servekit.observe import log
from servekit.settings import Settings
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello

T = TypeVar("T")

_ORPHAN_GRACE_S = 5.0
_GC_THRESHOLD = 10_000
"""New objects between two collections; Python's default is 700."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Supervisor:
    """The supervisor, seen from its child.

    Attributes:
        ending: Set when this process was told to end, or the supervisor is gone.
    """

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._tasks = Tasks()
        self.ending = asyncio.Event()

    async def attend(self, control: socket.socket, verbs: Mapping[str, Verb]) -> None:
        """Answer the supervisor's verbs from now on."""
        control.setblocking(False)
        _, self._connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(Hello(), client=True, handler=handler(verbs)), sock=control
        )
        self._connection.on_lost = lambda _: self.ending.set()

    async def ask(
        self, verb: str, body: msgspec.Struct | None = None, *, answer: type[T], timeout_s: float
    ) -> T:
        """Ask the supervisor something; see `control.ask`."""
        assert self._connection is not None
        return await ask(self._connection, verb, body, answer=answer, timeout_s=timeout_s)

    def tell(self, verb: str, body: msgspec.Struct) -> None:
        """Tell the supervisor something, without waiting."""

        async def send() -> None:
            with contextlib.suppress(CallError):
                await self.ask(verb, body, answer=Nothing, timeout_s=5.0)

        self._tasks.spawn(send(), name=f"tell {verb}")


class Part(Protocol):
    """What a child process is: a replica, or the gateway.

    Attributes:
        verbs: What the supervisor may ask of it.
        folder: The app's private folder, known once it has started.
    """

    verbs: Mapping[str, Verb]
    folder: str

    async def stop(self) -> None:
        """End what was started and remove what was made."""
        ...


def run(make: Callable[[Supervisor], Part], control: int, lifeline: int, *, role: str) -> None:
    """Be a child process until told to end."""
    settings = Settings.load()
    log.configure(settings.log_format, settings.log_level, role)
    uvloop.run(_serve(make, socket.socket(fileno=control), lifeline))


async def _serve(make: Callable[[Supervisor], Part], control: socket.socket, lifeline: int) -> None:
    loop = asyncio.get_running_loop()
    supervisor = Supervisor()
    part = make(supervisor)
    loop.add_signal_handler(signal.SIGTERM, supervisor.ending.set)
    threading.Thread(
        target=_watch, args=(lifeline, loop, supervisor.ending.set), daemon=True
    ).start()
    await supervisor.attend(control, part.verbs)
    await supervisor.ending.wait()
    await part.stop()
    if _is_orphan(lifeline):
        if part.folder:
            shutil.rmtree(part.folder, ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # with what user code started; nobody else will


def _is_orphan(lifeline: int) -> bool:
    return bool(select.select([lifeline], [], [], 0)[0])


def _watch(lifeline: int, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        os.read(lifeline, 1)
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(end)
    time.sleep(_ORPHAN_GRACE_S)
    # The loop did not end in time: user code blocks it. Nobody is left to kill us but ourselves.
    os.killpg(os.getpgrp(), signal.SIGKILL)


def settle_memory() -> None:
    """Take what was loaded so far out of the garbage collector's sight, once it is all there.

    It would walk through all modules and models again and again, and find nothing: requests leave
    next to no cycles. `gc.freeze` also keeps pages shared with whatever is forked later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def resident_bytes() -> int:
    """Return this process's resident memory; 0 where the kernel does not tell (macOS)."""
    try:
        with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123  (called every second)
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0
