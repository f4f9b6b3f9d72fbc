"""`RayEngine`: an app on Ray for as long as a command runs."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain

import msgspec

from servekit.core.aio import Tasks
from servekit.engine.admin import Admin
from servekit.engine.control import AppStatus, ServiceStatus
from servekit.engine.description import Described
from servekit.engine.numbers import bounds, initial
from servekit.engine.ray import cluster
from servekit.engine.ray.deploy import Deployment, order_of, revision
from servekit.errors import CallError, ConfigError, NotFound
from servekit.settings import Settings

_TICK_S = 1.0


class RayEngine:
    """One app on a cluster: joined or started here at the start, and left at the end with no trace.

    Args:
        described: The app.
        settings: Of this process.
        target: What the user asked to serve, for `servekit status`.
        dev: Show the playground.

    Raises:
        ConfigError: A setting can't be used on a cluster.

    Attributes:
        url: Where the gateways listen.
        app: What is served now.
    """

    def __init__(
        self, described: Described, settings: Settings, *, target: str, dev: bool = False
    ) -> None:
        assert described.app is not None
        self._settings = settings
        self._tasks = Tasks()
        # `leave` and `stop` come with the delay between them already.
        order = order_of(target, revision(described), settings, dev=dev)
        front = msgspec.structs.replace(order.front, drain_delay_s=0.0)
        self._order = msgspec.structs.replace(order, front=front)
        self._deployment = Deployment(order.common.app)
        self._admin = Admin(self, settings.runtime_dir)
        self._joined = self._deployed = False
        self._stopping = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        self._printed: dict[str, int] = {}
        self.app = described.app
        self.url = order.front.url
        self.ready = False
        self._status = AppStatus(
            name=order.common.app,
            target=target,
            url=self.url,
            pid=os.getpid(),
            revision=self.app.revision,
            uptime_s=0.0,
            gateways=[],
            services=[
                ServiceStatus(
                    name=spec.name,
                    version=spec.version,
                    state="starting",
                    bounds=bounds(spec.replicas),
                    desired=initial(spec.replicas),
                    restarts=0,
                    replicas=[],
                )
                for spec in self.app.services
            ],
        )

    async def start(self) -> None:
        """Join the cluster, start everything; returns when every service is ready.

        Raises:
            ConfigError: There is no such cluster, or the app runs there already.
            ResourceError: The cluster has less than the app asks for.
            SetupError: A replica could not start; nothing is left running.
        """
        await self._admin.open()
        await asyncio.to_thread(cluster.join, self._settings.ray_address)
        self._joined = True
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))  # Ray has put its own in their place
        if await asyncio.to_thread(self._deployment.order) is not None:
            raise ConfigError(
                f"{self._deployment.name} runs on this cluster already; `servekit deploy --target "
                "ray` updates it, `servekit delete` ends it"
            )
        order, _ = await asyncio.to_thread(self._deployment.next, self._order, None)
        self._deployed = True
        self._ticking = self._tasks.spawn(self._tick(), name="tick")
        await self._deployment.carry_out(order, timeout_s=self._settings.start_timeout_s)
        self._order = order
        await self.look()
        self.ready = True

    async def roll(self, described: Described) -> list[str]:
        """Go over to another revision without losing a call; returns the services that changed.

        Raises:
            ResourceError: The cluster has less than it asks for.
            SetupError: A new replica could not start; the old revision goes on.
        """
        assert described.app is not None
        before = await asyncio.to_thread(self._deployment.order)
        wanted = msgspec.structs.replace(self._order, current=revision(described))
        order, plan = await asyncio.to_thread(self._deployment.next, wanted, before)
        await self._deployment.carry_out(order, timeout_s=self._settings.start_timeout_s)
        self._order, self.app = order, described.app
        await self.look()
        return [*plan.starts, *plan.restarts, *plan.tunes]

    async def scale(self, wanted: Mapping[str, int | tuple[int, int]]) -> None:
        """Have other numbers of replicas, each until its service's code changes.

        Raises:
            NotFound: There is no such service.
            ConfigError: A service takes no such number.
            ResourceError: The cluster could not hold them.
        """
        await asyncio.to_thread(self._deployment.scale, wanted)

    def status(self) -> AppStatus:
        """Return what ran at the last look."""
        return self._status

    async def look(self) -> AppStatus:
        """Look what runs now; what was there before is known as long as nobody answers."""
        if not self._deployed:
            return self._status
        try:
            found = await asyncio.to_thread(self._deployment.status)
        except (CallError, NotFound):
            return self._status
        self._status = msgspec.structs.replace(found, pid=os.getpid(), url=self.url)
        return self._status

    async def _tick(self) -> None:
        while not self._stopping.is_set():
            if not self.ready:  # later only those who ask look
                await self.look()
            await self._print()
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._stopping.wait()

    async def _print(self) -> None:
        """Print what the app's processes have printed, as those of the local engine do."""
        with suppress(CallError):
            printed = await asyncio.to_thread(self._deployment.logs, self._printed)
            for line in chain.from_iterable(printed.values()):
                print(line, file=sys.stderr)  # noqa: T201

    async def leave(self) -> None:
        """Say that the app is not ready any more, but go on as before."""
        await asyncio.to_thread(self._deployment.leave)

    async def stop(self) -> None:
        """Finish the requests on board, end the app, and leave the cluster."""
        self._stopping.set()
        if self._ticking is not None:
            await self._ticking  # what it asks would never be answered once the app has ended
        if self.ready:
            await self._print()
        if self._deployed:
            until = time.monotonic() + self._settings.drain_s
            await asyncio.to_thread(self._deployment.delete, until)
        if self._joined:
            await asyncio.to_thread(cluster.leave)
        await self._admin.close()
        await self._tasks.close()

    def kill(self) -> None:
        """End all processes at once."""
        self._deployment.kill()
