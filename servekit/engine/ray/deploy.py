"""What an operator does with an app on Ray, from outside the cluster: deploy, look, scale, end.

Only the first order of an app goes to Ray Serve from here. Later ones go through the app's
controller, so there is one that writes.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from servekit.engine.control import AppStatus
from servekit.engine.description import Described
from servekit.engine.front import bind
from servekit.engine.numbers import initial, resize
from servekit.engine.ray import build, cluster
from servekit.engine.ray.code import archive, fingerprint
from servekit.engine.ray.controller import RayController, failure
from servekit.engine.ray.orders import (
    CONTROLLER,
    GATEWAY,
    AppOrder,
    Common,
    Front,
    Outcome,
    Revision,
    pack,
)
from servekit.errors import CallError, ConfigError, NotFound, ServekitError, SetupError, suggest
from servekit.gateway.credentials import Credentials
from servekit.gateway.edge import Edge
from servekit.settings import Settings
from servekit.spec.app import ServiceSpec
from servekit.spec.definition import ServiceDefinition
from servekit.spec.graph import topology

_ASK_S = 20.0
_LOOK_S = 1.0
_POLL_S = 0.2


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What an order will change, by names of services.

    Attributes:
        crowded: Of those that restart, those whose old replicas leave before new ones start.
        tunes: Whose replicas take other arguments.
    """

    starts: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    crowded: tuple[str, ...] = ()
    tunes: tuple[str, ...] = ()
    resizes: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


def revision(described: Described) -> Revision:
    """Return an app as it is sent to a cluster."""
    app = described.app
    assert app is not None
    folders = (*described.search_path, str(Path.cwd()))
    models = [model for service in app.services for model in _models(service)]
    services = tuple(map(_with_models, app.services))
    return Revision(
        app=msgspec.structs.replace(app, services=services),
        code=archive(described.sources, folders, models),
    )


def _with_models(service: ServiceSpec) -> ServiceSpec:
    """Return a service whose code is another one when its models are: running replicas have the old."""
    models = _models(service)
    if not models:
        return service
    code = hashlib.sha256(f"{service.code} {fingerprint(models)}".encode()).hexdigest()
    return msgspec.structs.replace(service, code=code[: len(service.code)])


def _models(service: ServiceSpec) -> list[Path]:
    """Return the models of a service's processes that are given by path, as far as they are here."""
    found = (model for one in service.together for model in one.models.values())
    paths = {Path(model.source).absolute() for model in found if not model.scheme}
    return sorted(path for path in paths if path.exists())


def order_of(
    target: str, current: Revision, settings: Settings, *, name: str = "", dev: bool = False
) -> AppOrder:
    """Return the order to run an app, as if there were nothing of it yet.

    Raises:
        ConfigError: A setting can't be used.
    """
    port = settings.port
    if not port:
        with bind(settings.host, 0) as free:
            port = free.getsockname()[1]
    return AppOrder(
        common=Common(
            app=name or current.app.root,
            secret=secrets.token_bytes(32),
            log_level=settings.log_level,
            log_format=settings.log_format,
            runtime_dir=str(settings.runtime_dir),
            drain_s=settings.drain_s,
        ),
        target=target,
        current=current,
        front=Front(
            host=settings.host,
            port=port,
            labels=dict(settings.gateway_nodes),
            dev=dev,
            edge=Edge.of(settings),
            credentials=Credentials.of(settings),
            drain_delay_s=settings.drain_delay_s,
            settings=settings.shown(),
        ),
        jobs=str(settings.jobs_dir.absolute()),
        started_at=time.time(),
    )


def by_value(root: ServiceDefinition) -> dict[str, bytes]:
    """Return the classes of an app that no module has, pickled, by service."""
    return {
        one.name: cloudpickle.dumps(one.cls) for one in topology(root) if not _importable(one.cls)
    }


def _importable(cls: type) -> bool:
    return cls.__module__ != "__main__" and "<locals>" not in cls.__qualname__


def deployed() -> list[str]:
    """Return the names of all apps of ours that the cluster has."""
    found = serve.status().applications
    return sorted(name for name, seen in found.items() if CONTROLLER in seen.deployments)


class Deployment:
    """One app on the cluster that this process has joined.

    Args:
        name: Of its Serve application.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def url(self) -> str:
        """Where its gateways listen."""
        return self.status().url

    # -- what is there -----------------------------------------------------------------------

    def order(self) -> AppOrder | None:
        """Return the order that holds; None if the app does not run.

        Raises:
            CallError: Its controller does not answer.
        """
        if not self._is_there():
            return None
        return msgspec.msgpack.decode(self._ask("order"), type=AppOrder)

    def _is_there(self) -> bool:
        seen = serve.status().applications.get(self.name)
        return seen is not None and seen.status is not ApplicationStatus.DELETING

    def status(self) -> AppStatus:
        """Return how the app is.

        Raises:
            NotFound: There is none of that name.
            CallError: Its controller does not answer.
        """
        return msgspec.msgpack.decode(self._ask("status"), type=AppStatus)

    def logs(self, since: dict[str, int]) -> dict[str, tuple[str, ...]]:
        """Return what the app's processes have printed since the last question.

        Args:
            since: What was seen; it is brought up to date. Empty asks for all that is kept.

        Raises:
            CallError: Its controller does not answer.
        """
        found = self._ask("logs", since)
        since.update({process: until for process, (until, _) in found.items()})
        return {process: lines for process, (_, lines) in found.items() if lines}

    # -- what may be done --------------------------------------------------------------------

    def next(self, wanted: AppOrder, before: AppOrder | None) -> tuple[AppOrder, Plan]:
        """Return the order to go from one to another, and what it will change.

        Raises:
            ResourceError: The cluster could not hold it.
            ConfigError: It has tasks, and the cluster several machines.
        """
        there = cluster.inventory()
        specs = wanted.current.app.services
        if any(spec.has_tasks for spec in specs) and len({node.address for node in there}) > 1:
            raise ConfigError(
                "jobs are kept in a file, which the machines of a cluster don't share; run services "
                "with tasks on a machine of their own, with `servekit serve`"
            )
        cluster.check([(spec, initial(spec.replicas)) for spec in specs], there)
        if before is None:
            env = dict(ray.get_runtime_context().runtime_env)
            common = msgspec.structs.replace(wanted.common, runtime_env=env)
            wanted = msgspec.structs.replace(wanted, common=common)
            return wanted, Plan(starts=tuple(spec.name for spec in specs))
        old = {spec.name: spec for spec in before.current.app.services}
        restarts = [
            spec
            for spec in specs
            if spec.name in old and build.version_of(spec) != build.version_of(old[spec.name])
        ]
        crowded = tuple(
            spec.name
            for spec in restarts
            if not cluster.has_room([(spec, initial(before.replicas(old[spec.name])))])
        )
        changed = {spec.name for spec in restarts}
        order = msgspec.structs.replace(
            wanted,
            common=msgspec.structs.replace(
                wanted.common,
                secret=before.common.secret,
                runtime_env=before.common.runtime_env,
            ),
            serial=before.serial + 1,
            previous=before.current,
            crowded=crowded,
            # What an operator said holds until the code of the service changes.
            numbers={
                name: number
                for name, number in before.numbers.items()
                if name not in changed and name in {spec.name for spec in specs}
            },
            started_at=before.started_at,
        )
        kept = [spec for spec in specs if spec.name in old and spec.name not in changed]
        resizes = [s.name for s in kept if order.replicas(s) != before.replicas(old[s.name])]
        tunes = [s.name for s in kept if s.arguments != old[s.name].arguments]
        return order, Plan(
            starts=tuple(spec.name for spec in specs if spec.name not in old),
            restarts=tuple(spec.name for spec in restarts),
            crowded=crowded,
            tunes=tuple(tunes),
            resizes=tuple(resizes),
            stays=tuple(spec.name for spec in kept if spec.name not in (*resizes, *tunes)),
            ends=tuple(old.keys() - {spec.name for spec in specs}),
        )

    async def carry_out(self, order: AppOrder, *, timeout_s: float) -> None:
        """Have an order; returns when all is as it says.

        Raises:
            SetupError: A replica does not start; what ran before goes on, and of a first order
                nothing is left.
        """
        first = not order.serial
        await cluster.check_environments(order.current.app.services)
        try:
            if first:
                there = cluster.lasting(order.front.labels)
                await asyncio.to_thread(build.deploy, order, RayController, nodes=there)
            else:
                await asyncio.to_thread(self._ask, "apply", pack(order))
            async with asyncio.timeout(timeout_s):
                outcome = await self._until_done(order)
            if outcome.error:
                message, _, trace = outcome.error.partition("\n")
                raise SetupError(message, trace=trace)
        except BaseException as error:
            if first:
                await asyncio.to_thread(self.delete)
            if isinstance(error, TimeoutError):
                raise SetupError(f"{self.name} is not ready after {timeout_s:g} s") from None
            raise

    async def _until_done(self, order: AppOrder) -> Outcome:
        while True:
            outcome = await asyncio.to_thread(self._outcome, order)
            if outcome.done:
                return outcome
            await asyncio.sleep(_POLL_S)

    def _outcome(self, order: AppOrder) -> Outcome:
        seen = serve.status().applications.get(self.name)
        if seen is None:
            return Outcome()
        controller = seen.deployments.get(CONTROLLER)
        if controller is not None and controller.replica_states.get("RUNNING"):  # type: ignore[call-overload]
            try:
                return msgspec.msgpack.decode(self._ask("outcome", order.serial), type=Outcome)
            except CallError:
                return Outcome()  # it is being replaced
        if seen.status is ApplicationStatus.DEPLOY_FAILED:
            return Outcome(done=True, error=failure(seen))
        return Outcome()

    async def rollback(self, *, timeout_s: float) -> None:
        """Go back to what ran before the last order.

        Raises:
            ConfigError: There was nothing before.
        """
        before = await asyncio.to_thread(self._held)
        if before.previous is None:
            raise ConfigError(
                f"{self.name} has had one revision only; there is nothing to go back to"
            )
        wanted = msgspec.structs.replace(before, current=before.previous)
        order, _ = await asyncio.to_thread(self.next, wanted, before)
        await self.carry_out(order, timeout_s=timeout_s)

    def scale(self, wanted: Mapping[str, int | tuple[int, int]]) -> AppStatus:
        """Have other numbers of replicas, each until its service's code changes.

        Raises:
            NotFound: There is no such app or service.
            ConfigError: A service takes no such number.
            ResourceError: The cluster could not hold them.
        """
        before = self._held()
        specs = before.current.app.services
        numbers = resize({spec.name: before.replicas(spec) for spec in specs}, wanted)
        order = msgspec.structs.replace(
            before, numbers=before.numbers | numbers, serial=before.serial + 1
        )
        needed = [(spec, initial(order.replicas(spec))) for spec in specs]
        cluster.check(needed, cluster.inventory())
        self._ask("apply", pack(order))
        return self.status()

    def leave(self) -> None:
        """Have the gateways say that the app is not ready, and serve on."""
        with suppress(CallError):
            self._ask("leave")

    def delete(self, until: float | None = None) -> None:
        """End the app: first its gateways finish what they have on board, then its replicas.

        Args:
            until: When to end it all the same, as `time.monotonic`; None is as its own settings say.
        """
        try:
            grace_s = float(self._ask("close"))
            until = time.monotonic() + grace_s if until is None else until
            while time.monotonic() < until and self._has_gateways():
                time.sleep(_POLL_S)
        except CallError:
            pass  # its controller is gone, or never was there
        serve.delete(self.name)

    def kill(self) -> None:
        """End the app without a grace."""
        serve.delete(self.name, _blocking=False)

    def _has_gateways(self) -> bool:
        seen = serve.status().applications.get(self.name)
        return seen is not None and any(
            name.startswith(GATEWAY) and any(one.replica_states.values())
            for name, one in seen.deployments.items()
        )

    def _held(self) -> AppOrder:
        """Return the order that holds.

        Raises:
            NotFound: The app does not run.
        """
        order = self.order()
        if order is None:
            raise self.absent()
        return order

    def absent(self) -> NotFound:
        """Return the error that says so."""
        hint = suggest(self.name, deployed())
        return NotFound(f"no app {self.name!r} runs on this cluster.{hint}", started=False)

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the app's controller.

        Raises:
            NotFound: There is none.
            CallError: As it raised, or it does not answer.
        """
        try:
            handle = serve.get_deployment_handle(CONTROLLER, self.name)
        except KeyError:
            raise self.absent() from None
        asked, until = getattr(handle, method).remote(*args), time.monotonic() + _ASK_S
        try:
            while True:
                try:
                    return asked.result(timeout_s=_LOOK_S)
                except TimeoutError:
                    # Serve does not tell who asks of a deployment that it has ended meanwhile.
                    if not self._is_there() or time.monotonic() > until:
                        raise
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ServekitError):
                raise cause from None
            raise CallError(f"the controller of {self.name} raised: {cause!r}") from error
        except (RayError, RayServeException, TimeoutError) as error:
            raise CallError(f"the controller of {self.name} does not answer: {error}") from error
