"""What an app may take of this machine: its GPUs, its memory, and who may load when.

The supervisor asks here before it starts anything. An app that can't fit is refused as a whole, with
what is there and who asks for what.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import TypeAlias

from servekit.core.call import now
from servekit.core.host import Host
from servekit.engine.devices import detect
from servekit.engine.placement import Placement
from servekit.engine.starts import Start, Starts
from servekit.errors import ResourceError
from servekit.observe.log import get_logger
from servekit.settings import Settings
from servekit.spec.app import AppSpec, ServiceSpec

_log = get_logger("servekit.supervisor")

Number: TypeAlias = tuple[ServiceSpec, int]
"""A service, and how many replicas it is to have."""

_LOOK_S = 1.0
"""How often to look whether memory has become free."""


class Budget:
    """This machine's resources, and who holds them.

    Args:
        settings: The GPUs that may be used, how many replicas load at once, how long one waits.
        host: The machine.
    """

    def __init__(self, settings: Settings, host: Host | None = None) -> None:
        self._settings = settings
        self._host = host or Host()
        self._placement: Placement | None = None
        self._reserved: dict[str, list[str]] = {}
        self._memory: dict[str, int] = {}
        self._app: AppSpec | None = None
        self._starts = Starts(settings.start_parallel or max(2, self._host.cores()))
        self._numbers = count()
        self._turns: dict[Start, asyncio.Future[None]] = {}

    # -- the whole app -----------------------------------------------------------------------

    async def admit(self, app: AppSpec, numbers: Iterable[Number]) -> None:
        """Plan for an app, before any of its replicas starts.

        Raises:
            ResourceError: As `check`.
        """
        numbers = tuple(numbers)
        if self._placement is None and any(spec.needs.gpu for spec in app.services):
            settings = self._settings
            # In a thread: a driver that was not loaded takes its time.
            inventory = await asyncio.to_thread(
                detect, declared=settings.gpus, visible=settings.cuda_visible_devices
            )
            self._placement = Placement(inventory)
        planned = self.check(numbers)
        if self._app is None and planned is not None:
            # Placed together, the largest first: one by one, as they start, they might not fit.
            self._placement = planned
            for spec, number in numbers:
                if spec.needs.gpu:
                    self._reserved[spec.name] = list(_names(spec, number))
        self._check_cores(numbers)
        self._app = app

    def check(self, numbers: Iterable[Number]) -> Placement | None:
        """Refuse numbers of replicas that this machine could not hold if it were empty.

        Returns:
            Where their GPUs would be; None if no service has asked for one.

        Raises:
            ResourceError: They ask for more GPUs or memory than there is.
        """
        numbers = tuple(numbers)
        self._check_memory(numbers)
        if self._placement is None:
            return None
        planned = Placement(self._placement.inventory)
        planned.place_all(
            {name: spec.needs.gpu for spec, number in numbers for name in _names(spec, number)}
        )
        return planned

    def _check_memory(self, numbers: Iterable[Number]) -> None:
        total = self._host.memory()
        asked = [(spec.needs.memory, number, spec.name) for spec, number in numbers]
        wanted = sum(memory * number for memory, number, _ in asked)
        if total and wanted > total:
            parts = ", ".join(
                f"{name} {number} of {_size(memory)}"
                for memory, number, name in sorted(asked, key=lambda one: -one[0] * one[1])
                if memory
            )
            raise ResourceError(
                f"the app asks for {_size(wanted)} of memory, and this machine has {_size(total)}: "
                f"{parts}; lower memory= or replicas="
            )

    def _check_cores(self, numbers: Iterable[Number]) -> None:
        cores = self._host.cores()
        asked = sum(spec.needs.cpu * number for spec, number in numbers)
        if asked > cores:
            _log.warning("replicas ask for more cores than there are", asked=asked, cores=cores)

    # -- one replica -------------------------------------------------------------------------

    def place(self, replica: str, spec: ServiceSpec) -> tuple[str, ...]:
        """Give a replica its memory and its GPUs; returns their ids.

        Raises:
            ResourceError: There is no room beside the replicas that run.
        """
        needs = spec.needs
        held, total = sum(self._memory.values()), self._host.memory()
        if needs.memory and total and held + needs.memory > total:
            raise ResourceError(
                f"{replica} asks for {_size(needs.memory)} of memory; of the {_size(total)} that this "
                f"machine has, {_size(held)} are others'"
            )
        devices: tuple[str, ...] = ()
        if needs.gpu:
            assert self._placement is not None
            if reserved := self._reserved.get(spec.name):
                devices = self._placement.hand_over(reserved.pop(0), replica)
            else:
                devices = self._placement.place(replica, needs.gpu)
        self._memory[replica] = needs.memory
        return devices

    def release(self, replica: str) -> None:
        """Take back what a replica holds."""
        self._memory.pop(replica, None)
        if self._placement is not None:
            self._placement.release(replica)

    @asynccontextmanager
    async def turn(self, spec: ServiceSpec, *, restart: bool = False) -> AsyncGenerator[None]:
        """Wait until a replica may load, which it does within the block.

        Args:
            spec: Its service.
            restart: It takes the place of one that was ready, so it goes before others.

        Raises:
            ResourceError: It has waited for memory as long as it may take to start.
        """
        start = self._start(spec, restart=restart)
        turn = self._turns[start] = asyncio.get_running_loop().create_future()
        self._starts.ask(start)
        try:
            await self._wait(start, turn)
            yield
        finally:
            del self._turns[start]
            self._starts.end(start)
            self._let_go_on()

    async def _wait(self, start: Start, turn: "asyncio.Future[None]") -> None:
        short_since: float | None = None
        while True:
            self._let_go_on()
            if turn.done():
                return
            if self._starts.short == start:
                if short_since is None:
                    short_since = now()
                    _log.info("waits for memory", service=start.service, needs=_size(start.memory))
                elif now() - short_since > self._settings.start_timeout_s:
                    raise ResourceError(
                        f"{start.service} asks for {_size(start.memory)} of memory, and while others "
                        f"load only {_size(self._host.available() or 0)} is free"
                    )
            await asyncio.wait([turn], timeout=_LOOK_S)

    def _let_go_on(self) -> None:
        while (start := self._starts.next(self._host.available)) is not None:
            self._turns[start].set_result(None)

    def _start(self, spec: ServiceSpec, *, restart: bool) -> Start:
        services = {} if self._app is None else {s.name: s for s in self._app.services}
        return Start(
            number=next(self._numbers),
            service=spec.name,
            rank=list(services).index(spec.name) if spec.name in services else len(services),
            memory=spec.needs.memory,
            needs=frozenset(_needed(spec, services, set())),
            restart=restart,
        )


def _needed(spec: ServiceSpec, services: dict[str, ServiceSpec], seen: set[str]) -> Iterator[str]:
    """Yield the services that a process calls, directly or not."""
    for edge in (edge for one in spec.together for edge in one.dependencies):
        if not edge.colocate and edge.service not in seen and edge.service in services:
            seen.add(edge.service)
            yield edge.service
            yield from _needed(services[edge.service], services, seen)


def _names(spec: ServiceSpec, number: int) -> Iterator[str]:
    """Yield what replicas that have no id yet are called."""
    return (f"{spec.name} #{n + 1}" for n in range(number))


def _size(size: int) -> str:
    return f"{round(size / 2**30, 1):g} GiB" if size >= 2**30 else f"{round(size / 2**20):g} MiB"
