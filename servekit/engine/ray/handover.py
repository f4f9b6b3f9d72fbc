"""A gateway's listening socket, handed to the gateway that takes its place on the node.

Connections that wait in a socket's queue are reset when its last copy closes. So a new gateway goes on
with its predecessor's socket, and only the first one on a node binds its own.
"""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

from servekit.engine.front import bind

_SUFFIX = "-door.sock"
_TAKE_S = 1.0
_MAX_ADDRESS = 512


def listen(folder: Path, host: str, port: int) -> socket.socket:
    """Return a listening socket, which others of the app on this node may have, too.

    Args:
        folder: Of the app's processes on this node.
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
