"""The socket that the gateway listens on: the supervisor's, so that it outlives any gateway."""

import socket

from servekit.errors import ConfigError

_BACKLOG = 2048


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
