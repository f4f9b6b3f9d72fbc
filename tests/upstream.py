"""A server that answers as a test wants: byte by byte, wrong, or not at all."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self, TypeAlias

import msgspec

from servekit.errors import CallError

Act: TypeAlias = bytes | Callable[[socket.socket], None]
"""What to do with a request: send bytes and take the next one, or anything, and then hang up."""


class Upstream:
    """Listens on a port of its own; `acts` are for one request each, the last for all that follow.

    Attributes:
        requests: Head and body of each request that came whole.
        connections: How many were opened.
        left: Set when a client has hung up in the middle of an answer.
    """

    def __init__(self, *acts: Act) -> None:
        self._acts = list(acts)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.connections = 0
        self.left = threading.Event()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._spawn(self._accept)

    def _spawn(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(sock)
            self._spawn(lambda sock=sock: self._serve(sock))

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock, sock.makefile("rb") as reader:
            while first := reader.readline():
                head: dict[str, str] = {}
                while line := reader.readline().strip():
                    name, _, value = line.decode().partition(":")
                    head[name.lower()] = value.strip()
                body = reader.read(int(head.get("content-length", 0)))
                with self._lock:
                    self.requests.append((first.decode().strip(), head, body))
                    act = self._acts.pop(0) if len(self._acts) > 1 else self._acts[0]
                if not isinstance(act, bytes):
                    act(sock)
                    return
                sock.sendall(act)

    def until_left(self, *parts: bytes) -> Callable[[socket.socket], None]:
        """Return an act: send these, then wait for the client to hang up."""

        def act(sock: socket.socket) -> None:
            for part in parts:
                sock.sendall(part)
            sock.settimeout(15)
            if sock.recv(1) == b"":
                self.left.set()

        return act

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)


def http(status: int, body: bytes = b"", **headers: str) -> bytes:
    """Return an answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named.setdefault("content-type", "application/json")
    named.setdefault("content-length", str(len(body)))
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in named.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def refusal(error: CallError, **headers: str) -> bytes:
    """Return the answer of a gateway for an error."""
    document = {"error": error.details() | {"request_id": "r"}}
    return http(error.status, msgspec.json.encode(document), **headers)


def stream(*parts: bytes) -> bytes:
    """Return the head of a stream, and parts of its body; its end is the connection's."""
    head = b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    return head + b"".join(parts)


def reset(sock: socket.socket) -> None:
    """Hang up with a reset instead of an end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def close(_: socket.socket) -> None:
    """Hang up."""
