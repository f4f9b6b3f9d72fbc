"""A replica on Ray: `ReplicaHost` in an actor that Ray Serve starts, checks, scales and ends."""

import asyncio
import os
from contextlib import suppress

import msgspec

from servekit.core.tracebacks import user_traceback
from servekit.engine.control import Health, Nothing, ask
from servekit.engine.ray.code import class_of, unpack
from servekit.engine.ray.discovery import Discovery
from servekit.engine.ray.orders import CONTROLLER, ReplicaOrder, States
from servekit.engine.ray.policy import CAPACITY, FINISHED, ONGOING
from servekit.engine.ray.process import Process
from servekit.engine.replica_host import ReplicaHost
from servekit.errors import AuthorError, CallError, SetupError, WireError
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import connect

_PROBE_S = 2.0


class RayReplica(Process):
    """What Ray Serve makes of a service; Ray calls all of its methods.

    Args:
        order: A `ReplicaOrder`, packed.
    """

    def __init__(self, order: bytes) -> None:
        self._order = msgspec.msgpack.decode(order, type=ReplicaOrder)
        super().__init__(self._order.common, self._order.spec.name, "replica")
        if not self._order.spec.needs.gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all of them to be seen
        self._host: ReplicaHost | None = None
        self._discovery: Discovery | None = None
        self._probe: Connection | None = None
        try:
            self.run(self._start())
        except AuthorError as error:
            # Ray shows the text of what is raised here, in its status and in ours.
            cause = error.__cause__ if error.__cause__ is not None else error
            raise SetupError(f"{error}\n{user_traceback(cause)}") from None

    async def _start(self) -> None:
        order, spec = self._order, self._order.spec
        places = self.places()
        unpack(order.code, self.folder)
        self._host = ReplicaHost(
            spec,
            replica=self.id,
            on_starved=self._starved,
            jobs=order.jobs,
            secret=order.common.secret,
            verbs={"states": self._on_states, "logs": self.on_logs},
        )
        self._discovery = Discovery(order.common.app, self._host.update)
        self._discovery.follow(order.services)
        self._addresses = await self._host.start(*places, cls=class_of(spec, order.code))

    def _starved(self, service: str) -> None:
        if self._discovery is not None:
            self._discovery.wake(service)

    async def _on_states(self, body: bytes) -> Nothing:
        assert self._discovery is not None
        self._discovery.take(msgspec.msgpack.decode(body, type=States))
        return Nothing()

    # -- Ray Serve's hooks -------------------------------------------------------------------

    async def record_replica_metadata(self) -> dict[str, str]:
        """Say where this replica is reached."""
        return self.metadata(self._addresses, self._order.spec.version)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the load, for `Policy`."""
        assert self._host is not None
        stats = self._host.stats()
        return {
            ONGOING: float(stats.ongoing),
            FINISHED: float(stats.finished),
            CAPACITY: stats.capacity_per_s or 0.0,
        }

    async def check_health(self) -> None:
        """Probe it as a caller would, through its socket.

        Raises:
            WireError: It does not answer, or its `live` hook is not content.
        """
        await self.on_loop(self._check())

    async def _check(self) -> None:
        if self._probe is None or self._probe.lost.done():
            self._probe = await connect(
                self._addresses[0],
                lambda: Connection(Hello(replica=CONTROLLER), client=True),
                timeout_s=_PROBE_S,
            )
        try:
            health = await ask(self._probe, "health", answer=Health, timeout_s=_PROBE_S)
        except CallError as error:
            raise WireError(f"{self.id} does not answer: {error}") from error
        if health.live:
            raise WireError(f"{self.id} is not well: {health.live}")

    async def wake(self) -> None:
        """Do nothing: that Ray had to start a replica for this call is its whole effect."""

    async def __del__(self) -> None:
        """Finish the calls on board, then end; Ray Serve waits for it."""
        await self.on_loop(self._stop())

    async def _stop(self) -> None:
        if self._probe is not None:
            await self._probe.close()
        if self._host is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.common.drain_s):
                    await self._host.drain()
            await self._host.stop()
        if self._discovery is not None:
            self._discovery.close()
        await self.clear()
