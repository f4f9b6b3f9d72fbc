"""What asyncio lacks: a scope for tasks, work that succeeds together, a beat, ends of connections."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Coroutine
from contextvars import Context
from typing import Any, Final

_MISSED: Final = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 2,
    "TCP_USER_TIMEOUT": 15_000,
}
"""A silent peer is asked after 5 s, and missed after 15 s; the last one is for data that it owes us."""
_NO_LINGER: Final = struct.pack("ii", 1, 0)


class Tasks:
    """A scope that owns background tasks: none is lost, none outlives `close()`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(
        self,
        coroutine: Coroutine[Any, Any, Any],
        *,
        name: str = "",
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        """Run a coroutine in this scope; an exception it raises goes to the loop's handler."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(coroutine, name=name or None, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {"message": f"background task {task.get_name()} failed", "exception": error}
            )

    async def close(self) -> None:
        """Cancel what still runs and wait until it has ended."""
        current = asyncio.current_task()
        while tasks := [task for task in self._tasks if task is not current]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Pulse:
    """Wakes all who wait at the moment; who comes later waits for the next beat."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def beat(self) -> None:
        """Wake everybody."""
        if self._next is not None:
            self._next.set_result(None)
            self._next = None

    async def wait(self, timeout_s: float) -> None:
        """Wait for the next beat, but no longer than `timeout_s` seconds."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._next], timeout=timeout_s)


async def together(*works: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines side by side; the first that raises cancels the others, and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


END: Final = object()
"""What `next_or_end` returns behind the last value."""


async def next_or_end(iterator: AsyncIterator[Any]) -> Any:
    """Return the next value, or `END`: what a loop may hand to another one, or to a thread."""
    return await anext(iterator, END)


async def aclose(iterator: AsyncIterator[Any]) -> None:
    """Close an async iterator, if it is of the kind that is closed."""
    if (close := getattr(iterator, "aclose", None)) is not None:
        await close()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def miss_soon(sock: socket.socket) -> None:
    """Have the kernel end a TCP connection whose peer is gone without a word, as without power."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _MISSED.items():
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def reset(transport: asyncio.WriteTransport) -> None:
    """End a connection now, by TCP with a reset: the kernel drops what it could not send."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is not None and sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):  # it is closed already
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
