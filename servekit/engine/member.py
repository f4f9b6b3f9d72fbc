"""One replica as the supervisor sees it: its process, its state, its health, its end."""

import asyncio
import contextlib
from collections.abc import Mapping
from enum import StrEnum

from servekit.core.call import now
from servekit.engine.control import Health, Nothing, Started, StartReplica, Stats, Verb, ask
from servekit.engine.process import Process
from servekit.engine.table import Target
from servekit.errors import CallError, SetupError, WireError
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


class Member:
    """One replica.

    Args:
        order: What it is to become.
        process: Its process.

    Attributes:
        state: Where it is in its life.
        ready_at: When it became ready; 0 before.
        stats: Its latest figures.
        trouble: What its health hooks said last; "" when well.
    """

    def __init__(self, order: StartReplica, process: Process) -> None:
        self._order = order
        self._probe: Connection | None = None
        self.spec = order.spec
        self.process = process
        self.id = order.replica
        self.state = State.STARTING
        self.ready_at = 0.0
        self.failing_since: float | None = None
        self.stats = Stats()
        self.trouble = ""

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
            self.process.ask("start", self._order, answer=Started, timeout_s=timeout_s)
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
        self.state, self.ready_at = State.STANDBY, now()
        return started

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
            self.stats = await self.process.ask("stats", answer=Stats, timeout_s=_PROBE_TIMEOUT_S)
        except (CallError, WireError, OSError) as error:
            self.failing_since = self.failing_since or now()
            self.trouble = f"does not answer: {error}"
            return
        self.failing_since = (self.failing_since or now()) if health.live else None
        self.trouble = health.live or health.ready

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
) -> Member:
    """Start a replica's process; it waits for its order."""
    process = await Process.spawn(
        order.replica,
        "servekit.engine.replica_worker",
        verbs=verbs,
        env={**order.spec.environment, **env},
    )
    return Member(order, process)
