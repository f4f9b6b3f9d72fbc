"""An app's controller on Ray: what no single replica or gateway can see or decide.

Ray Serve starts, checks, scales and replaces processes. What it doesn't do is here: a gateway on each
node that comes, none on one that leaves; the new app told to the gateways when all services have it;
back to what ran before when a roll fails; figures and states of the whole app. No call ever goes
through this process: while it is away, everything that runs goes on.
"""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from servekit.core.aio import Tasks
from servekit.engine.backlog import Backlog
from servekit.engine.control import (
    AppStatus,
    Configured,
    Figures,
    Health,
    Nothing,
    ProcessStatus,
    ServiceStatus,
    Stats,
    Verb,
    ask,
)
from servekit.engine.numbers import bounds
from servekit.engine.ray import build, cluster
from servekit.engine.ray.discovery import Discovery
from servekit.engine.ray.logs import Lines, Since
from servekit.engine.ray.orders import CONTROLLER, GATEWAY, AppOrder, Outcome, States, pack
from servekit.engine.ray.process import Process
from servekit.engine.router import Router
from servekit.errors import CallError, Conflict, SetupError
from servekit.observe.families import Families
from servekit.observe.log import get_logger
from servekit.observe.metrics import Aggregate, Metrics
from servekit.spec.app import ServiceSpec
from servekit.spec.policy import Autoscale
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello

T = TypeVar("T")

_log = get_logger("servekit.controller")

_TICK_S = 2.0
_ROLL_TICK_S = 0.5
_ASK_S = 2.0
_TUNE_S = 30.0
_TRACE = "Traceback (most recent call last):"
_FAILED = ("UNHEALTHY", "DEPLOY_FAILED")


class RayController(Process):
    """The controller; Ray calls all of its public methods.

    Args:
        order: An `AppOrder`, packed: the latest that Serve has taken.
        *_: Handles of all other deployments, which makes them part of the Serve application.
    """

    def __init__(self, order: bytes, *_: Any) -> None:
        self._order = msgspec.msgpack.decode(order, type=AppOrder)
        super().__init__(self._order.common, CONTROLLER, "controller")
        self._tasks = Tasks()
        self._lock = asyncio.Lock()
        self._outcome = Outcome()
        self._failure = ""
        self._before: AppOrder | None = None
        self._stages: list[list[str]] = []
        self._closing = False
        self._nodes: tuple[str, ...] = ()
        self._told: dict[str, str] = {}
        self._states = States({})
        self._told_states: set[str] = set()
        self._stats: dict[str, tuple[Stats, Health]] = {}
        self._metrics = Metrics(replica="controller")
        self._backlog = Backlog(Path(self._order.jobs), Families(self._metrics))
        self._aggregate = Aggregate()
        self._seen: ApplicationStatusOverview | None = None
        self.run(self._start())

    async def _start(self) -> None:
        hello = Hello(service=CONTROLLER, replica=self.id)
        self._router = Router(hello, secret=self.common.secret)
        self._discovery = Discovery(self.common.app, self._router.update)
        verbs: dict[str, Verb] = {"metrics": self._on_metrics, "status": self._on_status}
        await self.listen(CONTROLLER, verbs)
        self._nodes = await asyncio.to_thread(cluster.lasting, self._order.front.labels)
        self._follow()
        self._tasks.spawn(self._tick(), name="tick")

    # -- what operators ask, through a Serve handle ------------------------------------------

    async def apply(self, order: bytes) -> None:
        """Go over to another order; `outcome` tells what became of it.

        Raises:
            Conflict: It was made from an order that does not hold any more.
        """
        await self.on_loop(self._apply(msgspec.msgpack.decode(order, type=AppOrder)))

    async def order(self) -> bytes:
        """Return the order that holds, packed."""
        return pack(self._order)

    async def outcome(self, serial: int) -> bytes:
        """Return the `Outcome` of an order, packed."""
        return pack(self._outcome if serial == self._order.serial else Outcome())

    async def leave(self) -> None:
        """Have the gateways say that the app is not ready."""
        await self.on_loop(self._leave())

    async def _leave(self) -> None:
        gateways = self._processes(GATEWAY)
        await asyncio.gather(*(self._ask(one, "leave", None, Nothing) for one in gateways))

    async def close(self) -> float:
        """End the gateways; returns how many seconds they may take."""
        await self.on_loop(self._close())
        return self.common.drain_s + self._order.front.drain_delay_s

    async def _close(self) -> None:
        async with self._lock:
            self._closing, self._nodes = True, ()
            await self._deploy()

    async def status(self) -> bytes:
        """Return the `AppStatus`, packed."""
        return pack(await self.on_loop(self._status()))

    async def logs(self, since: dict[str, int]) -> dict[str, tuple[int, tuple[str, ...]]]:
        """Return what processes printed, behind so many lines of each, and how many those were."""
        return await self.on_loop(self._logs(since))

    async def _logs(self, since: dict[str, int]) -> dict[str, tuple[int, tuple[str, ...]]]:
        processes = [*self._processes()]
        found = await asyncio.gather(
            *(self._ask(one, "logs", Since(since.get(one, 0)), Lines) for one in processes)
        )
        own = self._tail.since(since.get(self.id, 0))
        return {
            process: (lines.until, lines.lines)
            for process, lines in zip([*processes, self.id], [*found, own], strict=True)
            if lines is not None
        }

    async def _apply(self, order: AppOrder) -> None:
        async with self._lock:
            before = self._order
            if order.serial != before.serial + 1:
                raise Conflict("somebody else has changed the app meanwhile; look again")
            self._before = before
            self._order, self._outcome, self._failure = order, Outcome(), ""
            self._stages = build.stages(order.current.app, before.current.app)[1:]
            await self._deploy()

    async def _deploy(self) -> None:
        """Tell Ray Serve of the order, up to the stage that it is in."""
        held = frozenset(name for stage in self._stages for name in stage)
        before = None if self._before is None else self._before.current
        await asyncio.to_thread(
            build.deploy, self._order, type(self), nodes=self._nodes, before=before, held=held
        )
        self._follow()

    # -- watching ----------------------------------------------------------------------------

    def _follow(self) -> None:
        gateways = {build.gateway_name(node): False for node in self._nodes}
        self._discovery.follow(build.services(self._order) | gateways)

    async def _tick(self) -> None:
        while True:
            try:
                await self._look()
            except Exception as error:  # noqa: BLE001  (Ray may be busy, or on its way back)
                _log.warning("could not look after the app", why=repr(error))
            await asyncio.sleep(_TICK_S if self._outcome.done else _ROLL_TICK_S)

    async def _look(self) -> None:
        async with self._lock:
            found = await asyncio.to_thread(cluster.lasting, self._order.front.labels)
            if found != self._nodes and not self._closing:
                _log.info("nodes changed", gateways=len(found))
                self._nodes = found
                await self._deploy()
            self._seen = (await asyncio.to_thread(serve.status)).applications.get(self.common.app)
            if self._outcome.done:
                await self._tell_app()  # those that have come since
            elif self._seen is not None:
                await self._settle(self._seen)
        await asyncio.gather(*(self._count(*item) for item in self._processes().items()))
        await self._tell_states()
        await self._backlog.serve(self._order.current.app)
        for service, queued in (await self._backlog.look()).items():
            if queued:
                self._discovery.wake(service)

    async def _settle(self, seen: ApplicationStatusOverview) -> None:
        """Go on with an order: to its next stage, to its end, or back to what was before."""
        if seen.status is ApplicationStatus.RUNNING:
            if self._stages:
                del self._stages[0]
                await self._deploy()
                return
            try:
                if self._has_all(seen) and await self._tell_app():
                    self._outcome = Outcome(done=True, error=self._failure)
            except SetupError as error:
                await self._go_back(f"{error.message}\n{error.trace}")
        elif seen.status is ApplicationStatus.DEPLOY_FAILED:
            await self._go_back(failure(seen))

    def _has_all(self, seen: ApplicationStatusOverview) -> bool:
        """Return whether this controller is connected to all that runs, so that its status has it."""
        there = Counter(id_.rpartition("-")[0] for id_ in self._processes())
        return all(
            there[name] >= one.replica_states.get("RUNNING", 0)  # type: ignore[call-overload]
            for name, one in seen.deployments.items()
            if name != CONTROLLER
        )

    async def _go_back(self, why: str) -> None:
        """Have the order before this one again, or end with what there is."""
        _log.error("a service does not go over", why=why.partition("\n")[0])
        before = self._before
        if before is None or self._failure:
            self._outcome = Outcome(done=True, error=self._failure or why)
        else:
            self._failure, self._stages = why, []
            self._order = msgspec.structs.replace(before, serial=self._order.serial)
            await self._deploy()

    async def _tell_app(self) -> bool:
        """Have all processes be as the app says, gateways last; returns whether they are.

        Raises:
            SetupError: The author's code raised at its new arguments.
        """
        app = self._order.current.app
        tunable = {spec.name: spec for spec in app.services if spec.is_tunable}
        behind = [id_ for id_ in self._processes() if self._told.get(id_) != app.revision]
        replicas = [(id_, spec) for id_ in behind if (spec := tunable.get(id_.rpartition("-")[0]))]
        tuned = await asyncio.gather(*(self._tune(id_, spec) for id_, spec in replicas))
        for answer in tuned:
            if answer is not None and answer.error:
                raise SetupError(answer.error, trace=answer.traceback)
        gateways = [id_ for id_ in behind if id_.startswith(GATEWAY)]
        taken = await asyncio.gather(*(self._ask(id_, "app", app, Nothing) for id_ in gateways))
        asked = [*(id_ for id_, _ in replicas), *gateways]
        answers = dict(zip(asked, [*tuned, *taken], strict=True))
        self._told |= {id_: app.revision for id_, answer in answers.items() if answer is not None}
        return None not in answers.values()

    async def _tune(self, replica: str, spec: ServiceSpec) -> Configured | None:
        self._told.pop(replica, None)  # whatever comes of it, it is not as it was
        return await self._ask(replica, "configure", spec, Configured, timeout_s=_TUNE_S)

    async def _count(self, process: str, connection: Connection) -> None:
        stats = await self._ask(process, "stats", None, Stats)
        health = Health()
        if not process.startswith(GATEWAY):
            health = await self._ask(process, "health", None, Health) or Health("does not answer")
        if connection.lost.done() or stats is None:
            return
        self._stats[process] = stats, health

    async def _tell_states(self) -> None:
        alive = self._processes()
        for gone in self._stats.keys() - alive.keys():
            del self._stats[gone]
            self._told.pop(gone, None)
            self._aggregate.retire(gone)
        deployments = {} if self._seen is None else self._seen.deployments
        states = States(
            build.services(self._order),
            down=tuple(
                name
                for name, one in deployments.items()
                if one.status in _FAILED and not one.replica_states.get("RUNNING")  # type: ignore[call-overload]
            ),
            unready=tuple(id_ for id_, (_, health) in self._stats.items() if health.ready),
        )
        new = alive.keys() - self._told_states
        told = alive if states != self._states else new
        self._states, self._told_states = states, set(alive)
        await asyncio.gather(*(self._ask(one, "states", states, Nothing) for one in told))

    def _processes(self, prefix: str = "") -> dict[str, Connection]:
        """Return the connected replicas and gateways, by id."""
        connections = self._router.connections()
        return {id_: one for id_, one in connections.items() if id_.startswith(prefix)}

    async def _ask(
        self,
        process: str,
        verb: str,
        body: msgspec.Struct | None,
        answer: type[T],
        timeout_s: float = _ASK_S,
    ) -> T | None:
        connection = self._router.connections().get(process)
        if connection is None:
            return None
        try:
            return await ask(connection, verb, body, answer=answer, timeout_s=timeout_s)
        except CallError:
            return None

    # -- what gateways ask -------------------------------------------------------------------

    async def _on_metrics(self, _: bytes) -> Figures:
        processes = [*self._processes()]
        found = await asyncio.gather(
            *(self._ask(process, "metrics", None, Figures) for process in processes)
        )
        for process, figures in zip(processes, found, strict=True):
            if figures is not None:
                self._aggregate.put(process, figures.snapshot)
        self._aggregate.put(self.id, self._metrics.snapshot())
        return Figures(self._aggregate.snapshot())

    async def _on_status(self, _: bytes) -> AppStatus:
        return await self._status()

    async def _status(self) -> AppStatus:
        order, seen = self._order, self._seen
        alive = self._processes()
        new = alive.keys() - self._stats.keys()
        await asyncio.gather(*(self._count(one, alive[one]) for one in new))
        return AppStatus(
            name=order.common.app,
            target=order.target,
            url=order.front.url,
            pid=0,
            revision=order.current.app.revision,
            uptime_s=time.time() - order.started_at,
            gateways=[self._process(id_) for id_ in alive if id_.startswith(GATEWAY)],
            services=[
                ServiceStatus(
                    name=spec.name,
                    version=spec.version,
                    state=self._state(spec.name, alive),
                    bounds=bounds(order.replicas(spec)),
                    desired=_desired(order.replicas(spec), seen, spec.name),
                    restarts=0,
                    replicas=[
                        self._process(id_) for id_ in alive if id_.rpartition("-")[0] == spec.name
                    ],
                )
                for spec in order.current.app.services
            ],
        )

    def _state(self, service: str, alive: dict[str, Connection]) -> str:
        if any(id_.rpartition("-")[0] == service for id_ in alive):
            return "up"
        if service in self._states.down:
            return "down"
        return "asleep" if self._states.services.get(service) else "starting"

    def _process(self, id_: str) -> ProcessStatus:
        stats, health = self._stats.get(id_, (Stats(pid=0), Health()))
        trouble = health.live or health.ready
        return ProcessStatus(
            id=id_,
            pid=stats.pid,
            state="unready" if trouble else "ready",
            ongoing=stats.ongoing,
            finished=stats.finished,
            rss=stats.rss,
            trouble=trouble,
        )

    async def __del__(self) -> None:
        """End."""
        await self.on_loop(self._stop())

    async def _stop(self) -> None:
        await self._tasks.close()
        self._discovery.close()
        await self._router.close()
        await self._backlog.close()
        await self.clear()


def failure(seen: ApplicationStatusOverview) -> str:
    """Return why an app does not start: one line, and the author's traceback where there is one."""
    reasons = [
        _told(name, one.message)
        for name, one in seen.deployments.items()
        if one.status in _FAILED and one.message
    ]
    return "\n".join(reasons) or seen.message


def _told(deployment: str, message: str) -> str:
    """Return what a replica raised (`RayReplica`), out of what Ray says around it."""
    _, found, own = message.rpartition(f"{SetupError.__module__}.{SetupError.__name__}: ")
    if not found:
        return f"{deployment}: {message}"
    lines = own.splitlines()
    return "\n".join(_TRACE if "ray::ServeReplica" in line else line for line in lines)


def _desired(policy: int | Autoscale, seen: ApplicationStatusOverview | None, service: str) -> int:
    if isinstance(policy, int):
        return policy
    found = None if seen is None else seen.deployments.get(service)
    states = {} if found is None else found.replica_states
    return sum(number for state, number in states.items() if state != "STOPPING")
