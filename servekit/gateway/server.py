"""uvicorn, with what we need on top: a client that leaves ends its call, and we keep the signals."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from servekit.gateway.asgi import App
from servekit.gateway.http import TASK

_MAX_HEADER_BYTES = 64 * 1024
_KEEP_ALIVE_S = 75


class _Protocol(HttpToolsProtocol):
    """One client connection."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End the work for a client that is gone."""
        cycle = self.cycle
        super().connection_lost(exc)
        if cycle is not None and not cycle.response_complete:
            task: asyncio.Task[None] | None = cycle.scope.get(TASK)
            if task is not None:
                task.cancel()


class Server(uvicorn.Server):
    """An HTTP server on a socket that is already bound.

    Args:
        app: The ASGI app.
        listener: The listening socket.
        drain_s: Longest wait for running requests at the end.
    """

    def __init__(self, app: App, listener: socket.socket, *, drain_s: float) -> None:
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            http=_Protocol,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(drain_s) or 1,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        )
        super().__init__(config)
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process that this server runs in."""
        yield

    async def run_until_drained(self) -> None:
        """Serve; returns when `drain` was called and the running requests have ended."""
        await self.serve(sockets=[self._listener])

    def drain(self) -> None:
        """Take no new connections; finish what runs."""
        self.should_exit = True
