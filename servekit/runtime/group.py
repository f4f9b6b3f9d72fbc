"""All replicas of one process: a service's own, and those of the dependencies that live beside it.

A colocated dependency is a replica like any other, with its own limits, threads, batchers and
figures; only its callers reach it without a wire. It starts before those that need it, and ends
after them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

from servekit.core.call import Handler
from servekit.jobs.store import Store
from servekit.observe.metrics import Snapshot, merge
from servekit.runtime.colocated import Colocated
from servekit.runtime.handle import Options, ServiceHandle
from servekit.runtime.replica import Replica
from servekit.spec.app import ServiceSpec
from servekit.spec.definition import DependencyDefinition, ServiceDefinition

Outside: TypeAlias = Callable[[ServiceDefinition, DependencyDefinition], Awaitable[object | None]]
"""Returns the handle of an owner's dependency, or None for one that lives in the same process."""


class Group:
    """A process's replicas.

    Args:
        definition: The service that the process is of.
        spec: Its settings, and those of the services beside it.
        replica_id: Unique in the app.
        store: Keeps the jobs of their tasks, if they have any.
        outward: Answers the calls that come as arguments of calls.

    Attributes:
        own: The replica of the service itself, which takes the calls from outside.
    """

    def __init__(
        self,
        definition: ServiceDefinition,
        spec: ServiceSpec,
        *,
        replica_id: str,
        store: Store | None = None,
        outward: Handler | None = None,
    ) -> None:
        self._definition = definition
        self._id = replica_id
        self._store = store
        self._specs = {service.name: service for service in spec.together}
        self._replicas: dict[str, Replica] = {}
        self._joints: dict[str, Colocated] = {}
        self.own = Replica(definition, spec, replica_id=replica_id, store=store, outward=outward)

    async def start(self, outside: Outside) -> None:
        """Start all replicas, dependencies first.

        Raises:
            SetupError: User code raised; `stop` ends those that had started.
        """
        await self._start(self._definition, self.own, outside)

    async def _start(self, found: ServiceDefinition, replica: Replica, outside: Outside) -> None:
        handles: dict[str, object] = {}
        for edge in found.dependencies.values():
            handle = await outside(found, edge)
            if handle is None:
                handle = await self._beside(edge, outside)
            handles[edge.attribute] = handle
        self._replicas[replica.service] = replica
        await replica.start(handles)

    async def _beside(self, edge: DependencyDefinition, outside: Outside) -> ServiceHandle:
        target = edge.target
        joint = self._joints.get(target.name)
        if joint is None:
            spec = self._specs[target.name]
            replica = Replica(target, spec, replica_id=self._id, store=self._store)
            await self._start(target, replica, outside)
            joint = self._joints[target.name] = Colocated(replica)
        return ServiceHandle(
            target,
            target.name,
            joint,
            asyncio.get_running_loop(),
            Options(timeout_s=edge.timeout_s, retries=edge.retries),
            colocated=True,
        )

    async def check(self, kind: Literal["live", "ready"]) -> str:
        """Run the health hooks of all replicas; returns "" when well, else what is wrong."""
        for replica in list(self._replicas.values()):  # `stop` may come meanwhile
            if trouble := await replica.check(kind):
                return trouble if replica is self.own else f"{replica.service}: {trouble}"
        return ""

    async def configure(self, spec: ServiceSpec) -> None:
        """Have all replicas take over what changes without a new process.

        Raises:
            SetupError: User code raised.
        """
        for service in spec.together:
            await self._replicas[service.name].configure(service)

    def metrics(self) -> Snapshot:
        """Return the figures of all replicas, each under its service's name."""
        return merge(replica.metrics() for replica in self._replicas.values())

    def drain(self) -> None:
        """Become unready, and begin no more jobs."""
        for replica in self._replicas.values():
            replica.drain()

    async def idle(self) -> None:
        """Wait until no job runs; `drain` it first."""
        for replica in list(self._replicas.values()):
            await replica.idle()

    async def stop(self) -> None:
        """Run the tear-down hooks, those of dependencies last."""
        while self._replicas:
            name, replica = self._replicas.popitem()
            if (joint := self._joints.pop(name, None)) is not None:
                await joint.close()
            await replica.stop()
