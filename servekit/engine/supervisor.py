"""The local engine: runs an app's gateway and replicas as child processes, and keeps them running.

The supervisor imports no user code and carries no requests. It starts the gateway and a pool per
service, pushes the routing table to all of them, probes, scales, rolls to new revisions, and ends
everything in order: first the gateway finishes its requests, then the replicas.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from servekit.core.aio import Tasks
from servekit.core.call import now
from servekit.engine.control import (
    AppStatus,
    Figures,
    Nothing,
    ReplicaStatus,
    ServiceStatus,
    Started,
    StartGateway,
    StartReplica,
    Stats,
    Verb,
    Wake,
    handler,
)
from servekit.engine.description import Described
from servekit.engine.devices import detect
from servekit.engine.listener import bind, is_public
from servekit.engine.member import Member, State, spawn
from servekit.engine.placement import Placement, allocate
from servekit.engine.pool import KILL_AFTER_S, Pool
from servekit.engine.process import Process
from servekit.engine.table import Table
from servekit.errors import CallError
from servekit.gateway.credentials import Credentials
from servekit.observe.families import Families
from servekit.observe.log import get_logger
from servekit.observe.metrics import Aggregate, Metrics
from servekit.settings import Settings
from servekit.spec.app import AppSpec, ServiceSpec
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, Listener

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
        url: Where the gateway listens.
        app: What is served now.
    """

    def __init__(
        self, described: Described, settings: Settings, *, target: str, dev: bool = False
    ) -> None:
        assert described.app is not None
        self._settings = settings
        self._target = target
        self._dev = dev
        self._search_path = described.search_path
        self._tasks = Tasks()
        self._pools: dict[str, Pool] = {}
        self._serial = 0
        self._last_replica = 0
        self._gateway: Process | None = None
        self._silent_since: float | None = None
        self._closing = False
        self._started_at = now()
        self._metrics = Metrics(replica="supervisor")
        self._families = Families(self._metrics)
        self._aggregate = Aggregate()
        self._credentials = Credentials.of(settings)
        if self._credentials is not None:
            from servekit.gateway.guard import Guard  # noqa: PLC0415

            Guard(self._credentials)  # so that a mistake in a file is found before anything starts
        self._devices = detect(declared=settings.gpus, visible=settings.cuda_visible_devices)
        self._placement = Placement(self._devices)
        self._listener = bind(settings.host, settings.port)
        self._folder = Path(tempfile.mkdtemp(prefix="servekit-", dir=settings.runtime_dir))
        self._admin = Listener(
            Address(f"unix:{self._folder}/admin.sock"),
            lambda: Connection(
                Hello(replica="supervisor"),
                client=False,
                handler=handler({"status": self._on_status}),
            ),
        )
        self.app: AppSpec = described.app
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start everything; returns when every service is ready.

        Raises:
            ResourceError: The machine has fewer GPUs than the app asks for.
            SetupError: A replica could not start; nothing is left running.
        """
        self._check_resources(self.app)
        if self._credentials is None and is_public(self._listener):
            _log.warning(
                "whoever reaches this address may call",
                url=self.url,
                fix="set api_keys or jwt_key, unless something in front asks who it is",
            )
        await self._admin.open()
        for spec in self.app.services:
            self._pools[spec.name] = self._pool(spec)
        starts = [asyncio.ensure_future(pool.start()) for pool in self._pools.values()]
        starts.append(asyncio.ensure_future(self._start_gateway()))
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        self._publish()
        self._tasks.spawn(self._tick(), name="tick")

    async def roll(self, described: Described) -> list[str]:
        """Go over to another revision of the app without losing a call.

        Returns:
            Names of the services that changed.

        Raises:
            AuthorError: A new replica could not start; the old revision goes on.
        """
        app = described.app
        assert app is not None
        self._check_resources(app)
        self._search_path = described.search_path
        old = {name: pool.spec for name, pool in self._pools.items()}
        changed = [s for s in app.services if s.name in old and s.revision != old[s.name].revision]
        added = [s for s in app.services if s.name not in old]
        self.app, before = app, self.app
        new_pools = {spec.name: self._pool(spec) for spec in added}
        self._pools |= new_pools
        starts = [asyncio.ensure_future(pool.start()) for pool in new_pools.values()]
        prepares = [asyncio.ensure_future(self._pools[s.name].prepare(s)) for s in changed]
        try:
            await asyncio.gather(*starts, *prepares)
        except BaseException:
            self.app = before
            await self._undo(new_pools, (*starts, *prepares), prepares)
            raise
        for spec in changed:
            self._pools[spec.name].adopt(spec)
        self._publish()
        await self._tell_gateway(app)
        for name in old.keys() - {s.name for s in app.services}:
            pool = self._pools.pop(name)
            self._publish()
            self._tasks.spawn(pool.close(), name=f"close {name}")
        return [spec.name for spec in (*added, *changed)]

    async def _undo(
        self,
        pools: Mapping[str, Pool],
        works: Sequence[asyncio.Future[Any]],
        prepares: Sequence[asyncio.Future[Member]],
    ) -> None:
        """End what a failed roll has started; the running revision was not touched."""
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        for prepare in prepares:
            if not prepare.cancelled() and prepare.exception() is None:
                await prepare.result().end(2.0)
        for name, pool in pools.items():
            del self._pools[name]
            await pool.close()

    async def stop(self) -> None:
        """Finish the requests on board, then end all processes and remove all sockets."""
        self._closing = True
        for pool in self._pools.values():
            pool.closing = True
        # Else the kernel would take connections for this copy of the socket, and nobody answer them.
        self._listener.close()
        drain_s = self._settings.drain_s
        if self._gateway is not None and not self._gateway.ended.done():
            with contextlib.suppress(CallError):
                await self._gateway.ask("drain", answer=Nothing, timeout_s=drain_s)
            await self._gateway.stop(2.0)
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        await self._admin.close()
        await self._tasks.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End all processes at once."""
        for pool in self._pools.values():
            for member in pool.members:
                member.process.signal(signal.SIGKILL)
        if self._gateway is not None:
            self._gateway.signal(signal.SIGKILL)

    # -- parts -------------------------------------------------------------------------------

    def _pool(self, spec: ServiceSpec) -> Pool:
        return Pool(
            spec,
            self._spawn,
            self._publish,
            drain_s=self._settings.drain_s,
            start_timeout_s=self._settings.start_timeout_s,
        )

    def _check_resources(self, app: AppSpec) -> None:
        requests: dict[str, float] = {}
        for spec in app.services:
            count = spec.replicas if isinstance(spec.replicas, int) else spec.replicas.start
            requests |= {f"{spec.name} #{n + 1}": spec.resources.gpu for n in range(count)}
        allocate(self._devices, requests)

    async def _spawn(self, spec: ServiceSpec) -> Member:
        self._last_replica += 1
        replica = f"{spec.name}-{self._last_replica}"
        devices = self._placement.place(replica, spec.resources.gpu)
        order = StartReplica(
            spec=spec,
            replica=replica,
            search_path=self._search_path,
            address=f"unix:{self._folder}/{self._last_replica}.sock",
            folder=str(self._folder),
            table=self._table(),
        )
        env = {"CUDA_VISIBLE_DEVICES": ",".join(devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        try:
            member = await spawn(order, verbs=self._verbs(), env=self._env() | env)
        except BaseException:
            self._placement.release(replica)
            raise
        member.process.ended.add_done_callback(lambda _: self._clear_up(member))
        return member

    def _clear_up(self, member: Member) -> None:
        self._placement.release(member.id)
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

    async def _start_gateway(self) -> None:
        fd = self._listener.fileno()
        order = StartGateway(
            app=self.app,
            listener=fd,
            folder=str(self._folder),
            table=self._table(),
            drain_s=self._settings.drain_s,
            dev=self._dev,
            credentials=self._credentials,
            settings=self._settings.shown(),
        )
        gateway = self._gateway = await Process.spawn(
            "gateway",
            "servekit.engine.gateway_worker",
            verbs=self._verbs(),
            env=self._env(),
            inherit=(fd,),
        )
        try:
            await gateway.ask("start", order, answer=Started, timeout_s=30.0)
        except BaseException:
            await gateway.stop(0.0)
            raise
        self._publish()  # what has changed while it was spawned
        self._tasks.spawn(self._keep_gateway(gateway), name="keep gateway")

    async def _keep_gateway(self, gateway: Process) -> None:
        cause = await asyncio.shield(gateway.ended)
        while not self._closing:
            _log.error("gateway died, starting another", cause=cause)
            try:
                await self._start_gateway()
            except CallError as error:
                cause = str(error)
                await asyncio.sleep(_TICK_S)
            else:
                return

    async def _tell_gateway(self, app: AppSpec) -> None:
        if self._gateway is not None and not self._gateway.ended.done():
            with contextlib.suppress(CallError):
                await self._gateway.ask("app", app, answer=Nothing, timeout_s=10.0)

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
        processes = [m.process for pool in self._pools.values() for m in pool.members]
        if self._gateway is not None:
            processes.append(self._gateway)
        return [process for process in processes if not process.ended.done()]

    # -- watching ----------------------------------------------------------------------------

    async def _tick(self) -> None:
        while not self._closing:
            await asyncio.sleep(_TICK_S)
            checks = asyncio.gather(*(pool.check() for pool in self._pools.values()))
            waiting, _ = await asyncio.gather(self._check_gateway(), checks)
            for pool in self._pools.values():
                for member in pool.members:
                    for name, count in member.stats.waiting.items():
                        waiting[name] = waiting.get(name, 0) + count
            for name, pool in self._pools.items():
                pool.waiting = waiting.get(name, 0)
                pool.scale(now())

    async def _check_gateway(self) -> dict[str, int]:
        """Probe the gateway; returns how many calls wait in it, by service."""
        gateway = self._gateway
        if gateway is None or gateway.ended.done():
            return {}
        try:
            stats = await gateway.ask("stats", answer=Stats, timeout_s=2.0)
        except CallError:
            self._silent_since = self._silent_since or now()
            if now() - self._silent_since > KILL_AFTER_S:
                _log.error("gateway hangs, killing it", pid=gateway.pid)
                gateway.signal(signal.SIGKILL)
                self._silent_since = None
            return {}
        self._silent_since = None
        return dict(stats.waiting)

    async def _on_wake(self, body: bytes) -> Nothing:
        wake = msgspec.msgpack.decode(body, type=Wake)
        if (pool := self._pools.get(wake.service)) is not None:
            pool.wake(now())
        return Nothing()

    async def _on_metrics(self, _: bytes) -> Figures:
        members = [
            m
            for pool in self._pools.values()
            for m in pool.members
            if m.state is not State.STARTING
        ]
        figures = await asyncio.gather(
            *(m.process.ask("metrics", answer=Figures, timeout_s=2.0) for m in members),
            return_exceptions=True,
        )
        for member, found in zip(members, figures, strict=True):
            if isinstance(found, Figures):
                self._aggregate.put(member.id, found.snapshot)
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
            target=self._target,
            url=self.url,
            pid=os.getpid(),
            revision=self.app.revision,
            uptime_s=now() - self._started_at,
            services=[
                ServiceStatus(
                    name=name,
                    version=pool.spec.version,
                    state=pool.targets().state,
                    desired=pool.desired,
                    restarts=sum(pool.restarts.values()),
                    replicas=[
                        ReplicaStatus(
                            id=m.id,
                            pid=m.process.pid,
                            state=m.state.value,
                            ongoing=m.stats.ongoing,
                            finished=m.stats.finished,
                            rss=m.stats.rss,
                            trouble=m.trouble,
                        )
                        for m in pool.members
                    ],
                )
                for name, pool in self._pools.items()
            ],
        )
