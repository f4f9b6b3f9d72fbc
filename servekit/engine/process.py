"""One child process and the line to it: spawn, ask, terminate, and the cause when it ends.

The child gets one end of a socket pair, over which it speaks our wire, and the read end of a pipe
that closes when this process dies, however it dies; see `engine/child.py` for what it does then.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from servekit.engine.control import Verb, ask, handler
from servekit.errors import ReplicaLost, WireError
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello

T = TypeVar("T")

_GREETING_S = 120.0
"""A child greets when Python and our modules are loaded, which takes its time on a busy machine."""
_SIGNALS = {s.value: s.name for s in signal.Signals}
_HINTS = {
    signal.SIGKILL.value: " (out of memory, or killed by hand)",
    signal.SIGSEGV.value: " (crash in native code)",
    signal.SIGABRT.value: " (abort in native code)",
}

_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""glibc keeps the memory of arrays for the next ones, instead of faulting it in for each call."""


class Process:
    """A running child.

    Args:
        name: For messages and the process table.

    Attributes:
        pid: Its process id, which is also its process group's.
        ended: Resolves with the exit cause.
    """

    def __init__(
        self,
        name: str,
        child: asyncio.subprocess.Process,
        connection: Connection,
        lifeline: int,
    ) -> None:
        self.name = name
        self.pid = child.pid
        self._child = child
        self._connection = connection
        self._lifeline = lifeline
        self.ended: asyncio.Task[str] = asyncio.get_running_loop().create_task(self._wait())

    @classmethod
    async def spawn(
        cls,
        name: str,
        module: str,
        *,
        verbs: Mapping[str, Verb],
        env: Mapping[str, str],
        inherit: tuple[int, ...] = (),
    ) -> "Process":
        """Start a child.

        Args:
            name: For messages.
            module: What to run, a module that calls `child.run`.
            verbs: What it may ask of this side.
            env: Added to this process's environment.
            inherit: File descriptors that it gets too.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        watched, lifeline = os.pipe()
        ours.setblocking(False)
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                str(theirs.fileno()),
                str(watched),
                stdin=asyncio.subprocess.DEVNULL,
                env={**_MALLOC, **os.environ, **env},
                pass_fds=(theirs.fileno(), watched, *inherit),
                start_new_session=True,
            )
            _, connection = await loop.create_connection(
                lambda: Connection(
                    Hello(replica="supervisor"),
                    client=False,
                    handler=handler(verbs),
                    greeting_s=_GREETING_S,
                ),
                sock=ours,
            )
        except BaseException:
            ours.close()
            os.close(lifeline)  # which ends the child, if it is there already
            raise
        finally:
            theirs.close()
            os.close(watched)
        return cls(name, child, connection, lifeline)

    async def ask(
        self,
        verb: str,
        body: msgspec.Struct | None = None,
        *,
        answer: type[T],
        timeout_s: float | None = None,
    ) -> T:
        """Ask the child something; see `control.ask`."""
        try:
            await self._connection.greeted()
        except WireError as error:
            raise ReplicaLost(f"{self.name} ended: {error}", started=False) from error
        return await ask(self._connection, verb, body, answer=answer, timeout_s=timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child and what it started; none when it has ended."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def stop(self, grace_s: float) -> str:
        """End it: SIGTERM, then SIGKILL after `grace_s` seconds; returns the exit cause."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                return await asyncio.shield(self.ended)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return await self.ended

    async def _wait(self) -> str:
        code = await self._child.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what it started, and left behind
        await self._connection.close()
        os.close(self._lifeline)
        if code >= 0:
            return f"exit code {code}"
        name = _SIGNALS.get(-code, str(-code))
        return f"killed by {name}{_HINTS.get(-code, '')}"
