"""The project that an app belongs to: its folder, the app's name within it, and which files count.

A project is the nearest folder, from the app's file or the current folder upwards, that has one of
`MARKS`; without one it is the folder of the file itself. What is left out: what `.servekitignore`
names (the syntax of .gitignore), and what no project ships (`NEVER`).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from servekit.errors import ConfigError

if TYPE_CHECKING:
    import pathspec

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
        name, colon, member = target.rpartition(":")
        if not colon or member.endswith(".py"):
            name, colon, member = target, "", ""
        if not name.endswith(".py"):
            return cls(_root(cwd) or cwd, target)
        file = (cwd / name).resolve()
        if not file.is_file():
            raise ConfigError(f"{name}: there is no such file in {cwd}")
        root = _root(file.parent) or file.parent
        return cls(root, f"{file.relative_to(root).as_posix()}{colon}{member}")

    def files(self) -> Iterator[PurePosixPath]:
        """Yield the files that belong to it, relative to its folder, in order.

        Raises:
            ConfigError: A link leads out of the project, or there are more than `MAX_FILES`.
        """
        import pathspec  # noqa: PLC0415

        own = self.root / IGNORE
        lines = [*NEVER, *(own.read_text("utf-8").splitlines() if own.is_file() else ())]
        ignored = pathspec.GitIgnoreSpec.from_lines(lines)
        count = 0
        for path in self._walk(self.root, ignored):
            if (count := count + 1) > MAX_FILES:
                raise ConfigError(
                    f"{self.root} has more than {MAX_FILES} files; name in {IGNORE} what the app "
                    "does not need"
                )
            yield path

    def _walk(self, folder: Path, ignored: "pathspec.GitIgnoreSpec") -> Iterator[PurePosixPath]:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = Path(entry.path)
            inner = PurePosixPath(path.relative_to(self.root).as_posix())
            is_folder = entry.is_dir()
            if ignored.match_file(f"{inner}/" if is_folder else str(inner)):
                continue
            if entry.is_symlink() and not path.resolve().is_relative_to(self.root):
                raise ConfigError(
                    f"{inner} is a link to {path.resolve()}, outside of the project {self.root}; "
                    f"put a copy in its place, or name it in {IGNORE}"
                )
            if is_folder:
                if entry.is_symlink():
                    raise ConfigError(
                        f"{inner} is a link to a folder; put a copy in its place, or name it in "
                        f"{IGNORE}"
                    )
                if not (path / "pyvenv.cfg").exists():
                    yield from self._walk(path, ignored)
            elif entry.is_file():
                yield inner
            else:
                raise ConfigError(f"{inner} is no file; name it in {IGNORE}")


def _root(folder: Path) -> Path | None:
    """Return the nearest folder of a project, that one or one above it."""
    for place in (folder, *folder.parents):
        if any((place / mark).is_file() for mark in MARKS):
            return place
    return None
