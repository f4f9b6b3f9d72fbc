"""uvicorn's server on a socket of ours, with signals left to the process."""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from servekit.gateway.guarded import GuardedApp
from servekit.gateway.http import Gateway
from servekit.gateway.protocol import HttpProtocol
from servekit.gateway.reader import Reader

_KEEP_ALIVE_S = 75
_CUT_S = 1.0
"""What requests that ran for too long get to send their error."""


class Server(uvicorn.Server):
    """An HTTP server on a socket that is already bound.

    Args:
        gateway: Answers the requests for endpoints.
        app: The ASGI app that answers all others; the gateway's guard stands before it, too.
        listener: The listening socket.
        drain_s: Longest wait for running requests at the end.
    """

    def __init__(
        self, gateway: Gateway, app: ASGIApp, listener: socket.socket, *, drain_s: float
    ) -> None:

        def connection(**settings: Any) -> Reader:
            return Reader(HttpProtocol(gateway, **settings))

        config = uvicorn.Config(
            app if gateway.guard is None else GuardedApp(app, gateway.guard),
            http=cast("Any", connection),
            ws="none",
            loop="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=cast("int", drain_s),  # it goes to `asyncio.wait_for`
        )
        super().__init__(config)
        self._gateway = gateway
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process that this server runs in."""
        yield

    def connections(self) -> list[object]:
        """Return the protocols of all clients that are connected."""
        return list(self.server_state.connections)

    async def run_until_drained(self) -> None:
        """Serve; returns when `drain` was called and the running requests have ended.

        Those that still run after `drain_s` are answered with 503.
        """
        await self.serve(sockets=[self._listener])
        if cut := self.server_state.tasks:
            await asyncio.wait(cut, timeout=_CUT_S)

    def leave(self) -> None:
        """Serve on, but let each answer be the last of its connection."""
        self._gateway.leaving = True
        for connection in self.server_state.connections:
            if isinstance(connection, HttpProtocol):  # a WebSocket has no answers to come
                connection.leave()

    def drain(self) -> None:
        """Take no new connections, close idle ones, finish what runs."""
        self.leave()
        self.should_exit = True
