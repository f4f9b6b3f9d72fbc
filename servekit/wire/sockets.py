"""Connections over unix and TCP sockets: addresses, listening, connecting."""

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

from servekit.errors import ConfigError, WireError
from servekit.wire.connection import Connection


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica listens: `unix:/run/x/a.sock` or `tcp:10.0.0.1:7000`."""

    text: str

    @property
    def unix(self) -> str | None:
        """Path of the socket file, or None."""
        return self.text.removeprefix("unix:") if self.text.startswith("unix:") else None

    def proof(self, secret: bytes) -> bytes:
        """Return what both sides must prove to know there: nothing where the file's mode guards."""
        return secret if self.unix is None else b""

    @property
    def tcp(self) -> tuple[str, int]:
        """Host and port.

        Raises:
            ConfigError: It is neither a unix nor a TCP address.
        """
        scheme, _, rest = self.text.partition(":")
        host, _, port = rest.rpartition(":")
        if scheme != "tcp" or not host or not port.isdigit():
            raise ConfigError(f"{self.text!r} is no address; write unix:PATH or tcp:HOST:PORT")
        return host.strip("[]"), int(port)


async def connect(
    address: Address, connection: Callable[[], Connection], *, timeout_s: float = 5.0
) -> Connection:
    """Open a connection and wait for its greeting.

    Raises:
        OSError: Nobody listens there.
        WireError: The peer refuses, or does not answer in time.
    """
    loop = asyncio.get_running_loop()
    opened: Connection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            if address.unix is not None:
                _, opened = await loop.create_unix_connection(connection, address.unix)
            else:
                _, opened = await loop.create_connection(connection, *address.tcp)
            await opened.greeted()
    except BaseException as error:
        if opened is not None:
            opened.abort()
        if isinstance(error, TimeoutError):
            raise WireError(f"{address.text} did not answer in {timeout_s} s") from None
        raise
    return opened


class Listener:
    """A listening socket and the connections that came in through it.

    Args:
        address: Where to listen; TCP port 0 picks a free one.
        connection: Makes the protocol of one incoming connection.
    """

    def __init__(self, address: Address, connection: Callable[[], Connection]) -> None:
        self._factory = connection
        self._server: asyncio.Server | None = None
        self.address = address
        self.connections: set[Connection] = set()

    async def open(self) -> None:
        """Start to listen.

        Raises:
            ConfigError: The folder of the unix socket is open to others.
            OSError: The address can't be bound.
        """
        loop = asyncio.get_running_loop()
        path = self.address.unix
        if path is None:
            self._server = await loop.create_server(self._accept, *self.address.tcp)
            host, port = self._server.sockets[0].getsockname()[:2]
            self.address = Address(f"tcp:{host}:{port}")
            return
        folder = os.path.dirname(path)  # noqa: PTH120  (a socket path, used as text)
        if stat.S_IMODE(os.stat(folder).st_mode) & 0o077:  # noqa: PTH116
            raise ConfigError(f"{folder} is open to other users; a socket folder needs mode 0700")
        umask = os.umask(0o177)
        try:
            self._server = await loop.create_unix_server(self._accept, path)
        finally:
            os.umask(umask)

    def _accept(self) -> Connection:
        connection = self._factory()
        self.connections.add(connection)
        connection.lost.add_done_callback(lambda _: self.connections.discard(connection))
        return connection

    async def drain(self) -> None:
        """Take no new connections or calls, and wait until the calls on board have ended."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.goaway()
        for connection in list(self.connections):
            await connection.drained()

    async def close(self) -> None:
        """Close everything and remove the socket file."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            await connection.close()
        if (path := self.address.unix) is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
