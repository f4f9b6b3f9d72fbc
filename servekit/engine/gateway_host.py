"""One gateway: what a gateway's process holds, whichever engine started it."""

import asyncio
import contextlib
import socket
from typing import Final, Protocol

import msgspec

from servekit.core.aio import Tasks
from servekit.engine import child
from servekit.engine.control import AppStatus, StartGateway, Stats
from servekit.engine.router import Router
from servekit.engine.table import Table
from servekit.errors import CallError
from servekit.gateway.asgi import AsgiApp
from servekit.gateway.compress import compress_pages
from servekit.gateway.connections import make_room
from servekit.gateway.debug import Debug
from servekit.gateway.edge import Edge
from servekit.gateway.guard import Guard
from servekit.gateway.http import Gateway
from servekit.gateway.jobs import JobRoutes
from servekit.gateway.server import Server
from servekit.gateway.site import Site
from servekit.observe.families import Families
from servekit.observe.log import get_logger
from servekit.observe.metrics import Metrics, Snapshot, render
from servekit.spec.app import AppSpec
from servekit.wire.frames import Hello

_log = get_logger("servekit.gateway")

_REFRESH_S: Final = 2.0
"""Time between two looks at the files of credentials."""


class Behind(Protocol):
    """What runs the app, as its gateways see it."""

    def wake(self, service: str) -> None:
        """Take note that calls wait for a service, which may sleep."""
        ...

    async def metrics(self) -> Snapshot:
        """Return the figures of the whole app.

        Raises:
            CallError: It is silent.
        """
        ...

    async def status(self) -> AppStatus:
        """Return how the app is.

        Raises:
            CallError: It is silent.
        """
        ...


class GatewayHost:
    """The HTTP server, and the router to all replicas.

    Args:
        order: What to serve, and how.
        behind: What runs the app.
        secret: What it proves to replicas over TCP.
    """

    def __init__(self, order: StartGateway, behind: Behind, *, secret: bytes = b"") -> None:
        self._order = order
        self._behind = behind
        self._tasks = Tasks()
        self._metrics = Metrics(replica="gateway")
        self._router = Router(Hello(replica="gateway"), secret=secret, on_starved=behind.wake)
        self._jobs = JobRoutes(self._router)
        self._guard: Guard | None = None
        if order.credentials is not None:
            self._guard = Guard(order.credentials, share=1 / order.workers)
        self._edge = _within_descriptors(order.edge)
        self._gateway = Gateway(self._router, Families(self._metrics), self._edge, self._guard)
        debug = Debug(order.name, self._gateway, self._connections, self._status, order.settings)
        # Outside of dev it is for those only whom the guard knows.
        shown = debug.document if order.dev or self._guard is not None else None
        self._site = Site(
            self._readiness,
            self._all_metrics,
            self._jobs,
            dev=order.dev,
            debug=shown,
            credentials=order.credentials,
        )
        self._asgi = AsgiApp(self._gateway, compress_pages(self._site.app, self._edge))
        self._server: Server | None = None
        self._served: asyncio.Task[None] | None = None
        self.serve(order.app)
        self.update(order.table)

    def start(self, listener: socket.socket) -> None:
        """Take connections."""
        order = self._order
        self._server = Server(
            self._gateway, self._asgi, listener, drain_s=order.drain_s, edge=self._edge
        )
        if order.leaving:
            self._server.leave()
        self._served = self._tasks.spawn(self._server.run_until_drained(), name="http server")
        if self._guard is not None:
            self._tasks.spawn(_keep_fresh(self._guard), name="credentials")
        child.settle_memory()

    def serve(self, app: AppSpec) -> None:
        """Answer for this app from now on."""
        self._asgi.serve(app)
        self._site.serve(app)

    def update(self, table: Table) -> None:
        """Follow a routing table."""
        self._router.update(table)

    def stats(self) -> Stats:
        """Return the figures for `servekit status`."""
        if self._server is None:
            return Stats(rss=child.resident_bytes())
        state = self._server.server_state
        return Stats(
            ongoing=len(state.tasks),
            finished=state.total_requests,
            waiting=self._router.statistics(),
            rss=child.resident_bytes(),
        )

    def metrics(self) -> Snapshot:
        """Return this gateway's own figures."""
        return self._metrics.snapshot()

    def leave(self) -> None:
        """Say that the app is about to end, and serve on."""
        if self._server is not None:
            self._server.leave()

    async def drain(self) -> None:
        """Take no new connections; returns when the running requests have ended, or were cut."""
        self._jobs.leave()
        if self._server is not None and self._served is not None:
            self._server.drain()
            await asyncio.wait([self._served])

    async def stop(self) -> None:
        """Finish the running requests, then hang up."""
        if self._server is not None and self._served is not None:
            self._server.drain()
            await asyncio.wait([self._served], timeout=1.0)
        await self._router.close()
        await self._tasks.close()

    # -- what its pages ask ------------------------------------------------------------------

    def _readiness(self) -> dict[str, str]:
        if self._gateway.leaving:
            return {"gateway": "draining"}
        return self._router.unready()

    async def _all_metrics(self) -> str:
        """Return the figures of the whole app; only this gateway's if nobody knows the others."""
        figures = self._metrics.snapshot()
        with contextlib.suppress(CallError):
            figures = await self._behind.metrics()
        return await asyncio.to_thread(render, figures)  # a tenth of a second for many series

    def _connections(self) -> list[object]:
        return [] if self._server is None else self._server.connections()

    async def _status(self) -> AppStatus | None:
        with contextlib.suppress(CallError):
            return await self._behind.status()
        return None


async def _keep_fresh(guard: Guard) -> None:
    while True:
        await asyncio.sleep(_REFRESH_S)
        await asyncio.to_thread(guard.refresh)  # a file system may take its time


def _within_descriptors(edge: Edge) -> Edge:
    """Return the settings with as many connections as this process may have."""
    possible = make_room(edge.max_connections)
    if possible < edge.max_connections:
        _log.warning(
            "fewer connections than max_connections: the limit on open files is too low",
            max_connections=edge.max_connections,
            possible=possible,
        )
    return msgspec.structs.replace(edge, max_connections=possible)
