"""The content-addressed folder: streams in, `sha256/<hex>` out; also the cache of all builds.

A blob has its name only once all of it is there, so that several processes may share the folder. What
is read is hashed on the way; a blob that has changed on the disk is refused, and removed.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

from servekit.errors import ConfigError
from servekit.packaging.oci.documents import MAX_DOCUMENT, Descriptor, digest_of

CHUNK: Final = 1 << 20

Progress: TypeAlias = Callable[[int, int], None]
"""Is told the bytes that are done, and all that are to be done."""

_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")


class BlobWriter:
    """A blob on its way in; see `Blobs.writer`.

    Attributes:
        size: Bytes so far.
    """

    def __init__(self, blobs: "Blobs", file: int) -> None:
        self._blobs = blobs
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append."""
        self._hash.update(data)
        self.size += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]

    def restart(self) -> None:
        """Forget what was written."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> str:
        """The digest so far."""
        return f"sha256:{self._hash.hexdigest()}"


class Blobs:
    """A folder of blobs.

    Args:
        root: The folder; made when the first blob comes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, digest: str) -> Path:
        """Return where a blob is, or would be."""
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise ConfigError(f"{digest!r} is no digest; write 'sha256:' and 64 hex digits")
        return self.root / "sha256" / match[1]

    def has(self, descriptor: Descriptor) -> bool:
        """Return whether a blob is there; its content is checked when it is read."""
        try:
            return self.path(descriptor.digest).stat().st_size == descriptor.size
        except OSError:
            return False

    @contextmanager
    def writer(self, expected: Descriptor | None = None) -> Generator[BlobWriter]:
        """Take in one blob; it is there when the block has ended without an error.

        Args:
            expected: What it must turn out to be.

        Raises:
            ConfigError: It turned out to be something else.
        """
        partial = self.root / "partial"
        partial.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(dir=partial)
        try:
            try:
                writer = BlobWriter(self, file)
                yield writer
            finally:
                os.close(file)
            if expected is not None and (writer.digest, writer.size) != (
                expected.digest,
                expected.size,
            ):
                raise ConfigError(
                    f"instead of {expected.digest} ({expected.size} bytes) came {writer.digest} "
                    f"({writer.size} bytes)"
                )
            path = self.path(writer.digest)
            path.parent.mkdir(exist_ok=True)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def note(self, path: Path, data: bytes) -> None:
        """Write a small file beside the blobs, all of it or nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(file, "wb") as written:
            written.write(data)
        Path(name).replace(path)

    def put(self, data: bytes, media_type: str) -> Descriptor:
        """Take in bytes, and return what they are now known by."""
        descriptor = Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))
        if not self.has(descriptor):
            with self.writer() as writer:
                writer.write(data)
        return descriptor

    def read(self, descriptor: Descriptor, *, limit: int = MAX_DOCUMENT) -> bytes:
        """Return a whole small blob.

        Args:
            descriptor: Of the blob.
            limit: Bytes that it may have.

        Raises:
            ConfigError: It is not there, is larger, or is damaged.
        """
        if descriptor.size > limit:
            raise ConfigError(
                f"{descriptor.digest} has {descriptor.size} bytes; {limit} are the limit"
            )
        return b"".join(self.chunks(descriptor))

    def chunks(self, descriptor: Descriptor) -> Iterator[bytes]:
        """Yield a blob, up to 1 MiB at a time; the last of it only if all of it is right.

        Raises:
            ConfigError: It is not there, or is damaged; then it is removed.
        """
        path = self.path(descriptor.digest)
        digest = hashlib.sha256()
        held = b""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != descriptor.size:
                    raise ConfigError(f"{path} has {size} bytes instead of {descriptor.size}")
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
                    if held:
                        yield held
                    held = chunk
        except FileNotFoundError:
            raise ConfigError(f"{self.root} has no blob {descriptor.digest}") from None
        if f"sha256:{digest.hexdigest()}" != descriptor.digest:
            path.unlink(missing_ok=True)
            raise ConfigError(f"{path} was damaged, and is removed; run this again")
        yield held
