"""One replica: load → set up → warm up → ready → drain → stop, and its calls in between.

A replica is a `Handler` over the endpoints of one service object. It does no networking: the
worker process puts it behind a socket, `local` behind an in-memory connection.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from servekit.core.call import EMPTY, Call, Handler, Load, Reply, now
from servekit.core.context import CURRENT, RequestContext
from servekit.errors import (
    BadRequest,
    CallError,
    ConfigError,
    NotFound,
    SetupError,
    UnsupportedMedia,
    is_shed,
    suggest,
)
from servekit.jobs.store import Store
from servekit.observe.families import Families
from servekit.observe.log import get_logger
from servekit.observe.metrics import Metrics, Snapshot
from servekit.runtime.batched import Batched
from servekit.runtime.endpoints import Runner, Stream, Unary
from servekit.runtime.form import receive
from servekit.runtime.meter import Meter, Pace
from servekit.runtime.mount import Mounted
from servekit.runtime.promise import fulfil
from servekit.runtime.slots import Slots
from servekit.runtime.task import Task
from servekit.runtime.threads import Threads
from servekit.settings import Settings
from servekit.spec.app import ServiceSpec
from servekit.spec.definition import (
    EndpointDefinition,
    HookKind,
    MountDefinition,
    ServiceDefinition,
    parameters,
)
from servekit.spec.model import Model
from servekit.spec.place import place

State = Literal["loading", "warming", "ready", "draining", "stopped"]

SYNC_LIMIT = 32
"""Threads of a service that sets no `Limits.max_ongoing`."""
ASYNC_LIMIT = 256
"""Async calls at once of a service that sets no `Limits.max_ongoing`."""

_HEALTH_TIMEOUT_S = 5.0
_log = get_logger("servekit.replica")


class Replica:
    """One service object and everything that runs its calls.

    Args:
        definition: The class.
        spec: Its settings in this app.
        replica_id: Unique in the app.
        store: Keeps the jobs of its tasks, if it has any.
        outward: Answers the calls that come as arguments of calls, if there may be any.

    Attributes:
        id: Its id.
        service: Name of its service in the app.
        state: Where it is in its life.
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
        self._spec = spec
        self._metrics = Metrics(replica=replica_id)
        self._families = Families(self._metrics)
        self._pace = Pace()
        limits = spec.limits
        self._loop = loop = asyncio.get_running_loop()
        self._threads = Threads(loop, limits.max_ongoing or SYNC_LIMIT, name=spec.name)
        self._async_slots = Slots(limits.max_ongoing or ASYNC_LIMIT, limits.max_queued, spec.name)
        self._sync_slots = Slots(limits.max_ongoing or SYNC_LIMIT, limits.max_queued, spec.name)
        self._store = store
        self._outward = outward
        self._tasks: list[Task] = []
        self._batched: list[Batched] = []
        self._meters: list[Meter] = []
        self._runners: dict[str, tuple[Runner, Meter]] = {}
        self._mounts: dict[str, Mounted] = {}
        self._instance: Any = None
        self.id = replica_id
        self.service = spec.name
        self.state: State = "loading"

    # -- life --------------------------------------------------------------------------------

    async def start(self, dependencies: Mapping[str, object]) -> None:
        """Have its models here, construct the service, run its set-up and warm-up hooks, and become ready.

        `__init__` and sync hooks run on this thread, as libraries with signal handlers and
        thread-bound contexts expect.

        Args:
            dependencies: Handles by attribute; there before `__init__` runs.

        Raises:
            SetupError: User code raised, chained to its exception; or a model can't be had.
        """
        instance: Any = object.__new__(cast("type[Any]", self._definition.cls))
        self._instance = instance
        for attribute, handle in dependencies.items():
            setattr(instance, attribute, handle)
        for attribute, model in self._definition.models.items():
            setattr(instance, attribute, await self._path(model))
        try:
            instance.__init__(**self._spec.args)
            await self._run_hooks("setup")
            for endpoint in self._definition.endpoints.values():
                self._add(endpoint)
            for mount in self._definition.mounts.values():
                await self._mount(mount)
            self._go_on("warming")
            await self._run_hooks("warmup")
        except Exception as error:
            raise SetupError(
                f"{self._spec.name}: set-up raised {type(error).__name__}: {error}"
            ) from error
        if self._go_on("ready"):
            for task in self._tasks:
                task.worker.start()

    async def _path(self, model: Model) -> Path:
        """Return where a model's files are; elsewhere than on the loop, as it may be fetched."""
        from servekit.store.store import Store  # noqa: PLC0415

        try:
            store = Store.of(Settings.load())
            return await asyncio.to_thread(store.path, model.spec, model.base)
        except ConfigError as error:
            raise SetupError(f"{model.where}: {error}") from None

    def _go_on(self, state: State) -> bool:
        """Enter a state of the way up, unless it was told to leave meanwhile."""
        if self.state == "draining":
            return False
        self.state = state
        return True

    def _meter(self, endpoint: str) -> Meter:
        spec = self._spec
        meter = Meter(
            self._families,
            self._pace,
            service=spec.name,
            endpoint=endpoint,
            version=spec.version,
        )
        self._meters.append(meter)
        return meter

    async def _mount(self, mount: MountDefinition) -> None:
        app = mount.fn(self._instance)
        meter = self._meter(mount.name)
        mounted = Mounted(app, place(mount.fn), self._async_slots, meter)
        await mounted.lifespan.start()
        self._mounts[mount.name] = mounted
        self._runners[mount.name] = (mounted, meter)

    def _add(self, definition: EndpointDefinition) -> None:
        spec = self._spec
        meter = self._meter(definition.name)
        runner: Runner
        if definition.batch is not None:
            runner = batched = Batched(
                self._instance,
                definition,
                self._threads,
                meter,
                self._families,
                service=spec.name,
            )
            self._batched.append(batched)
            self._runners[f"{definition.name}/batch"] = (batched.many, meter)
        elif definition.task is not None:
            runner = self._add_task(definition, meter)
        else:
            slots = self._async_slots if definition.is_async else self._sync_slots
            if (limit := definition.max_concurrency) is not None:
                slots = Slots(limit, spec.limits.max_queued, definition.where)
            kind = Stream if definition.kind == "stream" else Unary
            runner = kind(self._instance, definition, slots, self._threads, meter)
        self._runners[definition.name] = (runner, meter)
        with contextlib.suppress(CallError):  # builds the validator, so that no call has to wait
            definition.schemas[0].decode(EMPTY)

    def _add_task(self, definition: EndpointDefinition, meter: Meter) -> Runner:
        if self._store is None:
            raise SetupError(f"{definition.where}: this process has no store for jobs")
        task = Task(
            self._instance,
            definition,
            self._async_slots if definition.is_async else self._sync_slots,
            self._threads,
            meter,
            self._families,
            self._store,
            service=self._spec.name,
            replica=self.id,
        )
        self._tasks.append(task)
        self._runners |= {name: (runner, meter) for name, runner in task.runners().items()}
        return task.submit

    async def configure(self, spec: ServiceSpec) -> None:
        """Go over to other arguments of the constructor, by the hooks that take them.

        Raises:
            SetupError: A hook raised; chained to its exception.
        """
        before, after = self._arguments(), self._arguments(spec)
        self._spec = spec
        for hook in self._definition.hooks.get("reconfigure", ()):
            values = {name: after[name] for name in parameters(hook)}
            if all(before[name] == value for name, value in values.items()):
                continue
            try:
                if inspect.iscoroutinefunction(hook):
                    await hook(self._instance, **values)
                else:
                    await asyncio.to_thread(hook, self._instance, **values)
            except Exception as error:
                raise SetupError(
                    f"{spec.name}: {hook.__name__} raised {type(error).__name__}: {error}"
                ) from error

    def _arguments(self, spec: ServiceSpec | None = None) -> Mapping[str, Any]:
        """Return what the constructor is called with, defaults and all."""
        bound = inspect.signature(self._definition.cls).bind(**(spec or self._spec).args)
        bound.apply_defaults()
        return bound.arguments

    async def _run_hooks(self, kind: HookKind) -> None:
        for hook in self._definition.hooks.get(kind, ()):
            outcome = hook(self._instance)
            if inspect.isawaitable(outcome):
                await outcome

    def drain(self) -> None:
        """Become unready; whoever owns the connections stops new calls and waits for old ones."""
        self.state = "draining"
        for task in self._tasks:
            task.drain()

    async def idle(self) -> None:
        """Wait until no job runs; `drain` it first."""
        for task in self._tasks:
            await task.worker.idle()

    async def stop(self) -> None:
        """Give back the jobs that run, and run the tear-down hooks; what they raise is logged."""
        self.state = "stopped"
        await asyncio.gather(*(task.worker.close() for task in self._tasks))
        for mounted in self._mounts.values():
            await mounted.lifespan.stop()
        try:
            await self._run_hooks("teardown")
        except Exception:  # noqa: BLE001  (user code; the process ends anyway)
            _log.exception("teardown raised", service=self._spec.name)
        self._threads.close()

    # -- calls -------------------------------------------------------------------------------

    async def __call__(self, call: Call) -> Reply:
        """Answer a call.

        Raises:
            CallError: It failed; see each endpoint's runner.
        """
        found = self._runners.get(call.endpoint)
        if found is None:
            names = list(self._runners)
            raise NotFound(
                f"{self._spec.name} has no endpoint {call.endpoint!r}."
                f"{suggest(call.endpoint, names)}",
                started=False,
            )
        if call.promises:
            return await self._fulfil(call)
        runner, meter = found
        context = RequestContext(call)
        CURRENT.set(context)
        if call.chunks is not None:
            await self._receive(call)
        if not call.internal:
            return await runner(call, context)
        started = now()
        code = 500
        try:
            reply = await runner(call, context)
            code = 200
        except CallError as error:
            code = error.status
            if is_shed(error):
                meter.shed(error.reason)
            raise
        except asyncio.CancelledError:
            code = 499
            raise
        finally:
            meter.answered(code, now() - started)
        return reply

    async def _fulfil(self, call: Call) -> Reply:
        """Answer a call after those that are its arguments."""
        endpoint = self._definition.endpoints.get(call.endpoint)
        if endpoint is None or self._outward is None or not call.internal:
            raise BadRequest(f"{call.endpoint} takes no calls as arguments", started=False)
        repeatable = await fulfil(call, endpoint.schemas[0], self._outward)
        try:
            return await self(call)
        except CallError as error:
            error.started = error.started or not repeatable
            raise

    async def _receive(self, call: Call) -> None:
        """Read what comes in pieces, unless the method itself does."""
        if call.endpoint in self._mounts:
            return
        endpoint = self._definition.endpoints.get(call.endpoint)
        if endpoint is None:
            raise UnsupportedMedia(f"{call.endpoint} takes no form", started=False)
        if endpoint.schemas[0].inbound is None:
            await receive(call, endpoint.schemas[0])

    # -- figures -----------------------------------------------------------------------------

    def load(self) -> Load:
        """Return the figures for the router."""
        ongoing = 0
        for meter in self._meters:
            ongoing += meter.ongoing
        return Load(ongoing, self._pace.unit_s)

    def capacity_per_s(self) -> float | None:
        """Return how many calls a second the batchers can serve in time; None if none knows."""
        known = [c for b in self._batched if (c := b.statistics().capacity_per_s) is not None]
        return min(known) if known else None

    @property
    def finished(self) -> int:
        """Calls answered since the start."""
        return sum(meter.finished for meter in self._meters)

    def metrics(self) -> Snapshot:
        """Return the figures for `/metrics`."""
        for meter in self._meters:
            meter.publish()
        return self._metrics.snapshot()

    # -- health ------------------------------------------------------------------------------

    async def check(self, kind: Literal["live", "ready"]) -> str:
        """Run the user's hooks of that kind; returns "" when well, else what is wrong."""
        if kind == "ready" and self.state != "ready":
            return f"the replica is {self.state}"
        for hook in self._definition.hooks.get(kind, ()):
            try:
                async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                    if inspect.iscoroutinefunction(hook):
                        healthy = await hook(self._instance)
                    else:
                        healthy = await asyncio.to_thread(hook, self._instance)
            except TimeoutError:
                return f"@sk.{kind} hook {hook.__name__} took over {_HEALTH_TIMEOUT_S} s"
            except Exception as error:  # noqa: BLE001  (user code)
                _log.exception("health hook raised", hook=hook.__name__)
                return f"@sk.{kind} hook {hook.__name__} raised {type(error).__name__}"
            if healthy is False:
                return f"@sk.{kind} hook {hook.__name__} returned False"
        return ""
