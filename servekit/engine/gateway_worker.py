"""The process of a gateway: `python -m servekit.engine.gateway_worker CONTROL LIFELINE`."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from servekit.core.aio import Tasks
from servekit.engine import child
from servekit.engine.control import (
    AppStatus,
    Figures,
    Nothing,
    Started,
    StartGateway,
    Stats,
    Verb,
    Wake,
)
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


class GatewayWorker:
    """The HTTP server, and the router to all replicas."""

    def __init__(self, supervisor: child.Supervisor) -> None:
        self._supervisor = supervisor
        self._metrics = Metrics(replica="gateway")
        self._router = Router(Hello(replica="gateway"), on_starved=self._starved)
        self._jobs = JobRoutes(self._router)
        self._tasks = Tasks()
        self._server: Server | None = None
        self._served: asyncio.Task[None] | None = None
        self.folder = ""
        self.verbs: Mapping[str, Verb] = {
            "start": self._start,
            "app": self._app,
            "table": self._table,
            "stats": self._stats,
            "metrics": self._figures,
            "leave": self._leave,
            "drain": self._drain,
        }

    async def _start(self, body: bytes) -> Started:
        order = msgspec.msgpack.decode(body, type=StartGateway)
        self.folder = order.folder
        guard = None
        if order.credentials is not None:
            guard = Guard(order.credentials, share=1 / order.workers)
        edge = _within_descriptors(order.edge)
        self._gateway = Gateway(self._router, Families(self._metrics), edge, guard)
        debug = Debug(
            order.name, self._gateway, self._connections, self._app_status, order.settings
        )
        # Outside of dev it is for those only whom the guard knows.
        shown = debug.document if order.dev or guard is not None else None
        self._site = Site(
            self._readiness,
            self._all_metrics,
            self._jobs,
            dev=order.dev,
            debug=shown,
            credentials=order.credentials,
        )
        self._asgi = AsgiApp(self._gateway, compress_pages(self._site.app, edge))
        self._serve(order.app)
        self._router.update(order.table)
        listener = socket.socket(fileno=order.listener)
        self._server = Server(self._gateway, self._asgi, listener, drain_s=order.drain_s, edge=edge)
        if order.leaving:
            self._server.leave()
        self._served = self._tasks.spawn(self._server.run_until_drained(), name="http server")
        if guard is not None:
            self._tasks.spawn(_keep_fresh(guard), name="credentials")
        child.settle_memory()
        return Started(address="listening")

    def _serve(self, app: AppSpec) -> None:
        self._asgi.serve(app)
        self._site.serve(app)

    async def _app(self, body: bytes) -> Nothing:
        self._serve(msgspec.msgpack.decode(body, type=AppSpec))
        return Nothing()

    async def _table(self, body: bytes) -> Nothing:
        table = msgspec.msgpack.decode(body, type=Table)
        self._router.update(table)
        return Nothing()

    def _readiness(self) -> dict[str, str]:
        if self._gateway.leaving:
            return {"gateway": "draining"}
        return self._router.unready()

    def _starved(self, service: str) -> None:
        self._supervisor.tell("wake", Wake(service))

    async def _stats(self, _: bytes) -> Stats:
        if self._server is None:
            return Stats(rss=child.resident_bytes())
        state = self._server.server_state
        return Stats(
            ongoing=len(state.tasks),
            finished=state.total_requests,
            waiting=self._router.statistics(),
            rss=child.resident_bytes(),
        )

    async def _figures(self, _: bytes) -> Figures:
        return Figures(self._metrics.snapshot())

    async def _all_metrics(self) -> str:
        """Return the figures of the whole app; only this worker's if the supervisor is silent."""
        figures: Snapshot = self._metrics.snapshot()
        with contextlib.suppress(CallError):
            figures = (
                await self._supervisor.ask("metrics", answer=Figures, timeout_s=3.0)
            ).snapshot
        return await asyncio.to_thread(render, figures)  # a tenth of a second for many series

    async def _leave(self, _: bytes) -> Nothing:
        if self._server is not None:
            self._server.leave()
        return Nothing()

    def _connections(self) -> list[object]:
        return [] if self._server is None else self._server.connections()

    async def _app_status(self) -> AppStatus | None:
        with contextlib.suppress(CallError):
            return await self._supervisor.ask("status", answer=AppStatus, timeout_s=3.0)
        return None

    async def _drain(self, _: bytes) -> Nothing:
        self._jobs.leave()
        if self._server is not None and self._served is not None:
            self._server.drain()
            await asyncio.wait([self._served])
        return Nothing()

    async def stop(self) -> None:
        """Finish the running requests, then hang up."""
        if self._server is not None and self._served is not None:
            self._server.drain()
            await asyncio.wait([self._served], timeout=1.0)
        await self._router.close()
        await self._tasks.close()


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


if __name__ == "__main__":
    child.run(GatewayWorker, int(sys.argv[1]), int(sys.argv[2]), role="gateway")
