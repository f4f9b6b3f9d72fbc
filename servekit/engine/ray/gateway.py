"""A gateway on Ray: `GatewayHost` in an actor of its own on each node.

A new one is there before an old one leaves, and goes on with its socket (`handover.py`). What they need to know of the whole app they ask its controller, over the wire.
"""

import asyncio

import msgspec

from servekit.engine.control import (
    AppStatus,
    Figures,
    Nothing,
    StartGateway,
    Stats,
    Verb,
    ask,
)
from servekit.engine.gateway_host import GatewayHost
from servekit.engine.handover import Door, listen
from servekit.engine.ray.discovery import Discovery
from servekit.engine.ray.orders import CONTROLLER, GatewayOrder, States
from servekit.engine.ray.process import Process
from servekit.engine.router import Router
from servekit.engine.table import Table
from servekit.errors import Unavailable
from servekit.observe.metrics import Snapshot
from servekit.spec.app import AppSpec
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello

_ASK_S = 3.0


class RayGateway(Process):
    """One gateway; Ray calls all of its public methods.

    Args:
        order: A `GatewayOrder`, packed.
    """

    def __init__(self, order: bytes) -> None:
        self._order = msgspec.msgpack.decode(order, type=GatewayOrder)
        super().__init__(self._order.common, self._order.name, "gateway")
        self.run(self._start())

    async def _start(self) -> None:
        order, front = self._order, self._order.front
        listener = listen(self.folder, front.host, front.port)
        hello = Hello(service=order.name, replica=self.id)
        self._control = Router(hello, secret=order.common.secret)
        self._host = GatewayHost(
            StartGateway(
                name=self.id,
                app=order.app,
                listener=listener.fileno(),
                folder=str(self.folder),
                table=Table(),
                edge=front.edge,
                drain_s=order.common.drain_s,
                workers=order.workers,
                dev=front.dev,
                credentials=front.credentials,
                settings=front.settings,
            ),
            self,
            secret=order.common.secret,
        )
        self._discovery = Discovery(order.common.app, self._update)
        self._discovery.follow({CONTROLLER: False} | order.services)
        verbs: dict[str, Verb] = {
            "app": self._on_app,
            "states": self._on_states,
            "stats": self._on_stats,
            "metrics": self._on_metrics,
            "leave": self._on_leave,
            "logs": self.on_logs,
        }
        await self.listen(order.name, verbs)
        self._host.start(listener)
        door = self.folder / self.id.rpartition("-")[2]
        self._door = Door(listener, door, f"{front.host}:{front.port}")

    def _update(self, table: Table) -> None:
        services = dict(table.services)
        own = {CONTROLLER: services.pop(CONTROLLER)} if CONTROLLER in services else {}
        self._host.update(msgspec.structs.replace(table, services=services))
        self._control.update(msgspec.structs.replace(table, services=own))

    # -- for the gateway ---------------------------------------------------------------------

    def wake(self, service: str) -> None:
        """Have Ray start a replica of a service that sleeps."""
        self._discovery.wake(service)

    async def metrics(self) -> Snapshot:
        """Ask the controller for the figures of the whole app."""
        return (await ask(self._controller(), "metrics", answer=Figures, timeout_s=_ASK_S)).snapshot

    async def status(self) -> AppStatus:
        """Ask the controller how the app is."""
        return await ask(self._controller(), "status", answer=AppStatus, timeout_s=_ASK_S)

    def _controller(self) -> Connection:
        for connection in self._control.connections().values():
            return connection
        raise Unavailable("the app's controller is not there now", started=False)

    # -- for the controller ------------------------------------------------------------------

    async def _on_app(self, body: bytes) -> Nothing:
        self._host.serve(msgspec.msgpack.decode(body, type=AppSpec))
        return Nothing()

    async def _on_states(self, body: bytes) -> Nothing:
        states = msgspec.msgpack.decode(body, type=States)
        services = {CONTROLLER: False} | states.services
        self._discovery.take(msgspec.structs.replace(states, services=services))
        return Nothing()

    async def _on_stats(self, _: bytes) -> Stats:
        return self._host.stats()

    async def _on_metrics(self, _: bytes) -> Figures:
        return Figures(self._host.metrics())

    async def _on_leave(self, _: bytes) -> Nothing:
        self._host.leave()
        return Nothing()

    async def __del__(self) -> None:
        """Say that it leaves, finish the requests on board, then end; Ray Serve waits for it."""
        await self.on_loop(self._stop())

    async def _stop(self) -> None:
        self._door.close()
        self._host.leave()
        await asyncio.sleep(self._order.front.drain_delay_s)
        await self._host.drain()
        await self._host.stop()
        self._discovery.close()
        await self._control.close()
        await self.clear()
