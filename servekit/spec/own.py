"""Which modules are the author's: not Python's, not installed, not servekit's own.

Nothing is imported here: what the app has not loaded yet, because a function imports it when it is
called, is found on the search path.
"""

import pkgutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from servekit.spec.sources import Source

_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_FOR_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Folders that installers write to: a user's own, a distribution's, another environment's."""
_OF_THE_MACHINE = frozenset({"sitecustomize", "usercustomize"})
"""Modules that Python imports by itself; Debian's is a link out of the folder of its library."""
_SERVEKIT = Path(__file__).resolve().parent.parent


class _Place(NamedTuple):
    """Where a module is: its file, and the folders of its submodules if it is a package."""

    file: Path | None = None
    folders: tuple[str, ...] | None = None


class OwnModules:
    """The author's modules on this machine."""

    def __init__(self) -> None:
        self._also: set[str] = set()
        self._places: dict[str, _Place] = {}
        self._read: set[Path] = set()

    def add(self, names: Iterable[str]) -> None:
        """Count modules as the author's wherever they are: those that services are in."""
        self._also.update(names)

    def names(self) -> set[str]:
        """Return the names of those that are loaded, and of those that lie beside or below them."""
        found: set[str] = set()
        for name in self._loaded_names():
            file, folders = self._place(name)
            assert file is not None
            above = name.rpartition(".")[0]
            around = file.parent if folders is None else file.parent.parent
            found.add(name)
            found.update(self._below((str(around),), above and f"{above}."))
        return {name for name in found if self._file(name) is not None}

    def _below(self, folders: tuple[str, ...], prefix: str) -> Iterator[str]:
        for module in pkgutil.iter_modules(folders, prefix):
            yield module.name
            if module.ispkg:
                yield from self._below(self._place(module.name).folders or (), f"{module.name}.")

    def _loaded_names(self) -> list[str]:
        return [name for name in list(sys.modules) if self._file(name) is not None]

    def files(self) -> tuple[Path, ...]:
        """Return the files of those that are loaded, and of those that were looked into."""
        loaded = {file for name in self._loaded_names() if (file := self._file(name)) is not None}
        return tuple(sorted(file for file in loaded | self._read if file.suffix == ".py"))

    def find(self, name: str) -> Source | None:
        """Return a module, as `Sources` asks for it."""
        file = self._file(name)
        if file is None:
            return None
        try:
            content = file.read_bytes()
        except OSError:
            return None
        self._read.add(file)
        return Source(content, is_package=self._place(name).folders is not None)

    def _file(self, name: str) -> Path | None:
        file = self._place(name).file
        if (
            file is None
            or name in _OF_THE_MACHINE
            or (name not in self._also and _is_elsewhere(file))
        ):
            return None
        return file

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            self._places[name] = self._loaded(name) or self._on_the_search_path(name)
        return self._places[name]

    @staticmethod
    def _loaded(name: str) -> _Place | None:
        module = sys.modules.get(name)
        if module is None:
            return None
        # Not by `getattr`: torch's, for one, have an object of any name.
        found = getattr(module, "__dict__", {})
        file, folders = found.get("__file__"), found.get("__path__")
        return _Place(
            Path(file).resolve() if isinstance(file, str) else None,
            None if folders is None else tuple(folders),
        )

    def _on_the_search_path(self, name: str) -> _Place:
        parent = name.rpartition(".")[0]
        folders = None
        if parent:
            package = self._place(parent)
            folders = package.folders
            if folders is None or (package.file is not None and _is_elsewhere(package.file)):
                return _Place()
        spec = _spec(name, folders)
        if spec is None:
            return _Place()
        inner = spec.submodule_search_locations
        has_file = spec.has_location and spec.origin is not None
        return _Place(
            Path(spec.origin).resolve() if has_file and spec.origin else None,
            None if inner is None else tuple(inner),
        )


def _spec(name: str, folders: tuple[str, ...] | None) -> ModuleSpec | None:
    try:
        # By its last part: a namespace package looks for its parent among what is imported.
        return PathFinder.find_spec(name.rpartition(".")[2], folders)
    except (ImportError, ValueError):
        return None


def _is_elsewhere(file: Path) -> bool:
    if not _FOR_PACKAGES.isdisjoint(file.parts):
        return True
    return any(map(file.is_relative_to, (_SERVEKIT, *_INSTALLED)))
