"""The replicas of one service: as many as wanted, of the wanted revision, restarted when they die.

A pool only ever moves from what is to what is wanted; every change (a death, a new number, a new
revision) wakes the same loop, which waits for nothing else. New replicas join the routing table
before old ones leave it, and those that leave finish their calls, so neither a restart nor a new
revision loses any.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from servekit.core.aio import Tasks, together
from servekit.core.call import now
from servekit.engine.control import ServiceStatus
from servekit.engine.member import Member, State
from servekit.engine.numbers import bounded, bounds, default_target
from servekit.engine.scaler import Scaler
from servekit.engine.table import ServiceTargets
from servekit.errors import ResourceError, SetupError
from servekit.observe.log import get_logger
from servekit.spec.app import ServiceSpec
from servekit.spec.policy import Autoscale

_log = get_logger("servekit.supervisor")

_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_PROVEN_S = 10.0
_PROVEN_CALLS = 100
"""A replica that lived this long, or answered so many calls before it died, ends the back-off."""
_DOWN_AFTER = 3
"""Failures in a row after which calls are refused instead of held."""
KILL_AFTER_S = 6.0
"""A process that did not answer for this long, in seconds, is killed."""
_ROOM_S = 1.0
"""How long until another look whether there is room for a replica."""
_END_S = 1.0
"""What a replica that has no calls on board gets to end by itself."""

Spawn = Callable[[ServiceSpec], Awaitable[Member]]


class Turn(Protocol):
    """Waits until a replica may load, which it does within the context; restarts go first."""

    def __call__(
        self, spec: ServiceSpec, *, restart: bool = False
    ) -> AbstractAsyncContextManager[None]:
        """Return the context."""
        ...


class Pool:
    """One service's replicas.

    Args:
        spec: The service.
        spawn: Starts a process for a replica of a spec.
        changed: Called when the routing table has to change.
        turn: As `Budget.turn`.
        drain_s: Longest wait for calls of a replica that leaves a running pool.
        start_timeout_s: Longest wait for a replica to become ready.

    Attributes:
        spec: The wanted revision.
        policy: How many replicas there may be: the code's word, or a later one.
        desired: How many there should be now.
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
        turn: Turn,
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
        self._failed_at = 0.0
        self._scaler: Scaler | None = None
        self._next = ""
        self._spawning = 0
        self._reached = 0  # replicas that were ready at once, of those still wanted
        self._yielded = 0  # replicas that made room for the next revision
        self._room_at = 0.0
        self._no_room = False
        self.closing = False
        self.members: list[Member] = []
        self.restarts: dict[str, int] = {}
        self.desired = 0
        self.waiting = 0
        self.adopt(spec)

    # -- wanted ------------------------------------------------------------------------------

    def adopt(self, spec: ServiceSpec) -> None:
        """Want this revision from now on; `prepare` it first to be sure that it starts."""
        self.spec = spec
        self._next, self._yielded = "", 0
        self._promote()
        if isinstance(spec.replicas, Autoscale):
            self.desired = self.desired or spec.replicas.start
        self.resize(spec.replicas)

    async def configure(self, spec: ServiceSpec) -> None:
        """Go over to a spec of which no process has to start.

        Raises:
            SetupError: User code raised in a replica; others may have taken it.
        """
        self.spec = spec
        await together(*(m.configure(spec, self._start_timeout_s) for m in self._current()))

    def resize(self, policy: int | Autoscale) -> None:
        """Want this many replicas from now on."""
        self.policy = policy
        self._scaler = None
        if isinstance(policy, Autoscale):
            target = policy.target_ongoing or default_target(self.spec)
            self._scaler = Scaler(policy, target=target)
        self._want(bounded(policy, self.desired))

    def scale(self, time: float) -> None:
        """Let the load decide about the number, where the service says so."""
        if self._scaler is None:
            return
        alive = self.alive
        capacities = [m.stats.capacity_per_s for m in alive if m.stats.capacity_per_s]
        wanted = self._scaler.observe(
            time,
            ongoing=sum(m.stats.ongoing for m in alive) + self.waiting,
            rate_per_s=sum(m.rate_per_s for m in alive),
            capacity_per_s=min(capacities, default=None),
            replicas=len(alive),
        )
        if wanted != self.desired:
            _log.info("scaling", service=self.spec.name, replicas=len(alive), to=wanted)
            self._want(wanted)

    def wake(self, time: float) -> None:
        """Start a replica for the first call of a sleeping service."""
        if self._scaler is not None and not self.desired:
            self._want(self._scaler.wake(time))

    def _want(self, count: int) -> None:
        self.desired = count
        self._reached = min(self._reached, count)
        if not count:
            # What sleeps is tried anew by its next call: were it down, none would ever wake it.
            self._failures, self._retry_at = 0, 0.0
        self._wake.set()
        self._changed()

    # -- is ----------------------------------------------------------------------------------

    @property
    def alive(self) -> list[Member]:
        """The replicas that are there to stay, of whatever revision."""
        return [m for m in self.members if m.state not in (State.DRAINING, State.ENDED)]

    def _current(self) -> list[Member]:
        return [m for m in self.alive if m.spec.process_revision == self.spec.process_revision]

    def _old(self) -> list[Member]:
        """Return the replicas of revisions that are over, those first that go first."""
        kept = (self.spec.process_revision, self._next)
        old = (m for m in self.alive if m.spec.process_revision not in kept)
        return sorted(old, key=_expendable)

    def targets(self) -> ServiceTargets:
        """Return what the routing table says of this service."""
        ready = tuple(m.target for m in self.members if m.state is State.READY)
        if ready:
            return ServiceTargets(ready, "up")
        if self._failures >= _DOWN_AFTER:
            return ServiceTargets((), "down", max(1.0, self._retry_at - now()))
        return ServiceTargets((), "starting" if self.desired else "asleep")

    def status(self) -> ServiceStatus:
        """Return what `servekit status` shows of this service."""
        return ServiceStatus(
            name=self.spec.name,
            version=self.spec.version,
            state=self.targets().state,
            bounds=bounds(self.policy),
            desired=self.desired,
            restarts=sum(self.restarts.values()),
            replicas=[member.status() for member in self.members],
        )

    def _promote(self) -> None:
        """Let the replicas of the wanted revision take calls."""
        for member in self._current():
            if member.state is State.STANDBY:
                member.state = State.READY
        ready = sum(m.state is State.READY for m in self._current())
        self._reached = max(self._reached, min(ready, self.desired))
        self._changed()

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the wanted number of replicas; returns when all are ready.

        Raises:
            SetupError: One could not start.
        """
        await together(*(self._prepare(self.spec) for _ in range(self.desired)))
        self._promote()
        self._tasks.spawn(self._reconcile(), name=f"pool {self.spec.name}")

    async def prepare(self, spec: ServiceSpec) -> None:
        """Start one replica of the next revision; it takes calls when that is adopted.

        Where there is no room for it beside the old ones, old ones leave first.

        Raises:
            SetupError: It could not start; nothing is left of it.
            ResourceError: There is no room for it, even without the old ones.
        """
        self._next = spec.process_revision
        while True:
            try:
                return await self._prepare(spec)
            except ResourceError as error:
                old = [*self._old(), *sorted(self._current(), key=_expendable)]
                if not old:
                    raise
                # One of the wanted revision would be started again.
                self._yielded += old[0].spec.process_revision == self.spec.process_revision
                await self._give_way(old[0], error)

    async def abandon(self) -> None:
        """End what was prepared; the next revision will not be adopted."""
        if self._yielded:
            _log.error(
                "what left for the new code starts again, from the code that is there now",
                service=self.spec.name,
            )
        prepared = [m for m in self.alive if m.spec.process_revision == self._next]
        self._next, self._yielded = "", 0
        self._wake.set()
        await asyncio.gather(*(self._let_go(member, _END_S) for member in prepared))

    async def _prepare(self, spec: ServiceSpec) -> None:
        async with self._turn(spec):
            await self._load(await self._launch(spec))

    async def _launch(self, spec: ServiceSpec) -> Member:
        """Start the process of a replica."""
        member = await self._spawn(spec)
        if spec.process_revision == self.spec.process_revision:
            member.adopt(self.spec)  # its arguments may have changed meanwhile
        self.members.append(member)
        self._tasks.spawn(self._attend(member), name=f"attend {member.id}")
        return member

    async def _load(self, member: Member) -> None:
        """Wait until a replica could take calls, or was told to leave before that.

        Raises:
            SetupError: It could not start; nothing is left of it.
        """
        try:
            started = await member.start(self._start_timeout_s)
        except BaseException as error:
            if member.state is State.DRAINING and isinstance(error, SetupError):
                return
            member.state = State.ENDED
            await member.end(_END_S)
            raise
        if member.state is State.STANDBY:
            _log.info("replica ready", replica=member.id, took_s=round(started.load_s, 2))

    async def _reconcile(self) -> None:
        """Move towards what is wanted, step by step."""
        while not self.closing:
            self._wake.clear()
            current = sorted(self._current(), key=_expendable)
            old = self._old()
            ready = sum(m.state is State.READY for m in current)
            self._retire(old, ready + len(old) - self.desired)
            self._retire(current, len(current) - self.desired)
            coming = len(current) + self._spawning
            lacking = max(0, self.desired - self._yielded - coming)
            delay = max(self._retry_at, self._room_at) - now() if lacking else None
            if delay is not None and delay <= 0:
                self._spawning += lacking
                for number in range(coming, coming + lacking):
                    starting = self._start_one(restart=number < self._reached)
                    self._tasks.spawn(starting, name=f"start {self.spec.name}")
                delay = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wake.wait()

    async def _start_one(self, *, restart: bool) -> None:
        """Start a replica of the wanted revision; one that fails is tried again after a while."""
        failures = self._failures
        try:
            async with contextlib.AsyncExitStack() as turn:
                try:
                    await turn.enter_async_context(self._turn(self.spec, restart=restart))
                    if len(self._current()) >= self.desired - self._yielded:
                        return  # while it waited, the load fell
                    member = await self._launch(self.spec)
                except ResourceError as error:
                    await turn.aclose()
                    await self._without_room(error, failures)
                    return
                finally:
                    self._spawning -= 1
                    self._wake.set()
                self._no_room = False
                await self._load(member)
            self._promote()
        except SetupError as error:
            _log.error("replica failed to start", why=error.message, traceback=error.trace)
            self._failed("setup", failures)
        self._wake.set()
        self._changed()

    async def _without_room(self, error: ResourceError, failures: int) -> None:
        """Have an old replica leave, one after the other, or wait until there is room."""
        old = self._old()
        if old and all(m.state in (State.READY, State.UNREADY) for m in self.members):
            await self._give_way(old[0], error)
            return
        if not self._no_room:  # once, not at each look
            self._no_room = True
            _log.warning("no room for a replica yet", service=self.spec.name, why=str(error))
        if self.members:
            self._room_at = now() + _ROOM_S
        else:
            self._failed("resources", failures)
            self._changed()

    async def _give_way(self, member: Member, error: ResourceError) -> None:
        """Have a replica of the old revision leave before the new one starts."""
        _log.warning(
            "no room beside an old replica, which leaves first", replica=member.id, why=str(error)
        )
        self._retire([member], 1)
        await asyncio.shield(member.process.ended)

    def _retire(self, members: list[Member], count: int) -> None:
        for member in members[: max(0, count)]:
            _log.info("replica leaves", replica=member.id)
            self._tasks.spawn(self._let_go(member, self._drain_s), name=f"drain {member.id}")
            self._changed()

    def _let_go(self, member: Member, grace_s: float) -> Coroutine[Any, Any, None]:
        """Take a replica out of the table, at once; returns the rest of its end."""
        was, member.state = member.state, State.DRAINING
        # One that starts, or failed to, has no calls, and may be busy with its set-up for long.
        starts = was in (State.STARTING, State.ENDED)
        return member.end(_END_S) if starts else member.drain(grace_s)

    def _failed(self, cause: str, failures: int) -> None:
        """Take note of a failure; of those that began side by side, one counts."""
        self.restarts[cause] = self.restarts.get(cause, 0) + 1
        self._failed_at = now()
        if self._failures == failures:
            delay = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
            self._failures += 1
            self._retry_at = now() + delay

    async def _attend(self, member: Member) -> None:
        """Watch one replica until it ends, and say why it did."""
        cause = await asyncio.shield(member.process.ended)
        was, member.state = member.state, State.ENDED
        if member in self.members:
            self.members.remove(member)
        self._room_at = 0.0  # there is what it had
        if was in (State.STANDBY, State.READY, State.UNREADY) and not self.closing:
            _log.error("replica died", replica=member.id, cause=cause, pid=member.process.pid)
            lived_s, answered = now() - member.ready_at, member.stats.finished
            if lived_s > _PROVEN_S or answered >= _PROVEN_CALLS:
                self._failures = 0
            self._failed("killed" if "killed" in cause else "exit", self._failures)
            self._wake.set()
        self._changed()

    async def check(self) -> None:
        """Probe all replicas; take those that are unwell out of the table, end those that hang."""
        members = [m for m in self.members if m.state in (State.READY, State.UNREADY)]
        leaving = [m for m in self.members if m.state is State.DRAINING]
        await asyncio.gather(*(m.check() for m in members), *(m.count() for m in leaving))
        for member in members:
            if member.state not in (State.READY, State.UNREADY):
                continue
            well = State.UNREADY if member.trouble else State.READY
            if member.state is not well:
                member.state = well
                _log.warning("replica health", replica=member.id, state=well, why=member.trouble)
                self._changed()
            # One that was there before says nothing of those that fail.
            if well is State.READY and self._failed_at < member.ready_at < now() - _PROVEN_S:
                self._failures = 0
            if member.failing_since and now() - member.failing_since > KILL_AFTER_S:
                _log.error("replica hangs, killing it", replica=member.id)
                self._tasks.spawn(member.end(0.0), name=f"kill {member.id}")

    async def close(self, grace_s: float) -> None:
        """Let all replicas finish their calls for so many seconds, then end them."""
        self.closing = True
        await asyncio.gather(*(self._let_go(member, grace_s) for member in self.members))
        await self._tasks.close()


def _expendable(member: Member) -> tuple[bool, bool, float]:
    """Sort those first that go first: starting ones hold no calls, unwell ones take none."""
    return member.state is State.READY, member.state is State.UNREADY, member.ready_at
