"""A listening socket, handed to who takes its owner's place: a gateway on a node, or a whole app.

Connections that wait in a socket's queue are reset when its last copy closes. So whoever comes next
goes on with the socket of who is there, and only the first binds its own.
"""

import asyncio
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from servekit.engine.front import bind
from servekit.errors import ConfigError
from servekit.settings import Settings

_SUFFIX = "-door.sock"
_TAKE_S = 1.0
_MAX_ADDRESS = 512


def listen(folder: Path, host: str, port: int) -> socket.socket:
    """Return a listening socket, which others of the app on this node may have, too.

    Args:
        folder: Where those who hand it over are; only this user may write there.
        host: Address of this machine.
        port: Not 0.

    Raises:
        ConfigError: The address is in use by others, or not this machine's.
    """
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            if (listener := _take(path, f"{host}:{port}")) is not None:
                return listener
    return bind(host, port, shared=True)


def listener(settings: Settings) -> socket.socket:
    """Return the listening socket of an app on this machine: its own, or that of one which is there.

    Raises:
        ConfigError: As `listen`; or who comes next could not know the port.
    """
    if settings.handover_dir is None:
        return bind(settings.host, settings.port)
    if not settings.port:
        raise ConfigError("handover_dir: whoever takes over must know the port, so it can't be 0")
    settings.handover_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return listen(settings.handover_dir, settings.host, settings.port)


def door(listener: socket.socket, settings: Settings) -> "Door":
    """Return the door of an app that has `handover_dir`."""
    assert settings.handover_dir is not None
    address = f"{settings.host}:{settings.port}"
    return Door(listener, settings.handover_dir / secrets.token_hex(8), address)


def _take(path: Path, address: str) -> socket.socket | None:
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(_TAKE_S)
        door.connect(str(path))
        told, fds, _, _ = socket.recv_fds(door, _MAX_ADDRESS, 1)
    taken = [socket.socket(fileno=fd) for fd in fds]
    if taken and told.decode() == address:
        taken[0].setblocking(False)
        return taken[0]
    for one in taken:
        one.close()
    return None


class Door:
    """Hands a copy of a listening socket to whoever asks; the folder lets in this user only.

    Args:
        listener: The socket.
        path: Begins the name of a new file in the folder that the app's processes share.
        address: Host and port as the gateway was told them.
    """

    def __init__(self, listener: socket.socket, path: Path, address: str) -> None:
        self._listener = listener
        self._address = address.encode()
        self._loop = asyncio.get_running_loop()
        self._path = path.with_name(path.name + _SUFFIX)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.setblocking(False)
        self._door.bind(str(self._path))
        self._path.chmod(0o600)
        self._door.listen()
        self._loop.add_reader(self._door, self._hand_over)

    def _hand_over(self) -> None:
        with suppress(OSError):
            asker, _ = self._door.accept()
            with asker:
                socket.send_fds(asker, [self._address], [self._listener.fileno()])

    def close(self) -> None:
        """Hand over no more."""
        self._loop.remove_reader(self._door)
        self._door.close()
        self._path.unlink(missing_ok=True)
