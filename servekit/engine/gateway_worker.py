"""The process of a gateway: `python -m servekit.engine.gateway_worker CONTROL LIFELINE`."""

import socket
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

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
from servekit.engine.gateway_host import GatewayHost
from servekit.engine.table import Table
from servekit.observe.metrics import Snapshot
from servekit.spec.app import AppSpec

_TIMEOUT_S: Final = 3.0


class GatewayWorker:
    """The supervisor's verbs over a `GatewayHost`, and the supervisor as what is behind it."""

    def __init__(self, supervisor: child.Supervisor) -> None:
        self._supervisor = supervisor
        self._host: GatewayHost | None = None
        self.folder = ""
        self.verbs: Mapping[str, Verb] = {
            "start": self._start,
            "app": self._app,
            "table": self._table,
            "stats": self._stats,
            "metrics": self._metrics,
            "leave": self._leave,
            "drain": self._drain,
        }

    # -- for the gateway ---------------------------------------------------------------------

    def wake(self, service: str) -> None:
        """Pass on that calls wait for a service."""
        self._supervisor.tell("wake", Wake(service))

    async def metrics(self) -> Snapshot:
        """Ask for the figures of the whole app."""
        return (
            await self._supervisor.ask("metrics", answer=Figures, timeout_s=_TIMEOUT_S)
        ).snapshot

    async def status(self) -> AppStatus:
        """Ask how the app is."""
        return await self._supervisor.ask("status", answer=AppStatus, timeout_s=_TIMEOUT_S)

    # -- for the supervisor ------------------------------------------------------------------

    async def _start(self, body: bytes) -> Started:
        order = msgspec.msgpack.decode(body, type=StartGateway)
        self.folder = order.folder
        self._host = GatewayHost(order, self)
        self._host.start(socket.socket(fileno=order.listener))
        return Started(address="listening")

    async def _app(self, body: bytes) -> Nothing:
        if self._host is not None:  # else the order to start brings a newer one, as for the table
            self._host.serve(msgspec.msgpack.decode(body, type=AppSpec))
        return Nothing()

    async def _table(self, body: bytes) -> Nothing:
        if self._host is not None:
            self._host.update(msgspec.msgpack.decode(body, type=Table))
        return Nothing()

    async def _stats(self, _: bytes) -> Stats:
        return self._host.stats() if self._host else Stats(rss=child.resident_bytes())

    async def _metrics(self, _: bytes) -> Figures:
        return Figures(self._host.metrics() if self._host else ())

    async def _leave(self, _: bytes) -> Nothing:
        if self._host is not None:
            self._host.leave()
        return Nothing()

    async def _drain(self, _: bytes) -> Nothing:
        if self._host is not None:
            await self._host.drain()
        return Nothing()

    async def stop(self) -> None:
        """Finish the running requests, then hang up."""
        if self._host is not None:
            await self._host.stop()


if __name__ == "__main__":
    child.run(GatewayWorker, int(sys.argv[1]), int(sys.argv[2]), role="gateway")
