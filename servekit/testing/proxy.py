"""A proxy that stands between a client and a server, and does to their bytes what networks do.

It runs on the event loop that it was entered on (`async with`), or on one of its own in a thread
(`with`). Faults are applied and removed at any time, from any thread. It knows nothing of the
protocol that it carries.
"""

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from servekit.core.aio import Tasks
from servekit.errors import ConfigError
from servekit.testing.faults import Fault, Refuse
from servekit.testing.link import Link

T = TypeVar("T")
Toward: TypeAlias = Literal["server", "client", "both"]
Connections: TypeAlias = Literal["all", "new", "running"]


@dataclass(frozen=True)
class Statistics:
    """What has passed.

    Attributes:
        connections: Clients that were taken so far.
        open: Those that are still here.
        unreached: Those that were hung up on, as the server could not be reached.
        cut: Directions that a fault has ended, in connections that are over.
        to_server: Bytes that servers got.
        to_client: Bytes that clients got.
    """

    connections: int
    open: int
    unreached: int
    cut: int
    to_server: int
    to_client: int


class Applied:
    """Faults that were applied together; as a context manager it removes them at its end."""

    def __init__(
        self, proxy: "FaultProxy", faults: tuple[Fault, ...], toward: Toward, on: Connections
    ) -> None:
        self._proxy = proxy
        self._toward = toward
        self._on = on
        self.faults = faults
        self.since = 0

    def covers(self, number: int, toward: str) -> bool:
        """Return whether a direction of a connection is meant."""
        return self._toward in (toward, "both") and (
            self._on == "all" or (self._on == "new") == (number > self.since)
        )

    def remove(self) -> None:
        """Remove these faults; those of others stay. What was cut stays cut."""
        self._proxy.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class FaultProxy:
    """A TCP or unix proxy with faults.

    Args:
        target: Where the server is: `http://host:port`, `host:port` or `unix:PATH`.
        seed: Of the jitter.

    Attributes:
        address: Where to connect instead, `host:port` or `unix:PATH`; "" before it is entered.

    Raises:
        ConfigError: The target is no address.
    """

    def __init__(self, target: str, *, seed: int = 0) -> None:
        self._scheme, self._target, self._path = _read(target)
        self._rng = Random(seed)  # noqa: S311
        self._rules: list[Applied] = []
        self._links: dict[int, Link] = {}
        self._counts: Counter[str] = Counter()
        self._tasks = Tasks()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._own: tuple[str, int] | str = ("127.0.0.1", 0)
        self.address = ""

    @property
    def url(self) -> str:
        """Where to connect instead, written like the target."""
        return f"{self._scheme}{self.address}{self._path}"

    # -- faults ------------------------------------------------------------------------------

    def apply(self, *faults: Fault, toward: Toward = "both", on: Connections = "all") -> Applied:
        """Do this to connections from now on.

        Args:
            *faults: All of them. Offsets count from a connection's beginning, in each direction.
            toward: Whose incoming bytes are meant.
            on: Whether all connections are meant, only new ones, or only those that are open.
        """

        def work() -> Applied:
            rule = Applied(self, faults, toward, on)
            rule.since = self._counts["connections"]
            self._rules.append(rule)
            self._follow()
            return rule

        return self._run(work)

    def heal(self) -> None:
        """Remove all faults; what was cut stays cut."""
        for rule in self._run(lambda: list(self._rules)):
            self.remove(rule)

    def remove(self, rule: Applied) -> None:
        """Remove what one `apply` has applied; again is no error."""

        def work() -> None:
            if rule in self._rules:
                self._rules.remove(rule)
                self._follow()

        self._run(work)

    def _follow(self) -> None:
        """Let faults that have changed act on what is open already."""
        if any(isinstance(fault, Refuse) for rule in self._rules for fault in rule.faults):
            self._deafen()
        else:
            self._listen()
        for link in list(self._links.values()):
            for way in link.ways.values():
                way.end_if_due()

    def _faults(self, number: int, toward: str) -> list[Fault]:
        return [f for rule in self._rules if rule.covers(number, toward) for f in rule.faults]

    def statistics(self) -> Statistics:
        """Return what has passed so far."""
        found = self._run(self._counts.copy)
        return Statistics(
            connections=found["connections"],
            open=len(self._links),
            unreached=found["unreached"],
            cut=found["cut"],
            to_server=found["server"],
            to_client=found["client"],
        )

    # -- life --------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        if isinstance(self._target, str):
            self._own = f"{tempfile.mkdtemp(prefix='servekit-proxy-')}/proxy.sock"
        self._follow()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._deafen()
        self._loop = None
        await self._tasks.close()
        if isinstance(self._own, str):
            Path(self._own).parent.rmdir()

    def __enter__(self) -> Self:
        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="servekit-proxy", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.__aenter__(), loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        loop, thread = self._loop, self._thread
        assert loop is not None
        assert thread is not None
        asyncio.run_coroutine_threadsafe(self.__aexit__(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _run(self, work: Callable[[], T]) -> T:
        """Do something on the loop's thread, and wait for it."""
        loop = self._loop
        if loop is None or loop is _running_loop():
            return work()
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  (raised where it was asked for)
                done.set_exception(error)

        loop.call_soon_threadsafe(run)
        return done.result()

    # -- connections -------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener is not None or self._loop is None:
            return
        family = socket.AF_UNIX if isinstance(self._own, str) else socket.AF_INET
        listener = self._listener = socket.socket(family)
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(self._own)
        listener.listen()
        self._own = listener.getsockname()  # the same port again after a `Refuse`
        self.address = _text(self._own)
        self._loop.add_reader(listener, self._accept, listener)

    def _deafen(self) -> None:
        if self._listener is None or self._loop is None:
            return
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        if isinstance(self._own, str):
            Path(self._own).unlink()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has left already
            client, _ = listener.accept()
            client.setblocking(False)
            self._counts["connections"] += 1
            number = self._counts["connections"]
            self._tasks.spawn(self._serve(number, client), name=f"link {number}")

    async def _serve(self, number: int, client: socket.socket) -> None:
        link = Link(lambda toward: self._faults(number, toward), self._rng, self._counts)
        self._links[number] = link
        try:
            await link.run(client, self._target)
        except OSError:
            self._counts["unreached"] += 1
        finally:
            del self._links[number]
            self._counts["cut"] += sum(way.cut for way in link.ways.values())


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _text(address: tuple[str, int] | str) -> str:
    return f"unix:{address}" if isinstance(address, str) else f"{address[0]}:{address[1]}"


def _read(target: str) -> tuple[str, tuple[str, int] | str, str]:
    """Return a target's scheme as it is written, its socket's address, and its path."""
    if target.startswith("unix:"):
        return "", target.removeprefix("unix:"), ""
    scheme, separator, rest = target.rpartition("://")
    parts = urlsplit(f"//{rest}")
    try:
        host, port = parts.hostname, parts.port or {"http": 80}.get(scheme)
    except ValueError:
        host = port = None
    if not host or not port:
        raise ConfigError(
            f"{target!r} is no address; write http://HOST:PORT, HOST:PORT or unix:PATH"
        )
    return scheme + separator, (host, port), parts.path
