"""`File`: an upload, as an open file with its name and media type."""

import io
import shutil
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self, cast

from servekit.core.call import BINARY, Buffer
from servekit.spec.media import Media
from servekit.spec.raw import RawError


class File:
    """A file that came with a request, or that is handed to another service.

    Small ones are in memory; larger ones lie in an unnamed temporary file. It is closed, and gone,
    once nobody refers to the `File`, so keep that and not only its `file`.

    Args:
        source: Its content, or an open binary file.
        name: What the client calls it; anything may be in it, so never open a path made of it.
        content_type: Its media type, as the client says.

    Attributes:
        file: Open for reading, at the beginning; may be handed to any library that reads files.
        name: What the client calls it.
        content_type: Its media type.
        size: Bytes.
    """

    __slots__ = ("content_type", "file", "name", "size")

    def __init__(
        self, source: Buffer | BinaryIO, *, name: str = "", content_type: str = BINARY
    ) -> None:
        if isinstance(source, bytes | bytearray | memoryview):
            self.file: BinaryIO = io.BytesIO(source)
        else:
            self.file = source
        self.size = self.file.seek(0, io.SEEK_END)
        self.file.seek(0)
        self.name = name
        self.content_type = content_type

    @classmethod
    def open(cls, path: str | Path, *, content_type: str = BINARY) -> Self:
        """Open a file of this machine, to send it."""
        return cls(Path(path).open("rb"), name=Path(path).name, content_type=content_type)

    def read(self, size: int = -1) -> bytes:
        """Read from where the last read ended; everything that is left by default."""
        return self.file.read(size)

    def save(self, path: str | Path) -> None:
        """Write the whole content to a path."""
        self.file.seek(0)
        with Path(path).open("wb") as target:
            shutil.copyfileobj(self.file, target)

    def close(self) -> None:
        """Give the memory, or the temporary file, back now."""
        self.file.close()

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"File({self.name!r}, {self.content_type!r}, {self.size} bytes)"


class FileMedia(Media):
    """Of a `File` hint; the whole file travels between services."""

    __slots__ = ()

    form = "file"
    wanted = "a file as a base64 string"
    json_schema: ClassVar[dict[str, Any]] = {"type": "string", "contentEncoding": "base64"}

    def read_raw(self, media_type: str, data: Any) -> File:
        """Return a file of bytes; one that was received as a file already stays it."""
        return data if isinstance(data, File) else File(data, content_type=media_type)

    def write_raw(self, media_type: str, value: File) -> bytes:  # noqa: ARG002
        """Return the whole content."""
        value.file.seek(0)
        return value.file.read()

    def check(self, value: object) -> None:
        """Check that a value is a file."""
        if not isinstance(value, File):
            raise RawError("file_type", f"wanted an sk.File, got {type(value).__name__}")

    def put(self, value: File, segments: list[Buffer]) -> dict[str, Any]:
        """Append the content to the segments; name and media type are in the stand-in."""
        names = {"name": value.name, "content_type": value.content_type}
        return super().put(value, segments) | names

    def get(self, holder: dict[str, Any], data: Any) -> File:
        """Return the file of a stand-in and its segment."""
        if isinstance(data, File):
            return data
        file = cast("File", super().get(holder, data))
        name, content_type = holder.get("name"), holder.get("content_type")
        if isinstance(name, str) and isinstance(content_type, str):
            file.name, file.content_type = name, content_type
        return file
