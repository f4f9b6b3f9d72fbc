"""The process of one replica: `python -m servekit.engine.replica_worker CONTROL LIFELINE`."""

import sys
from collections.abc import Mapping

import msgspec

from servekit.core.call import now
from servekit.core.tracebacks import user_traceback
from servekit.engine import child
from servekit.engine.control import (
    Configured,
    Figures,
    Nothing,
    Started,
    StartReplica,
    Stats,
    Verb,
    Wake,
)
from servekit.engine.replica_host import ReplicaHost
from servekit.engine.table import Table
from servekit.errors import AuthorError
from servekit.wire.sockets import Address


class ReplicaWorker:
    """The supervisor's verbs over a `ReplicaHost`."""

    def __init__(self, supervisor: child.Supervisor) -> None:
        self._supervisor = supervisor
        self._host: ReplicaHost | None = None
        self.folder = ""
        self.verbs: Mapping[str, Verb] = {
            "start": self._start,
            "table": self._table,
            "stats": self._stats,
            "metrics": self._metrics,
            "configure": self._configure,
            "drain": self._drain,
        }

    async def _start(self, body: bytes) -> Started:
        order = msgspec.msgpack.decode(body, type=StartReplica)
        began = now()
        self.folder = order.folder
        sys.path[:0] = [folder for folder in order.search_path if folder not in sys.path]
        host = self._host = ReplicaHost(
            order.spec, replica=order.replica, on_starved=self._starved, jobs=order.jobs
        )
        host.update(order.table)
        try:
            [address] = await host.start(Address(order.address))
        except Exception as error:  # noqa: BLE001  (whatever user code raises goes to the author)
            cause = error.__cause__ if isinstance(error, AuthorError) else error
            return Started(error=str(error), traceback=user_traceback(cause or error))
        return Started(address=address.text, load_s=now() - began)

    def _starved(self, service: str) -> None:
        self._supervisor.tell("wake", Wake(service))

    async def _table(self, body: bytes) -> Nothing:
        if self._host is not None:  # else the order to start brings a newer one
            self._host.update(msgspec.msgpack.decode(body, type=Table))
        return Nothing()

    async def _stats(self, _: bytes) -> Stats:
        # One that leaves may not even have begun to load.
        return self._host.stats() if self._host else Stats(rss=child.resident_bytes())

    async def _metrics(self, _: bytes) -> Figures:
        return Figures(self._host.metrics() if self._host else ())

    async def _configure(self, body: bytes) -> Configured:
        # Before the order to start there is nothing to do: it brings the latest.
        return await self._host.on_configure(body) if self._host is not None else Configured()

    async def _drain(self, _: bytes) -> Nothing:
        if self._host is not None:
            await self._host.drain()
        return Nothing()

    async def stop(self) -> None:
        """Run the tear-down hooks, close the sockets, remove the socket file."""
        if self._host is not None:
            await self._host.stop()


if __name__ == "__main__":
    child.run(ReplicaWorker, int(sys.argv[1]), int(sys.argv[2]), role="replica")
