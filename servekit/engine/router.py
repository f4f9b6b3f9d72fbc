"""From a service's name to one of its replicas: choose, hold, send, and send again when safe.

The router follows the table that the supervisor pushes, keeps one connection to every replica in
it, and picks by power of two choices on the estimated completion time (Mitzenmacher 2001), from
figures that ride on each reply. A call that finds no replica waits within its deadline; one whose
replica was lost goes to another if it had not started, or may run twice.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from random import randrange

from servekit.core.aio import Tasks
from servekit.core.call import Call, Reply, now
from servekit.engine.table import ServiceTargets, Table, Target
from servekit.errors import (
    DeadlineExceeded,
    NotFound,
    Overloaded,
    ReplicaLost,
    Unavailable,
    WireError,
    suggest,
)
from servekit.observe.log import get_logger
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, connect

_log = get_logger("servekit.router")

MAX_HELD = 1024
"""Calls of one service that may wait for a replica."""
_FRESH_S = 1.0
"""How long after its last call a replica's figures are held to be true, beside what they say."""
_RECONNECT_S = (0.02, 0.1, 0.5, 1.0)


class Router:
    """A `Handler` over all services of a table.

    Args:
        hello: What replicas are told about this process.
        secret: What both sides must prove to know where the address is TCP.
        on_starved: Called with a service's name when a call begins to wait for a replica.
    """

    def __init__(
        self,
        hello: Hello,
        *,
        secret: bytes = b"",
        on_starved: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._hello = hello
        self._secret = secret
        self._on_starved = on_starved
        self._tasks = Tasks()
        self._services: dict[str, _Service] = {}
        self._serial = -1

    def update(self, table: Table) -> None:
        """Follow a table; an older one than the current is ignored."""
        if table.serial <= self._serial:
            return
        self._serial = table.serial
        for name, targets in table.services.items():
            service = self._services.get(name)
            if service is None:
                service = self._services[name] = _Service(name)
            for target in service.follow(targets, proves=table.proves):
                service.links[target.replica] = link = _Link(target)
                link.task = self._tasks.spawn(self._keep(service, link), name=f"link {target}")
            service.changed()
            if service.held and not targets.targets:
                self._on_starved(name)  # the replica that they waited for has left
        for name in self._services.keys() - table.services.keys():
            self._services.pop(name).end()

    async def __call__(self, call: Call) -> Reply:
        """Answer a call through one of its service's replicas.

        Raises:
            CallError: As the replica answered; `Unavailable` or `Overloaded` when there is none
                to take it, `ReplicaLost` when it was lost and may not run again.
        """
        service = self._services.get(call.service)
        if service is None:
            raise NotFound(
                f"no service {call.service!r} runs here.{suggest(call.service, [*self._services])}",
                started=False,
            )
        while True:
            connection = service.pick(call) or await self._hold(service, call)
            try:
                return await connection.call(call)
            except Unavailable as error:
                if error.started or error.reason != "draining":
                    raise
            except ReplicaLost as error:
                if error.started:
                    if not call.idempotent or call.attempt >= call.retries:
                        raise
                    call.attempt += 1

    def statistics(self) -> dict[str, int]:
        """Return how many calls wait for a replica, by service."""
        return {name: len(s.held) for name, s in self._services.items() if s.held}

    def unready(self) -> dict[str, str]:
        """Return the services that have no replica to take a call, and their state."""
        return {
            name: "connecting" if service.state == "up" else service.state
            for name, service in self._services.items()
            if service.state != "asleep" and not service.usable()
        } or ({} if self._services else {"app": "starting"})

    def connections(self) -> dict[str, Connection]:
        """Return the connected replicas, by id."""
        return {
            link.target.replica: link.connection
            for service in self._services.values()
            for link in service.links.values()
            if link.connection is not None
        }

    async def close(self) -> None:
        """End all connections."""
        for service in self._services.values():
            service.end()
        await self._tasks.close()

    async def _hold(self, service: "_Service", call: Call) -> Connection:
        """Wait until the service has a replica, within the call's deadline."""
        while True:
            if service.state == "down":
                raise Unavailable(
                    f"{service.name} has no replica that works",
                    reason="no_replica",
                    retry_after_s=service.retry_after_s,
                    started=False,
                )
            if len(service.held) >= MAX_HELD:
                raise Overloaded(
                    f"{MAX_HELD} calls wait for {service.name} to become ready",
                    reason="no_replica",
                    retry_after_s=1.0,
                    started=False,
                )
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            timer = None
            if call.deadline is not None:
                timer = loop.call_later(max(0.0, call.deadline - now()), _expire, waiter)
            service.held.append(waiter)
            self._on_starved(service.name)
            try:
                await waiter
            finally:
                if timer is not None:
                    timer.cancel()
                if waiter in service.held:
                    service.held.remove(waiter)
            if (connection := service.pick(call)) is not None:
                return connection

    async def _keep(self, service: "_Service", link: "_Link") -> None:
        """Hold a connection to one replica, for as long as it is there."""
        attempt = 0
        address = Address(link.target.address)
        while not link.doubted:
            try:
                connection = await connect(address, partial(self._make, address))
            except (OSError, WireError) as error:
                _log.debug("replica not reached", replica=link.target.replica, error=str(error))
                await asyncio.sleep(_RECONNECT_S[min(attempt, len(_RECONNECT_S) - 1)])
                attempt += 1
                continue
            attempt = 0
            link.connection = connection
            service.changed()
            try:
                await asyncio.shield(connection.lost)
            finally:
                link.connection = None
                if not connection.lost.done():
                    finish = self._tasks.spawn(_finish(connection), name="finish")
                    finish.add_done_callback(partial(_abort, connection))  # also if cut short
        service.links.pop(link.target.replica, None)

    def _make(self, address: Address) -> Connection:
        return Connection(self._hello, client=True, secret=address.proof(self._secret))


async def _finish(connection: Connection) -> None:
    """Let a replica that left the table answer what it has, then hang up."""
    await connection.settled()
    await connection.close()


def _abort(connection: Connection, _: asyncio.Task[None]) -> None:
    connection.abort()


def _expire(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_exception(
            DeadlineExceeded("the deadline passed before a replica was ready", started=False)
        )


class _Link:
    """One replica of the table.

    Attributes:
        doubted: The table does not have it any more, but its connection is there.
    """

    __slots__ = ("connection", "doubted", "target", "task")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.doubted = False
        self.connection: Connection | None = None
        self.task: asyncio.Task[None] | None = None


class _Service:
    """The router's view of one service."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = "starting"
        self.retry_after_s = 1.0
        self.unready: tuple[str, ...] = ()
        self.links: dict[str, _Link] = {}
        self.held: deque[asyncio.Future[None]] = deque()
        self._usable: list[Connection] = []

    def follow(self, targets: ServiceTargets, *, proves: bool = True) -> list[Target]:
        """Drop the links that are not in the table any more; returns the targets that are new."""
        self.state, self.retry_after_s = targets.state, targets.retry_after_s
        self.unready = targets.unready
        wanted = {target.replica: target for target in targets.targets}
        for replica, link in [*self.links.items()]:
            link.doubted = replica not in wanted
            if not link.doubted or (link.connection is not None and not proves):
                continue
            del self.links[replica]
            if link.task is not None:
                link.task.cancel()
        return [target for replica, target in wanted.items() if replica not in self.links]

    def end(self) -> None:
        """Drop all links, and refuse the calls that wait for one."""
        self.follow(ServiceTargets(state="down"))
        self.changed()

    def changed(self) -> None:
        """Let every held call look again."""
        if self.usable() or self.state == "down":
            for waiter in self.held:
                if not waiter.done():
                    waiter.set_result(None)

    def usable(self) -> list[Connection]:
        """Look which replicas take calls."""
        self._usable = [
            link.connection
            for replica, link in self.links.items()
            if link.connection is not None
            and link.connection.usable
            and replica not in self.unready
        ]
        return self._usable

    def pick(self, call: Call) -> Connection | None:
        """Return a replica that takes calls, if there is one."""
        while (chosen := self._choose(call)) is not None and not chosen.usable:
            self.usable()  # it has left since the last look
        return chosen

    def _choose(self, call: Call) -> Connection | None:
        """Return the better of two random replicas, or the one that an affinity key names."""
        usable = self._usable
        count = len(usable)
        if count < 2:
            return usable[0] if usable else None
        if call.affinity_key:
            key = call.affinity_key.encode()
            return max(usable, key=lambda c: blake2b(key + c.peer.replica.encode()).digest())
        first = randrange(count)  # noqa: S311
        second = randrange(count - 1)  # noqa: S311
        one, other = usable[first], usable[second + (second >= first)]
        if completion_time(other) < completion_time(one):
            one, other = other, one
        return other if is_stale(other) else one


def completion_time(connection: Connection) -> float:
    """Estimate the seconds until a new call to that replica would be answered.

    The replica's own count covers all its callers but is as old as its last reply; ours is fresh
    but covers only this process. The larger is nearer to the truth.
    """
    load = connection.load
    return (max(load.ongoing, connection.ongoing) + 1) * (load.unit_s or 1e-6)


def is_stale(connection: Connection) -> bool:
    """Return whether a replica's figures are of work that is long done.

    Only its replies bring new ones: who stays away because of a slow first call, or of a queue
    that others made, would stay away for good.
    """
    if connection.ongoing:
        return False
    return now() - connection.called_at > _FRESH_S + completion_time(connection)
