"""The socket over which `servekit status` and `servekit scale` find and ask a running app: both its ends."""

import shutil
import tempfile
from pathlib import Path

import msgspec

from servekit.engine.base import Engine
from servekit.engine.control import AppStatus, Scale, handler
from servekit.engine.control import ask as ask_over
from servekit.errors import AuthorError, BadRequest
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, Listener, connect

_TIMEOUT_S = 2.0


class Admin:
    """A private folder with the socket in it.

    Args:
        engine: What is asked.
        runtime_dir: Where the folder is made.

    Attributes:
        folder: For this user alone; it is removed at the end, with all that is in it.
    """

    def __init__(self, engine: Engine, runtime_dir: Path) -> None:
        self._engine = engine
        self.folder = Path(tempfile.mkdtemp(prefix="servekit-", dir=runtime_dir))
        verbs = handler({"status": self._on_status, "scale": self._on_scale})
        self._listener = Listener(
            Address(f"unix:{self.folder}/admin.sock"),
            lambda: Connection(Hello(replica="supervisor"), client=False, handler=verbs),
        )

    async def open(self) -> None:
        """Answer from now on."""
        await self._listener.open()

    async def close(self) -> None:
        """Answer no more, and remove the folder."""
        await self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _on_status(self, _: bytes) -> AppStatus:
        return await self._engine.look()

    async def _on_scale(self, body: bytes) -> AppStatus:
        try:
            await self._engine.scale(msgspec.msgpack.decode(body, type=Scale).services)
        except AuthorError as error:
            raise BadRequest(str(error), started=False) from error
        return await self._engine.look()


async def ask(path: Path, verb: str, body: msgspec.Struct | None = None) -> AppStatus:
    """Have a supervisor do something; returns how its app is then.

    Raises:
        CallError: It refuses, or did not answer in time.
        OSError: Nobody listens there.
        WireError: It greets in another way.
    """
    connection = await connect(
        Address(f"unix:{path}"), lambda: Connection(Hello(), client=True), timeout_s=_TIMEOUT_S
    )
    try:
        return await ask_over(connection, verb, body, answer=AppStatus, timeout_s=_TIMEOUT_S)
    finally:
        await connection.close()
