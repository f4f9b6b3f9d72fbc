"""A service behind a gateway on a real port, all in the test's own event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from servekit.engine.front import bind
from servekit.gateway.asgi import AsgiApp
from servekit.gateway.edge import PLAIN, Edge
from servekit.gateway.http import Gateway
from servekit.gateway.jobs import JobRoutes
from servekit.gateway.server import Server
from servekit.gateway.site import Site
from servekit.observe.families import Families
from servekit.observe.metrics import Metrics
from servekit.runtime.replica import Replica
from servekit.spec.definition import definition
from servekit.spec.describe import describe
from servekit.wire import memory
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello


@dataclass
class Served:
    """What runs.

    Attributes:
        address: `host:port`.
        http: A client of it.
        replica: The only one.
    """

    address: str
    http: httpx.AsyncClient
    replica: Replica
    gateway: Gateway
    metrics: Metrics

    def counted(self) -> dict[tuple[str, str], float]:
        """Return how many requests ended, by endpoint and status."""
        return {
            (labels["endpoint"], labels["code"]): sample.value
            for family in self.metrics.snapshot()
            if family.name == "servekit_requests_total"
            for sample in family.samples
            if (labels := dict(zip(family.labels, sample.labels, strict=True)))
        }

    async def idle(self) -> None:
        """Wait until no call is on board."""
        async with asyncio.timeout(15):
            while self.replica.load().ongoing:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def served(service: type, edge: Edge = PLAIN) -> AsyncIterator[Served]:
    app = describe(service)
    name = app.root
    replica = Replica(definition(service), app.service(name), replica_id=f"{name}-1")
    await replica.start({})
    server = Connection(Hello(name, f"{name}-1"), client=False, handler=replica)
    client = Connection(Hello(), client=True)
    await memory.join(client, server)
    metrics = Metrics()
    gateway = Gateway(client.call, Families(metrics), edge)

    async def no_metrics() -> str:
        return ""

    front = AsgiApp(gateway, Site(dict, no_metrics, JobRoutes(client.call), dev=False).app)
    front.serve(app)
    listener = bind("127.0.0.1", 0)
    http = Server(gateway, front, listener, drain_s=2.0, edge=edge)
    serving = asyncio.ensure_future(http.run_until_drained())
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as asking:
            yield Served(address, asking, replica, gateway, metrics)
    finally:
        http.drain()
        await serving
        await client.close()
        await server.close()
        await replica.stop()
