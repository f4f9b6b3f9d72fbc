"""What every process of an app on Ray has in common: a loop of its own, a wire, and the others.

Ray Serve makes one object per replica and calls it on its own event loop. Ours only passes on: what
serves runs on a uvloop in a thread of its own, so neither can make the other wait.
"""

import asyncio
import hashlib
import shutil
import socket
import threading
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray
import uvloop
from ray import serve
from ray.serve.handle import DeploymentHandle

from servekit.engine.control import Verb, handler
from servekit.engine.ray.logs import Lines, Since, Tail
from servekit.engine.ray.orders import Common
from servekit.observe import log
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, Listener

T = TypeVar("T")


class Process:
    """One replica of a Serve deployment.

    Args:
        common: What all processes of the app are told.
        deployment: Name of its deployment.
        role: What its log lines say that it is.

    Attributes:
        id: Unique in the app.
        folder: Private; the app's processes on a node share it, and the last one removes it.
    """

    def __init__(self, common: Common, deployment: str, role: str) -> None:
        self._tail = Tail()
        self._tail.install()
        log.configure(common.log_format, common.log_level, role)
        unique = serve.get_replica_context().replica_id.unique_id
        node = ray.get_runtime_context().get_node_id()
        self.id = f"{deployment}-{unique}"
        self.common = common
        name = f"servekit-{hashlib.sha256(common.secret).hexdigest()[:8]}-{node[:8]}"
        self.folder = Path(common.runtime_dir) / name
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._listeners: list[Listener] = []
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="servekit", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop that serves, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop that serves."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def places(self) -> tuple[Address, Address]:
        """Return where to listen: a unix socket, and any port of the node's own address."""
        _sweep(self.folder.glob("*.sock"))
        unix = self.folder / f"{self.id.rpartition('-')[2]}.sock"
        return Address(f"unix:{unix}"), Address(f"tcp:{ray.util.get_node_ip_address()}:0")

    async def listen(self, service: str, verbs: Mapping[str, Verb]) -> None:
        """Answer these verbs, and nothing else, from now on.

        Raises:
            OSError: An address can't be bound.
        """
        hello, answer = Hello(service=service, replica=self.id), handler(verbs)

        def accept(at: Address) -> Connection:
            secret = at.proof(self.common.secret)
            return Connection(hello, client=False, handler=answer, secret=secret)

        self._listeners = [Listener(at, partial(accept, at)) for at in self.places()]
        await asyncio.gather(*(one.open() for one in self._listeners))

    async def record_replica_metadata(self) -> dict[str, str]:
        """Tell Ray Serve where this process is reached."""
        return self.metadata(one.address for one in self._listeners)

    async def check_health(self) -> None:
        """Answer Ray Serve as long as the loop that serves does."""
        await self.on_loop(asyncio.sleep(0))

    async def on_logs(self, body: bytes) -> Lines:
        """Return what was printed since the last question."""
        return self._tail.since(msgspec.msgpack.decode(body, type=Since).until)

    def metadata(self, addresses: Iterable[Address], version: str = "") -> dict[str, str]:
        """Return what others are told of this process."""
        unix, tcp = addresses
        return {"replica": self.id, "unix": unix.text, "tcp": tcp.text, "version": version}

    async def clear(self) -> None:
        """Listen no more; remove the app's folders on this machine, unless other processes do."""
        for listener in self._listeners:
            await listener.close()
        for folder in self.folder.parent.glob(f"{self.folder.name.rpartition('-')[0]}-*"):
            _sweep(folder.glob("*.sock"))
            if not any(folder.glob("*.sock")):
                shutil.rmtree(folder, ignore_errors=True)


def handle(deployment: str, app: str) -> DeploymentHandle[Any]:
    """Return a handle that follows its deployment from now on."""
    # `options` is what makes it begin, before there is a first request.
    return serve.get_deployment_handle(deployment, app, _check_exists=False).options()


def _sweep(paths: Iterable[Path]) -> None:
    """Remove the sockets of processes that were killed."""
    for path in paths:
        with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
