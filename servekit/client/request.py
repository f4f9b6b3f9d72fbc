"""From arguments to requests, without I/O on the network: bodies, queries, uploads, headers."""

import base64
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Final, cast
from urllib.parse import urlencode

import httpx
import msgspec

from servekit.client.exchange import TIMEOUT_HEADER
from servekit.core.call import BINARY, JSON, MSGPACK, NPY, now
from servekit.spec.body import pack

_FILE_TYPES: Final = {".npy": NPY, ".json": JSON, ".msgpack": MSGPACK}
_SHORTEST_S: Final = 0.001
_MANY: Final = (list, tuple, set, frozenset)


class Outgoing(msgspec.Struct, eq=False):
    """One call on its way to a gateway, for as many attempts as it needs.

    Attributes:
        method: HTTP method.
        path: With the query.
        headers: Sent with each attempt, beside the time that is left.
        content: The body.
        deadline: Absolute, on `now`'s clock; None is the server's affair.
        retries: Attempts after the first.
        idempotent: Running it twice does no harm.
    """

    method: str
    path: str
    headers: dict[str, str]
    content: bytes = b""
    deadline: float | None = None
    retries: int = 0
    idempotent: bool = False

    def headers_now(self) -> dict[str, str]:
        """Return the headers of an attempt that is made now."""
        if self.deadline is None or TIMEOUT_HEADER in self.headers:
            return self.headers
        left = max(_SHORTEST_S, self.deadline - now())
        return self.headers | {TIMEOUT_HEADER: f"{left:.3f}s"}


def with_query(path: str, arguments: Mapping[str, Any]) -> str:
    """Return a path with arguments behind it, in the form in which the gateway reads them back.

    A list is its items under one name, None is `null`, bytes are base64.

    Raises:
        TypeError: An argument has no place in a query.
    """
    pairs = [
        (name, _text(name, item)) for name, value in arguments.items() for item in _items(value)
    ]
    return f"{path}?{urlencode(pairs)}" if pairs else path


def _items(value: Any) -> Iterable[Any]:
    return cast("Iterable[Any]", value) if isinstance(value, _MANY) else (value,)


def _text(name: str, value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if value is None or isinstance(value, bool | int | float):
        return msgspec.json.encode(value).decode()
    raise TypeError(
        f"{name}={value!r:.100}: a query takes text, numbers, booleans, None, and lists of them"
    )


# ---- bodies


def encoded(body: tuple[Any, ...], arguments: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return media type and bytes of a body, given itself or as arguments by name.

    Bytes and files go as they are; arguments with files in them as a form; everything else as JSON,
    or as MessagePack if there are arrays in it.

    Raises:
        TypeError: Something in it can't be sent.
        OSError: A file can't be read.
    """
    if body:
        (value,) = body
        if isinstance(value, bytes | bytearray):
            return BINARY, bytes(value)
        if is_file(value):
            return file_type(_name(value)), _read(value)
        return _document(value)
    if holds_files((), arguments):
        return _form(arguments)
    return _document(dict(arguments))


def file_type(name: str) -> str:
    """Return the media type of a file that is a body of its own, by its name."""
    return _FILE_TYPES.get(PurePath(name).suffix, BINARY)


def holds_files(body: tuple[Any, ...], arguments: Mapping[str, Any]) -> bool:
    """Return whether encoding a body reads files."""
    return any(map(_holds_files, (*body, *arguments.values())))


def is_file(value: object) -> bool:
    """Return whether a value is a path or an open file, whose content is meant."""
    return isinstance(value, Path) or hasattr(value, "read")


def _holds_files(value: Any) -> bool:
    return any(map(is_file, islice(_items(value), 1)))  # a list may be long


def _document(value: Any) -> tuple[str, bytes]:
    try:
        return JSON, msgspec.json.encode(value)
    except TypeError:
        return MSGPACK, pack(value)  # it holds arrays


def _form(arguments: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return a multipart form (RFC 7578): files as they are, other arguments as JSON parts."""
    request = httpx.Request("POST", "http://form", files=list(_parts(arguments)))
    return request.headers["content-type"], request.read()


def _parts(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in arguments.items():
        if is_file(value):
            yield name, (_name(value) or name, _read(value))
        elif _holds_files(value):
            for item in _items(value):
                if not is_file(item):
                    raise TypeError(f"{name}: a list of files holds a {type(item).__name__}")
                yield name, (_name(item) or name, _read(item))
        else:
            yield name, (None, msgspec.json.encode(value, enc_hook=_lists), JSON)


def _lists(value: Any) -> Any:
    if hasattr(value, "__array_interface__"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} can't be sent beside a file")


def _name(file: Any) -> str:
    name = file if isinstance(file, Path) else getattr(file, "name", "")
    return PurePath(name).name if isinstance(name, str | PurePath) else ""


def _read(file: Any) -> bytes:
    data = file.read_bytes() if isinstance(file, Path) else file.read()
    if not isinstance(data, bytes):
        raise TypeError(f"the file {_name(file) or file!r} gives text; open it in mode 'rb'")
    return data
