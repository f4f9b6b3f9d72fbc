"""What goes into a layer: a file, a directory or a symbolic link, at a path in the image.

Owners and times are not among it, and of permissions only whether a file may be executed and whether
everyone may write to a directory: what varies between machines would change digests.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias

from servekit.errors import ConfigError
from servekit.packaging.oci.documents import digest_of
from servekit.packaging.oci.tar import MAX_PATH

EntryKind: TypeAlias = Literal["file", "directory", "symlink"]

_WHITEOUT: Final = ".wh."
_LONGEST_NAME: Final = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One path of a layer; made by `file`, `directory` or `symlink`.

    Attributes:
        path: Where, like `app/main.py`.
        mode: 0644, 0755, 1777 or, for links, 0777.
        content: Of a file: its bytes, or the file that has them.
        digest: Of a file's content, if it is known; it is checked when the layer is written.
        target: Of a link: what it points to, in the image.
    """

    path: str
    kind: EntryKind
    mode: int
    content: bytes | Path = b""
    digest: str = ""
    target: str = ""

    @classmethod
    def file(
        cls, path: str, content: bytes | Path, *, executable: bool | None = None, digest: str = ""
    ) -> Self:
        """Return a file.

        Args:
            path: Where it is in the image.
            content: Its bytes, or a file, which is read when the layer is written.
            executable: By default as the file is now; bytes are not.
            digest: `sha256:…` of the content, if that is known: then it is not hashed once more.

        Raises:
            ConfigError: The path can't be in an image, or the file can't be read.
        """
        _check_path(path)
        if executable is None:
            executable = isinstance(content, Path) and bool(_stat(content).st_mode & stat.S_IXUSR)
        mode = 0o755 if executable else 0o644
        return cls(path=path, kind="file", mode=mode, content=content, digest=digest)

    @classmethod
    def directory(cls, path: str, *, shared: bool = False) -> Self:
        """Return a directory.

        Args:
            path: Where it is in the image.
            shared: Everyone may write to it, like to `/tmp`.

        Raises:
            ConfigError: The path can't be in an image.
        """
        _check_path(path)
        return cls(path=path, kind="directory", mode=0o1777 if shared else 0o755)

    @classmethod
    def symlink(cls, path: str, target: str) -> Self:
        """Return a symbolic link.

        Args:
            path: Where it is in the image.
            target: What it points to: relative to the link's folder, or absolute in the image.

        Raises:
            ConfigError: The path or the target can't be in an image.
        """
        _check_path(path)
        if not 0 < len(_encoded(target, path)) < MAX_PATH or "\0" in target:
            raise ConfigError(f"link {path!r} can't point to {target!r}")
        return cls(path=path, kind="symlink", mode=0o777, target=target)

    @contextmanager
    def open(self) -> Generator[tuple[BufferedIOBase, int]]:
        """Open a file's content: the stream, and its size in bytes.

        Raises:
            ConfigError: It can't be read, or is no regular file.
        """
        if isinstance(self.content, bytes):
            yield BytesIO(self.content), len(self.content)
            return
        try:
            # A FIFO would wait for a writer.
            number = os.open(self.content, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(self.content, error) from error
        with os.fdopen(number, "rb") as file:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{self.content} is no file; it can't go to {self.path!r}")
            yield file, found.st_size

    def hashed(self) -> Self:
        """Return it with the digest of its content."""
        if self.kind != "file" or self.digest:
            return self
        if isinstance(self.content, bytes):
            return replace(self, digest=digest_of(self.content))
        with self.open() as (file, _):
            return replace(self, digest=f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}")


def walk(folder: Path, at: str, *, keep: Callable[[str], bool] | None = None) -> Iterator[Entry]:
    """Yield all that is below a folder; links are not followed, but taken as they are.

    Args:
        folder: On this machine.
        at: Where it is in the image.
        keep: Is asked for each path below the folder, like `pkg/data.json`; what is below one that
            is not kept is not looked at. None keeps all.

    Raises:
        ConfigError: Something can't be read, or is neither file, directory nor link.
    """
    todo = [(folder, "")]
    while todo:
        current, prefix = todo.pop()
        try:
            with os.scandir(current) as found:
                children = sorted(found, key=lambda child: child.name)
        except OSError as error:
            raise _unreadable(current, error) from error
        for child in children:
            relative = f"{prefix}{child.name}"
            if keep is not None and not keep(relative):
                continue
            path = f"{at}/{relative}"
            if child.is_symlink():
                yield Entry.symlink(path, str(Path(child.path).readlink()))
            elif child.is_dir():
                yield Entry.directory(path)
                todo.append((Path(child.path), f"{relative}/"))
            elif child.is_file():
                yield Entry.file(path, Path(child.path))
            else:
                raise ConfigError(f"{child.path} is a socket or a device; leave it out")


def _check_path(path: str) -> None:
    parts = path.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in path:
        raise ConfigError(
            f"{path!r} can't be in an image; write a path like 'app/main.py', from the root but "
            "without its '/'"
        )
    raw = _encoded(path, path)
    if len(raw) > MAX_PATH or max(map(len, raw.split(b"/"))) > _LONGEST_NAME:
        raise ConfigError(f"{path[:80]!r}… is too long; {_LONGEST_NAME} bytes a name are the limit")
    if any(part.startswith(_WHITEOUT) for part in parts):
        raise ConfigError(f"{path!r}: engines take names with {_WHITEOUT!r} for deleted files")


def _encoded(text: str, path: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path!r} has a name that is not UTF-8; rename it") from None


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} can't be read: {error.strerror or error}")
