"""The socket over which `servekit status` and `servekit scale` find and ask a running app."""

import shutil
import tempfile
from pathlib import Path

import msgspec

from servekit.engine.base import Engine
from servekit.engine.control import AppStatus, Scale, handler
from servekit.errors import AuthorError, BadRequest
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, Listener


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
