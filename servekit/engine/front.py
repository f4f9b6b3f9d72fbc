"""The gateways of one app: workers that take connections from one socket, kept running.

The socket is the supervisor's, and all workers inherit it. So a worker that dies loses only the
connections that it had accepted: the others take those that wait, and another worker starts.
"""

import asyncio
import contextlib
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from ipaddress import ip_address

import msgspec

from servekit.core.aio import Tasks, together
from servekit.core.call import now
from servekit.engine.control import Nothing, ProcessStatus, Started, StartGateway, Stats, Verb
from servekit.engine.pool import KILL_AFTER_S
from servekit.engine.process import Process
from servekit.errors import CallError, ConfigError
from servekit.gateway.edge import Edge
from servekit.observe.log import get_logger
from servekit.spec.app import AppSpec

_log = get_logger("servekit.supervisor")

_BACKLOG = 2048
_RETRY_S = 1.0
_START_S = 120.0
"""Python and our modules are loaded in it, which takes its time on a busy machine."""
_TELL_S = 10.0
"""A worker that has not taken a new app after this time is killed: it would serve the old one."""
_STATS_S = 2.0
_END_S = 2.0


class Front:
    """All gateways of one app.

    Args:
        listener: The listening socket; it is closed by `drain`.
        workers: How many processes share it.
        edge: What they speak on it.
        order: Makes what a worker is told when it starts, from its name and the socket's number.
        verbs: What a worker may ask.
        env: Added to the environment of workers.
        on_start: Called when a worker has started.
        on_end: Called with the name of a worker that has ended; no other ever gets that name.

    Attributes:
        listener: That socket.
        url: Where they listen.
        leaving: The app is about to end, and says so to those who ask whether it is ready.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        workers: int,
        edge: Edge,
        order: Callable[[str, int], StartGateway],
        verbs: Mapping[str, Verb],
        env: Mapping[str, str],
        on_start: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.listener = listener
        self._count = workers
        self._order = order
        self._verbs = verbs
        self._env = env
        self._on_start = on_start
        self._on_end = on_end
        self._tasks = Tasks()
        self._workers: list[_Worker] = []
        self._serial = 0
        self._closing = False
        self.leaving = False
        host, port = listener.getsockname()[:2]
        self._scheme = edge.scheme
        self._is_public = not ip_address(host.partition("%")[0]).is_loopback
        self.url = edge.url(host, port)

    def warn_of_strangers(self, *, asks_who: bool) -> None:
        """Say in the log what is unsafe about an address that other machines reach.

        Args:
            asks_who: Every call needs a credential.
        """
        if not self._is_public:
            return
        if not asks_who:
            _log.warning(
                "whoever reaches this address may call",
                url=self.url,
                fix="set api_keys or jwt_key, unless something in front asks who it is",
            )
        elif self._scheme == "http":
            _log.warning(
                "credentials reach this address in the clear",
                url=self.url,
                fix="set tls_cert and tls_key, unless something in front speaks TLS",
            )

    @property
    def processes(self) -> list[Process]:
        """Return those that have not ended, in whatever state."""
        return [worker.process for worker in self._workers]

    @property
    def started(self) -> list[Process]:
        """Return those that take connections."""
        return [worker.process for worker in self._workers if worker.started]

    async def start(self) -> None:
        """Start all workers; returns when all of them take connections.

        Raises:
            CallError: One did not start; nothing is left of it.
        """
        await together(*(self._start_one() for _ in range(self._count)))

    async def _start_one(self) -> None:
        self._serial += 1
        name = f"gateway-{self._serial}"
        fd = self.listener.fileno()
        process = await Process.spawn(
            name,
            "servekit.engine.gateway_worker",
            verbs=self._verbs,
            env=self._env,
            inherit=(fd,),
        )
        worker = _Worker(process)
        self._workers.append(worker)
        process.ended.add_done_callback(partial(self._ended, worker))
        try:
            # What `serve` tells from now on comes behind this order, so no worker misses it.
            await process.ask("start", self._order(name, fd), answer=Started, timeout_s=_START_S)
        except BaseException:
            await process.stop(0.0)
            raise
        worker.started = True
        self._on_start()
        self._tasks.spawn(self._keep(worker), name=f"keep {name}")

    def _ended(self, worker: "_Worker", _: asyncio.Task[str]) -> None:
        self._workers.remove(worker)
        self._on_end(worker.process.name)

    async def _keep(self, worker: "_Worker") -> None:
        """Start another when a worker has died, as often as it takes."""
        cause = await asyncio.shield(worker.process.ended)
        while not self._closing:
            _log.error("gateway died, starting another", gateway=worker.process.name, cause=cause)
            try:
                await self._start_one()
            except CallError as error:
                cause = str(error)
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def serve(self, app: AppSpec) -> None:
        """Have all workers answer for this app; returns when none answers for another."""
        await asyncio.gather(*(self._serve(process, app) for process in self.processes))

    async def _serve(self, process: Process, app: AppSpec) -> None:
        if not await _tell(process, "app", app, timeout_s=_TELL_S):
            _log.error("gateway did not take the new app, killing it", gateway=process.name)
            process.signal(signal.SIGKILL)

    async def check(self) -> Counter[str]:
        """Probe all workers, kill those that hang; returns how many calls wait, by service."""
        waiting: Counter[str] = Counter()
        workers = [worker for worker in self._workers if worker.started]
        for found in await asyncio.gather(*(worker.check() for worker in workers)):
            waiting.update(found)
        return waiting

    def status(self) -> Iterator[ProcessStatus]:
        """Yield what `servekit status` shows of each worker."""
        for worker in self._workers:
            ready = "draining" if self.leaving else "ready"
            yield ProcessStatus(
                id=worker.process.name,
                pid=worker.process.pid,
                state=ready if worker.started else "starting",
                ongoing=worker.stats.ongoing,
                finished=worker.stats.finished,
                rss=worker.stats.rss,
                trouble="does not answer" if worker.silent_since else "",
            )

    async def leave(self) -> None:
        """Say that the app is not ready any more, and still answer what is asked."""
        self.leaving = True
        await asyncio.gather(
            *(_tell(process, "leave", timeout_s=_STATS_S) for process in self.processes)
        )

    async def drain(self, grace_s: float) -> None:
        """Take no more connections, finish what runs for so many seconds, then end all workers."""
        self._closing = self.leaving = True
        # Else the kernel would take connections for this copy of the socket, and nobody answer them.
        self.listener.close()
        await asyncio.gather(*(worker.drain(grace_s) for worker in self._workers))
        await self._tasks.close()

    def kill(self) -> None:
        """End all workers at once."""
        for process in self.processes:
            process.signal(signal.SIGKILL)


class _Worker:
    """One gateway as the supervisor sees it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.started = False
        self.silent_since: float | None = None
        self.stats = Stats()

    async def check(self) -> Mapping[str, int]:
        try:
            self.stats = await self.process.ask("stats", answer=Stats, timeout_s=_STATS_S)
        except CallError:
            self.silent_since = self.silent_since or now()
            if now() - self.silent_since > KILL_AFTER_S:
                _log.error("gateway hangs, killing it", gateway=self.process.name)
                self.process.signal(signal.SIGKILL)
            return {}
        self.silent_since = None
        return self.stats.waiting

    async def drain(self, grace_s: float) -> None:
        if self.started:
            await _tell(self.process, "drain", timeout_s=grace_s + _END_S)
        await self.process.stop(_END_S)


async def _tell(
    process: Process, verb: str, body: msgspec.Struct | None = None, *, timeout_s: float
) -> bool:
    """Tell a worker something; returns whether it took it."""
    with contextlib.suppress(CallError):
        await process.ask(verb, body, answer=Nothing, timeout_s=timeout_s)
        return True
    return False


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening socket.

    Args:
        host: Address of this machine.
        port: 0 takes a free one.
        shared: Other processes of this user may listen there, too.

    Raises:
        ConfigError: The address is in use, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"can't listen on {host}:{port}: {error.strerror}; choose another with --port, or "
            "--port 0 for a free one"
        ) from error
    listener.setblocking(False)
    return listener
