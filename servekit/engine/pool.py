"""The replicas of one service: as many as wanted, of the wanted revision, restarted when they die.

A pool only ever moves from what is to what is wanted; every change (a death, a new number, a new
revision) wakes the same loop. New replicas join the routing table before old ones leave it, and
those that leave finish their calls, so neither a restart nor a new revision loses any.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from servekit.core.aio import Tasks
from servekit.core.call import now
from servekit.engine.member import Member, State
from servekit.engine.scaler import Scaler
from servekit.engine.table import ServiceTargets
from servekit.errors import AuthorError, ResourceError, SetupError
from servekit.observe.log import get_logger
from servekit.spec.app import ServiceSpec
from servekit.spec.policy import Autoscale

_log = get_logger("servekit.supervisor")

_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_PROVEN_S = 10.0
"""A replica that lived this long ends the back-off."""
_DOWN_AFTER = 3
"""Failures in a row after which calls are refused instead of held."""
KILL_AFTER_S = 6.0
"""A process that did not answer for this long, in seconds, is killed."""
_END_S = 1.0
"""What a replica that has no calls on board gets to end by itself."""

DEFAULT_TARGET_ONGOING = 10.0

Spawn = Callable[[ServiceSpec], Awaitable[Member]]


class Pool:
    """One service's replicas.

    Args:
        spec: The service.
        spawn: Starts a process for a replica of a spec.
        changed: Called when the routing table has to change.
        turn: Waits until a replica may load, which it does within the context.
        drain_s: Longest wait for calls of a replica that leaves.
        start_timeout_s: Longest wait for a replica to become ready.

    Attributes:
        spec: The wanted revision.
        desired: The wanted number.
        members: All replicas that have not ended.
        waiting: Calls that wait for a replica, in all processes.
        restarts: Replicas started in place of one that died, by cause.
        closing: What dies now is not started again.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        spawn: Spawn,
        changed: Callable[[], None],
        turn: Callable[[ServiceSpec], AbstractAsyncContextManager[None]],
        *,
        drain_s: float,
        start_timeout_s: float,
    ) -> None:
        self._spawn = spawn
        self._changed = changed
        self._turn = turn
        self._drain_s = drain_s
        self._start_timeout_s = start_timeout_s
        self._tasks = Tasks()
        self._wake = asyncio.Event()
        self._failures = 0
        self._retry_at = 0.0
        self._scaler: Scaler | None = None
        self._finished = 0
        self.closing = False
        self.members: list[Member] = []
        self.restarts: dict[str, int] = {}
        self.desired = 0
        self.waiting = 0
        self.adopt(spec)

    # -- wanted ------------------------------------------------------------------------------

    def adopt(self, spec: ServiceSpec) -> None:
        """Want this revision from now on; `prepare` it first to be sure that it starts."""
        policy = spec.replicas
        self.spec = spec
        self._promote()
        if isinstance(policy, Autoscale):
            before = self.desired
            self._scaler = Scaler(policy, target=policy.target_ongoing or default_target(spec))
            self.desired = min(max(before, policy.min), policy.max) if before else policy.start
        else:
            self._scaler = None
            self.desired = policy
        self._wake.set()

    def scale(self, time: float) -> None:
        """Let the load decide about the number, where the service says so."""
        if self._scaler is None:
            return
        alive = self._alive()
        finished = sum(m.stats.finished for m in alive)
        rate = max(0.0, float(finished - self._finished))
        self._finished = finished
        capacities = [m.stats.capacity_per_s for m in alive if m.stats.capacity_per_s]
        wanted = self._scaler.observe(
            time,
            ongoing=sum(m.stats.ongoing for m in alive) + self.waiting,
            rate_per_s=rate,
            capacity_per_s=min(capacities, default=None),
            replicas=len(alive),
        )
        if wanted != self.desired:
            _log.info("scaling", service=self.spec.name, replicas=len(alive), to=wanted)
            self.desired = wanted
            self._wake.set()

    def wake(self, time: float) -> None:
        """Start a replica for the first call of a sleeping service."""
        if self._scaler is not None and not self.desired:
            self.desired = self._scaler.wake(time)
            self._wake.set()

    # -- is ----------------------------------------------------------------------------------

    def _alive(self) -> list[Member]:
        return [m for m in self.members if m.state not in (State.DRAINING, State.ENDED)]

    def targets(self) -> ServiceTargets:
        """Return what the routing table says of this service."""
        ready = tuple(m.target for m in self.members if m.state is State.READY)
        if ready:
            return ServiceTargets(ready, "up")
        if self._failures >= _DOWN_AFTER:
            return ServiceTargets((), "down", max(1.0, self._retry_at - now()))
        return ServiceTargets((), "starting" if self.desired else "asleep")

    def _promote(self) -> None:
        """Let the replicas of the wanted revision take calls."""
        for member in self.members:
            if member.state is State.STANDBY and member.spec.revision == self.spec.revision:
                member.state = State.READY
        self._changed()

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the wanted number of replicas; returns when all are ready.

        Raises:
            SetupError: One could not start.
        """
        starts = [asyncio.ensure_future(self.prepare(self.spec)) for _ in range(self.desired)]
        try:
            await asyncio.gather(*starts)
        except AuthorError:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        self._promote()
        self._tasks.spawn(self._reconcile(), name=f"pool {self.spec.name}")

    async def prepare(self, spec: ServiceSpec) -> Member:
        """Start one replica of a revision; it takes calls when the revision is adopted.

        Raises:
            SetupError: It could not start; nothing is left of it.
            ResourceError: There is no room for it.
        """
        async with self._turn(spec):
            member = await self._spawn(spec)
            self.members.append(member)
            self._tasks.spawn(self._attend(member), name=f"attend {member.id}")
            try:
                started = await member.start(self._start_timeout_s)
            except BaseException:
                member.state = State.ENDED
                await member.end(_END_S)
                raise
        _log.info("replica ready", replica=member.id, took_s=round(started.load_s, 2))
        return member

    async def _reconcile(self) -> None:
        """Move towards what is wanted, step by step."""
        while not self.closing:
            self._wake.clear()
            alive = self._alive()
            current = [m for m in alive if m.spec.revision == self.spec.revision]
            old = [m for m in alive if m.spec.revision != self.spec.revision]
            ready = sum(m.state is State.READY for m in current)
            self._retire(old, ready + len(old) - self.desired)
            if len(current) < self.desired:
                await self._start_one()
                continue
            # Starting ones hold no calls yet, so they are the first to go.
            current.sort(key=lambda m: (m.state is not State.STARTING, m.ready_at))
            self._retire(current, len(current) - self.desired)
            await self._wake.wait()

    async def _start_one(self) -> None:
        delay = self._retry_at - now()
        if delay > 0:
            try:
                async with asyncio.timeout(delay):
                    await self._wake.wait()
            except TimeoutError:
                pass
            else:
                return
        try:
            await self.prepare(self.spec)
            self._promote()
        except SetupError as error:
            _log.error("replica failed to start", why=error.message, traceback=error.trace)
            self._failed("setup")
        except ResourceError as error:
            _log.error("no room for a replica", service=self.spec.name, why=str(error))
            self._failed("resources")
        self._changed()

    def _retire(self, members: list[Member], count: int) -> None:
        for member in members[: max(0, count)]:
            member.state = State.DRAINING
            self._changed()
            self._tasks.spawn(self._let_go(member), name=f"drain {member.id}")

    async def _let_go(self, member: Member) -> None:
        await member.drain(self._drain_s)
        _log.info("replica drained", replica=member.id)

    def _failed(self, cause: str) -> None:
        self.restarts[cause] = self.restarts.get(cause, 0) + 1
        delay = _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
        self._failures += 1
        self._retry_at = now() + delay

    async def _attend(self, member: Member) -> None:
        """Watch one replica until it ends, and say why it did."""
        cause = await asyncio.shield(member.process.ended)
        was, member.state = member.state, State.ENDED
        if member in self.members:
            self.members.remove(member)
        if was in (State.STANDBY, State.READY, State.UNREADY) and not self.closing:
            _log.error("replica died", replica=member.id, cause=cause, pid=member.process.pid)
            if now() - member.ready_at > _PROVEN_S:
                self._failures = 0
            self._failed("killed" if "killed" in cause else "exit")
            self._wake.set()
        self._changed()

    async def check(self) -> None:
        """Probe all replicas; take those that are unwell out of the table, end those that hang."""
        members = [m for m in self.members if m.state in (State.READY, State.UNREADY)]
        await asyncio.gather(*(m.check() for m in members))
        for member in members:
            if member.state not in (State.READY, State.UNREADY):
                continue
            well = State.UNREADY if member.trouble else State.READY
            if member.state is not well:
                member.state = well
                _log.warning("replica health", replica=member.id, state=well, why=member.trouble)
                self._changed()
            if well is State.READY and now() - member.ready_at > _PROVEN_S:
                self._failures = 0
            if member.failing_since and now() - member.failing_since > KILL_AFTER_S:
                _log.error("replica hangs, killing it", replica=member.id)
                self._tasks.spawn(member.end(0.0), name=f"kill {member.id}")

    async def close(self) -> None:
        """Drain all replicas and end them."""
        self.closing = True
        # Those that start, or failed to, hold no calls, and may be busy with their set-up for long.
        ends = [
            m.end(_END_S) if m.state in (State.STARTING, State.ENDED) else m.drain(self._drain_s)
            for m in self.members
        ]
        for member in self.members:
            member.state = State.DRAINING
        await asyncio.gather(*ends)
        await self._tasks.close()


def default_target(spec: ServiceSpec) -> float:
    """Return the calls on board that one replica should have when the policy does not say."""
    sizes = [e.batch.max_size for e in spec.endpoints if e.batch is not None]
    if sizes:
        return float(max(sizes))
    return float(spec.limits.max_ongoing or DEFAULT_TARGET_ONGOING)
