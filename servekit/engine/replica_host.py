"""One replica behind its socket: what a replica's process holds, whichever engine started it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec

from servekit.core.call import Call, Reply
from servekit.core.tracebacks import user_traceback
from servekit.engine import child
from servekit.engine.control import (
    SERVICE,
    Configured,
    Figures,
    Health,
    Stats,
    Verb,
    handler,
)
from servekit.engine.router import Router
from servekit.engine.table import Table
from servekit.errors import NotFound, SetupError
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
        secret: What callers over TCP must prove to know.
        verbs: What may be asked of this process besides its own verbs; see `control.py`.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        *,
        replica: str,
        on_starved: Callable[[str], None],
        jobs: str = "",
        secret: bytes = b"",
        verbs: Mapping[str, Verb] | None = None,
    ) -> None:
        self._spec = spec
        self._hello = Hello(service=spec.name, replica=replica, version=spec.version)
        self._jobs = jobs
        self._secret = secret
        self._router = Router(self._hello, secret=secret, on_starved=on_starved)
        self._group: Group | None = None
        self._store: SqliteStore | None = None
        self._listeners: list[Listener] = []
        self._configuring = asyncio.Lock()
        own: dict[str, Verb] = {
            "health": self._on_health,
            "stats": self._on_stats,
            "metrics": self._on_metrics,
            "configure": self.on_configure,
        }
        self._control = handler(own | dict(verbs or {}))

    async def start(self, *addresses: Address, cls: type | None = None) -> tuple[Address, ...]:
        """Load the service, and take calls; returns where, with the ports of those that were 0.

        Args:
            *addresses: Where to listen.
            cls: The service's class; None loads it by its name.

        Raises:
            AuthorError: It can't be loaded, or its set-up raised.
            OSError: An address can't be bound.
        """
        spec = self._spec
        found = definition(cls or load(spec.target))
        if self._jobs:
            self._store = SqliteStore(self._jobs)
            await self._store.open()
        group = self._group = Group(
            found, spec, replica_id=self._hello.replica, store=self._store, outward=self._router
        )
        await group.start(self._handle_of)
        if self._spec is not spec:
            await group.configure(self._spec)
        for address in addresses:
            listener = Listener(address, partial(self._accept, address, group))
            self._listeners.append(listener)
            await listener.open()
        child.settle_memory()
        return tuple(listener.address for listener in self._listeners)

    def _accept(self, address: Address, group: Group) -> Connection:
        return Connection(
            self._hello,
            client=False,
            handler=self._handle,
            secret=address.proof(self._secret),
            own_load=group.own.load,
        )

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
            return self._control(call)
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

    async def health(self) -> Health:
        """Ask the user's hooks."""
        assert self._group is not None
        return Health(live=await self._group.check("live"), ready=await self._group.check("ready"))

    def metrics(self) -> Snapshot:
        """Return the figures for `/metrics`."""
        return self._group.metrics() if self._group is not None else ()

    async def drain(self) -> None:
        """Take no new calls and jobs; returns when those on board have ended."""
        if self._group is not None:
            self._group.drain()
        await asyncio.gather(*(listener.drain() for listener in self._listeners))
        if self._group is not None:
            await self._group.idle()

    async def stop(self) -> None:
        """Run the tear-down hooks, close the sockets, remove the socket files."""
        for listener in self._listeners:
            await listener.close()
        if self._group is not None:
            await self._group.stop()
        if self._store is not None:
            await self._store.close()
        await self._router.close()

    # -- what may be asked over its sockets --------------------------------------------------

    async def on_configure(self, body: bytes) -> Configured:
        """Take over what changes without a new process; while it loads, once it has."""
        self._spec = msgspec.msgpack.decode(body, type=ServiceSpec)
        async with self._configuring:
            if self._group is not None and self._group.own.state == "ready":
                try:
                    await self._group.configure(self._spec)
                except SetupError as error:
                    return Configured(str(error), user_traceback(error.__cause__ or error))
        return Configured()

    async def _on_health(self, _: bytes) -> Health:
        return await self.health()

    async def _on_stats(self, _: bytes) -> Stats:
        return self.stats()

    async def _on_metrics(self, _: bytes) -> Figures:
        return Figures(self.metrics())
