"""uvicorn's server on a socket of ours, with TLS if so wished, and signals left to the process."""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from servekit.core.aio import Tasks
from servekit.gateway.certificate import HANDSHAKE_S, Certificate
from servekit.gateway.cors import Cors, CorsPages
from servekit.gateway.edge import PLAIN, Edge
from servekit.gateway.guarded import GuardedApp
from servekit.gateway.http import Gateway
from servekit.gateway.protocol import HttpProtocol
from servekit.gateway.reader import Reader

_KEEP_ALIVE_S = 75
_CUT_S = 1.0
"""What requests that ran for too long get to send their error."""
_UNREAD_S = 60
"""After which a connection is ended whose client takes nothing of what it was sent."""


class Server(uvicorn.Server):
    """An HTTP server on a socket that is already bound.

    Args:
        gateway: Answers the requests for endpoints.
        app: The ASGI app that answers all others; the gateway's guard stands before it, too.
        listener: The listening socket.
        drain_s: Longest wait for running requests at the end.
        edge: What clients may do.
    """

    def __init__(
        self,
        gateway: Gateway,
        app: ASGIApp,
        listener: socket.socket,
        *,
        drain_s: float,
        edge: Edge = PLAIN,
    ) -> None:

        def connection(**settings: Any) -> Reader:
            return Reader(HttpProtocol(gateway, **settings))

        if gateway.guard is not None:
            app = GuardedApp(app, gateway.guard)
        if (cors := Cors.of(edge)) is not None:
            app = CorsPages(app, cors)  # outermost: a browser asks without credentials
        config = uvicorn.Config(
            app,
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
        self._connection = connection
        self._gateway = gateway
        self._listener = listener
        self._certificate = Certificate(edge.tls_cert, edge.tls_key) if edge.tls_cert else None

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
        tasks = Tasks()
        if self._certificate is not None:
            tasks.spawn(self._certificate.follow(), name="certificate")
        try:
            await self.serve(sockets=[self._listener])
            if cut := self.server_state.tasks:
                await asyncio.wait(cut, timeout=_CUT_S)
        finally:
            await tasks.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen: as uvicorn does, but a handshake has its time, and so has an unread answer."""
        assert sockets is not None
        for listener in sockets:
            _end_unread(listener)
            tls: dict[str, Any] = {}
            if self._certificate is not None:
                tls = {
                    "ssl": self._certificate.context(),
                    "ssl_handshake_timeout": HANDSHAKE_S,
                }
            server = await asyncio.get_running_loop().create_server(
                lambda: self._connection(
                    config=self.config, server_state=self.server_state, app_state={}
                ),
                sock=listener,
                backlog=self.config.backlog,
                **tls,
            )
            self.servers = [server]
        self.started = True

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


def _end_unread(listener: socket.socket) -> None:
    """Have the kernel end connections whose client does not read; macOS has no such option.

    It sees what the protocol's timer can't: what waits behind TLS, and behind a `close()`. Those
    that are accepted have the listener's options.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT") and listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_S * 1000)
