"""An event loop for code that has none: it runs in a thread of its own."""

import asyncio
import os
import threading
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

from servekit.errors import ServekitError

_Ts = TypeVarTuple("_Ts")


class ThreadLoop(asyncio.SelectorEventLoop):
    """An event loop that runs in a thread.

    A forked child inherits the loop, but not its thread. There it refuses work, which else would
    wait for ever.
    """

    orphaned = False

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run a callback in the loop's thread."""
        if self.orphaned:
            raise ServekitError(
                "this handle was made before a fork, and its thread has stayed in the parent; "
                "make it in the process that uses it"
            )
        return super().call_soon_threadsafe(callback, *args, context=context)


_background: ThreadLoop | None = None
_starting = threading.Lock()
_orphans: list[ThreadLoop] = []
"""Kept for ever: to end one would take its sockets out of the epoll set that the parent waits on."""


def background_loop() -> ThreadLoop:
    """Return the one loop that runs in a thread of this process until it exits.

    It is started when first asked for, and once more in a forked child.
    """
    global _background  # noqa: PLW0603  (a process has one)
    with _starting:
        if _background is None:
            _background = ThreadLoop()
            threading.Thread(
                target=_background.run_forever, name="servekit-client", daemon=True
            ).start()
        return _background


def _in_child() -> None:
    global _background, _starting
    if _background is not None:
        _background.orphaned = True
        _orphans.append(_background)
    _background, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_in_child)
