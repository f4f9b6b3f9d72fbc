"""One replica as the supervisor sees it: its process, its state, its health, its end."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from enum import StrEnum

import msgspec

from servekit.core.call import now
from servekit.engine.control import (
    Configured,
    Health,
    Nothing,
    ProcessStatus,
    Started,
    StartReplica,
    Stats,
    Verb,
    ask,
)
from servekit.engine.process import Process
from servekit.engine.table import Table, Target
from servekit.errors import CallError, SetupError, WireError
from servekit.spec.app import ServiceSpec
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, connect


class State(StrEnum):
    """Where a member is in its life."""

    STARTING = "starting"
    STANDBY = "standby"
    READY = "ready"
    UNREADY = "unready"
    DRAINING = "draining"
    ENDED = "ended"


_PROBE_TIMEOUT_S = 2.0
_STALE_S = 2.0
"""Figures of a replica that does not answer count no longer than this: two periods."""


class Member:
    """One replica.

    Args:
        order: What it is to become.
        process: Its process.
        table: Returns the routing table.

    Attributes:
        state: Where it is in its life.
        ready_at: When it became ready; 0 before.
        stats: Its latest figures; what it has on board is forgotten when it does not answer.
        rate_per_s: Calls that it answers per second.
        trouble: What its health hooks said last; "" when well.
    """

    def __init__(
        self, order: StartReplica, process: Process, table: Callable[[], Table] = Table
    ) -> None:
        self._order = order
        self._table = table
        self._probe: Connection | None = None
        self.spec = order.spec
        self.process = process
        self.id = order.replica
        self.state = State.STARTING
        self.ready_at = 0.0
        self.failing_since: float | None = None
        self.stats = Stats()
        self.rate_per_s = 0.0
        self.trouble = ""
        self._counted_at = 0.0

    @property
    def target(self) -> Target:
        """Return what the routing table says of it."""
        return Target(self.id, self._order.address, self.spec.version)

    async def start(self, timeout_s: float) -> Started:
        """Have it load and set up the service; returns when it could take calls.

        Raises:
            SetupError: User code raised, the process died, or it took too long.
        """
        asking = asyncio.ensure_future(
            self.process.ask("start", self._to_start, answer=Started, timeout_s=timeout_s)
        )
        asking.add_done_callback(_seen)
        await asyncio.wait([asking, self.process.ended], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()
            raise SetupError(f"{self.id} ended while it started: {self.process.ended.result()}")
        try:
            started = asking.result()
        except CallError as error:
            cause = error.message
            if self.process.ended.done():
                cause = self.process.ended.result()
            raise SetupError(f"{self.id} did not start: {cause}") from error
        if started.error:
            raise SetupError(started.error, trace=started.traceback)
        if self.state is State.STARTING:  # else it was told to leave meanwhile
            self.state, self.ready_at = State.STANDBY, now()
        return started

    def _to_start(self) -> StartReplica:
        # While the process came up the table may have changed, and it was told of nothing.
        return msgspec.structs.replace(self._order, table=self._table())

    def adopt(self, spec: ServiceSpec) -> None:
        """Be of this spec; of what changes only with a process it differs in nothing."""
        self.spec = spec
        self._order = msgspec.structs.replace(self._order, spec=spec)

    async def configure(self, spec: ServiceSpec, timeout_s: float) -> None:
        """Have it take over what changes without a new process.

        Raises:
            SetupError: User code raised, or it took too long.
        """
        self.adopt(spec)
        try:
            done = await self.process.ask("configure", spec, answer=Configured, timeout_s=timeout_s)
        except CallError as error:
            if self.process.ended.done():
                return  # the one in its place starts with it
            raise SetupError(f"{self.id} did not take other arguments: {error}") from error
        if done.error:
            raise SetupError(done.error, trace=done.traceback)

    async def check(self) -> None:
        """Probe it through its data socket, and take its figures.

        Sets `trouble` to what is wrong, and `failing_since` while it does not answer at all.
        """
        try:
            if self._probe is None or self._probe.lost.done():
                hello = Hello(replica="supervisor")
                self._probe = await connect(
                    Address(self._order.address),
                    lambda: Connection(hello, client=True),
                    timeout_s=_PROBE_TIMEOUT_S,
                )
            health = await ask(self._probe, "health", answer=Health, timeout_s=_PROBE_TIMEOUT_S)
            await self._count()
        except (CallError, WireError, OSError) as error:
            self.failing_since = self.failing_since or now()
            self.trouble = f"does not answer: {error}"
            self._forget()
            return
        self.failing_since = (self.failing_since or now()) if health.live else None
        self.trouble = health.live or health.ready

    async def count(self) -> None:
        """Take its figures only: one that drains takes no probes, but its calls may still wait."""
        try:
            await self._count()
        except CallError:
            self._forget()

    async def _count(self) -> None:
        stats = await self.process.ask("stats", answer=Stats, timeout_s=_PROBE_TIMEOUT_S)
        time = now()
        finished = stats.finished - self.stats.finished
        self.rate_per_s = finished / max(time - (self._counted_at or self.ready_at), 1e-3)
        self.stats, self._counted_at = stats, time

    def _forget(self) -> None:
        """Let figures that are too old say nothing about the load."""
        if now() - (self._counted_at or self.ready_at) >= _STALE_S:
            self.stats = Stats(finished=self.stats.finished, rss=self.stats.rss)
            self.rate_per_s = 0.0

    def status(self) -> ProcessStatus:
        """Return what `servekit status` shows of it."""
        return ProcessStatus(
            id=self.id,
            pid=self.process.pid,
            state=self.state.value,
            ongoing=self.stats.ongoing,
            finished=self.stats.finished,
            rss=self.stats.rss,
            trouble=self.trouble,
        )

    async def drain(self, grace_s: float) -> None:
        """Let it finish what it has, then end it."""
        self.state = State.DRAINING
        if not self.process.ended.done():
            with contextlib.suppress(CallError, WireError):
                await self.process.ask("drain", answer=Nothing, timeout_s=grace_s)
        await self.end(2.0)

    async def end(self, grace_s: float) -> None:
        """End its process."""
        await self.process.stop(grace_s)
        if self._probe is not None:
            await self._probe.close()


def _seen(asking: asyncio.Future[Started]) -> None:
    # When the process ends first, nobody asks for this outcome any more.
    if not asking.cancelled():
        asking.exception()


async def spawn(
    order: StartReplica,
    *,
    verbs: Mapping[str, Verb],
    env: Mapping[str, str],
    table: Callable[[], Table],
) -> Member:
    """Start a replica's process; it waits for its order."""
    process = await Process.spawn(
        order.replica,
        "servekit.engine.replica_worker",
        verbs=verbs,
        env={**order.spec.environment, **env},
    )
    return Member(order, process, table)
