"""What is in a tar, one member at a time: bytes that someone else wrote in, members out.

Reads ustar, PAX and GNU tars as a stream, so that nothing is unpacked and nothing is kept. `tarfile` is
not for this: it reads a header of any length into memory, follows chains of headers without end, and
keeps all members. Refused are absolute paths, `..`, sparse files, wrong checksums, truncated tars, and
more of anything than the limits below.
"""

from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

from servekit.errors import ConfigError

MAX_PATH: Final = 4096
"""Characters of a path."""
_MAX_MEMBERS: Final = 2_000_000
_MAX_RECORDS: Final = 1 << 20
"""Bytes of a PAX header, which has extended attributes too."""
_BLOCK: Final = 512

Kind: TypeAlias = Literal["file", "directory", "symlink", "hardlink", "device"]
_KINDS: Final[dict[bytes, Kind]] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"3": "device",
    b"4": "device",
    b"5": "directory",
    b"6": "device",  # FIFO
}
_EXTENDED: Final = {b"x": "", b"g": "", b"L": "path", b"K": "linkpath"}
"""Headers that belong to the next member (`g`: to all), and the field that GNU's have."""


class Member(NamedTuple):
    """One member of a tar.

    Attributes:
        path: Like `usr/bin/env`; "" is the root.
        mode: Permissions, 12 bits.
        size: Bytes of a file.
        target: What a link points to: for a hard link a path like `path`.
    """

    path: str
    kind: Kind
    mode: int
    size: int
    target: str


class TarReader:
    """The members of a tar, in order; to be iterated once, to the end of the bytes.

    Args:
        chunks: The bytes, not compressed.
        where: What errors call the tar.

    Raises:
        ConfigError: While iterating: it is no tar, or has what is refused.
    """

    def __init__(self, chunks: Iterable[bytes], *, where: str) -> None:
        self._chunks = iter(chunks)
        self._where = where
        self._buffer = memoryview(b"")
        self._left = 0
        self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        for _ in range(_MAX_MEMBERS):
            member = self._next()
            if member is None:
                for _ in self._chunks:  # padding; whoever hashes the bytes wants all
                    pass
                return
            yield member
        raise self._error(f"has more than {_MAX_MEMBERS} members")

    def content(self) -> Iterator[bytes]:
        """Yield the bytes of the file that was just returned."""
        while self._left:
            data = self._some(self._left)
            self._left -= len(data)
            yield bytes(data)

    # -- headers -----------------------------------------------------------------------------

    def _next(self) -> Member | None:
        records: dict[str, bytes] = {}
        for _ in range(1 + len(_EXTENDED)):
            self._skip()
            header = self._block()
            if header is None:
                return None
            if sum(header) - sum(header[148:156]) + 8 * ord(" ") != self._number(header[148:156]):
                raise self._error("has a header with a wrong checksum")
            kind = header[156:157]
            if kind not in _EXTENDED:
                return self._member(header, records)
            self._extend(kind, self._number(header[124:136]), records)
        raise self._error("has a chain of extended headers")

    def _extend(self, kind: bytes, size: int, records: dict[str, bytes]) -> None:
        """Read what belongs to the next member."""
        if size > _MAX_RECORDS:
            raise self._error(f"has an extended header of {size} bytes")
        self._left, self._padding = size, -size % _BLOCK
        data = b"".join(self.content())
        if field := _EXTENDED[kind]:
            records[field] = data.rstrip(b"\0")
        elif kind == b"x":
            records.update(self._records(data))

    def _records(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Yield what a PAX header says: lines of `<length> <keyword>=<value>`, with their length."""
        start = 0
        while start < len(data):
            length, space, _ = data[start : start + 20].partition(b" ")
            end = start + (int(length) if length.isdigit() else 0)
            key, equals, value = data[start + len(length) + 1 : end].partition(b"=")
            if not space or not equals or end > len(data) or value[-1:] != b"\n":
                raise self._error("has a PAX header that is none")
            if key.startswith(b"GNU.sparse"):
                raise self._error("has a sparse file; write it with `tar` without --sparse")
            yield key.decode("ascii", "replace"), value[:-1]
            start = end

    def _member(self, header: bytes, records: dict[str, bytes]) -> Member:
        name = _text(header[:100])
        if header[257:263] == b"ustar\0" and (prefix := _text(header[345:500])):
            name = prefix + b"/" + name
        name = records.get("path", name)
        kind = _KINDS.get(header[156:157])
        if kind is None:
            raise self._error(f"has a member {name!r} of the type {header[156:157]!r}")
        if kind == "file" and name.endswith(b"/"):
            kind = "directory"  # as tars of 1979 have them
        size = 0
        if kind == "file":
            size = self._number(header[124:136])
            if "size" in records:
                text = records["size"]
                size = int(text) if text.isdigit() and len(text) < 20 else -1
            if size < 0:
                raise self._error(f"has a member {name!r} without a size")
        self._left, self._padding = size, -size % _BLOCK
        target = records.get("linkpath", _text(header[157:257]))
        return Member(
            self._path(name),
            kind,
            self._number(header[100:108]) & 0o7777,
            size,
            self._path(target) if kind == "hardlink" else _decode(target),
        )

    def _path(self, raw: bytes) -> str:
        text = _decode(raw)
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if text.startswith("/") or ".." in parts or "\0" in text or len(text) > MAX_PATH:
            raise self._error(f"has a member {text[:200]!r}, which is outside of it")
        return "/".join(parts)

    def _number(self, field: bytes) -> int:
        if field[0] & 0x80:  # GNU's way to write large ones
            return int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
        digits = _text(field).strip(b" ")
        if digits.strip(b"01234567"):
            raise self._error(f"has a header with the number {digits!r}")
        return int(digits or b"0", 8)

    # -- bytes -------------------------------------------------------------------------------

    def _skip(self) -> None:
        """Go to the end of what belongs to the latest header."""
        while self._left:
            self._left -= len(self._some(self._left))
        while self._padding:
            self._padding -= len(self._some(self._padding))

    def _block(self) -> bytes | None:
        """Return the next header; None at the end, which is a block of zeros, or nothing."""
        if not self._buffer and not self._fill():
            return None
        header = b""
        while len(header) < _BLOCK:
            header += self._some(_BLOCK - len(header))
        return header if header.strip(b"\0") else None

    def _some(self, limit: int) -> memoryview:
        if not self._buffer and not self._fill():
            raise self._error("ends in the middle")
        data, self._buffer = self._buffer[:limit], self._buffer[limit:]
        return data

    def _fill(self) -> bool:
        for chunk in self._chunks:
            if chunk:
                self._buffer = memoryview(chunk)
                return True
        return False

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self._where} {what}; it is no tar that can be used")


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")
