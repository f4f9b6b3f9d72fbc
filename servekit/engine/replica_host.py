"""One replica behind its socket: what a replica's process holds, whichever engine started it."""

import asyncio
from collections.abc import Awaitable, Callable

from servekit.core.call import Call, Reply
from servekit.engine import child
from servekit.engine.control import SERVICE, Health, Stats, handler
from servekit.engine.router import Router
from servekit.engine.table import Table
from servekit.errors import NotFound
from servekit.jobs.sqlite import SqliteStore
from servekit.observe.metrics import Snapshot
from servekit.runtime.group import Group
from servekit.runtime.handle import Options, ServiceHandle
from servekit.spec.app import ServiceSpec
from servekit.spec.definition import DependencyDefinition, ServiceDefinition, definition
from servekit.spec.target import load
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, Listener


class ReplicaHost:
    """A service's replica, those beside it, the store of its jobs, and the router to the others.

    Everything but `start` may be called in every phase: an engine asks a replica for its figures,
    or to leave, while it still loads.

    Args:
        spec: The service.
        replica: Unique in the app.
        on_starved: Called with the name of a service of which there is no replica to take a call.
        jobs: File that keeps the jobs of its tasks; "" if it has none.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        *,
        replica: str,
        on_starved: Callable[[str], None],
        jobs: str = "",
    ) -> None:
        self._spec = spec
        self._hello = Hello(service=spec.name, replica=replica, version=spec.version)
        self._jobs = jobs
        self._router = Router(self._hello, on_starved=on_starved)
        self._group: Group | None = None
        self._store: SqliteStore | None = None
        self._listener: Listener | None = None
        self._probe = handler({"health": self._health})

    async def start(self, address: Address) -> Address:
        """Load the service, and take calls; returns where, with the port if that was 0.

        Raises:
            AuthorError: It can't be loaded, or its set-up raised.
            OSError: The address can't be bound.
        """
        spec = self._spec
        found = definition(load(spec.target))
        if self._jobs:
            self._store = SqliteStore(self._jobs)
            await self._store.open()
        group = self._group = Group(
            found, spec, replica_id=self._hello.replica, store=self._store, outward=self._router
        )
        await group.start(self._handle_of)
        replica = group.own
        listener = self._listener = Listener(
            address,
            lambda: Connection(
                self._hello, client=False, handler=self._handle, own_load=replica.load
            ),
        )
        await listener.open()
        child.settle_memory()
        return listener.address

    async def _handle_of(
        self, _: ServiceDefinition, edge: DependencyDefinition
    ) -> ServiceHandle | None:
        if edge.colocate:
            return None
        return ServiceHandle(
            edge.target,
            edge.target.name,
            self._router,
            asyncio.get_running_loop(),
            Options(timeout_s=edge.timeout_s, retries=edge.retries),
            pipelines=True,
        )

    def _handle(self, call: Call) -> Awaitable[Reply]:
        assert self._group is not None
        replica = self._group.own
        if call.service == replica.service:
            return replica(call)
        if call.service == SERVICE:
            return self._probe(call)
        raise NotFound(f"this is a replica of {replica.service}, not {call.service}", started=False)

    def update(self, table: Table) -> None:
        """Follow a routing table."""
        self._router.update(table)

    def stats(self) -> Stats:
        """Return the figures for the scaler and `servekit status`."""
        if self._group is None:
            return Stats(rss=child.resident_bytes())
        replica = self._group.own
        return Stats(
            ongoing=replica.load().ongoing,
            finished=replica.finished,
            capacity_per_s=replica.capacity_per_s(),
            waiting=self._router.statistics(),
            rss=child.resident_bytes(),
        )

    async def _health(self, _: bytes) -> Health:
        group = self._group
        assert group is not None
        return Health(live=await group.check("live"), ready=await group.check("ready"))

    def metrics(self) -> Snapshot:
        """Return the figures for `/metrics`."""
        return self._group.metrics() if self._group is not None else ()

    async def drain(self) -> None:
        """Take no new calls and jobs; returns when those on board have ended."""
        if self._group is not None:
            self._group.drain()
        if self._listener is not None:
            await self._listener.drain()
        if self._group is not None:
            await self._group.idle()

    async def stop(self) -> None:
        """Run the tear-down hooks, close the sockets, remove the socket file."""
        if self._listener is not None:
            await self._listener.close()
        if self._group is not None:
            await self._group.stop()
        if self._store is not None:
            await self._store.close()
        await self._router.close()
