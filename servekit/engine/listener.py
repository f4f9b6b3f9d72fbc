"""The socket that the gateway listens on: made by the supervisor, so that it outlives a gateway."""

import socket
from ipaddress import ip_address
from typing import Final

from servekit.errors import ConfigError

_BACKLOG: Final = 2048


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: The address is in use, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


def is_public(listener: socket.socket) -> bool:
    """Return whether other machines may reach a listening socket."""
    return not ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
