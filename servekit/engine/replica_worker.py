"""The process of one replica: `python -m servekit.engine.replica_worker CONTROL LIFELINE`."""

import asyncio
import sys
from collections.abc import Awaitable, Mapping

import msgspec

from servekit.core.call import Call, Reply, now
from servekit.core.tracebacks import user_traceback
from servekit.engine import child
from servekit.engine.control import (
    SERVICE,
    Figures,
    Health,
    Nothing,
    Started,
    StartReplica,
    Stats,
    Verb,
    Wake,
    handler,
)
from servekit.engine.router import Router
from servekit.engine.table import Table
from servekit.errors import AuthorError, NotFound
from servekit.jobs.sqlite import SqliteStore
from servekit.runtime.group import Group
from servekit.runtime.handle import Options, ServiceHandle
from servekit.spec.definition import DependencyDefinition, ServiceDefinition, definition
from servekit.spec.target import load
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, Listener


class ReplicaWorker:
    """One replica behind a socket, and the router to its dependencies."""

    def __init__(self, supervisor: child.Supervisor) -> None:
        self._supervisor = supervisor
        self._group: Group | None = None
        self._router: Router | None = None
        self._listener: Listener | None = None
        self._store: SqliteStore | None = None
        self.folder = ""
        self._probe = handler({"health": self._health})
        self.verbs: Mapping[str, Verb] = {
            "start": self._start,
            "table": self._table,
            "stats": self._stats,
            "metrics": self._metrics,
            "drain": self._drain,
        }

    async def _start(self, body: bytes) -> Started:
        order = msgspec.msgpack.decode(body, type=StartReplica)
        began = now()
        try:
            await self._become(order)
        except Exception as error:  # noqa: BLE001  (whatever user code raises goes to the author)
            cause = error.__cause__ if isinstance(error, AuthorError) else error
            return Started(error=str(error), traceback=user_traceback(cause or error))
        assert self._listener is not None
        return Started(address=self._listener.address.text, load_s=now() - began)

    async def _become(self, order: StartReplica) -> None:
        self.folder = order.folder
        spec = order.spec
        sys.path[:0] = [folder for folder in order.search_path if folder not in sys.path]
        hello = Hello(service=spec.name, replica=order.replica, version=spec.version)
        router = self._router = Router(hello, on_starved=self._starved)
        router.update(order.table)
        found = definition(load(spec.target))
        if order.jobs:
            self._store = SqliteStore(order.jobs)
            await self._store.open()
        group = self._group = Group(
            found, spec, replica_id=order.replica, store=self._store, outward=router
        )
        await group.start(self._handle_of)
        replica = group.own
        self._listener = Listener(
            Address(order.address),
            lambda: Connection(hello, client=False, handler=self._handle, own_load=replica.load),
        )
        await self._listener.open()
        child.settle_memory()

    async def _handle_of(
        self, _: ServiceDefinition, edge: DependencyDefinition
    ) -> ServiceHandle | None:
        if edge.colocate:
            return None
        assert self._router is not None
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

    def _starved(self, service: str) -> None:
        self._supervisor.tell("wake", Wake(service))

    async def _table(self, body: bytes) -> Nothing:
        if self._router is not None:  # else the order to start brings a newer one
            self._router.update(msgspec.msgpack.decode(body, type=Table))
        return Nothing()

    async def _stats(self, _: bytes) -> Stats:
        group, router = self._group, self._router
        if group is None or router is None:  # it leaves, and has not even begun to load
            return Stats(rss=child.resident_bytes())
        replica = group.own
        return Stats(
            ongoing=replica.load().ongoing,
            finished=replica.finished,
            capacity_per_s=replica.capacity_per_s(),
            waiting=router.statistics(),
            rss=child.resident_bytes(),
        )

    async def _health(self, _: bytes) -> Health:
        group = self._group
        assert group is not None
        return Health(live=await group.check("live"), ready=await group.check("ready"))

    async def _metrics(self, _: bytes) -> Figures:
        return Figures(self._group.metrics() if self._group is not None else ())

    async def _drain(self, _: bytes) -> Nothing:
        if self._group is not None:
            self._group.drain()
        if self._listener is not None:
            await self._listener.drain()
        if self._group is not None:
            await self._group.idle()
        return Nothing()

    async def stop(self) -> None:
        """Run the tear-down hooks, close the sockets, remove the socket file."""
        if self._listener is not None:
            await self._listener.close()
        if self._group is not None:
            await self._group.stop()
        if self._store is not None:
            await self._store.close()
        if self._router is not None:
            await self._router.close()


if __name__ == "__main__":
    child.run(ReplicaWorker, int(sys.argv[1]), int(sys.argv[2]), role="replica")
