"""The project that an app belongs to: its folder, the app's name within it, and which files count.

A project is the nearest folder, from the app's file or the current folder upwards, that has one of
`MARKS`; without one it is the folder of the file itself. What is left out: what `.servekitignore`
names (the syntax of .gitignore), what no project ships (`NEVER`), and container images, as an earlier
`servekit containerize` may have written one there.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from servekit.errors import ConfigError
from servekit.spec.target import split

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MARKS = (".servekitignore", "servekit.toml", "pyproject.toml", "pylock.toml", "requirements.txt")
IGNORE = ".servekitignore"

NEVER = (
    ".*",
    "!.servekitignore",
    "__pycache__/",
    "*.py[cod]",
    "*.egg-info/",
    "node_modules/",
    "/build/",
    "/dist/",
    "*.bundle",
)
"""Left out, unless `.servekitignore` takes it back with `!`."""

MAX_FILES = 20_000

_ELSEWHERE = ("pyvenv.cfg", "HEAD", "oci-layout")
"""Folders with one of these are environments, repositories and images of their own."""


@dataclass(frozen=True)
class Project:
    """A folder with an app in it.

    Attributes:
        root: The folder, absolute.
        target: The app as it is named from there.
    """

    root: Path
    target: str

    @classmethod
    def of(cls, target: str, cwd: Path) -> "Project":
        """Find the project of an app.

        Args:
            target: Import string or file, as `servekit serve` takes it from `cwd`.
            cwd: The current folder.

        Raises:
            ConfigError: There is no such file.
        """
        name, member = split(target)
        if not name.endswith(".py"):
            return cls(_root(cwd) or cwd, target)
        file = (cwd / name).resolve()
        if not file.is_file():
            raise ConfigError(f"{name}: there is no such file in {cwd}")
        root = _root(file.parent) or file.parent
        inner = file.relative_to(root).as_posix()
        return cls(root, f"{inner}:{member}" if member else inner)

    def files(self, included: Sequence[str] = ()) -> Iterator[PurePosixPath]:
        """Yield the files that belong to it, relative to its folder, in order.

        Args:
            included: Patterns of what is taken along though it would be left out.

        Raises:
            ConfigError: A link leads elsewhere, or there are more than `MAX_FILES`.
        """
        from pathspec import GitIgnoreSpec  # noqa: PLC0415

        own = self.root / IGNORE
        lines = own.read_text("utf-8").splitlines() if own.is_file() else []
        ignored = GitIgnoreSpec.from_lines([*NEVER, *lines])
        wanted = GitIgnoreSpec.from_lines(included)
        count = 0
        for path in self._walk(self.root, ignored, wanted):
            if (count := count + 1) > MAX_FILES:
                raise ConfigError(
                    f"{self.root} has more than {MAX_FILES} files; name in {IGNORE} what the app "
                    "does not need"
                )
            yield path

    def state(self, suffixes: Sequence[str] = ()) -> str:
        """Return what changes whenever one of its files does, as `make` sees it: by size and time.

        Args:
            suffixes: Of the files that count; none is all.
        """
        state = hashlib.sha256(bytes(self.root))
        for path in self.files():
            if not suffixes or path.suffix in suffixes:
                stat = (self.root / path).stat()
                state.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        return state.hexdigest()[:16]

    def _walk(
        self, folder: Path, ignored: "GitIgnoreSpec", wanted: "GitIgnoreSpec"
    ) -> Iterator[PurePosixPath]:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = Path(entry.path)
            inner = path.relative_to(self.root).as_posix()
            if entry.is_dir(follow_symlinks=False):
                left_out = ignored.match_file(f"{inner}/") and not len(wanted)
                if not left_out and not any((path / mark).exists() for mark in _ELSEWHERE):
                    yield from self._walk(path, ignored, wanted)
            elif wanted.match_file(inner) or not (ignored.match_file(inner) or _is_image(path)):
                if entry.is_symlink():
                    self._check_link(path, inner)
                if entry.is_file():  # and no socket
                    yield PurePosixPath(inner)

    def _check_link(self, path: Path, inner: str) -> None:
        target = path.resolve()
        if not target.is_file() or not target.is_relative_to(self.root):
            raise ConfigError(
                f"{inner} is a link to {target}, which is no file of the project; put a copy in its "
                f"place, or name it in {IGNORE}"
            )


def _is_image(path: Path) -> bool:
    """Return whether a file is a tar that an engine loads."""
    from servekit.packaging.oci.archive import is_archive  # noqa: PLC0415

    try:
        return path.suffix == ".tar" and is_archive(path)
    except ConfigError:  # no tar at all
        return False


def _root(folder: Path) -> Path | None:
    """Return the nearest folder of a project, that one or one above it."""
    for place in (folder, *folder.parents):
        if any((place / mark).is_file() for mark in MARKS):
            return place
    return None
