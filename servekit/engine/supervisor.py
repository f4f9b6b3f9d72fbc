"""The local engine: runs an app's gateway and replicas as child processes, and keeps them running.

The supervisor imports no user code and carries no requests. It starts the gateways and a pool per
service, pushes the routing table to all of them, probes, scales, rolls to new revisions, and ends
everything in order: first the gateways finish their requests, then the replicas.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping

import msgspec

from servekit.core.aio import Tasks, together
from servekit.core.call import now
from servekit.engine import handover
from servekit.engine.admin import Admin
from servekit.engine.backlog import Backlog
from servekit.engine.budget import Budget
from servekit.engine.control import (
    AppStatus,
    Figures,
    Nothing,
    StartGateway,
    StartReplica,
    Verb,
    Wake,
)
from servekit.engine.description import Described
from servekit.engine.front import Front
from servekit.engine.handover import Door
from servekit.engine.member import Member, State, spawn
from servekit.engine.numbers import bounded, initial, resize
from servekit.engine.pool import Pool
from servekit.engine.process import Process
from servekit.engine.table import Table
from servekit.errors import CallError, SetupError
from servekit.gateway.credentials import Credentials
from servekit.gateway.edge import Edge
from servekit.observe.families import Families
from servekit.observe.log import get_logger
from servekit.observe.metrics import Aggregate, Metrics
from servekit.settings import Settings
from servekit.spec.app import AppSpec, ServiceSpec
from servekit.spec.policy import Autoscale

_log = get_logger("servekit.supervisor")

_TICK_S = 1.0


class Supervisor:
    """One running app.

    Args:
        described: The app.
        settings: Of this process.
        target: What the user asked to serve, for `servekit status`.
        dev: Show the playground.

    Raises:
        ConfigError: The address can't be had, or a file of credentials can't be used.

    Attributes:
        url: Where the gateways listen.
        app: What is served now.
    """

    def __init__(
        self, described: Described, settings: Settings, *, target: str, dev: bool = False
    ) -> None:
        assert described.app is not None
        self._settings = settings
        self._edge = Edge.of(settings)
        self._target = target
        self._dev = dev
        self._search_path = described.search_path
        self._tasks = Tasks()
        self._pools: dict[str, Pool] = {}
        self._serial = 0
        self._last_replica = 0
        self._not_rolled: dict[str, int] = {}
        self._closing = False
        self._started_at = now()
        self._metrics = Metrics(replica="supervisor")
        self._families = Families(self._metrics)
        self._aggregate = Aggregate()
        self._backlog = Backlog(settings.jobs_dir, self._families)
        self._budget = Budget(settings)
        self._credentials = Credentials.of(settings)
        if self._credentials is not None:
            from servekit.gateway.guard import Guard  # noqa: PLC0415

            Guard(self._credentials)  # so that a mistake in a file is found before anything starts
        self._front = Front(
            handover.listener(settings),
            workers=settings.gateway_workers,
            edge=self._edge,
            order=self._gateway_order,
            verbs=self._verbs(),
            env=self._env(),
            on_start=self._publish,  # what has changed while it started
            on_end=self._aggregate.retire,
        )
        self._door: Door | None = None
        self._admin = Admin(self, settings.runtime_dir)
        self._folder = self._admin.folder
        self.app: AppSpec = described.app
        self.url = self._front.url

    @property
    def ready(self) -> bool:
        """Return whether a gateway says so to who asks; others may start yet."""
        states = {pool.targets().state for pool in self._pools.values()}
        return bool(self._front.started and states) and states <= {"up", "asleep"}

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start everything; returns when every service is ready.

        Raises:
            ResourceError: The machine has less than the app asks for.
            SetupError: A replica could not start; nothing is left running.
        """
        self._front.warn_of_strangers(asks_who=self._credentials is not None)
        await self._budget.admit(self.app, ((s, initial(s.replicas)) for s in self.app.services))
        await self._backlog.serve(self.app)
        await self._admin.open()
        for spec in self.app.services:
            self._pools[spec.name] = self._pool(spec)
        starts = [pool.start() for pool in self._pools.values()]
        if self._settings.handover_dir is None:
            await together(*starts, self._front.start())
        else:  # who was here before takes the calls until all is ready
            await together(*starts)
            await self._front.start()
            self._door = handover.door(self._front.listener, self._settings)
        self._publish()
        self._tasks.spawn(self._tick(), name="tick")

    async def roll(self, described: Described) -> list[str]:
        """Go over to another revision of the app without losing a call.

        All gateways have the new one before the first replica of the old one leaves.

        Returns:
            Names of the services that changed.

        Raises:
            AuthorError: A new replica could not start; the old revision goes on.
        """
        assert described.app is not None
        app = self._without_doubt(described.app)
        old = {name: pool.spec for name, pool in self._pools.items()}
        new = [s for s in app.services if s.name not in old]
        kept = [s for s in app.services if s.name in old]
        changed = [s for s in kept if s.process_revision != old[s.name].process_revision]
        light = [s for s in kept if s not in changed and s.revision != old[s.name].revision]
        resized = {s.name: s.replicas for s in light if s.replicas != old[s.name].replicas}
        await self._budget.admit(
            app,
            (
                (
                    s,
                    initial(s.replicas)
                    if s in (*new, *changed)
                    else self._running(s.name, resized.get(s.name)),
                )
                for s in app.services
            ),
        )
        await self._backlog.serve(app)
        added = {spec.name: self._pool(spec) for spec in new}
        self._pools |= added
        before, self._search_path = self._search_path, described.search_path
        try:
            await together(
                *(pool.start() for pool in added.values()),
                *(self._pools[spec.name].prepare(spec) for spec in changed),
                *(self._pools[spec.name].configure(spec) for spec in light),
            )
        except BaseException:
            self._search_path = before
            for spec in changed:
                self._not_rolled.setdefault(spec.name, self._last_replica)
            await asyncio.gather(
                *(self._pools.pop(name).close(0.0) for name in added),
                *(self._pools[spec.name].abandon() for spec in changed),
                *(self._take_back(old[spec.name]) for spec in light),
            )
            raise
        self.app = app
        await self._front.serve(app)
        self._not_rolled.clear()
        for spec in changed:
            self._pools[spec.name].adopt(spec)
        for name, policy in resized.items():
            self._pools[name].resize(policy)
        for name in old.keys() - {s.name for s in app.services}:
            closing = self._pools.pop(name).close(self._settings.drain_s)
            self._tasks.spawn(closing, name=f"close {name}")
        self._publish()
        return [*added, *(spec.name for spec in (*changed, *light))]

    async def _take_back(self, spec: ServiceSpec) -> None:
        try:
            await self._pools[spec.name].configure(spec)
        except SetupError as error:
            _log.error("a replica did not go back to its old arguments", why=error.message)

    def _without_doubt(self, app: AppSpec) -> AppSpec:
        """Give another revision to what may run code that was edited and is as it was again.

        A replica that starts after a roll has failed runs what is on the disk then.
        """

        def started_since(name: str) -> bool:
            since = self._not_rolled.get(name)
            members = self._pools[name].members if since is not None else []
            return any(int(m.id.rpartition("-")[2]) > (since or 0) for m in members)

        services = (
            msgspec.structs.replace(spec, code=f"{spec.code}+")
            if started_since(spec.name)
            and spec.process_revision == self._pools[spec.name].spec.process_revision
            else spec
            for spec in app.services
        )
        return msgspec.structs.replace(app, services=tuple(services))

    async def scale(self, wanted: Mapping[str, int | tuple[int, int]]) -> None:
        """Have other numbers of replicas, each until its service's code changes.

        Args:
            wanted: By service: a number, or bounds where the load decides.

        Raises:
            NotFound: There is no such service.
            ConfigError: A service takes no such number.
            ResourceError: The machine has less; nothing has changed.
        """
        policies = resize({name: pool.policy for name, pool in self._pools.items()}, wanted)
        self._budget.check(
            (pool.spec, self._running(name, policies.get(name)))
            for name, pool in self._pools.items()
        )
        for name, policy in policies.items():
            self._pools[name].resize(policy)

    def _running(self, name: str, policy: int | Autoscale | None = None) -> int:
        """Return for how many replicas there must be room: beyond those, the load may wait."""
        pool = self._pools[name]
        return bounded(pool.policy if policy is None else policy, len(pool.alive))

    async def leave(self) -> None:
        """Say that the app is not ready any more, but go on as before."""
        await self._front.leave()

    async def stop(self) -> None:
        """Finish the requests on board, then end all processes and remove all sockets.

        Gateways and replicas share `drain_s`.
        """
        self._closing = True
        for pool in self._pools.values():
            pool.closing = True
        if self._door is not None:
            self._door.close()
        cut_at = now() + self._settings.drain_s
        await self._front.drain(self._settings.drain_s)
        left_s = max(0.0, cut_at - now())
        await asyncio.gather(*(pool.close(left_s) for pool in self._pools.values()))
        await self._backlog.close()
        await self._tasks.close()
        await self._admin.close()

    def kill(self) -> None:
        """End all processes at once."""
        for pool in self._pools.values():
            for member in pool.members:
                member.process.signal(signal.SIGKILL)
        self._front.kill()

    # -- parts -------------------------------------------------------------------------------

    def _pool(self, spec: ServiceSpec) -> Pool:
        return Pool(
            spec,
            self._spawn,
            self._publish,
            self._budget.turn,
            drain_s=self._settings.drain_s,
            start_timeout_s=self._settings.start_timeout_s,
        )

    async def _spawn(self, spec: ServiceSpec) -> Member:
        self._last_replica += 1
        replica = f"{spec.name}-{self._last_replica}"
        devices = self._budget.place(replica, spec)
        order = StartReplica(
            spec=spec,
            replica=replica,
            search_path=self._search_path,
            address=f"unix:{self._folder}/{self._last_replica}.sock",
            folder=str(self._folder),
            jobs=self._backlog.file(spec),
        )
        env = {"CUDA_VISIBLE_DEVICES": ",".join(devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        try:
            member = await spawn(
                order, verbs=self._verbs(), env=self._env() | env, table=self._table
            )
        except BaseException:
            self._budget.release(replica)
            raise
        member.process.ended.add_done_callback(lambda _: self._clear_up(member))
        return member

    def _clear_up(self, member: Member) -> None:
        self._budget.release(member.id)
        self._aggregate.retire(member.id)
        (self._folder / f"{member.id.rpartition('-')[2]}.sock").unlink(missing_ok=True)

    def _env(self) -> dict[str, str]:
        settings = self._settings
        return {
            "SERVEKIT_LOG_LEVEL": settings.log_level,
            "SERVEKIT_LOG_FORMAT": settings.log_format,
        }

    def _verbs(self) -> Mapping[str, Verb]:
        return {"wake": self._on_wake, "metrics": self._on_metrics, "status": self._on_status}

    def _gateway_order(self, name: str, listener: int) -> StartGateway:
        return StartGateway(
            name=name,
            app=self.app,
            listener=listener,
            folder=str(self._folder),
            table=self._table(),
            edge=self._edge,
            drain_s=self._settings.drain_s,
            leaving=self._front.leaving,
            dev=self._dev,
            credentials=self._credentials,
            settings=self._settings.shown(),
            workers=self._settings.gateway_workers,
        )

    # -- routing table -----------------------------------------------------------------------

    def _table(self) -> Table:
        self._serial += 1
        return Table(self._serial, {name: pool.targets() for name, pool in self._pools.items()})

    def _publish(self) -> None:
        table = self._table()
        for process in self._processes():
            self._tasks.spawn(self._send_table(process, table), name="table")

    async def _send_table(self, process: Process, table: Table) -> None:
        with contextlib.suppress(CallError):
            await process.ask("table", table, answer=Nothing, timeout_s=30.0)

    def _processes(self) -> list[Process]:
        """Return all that run, in whatever state."""
        members = [m.process for pool in self._pools.values() for m in pool.members]
        return [p for p in (*self._front.processes, *members) if not p.ended.done()]

    def _started(self) -> list[Process]:
        """Return all that can be asked."""
        members = [m for pool in self._pools.values() for m in pool.members]
        ready = [m.process for m in members if m.state is not State.STARTING]
        return [*self._front.started, *ready]

    # -- watching ----------------------------------------------------------------------------

    async def _tick(self) -> None:
        while not self._closing:
            await asyncio.sleep(_TICK_S)
            checks = asyncio.gather(*(pool.check() for pool in self._pools.values()))
            waiting, jobs, _ = await asyncio.gather(
                self._front.check(), self._backlog.look(), checks
            )
            for pool in self._pools.values():
                for member in pool.members:
                    waiting.update(member.stats.waiting)
            for name, pool in self._pools.items():
                queued = sum(jobs.get(one.name, 0) for one in (*pool.spec.beside, pool.spec))
                pool.waiting = waiting[name] + queued
                if queued:
                    pool.wake(now())
                pool.scale(now())

    async def _on_wake(self, body: bytes) -> Nothing:
        wake = msgspec.msgpack.decode(body, type=Wake)
        if (pool := self._pools.get(wake.service)) is not None:
            pool.wake(now())
        return Nothing()

    async def _on_metrics(self, _: bytes) -> Figures:
        processes = self._started()
        figures = await asyncio.gather(
            *(process.ask("metrics", answer=Figures, timeout_s=2.0) for process in processes),
            return_exceptions=True,
        )
        for process, found in zip(processes, figures, strict=True):
            # What has ended meanwhile was added to the totals already.
            if isinstance(found, Figures) and not process.ended.done():
                self._aggregate.put(process.name, found.snapshot)
        for name, pool in self._pools.items():
            for state in State:
                gauge = self._families.replicas.labels(service=name, state=state.value)
                gauge.set(sum(m.state is state for m in pool.members))
            for cause, count in pool.restarts.items():
                counter = self._families.replica_restarts.labels(service=name, cause=cause)
                counter.value = count
        self._aggregate.put("supervisor", self._metrics.snapshot())
        return Figures(self._aggregate.snapshot())

    async def _on_status(self, _: bytes) -> AppStatus:
        return self.status()

    def status(self) -> AppStatus:
        """Return what runs, also while it starts."""
        return AppStatus(
            name=self.app.root,
            target=self._target,
            url=self.url,
            pid=os.getpid(),
            revision=self.app.revision,
            uptime_s=now() - self._started_at,
            gateways=list(self._front.status()),
            services=[pool.status() for pool in self._pools.values()],
        )

    async def look(self) -> AppStatus:
        """Look what runs now: the supervisor always knows."""
        return self.status()
