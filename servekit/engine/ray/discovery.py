"""From Ray Serve's tables to ours: who answers for which service, in every process of an app.

Ray Serve pushes a deployment's replicas to whoever has a handle to it, and `hook.py` gets to see
them; what a replica said of itself (`record_replica_metadata`) has its addresses. A replica on
this node is reached by its unix socket, others by TCP. That a replica is missing proves nothing:
while Serve changes a deployment its table may be empty for a moment, so `Table.proves` is false.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import RunningReplica

from servekit.engine.ray.orders import States
from servekit.engine.ray.process import handle
from servekit.engine.table import ServiceTargets, Table, Target
from servekit.observe.log import get_logger

_log = get_logger("servekit.discovery")

_WAKE_S = 1.0
"""Time between two calls that wake the same service."""

_listening: "dict[tuple[str, str], Callable[[tuple[Target, ...]], None]]" = {}
"""Who wants to know of a deployment, by app and name; a process has one `Discovery` per app."""


def heard(app: str, deployment: str, replicas: Iterable[RunningReplica]) -> None:
    """Take all replicas of a deployment that run; called on a thread of Ray's."""
    if (listener := _listening.get((app, deployment))) is not None:
        own = ray.get_runtime_context().get_node_id()
        found = [_target(replica, own) for replica in replicas]
        listener(tuple(target for target in found if target is not None))


def _target(replica: RunningReplica, own_node: str) -> Target | None:
    said = replica.replica_metadata
    if "tcp" not in said:
        return None  # it is about to say so
    near = replica.node_id == own_node and said.get("unix")
    return Target(said["replica"], said["unix"] if near else said["tcp"], said["version"])


class Discovery:
    """Follows some services of an app. All methods belong to the loop's thread.

    Args:
        app: The Serve application.
        update: Takes each new routing table.
    """

    def __init__(self, app: str, update: Callable[[Table], None]) -> None:
        self._app = app
        self._update = update
        self._loop = asyncio.get_running_loop()
        self._handles: dict[str, DeploymentHandle[Any]] = {}
        self._targets: dict[str, tuple[Target, ...]] = {}
        self._asleep: set[str] = set()
        self._states = States({})
        self._serial = 0
        self._woken_at: dict[str, float] = {}

    def follow(self, services: Mapping[str, bool]) -> None:
        """Follow these services from now on, and no others.

        Args:
            services: By name, whether one may sleep: without a replica it does, and a call wakes it.
        """
        self._asleep = {name for name, may_sleep in services.items() if may_sleep}
        for name in self._handles.keys() - services.keys():
            self._handles.pop(name).shutdown()
            del self._targets[name], _listening[self._app, name]
        for name in services.keys() - self._handles.keys():
            self._targets[name] = ()
            _listening[self._app, name] = partial(self._pass_on, name)
            self._handles[name] = handle(name, self._app)
        self._publish()

    def take(self, states: States) -> None:
        """Take what the controller says."""
        if states != self._states:
            self._states = states
            self.follow(states.services)

    def wake(self, service: str) -> None:
        """Have Ray Serve start a first replica of a service that sleeps."""
        now = self._loop.time()
        if service not in self._asleep or self._targets[service]:
            return
        if now - self._woken_at.get(service, -_WAKE_S) >= _WAKE_S:
            self._woken_at[service] = now
            _log.info("waking", service=service)
            self._handles[service].wake.remote()

    def close(self) -> None:
        """Follow nothing any more."""
        self.follow({})

    def _pass_on(self, service: str, targets: tuple[Target, ...]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._heard, service, targets)

    def _heard(self, service: str, targets: tuple[Target, ...]) -> None:
        if service in self._handles and targets != self._targets[service]:
            self._targets[service] = targets
            self._publish()

    def _publish(self) -> None:
        self._serial += 1
        table = {service: self._of(service) for service in self._handles}
        self._update(Table(self._serial, table, proves=False))

    def _of(self, service: str) -> ServiceTargets:
        targets, unready = self._targets[service], self._states.unready
        if not targets and service in self._states.down:
            return ServiceTargets((), "down")
        if targets and all(target.replica in unready for target in targets):
            return ServiceTargets(targets, "starting", unready=unready)
        if service in self._asleep:
            return ServiceTargets(targets, "asleep", unready=unready)
        return ServiceTargets(targets, "up" if targets else "starting", unready=unready)
