"""The models of a machine: equal files are kept once, whatever they are called and whoever needs them.

In the folder: `blobs/` has the files by their SHA-256, `trees/` what a source had, as hard links to
them, `refs/` which tree a source is. So a blob with one link belongs to nobody any more. A bundle's
`models` has `trees` and `refs` alone, and is never written to.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from servekit.errors import ConfigError
from servekit.settings import Settings
from servekit.spec.model import ModelSpec
from servekit.store.sources import Fetched, fetcher, files

_LONGEST_FETCH_S = 86400.0


class File(msgspec.Struct, frozen=True, kw_only=True):
    """One file: digest, and size in bytes."""

    sha256: str
    size: int


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A source that has been fetched.

    Attributes:
        spec: What was asked for.
        revision: The commit that its revision was.
        is_file: It is one file, not a folder.
        files: By path.
    """

    spec: ModelSpec
    revision: str = ""
    is_file: bool = False
    files: dict[str, File] = msgspec.field(default_factory=dict[str, File])

    def __post_init__(self) -> None:
        for name in self.files:
            if not all(part not in ("", ".", "..") for part in name.split("/")):
                raise ValueError(f"{name!r} leads elsewhere")

    @property
    def digest(self) -> str:
        """SHA-256 of the file; of a folder, of all digests and names."""
        if self.is_file:
            [file] = self.files.values()
            return file.sha256
        lines = (f"{file.sha256}  {name}\n" for name, file in sorted(self.files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def tree(self) -> str:
        """Name of its folder: the names of the files count as well."""
        names = "\0".join(sorted(self.files))
        return hashlib.sha256(f"{self.digest}\0{names}".encode()).hexdigest()[:32]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True)
class Store:
    """The models in a folder.

    Attributes:
        folder: Made when something is fetched.
        bundled: A folder of the same kind that is looked at first, and only read.
        offline: Fetch nothing.
    """

    folder: Path
    bundled: Path | None = None
    offline: bool = False

    @classmethod
    def of(cls, settings: Settings) -> "Store":
        """Return the store of this machine."""
        folder = settings.models_dir or settings.cache_dir / "models"
        bundled = settings.bundle_dir / "models" if settings.bundle_dir else None
        return cls(folder.absolute(), bundled, settings.offline)

    def path(self, spec: ModelSpec, base: Path) -> Path:
        """Return where a model's files are: of one file its path, else that of a folder.

        Args:
            spec: What is wanted; fetched if it is not here.
            base: Folder that a relative path is from.

        Raises:
            ConfigError: It is not there, can't be fetched, or is not what its digest says.
        """
        if not spec.scheme:
            return _here(spec, base)
        for folder in (self.bundled, self.folder):
            if folder is not None and (kept := _read(folder, spec)) is not None:
                return _place(folder, kept)
        return _place(self.folder, self.pull(spec))

    def pull(self, spec: ModelSpec) -> Kept:
        """Have a source here, fetched if it is not; processes that ask at one time fetch it once.

        Raises:
            ConfigError: It can't be fetched, or is not what its digest says.
        """
        if not spec.scheme:
            raise ConfigError(f"{spec.source} is a path; nothing is to be fetched")
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked(f"{_key(spec)}.lock"):
            if (kept := _read(self.folder, spec)) is not None:
                return kept
            if self.offline:
                raise ConfigError(
                    f"{spec.title} is not on this machine, and `offline` is set; fetch it with "
                    "`servekit models pull`, or build a bundle, which has its models in it"
                )
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".fetching-") as scratch:
                fetched = Path(scratch) / "fetched"
                fetched.mkdir()
                return self._keep(spec, fetcher(spec)(spec, fetched), fetched)

    def _keep(self, spec: ModelSpec, origin: Fetched, fetched: Path) -> Kept:
        found = {path.relative_to(fetched).as_posix(): path for path in files(fetched)}
        if not found:
            raise ConfigError(f"{spec.title} has no files that were asked for")
        kept = Kept(
            spec=spec,
            revision=origin.revision,
            is_file=origin.is_file,
            files={
                name: File(sha256=_digest(path), size=path.stat().st_size)
                for name, path in found.items()
            },
        )
        if spec.sha256 not in ("", kept.digest):
            raise ConfigError(
                f"{spec.title} is not what was asked for: its sha256 is {kept.digest}, "
                f"not {spec.sha256}"
            )
        with self._locked(".lock"):
            for name, path in found.items():
                blob = self._blob(kept.files[name].sha256)
                blob.parent.mkdir(parents=True, exist_ok=True)
                path.chmod(0o444)
                if blob.exists():
                    path.unlink()
                    os.link(blob, path)
                else:
                    os.link(path, blob)
            tree = self.folder / "trees" / kept.tree
            tree.parent.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):  # an equal one is there
                fetched.rename(tree)
            write_ref(self.folder, kept)
        return kept

    def export(self, spec: ModelSpec, into: Path) -> Kept:
        """Put a model into a folder that is to be somebody's `bundled`; it is fetched if need be.

        Raises:
            ConfigError: As `pull`.
        """
        kept = self.pull(spec)
        for name in kept.files:
            copy = into / "trees" / kept.tree / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            original = self.folder / "trees" / kept.tree / name
            try:
                copy.hardlink_to(original)
            except FileExistsError:
                continue  # two sources, one tree
            except OSError:  # another file system
                shutil.copyfile(original, copy)
        write_ref(into, kept)
        return kept

    def _blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest[:2] / digest

    def kept(self) -> list[Kept]:
        """Return what is here, by source."""
        found = (_decoded(path) for path in (self.folder / "refs").glob("*.json"))
        return sorted((one for one in found if one), key=lambda one: one.spec.title)

    def used(self, kept: Kept) -> float:
        """Return when a model was last asked for, in seconds since 1970."""
        return _ref(self.folder, kept.spec).stat().st_mtime

    def verify(self) -> list[str]:
        """Read all files; drops the models that are not as they were, and returns what was wrong.

        They are fetched again by who asks for them next.
        """
        wrong: list[str] = []
        with self._locked(".lock"):
            for kept in self.kept():
                tree = self.folder / "trees" / kept.tree
                broken = [
                    name for name, file in kept.files.items() if not _is(tree / name, file.sha256)
                ]
                wrong += [f"{kept.spec.title}: {name}" for name in broken]
                if broken:
                    for name in broken:
                        self._blob(kept.files[name].sha256).unlink(missing_ok=True)
                    _ref(self.folder, kept.spec).unlink()
                    shutil.rmtree(tree, ignore_errors=True)  # two sources may have one tree
        return wrong

    def collect(self, unused_for_s: float = float("inf")) -> int:
        """Remove what nobody asked for in a time, and what belongs to no model; returns the bytes.

        Args:
            unused_for_s: Seconds.
        """
        before = self._size()
        with self._locked(".lock"):
            for kept in self.kept():
                if time.time() - self.used(kept) > unused_for_s:
                    _ref(self.folder, kept.spec).unlink()
            trees = {kept.tree for kept in self.kept()}
            for tree in (self.folder / "trees").glob("*"):
                if tree.name not in trees:
                    shutil.rmtree(tree)
            for blob in (self.folder / "blobs").glob("*/*"):
                if blob.stat().st_nlink == 1:
                    blob.unlink()
            for left in self.folder.glob(".fetching-*"):  # by processes that were killed
                if time.time() - left.stat().st_mtime > _LONGEST_FETCH_S:
                    shutil.rmtree(left)
        return before - self._size()

    def _size(self) -> int:
        return sum(blob.stat().st_size for blob in (self.folder / "blobs").glob("*/*"))

    @contextlib.contextmanager
    def _locked(self, name: str) -> Generator[None]:
        folder = self.folder / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield


def write_ref(folder: Path, kept: Kept) -> None:
    """Note in a store's folder which tree a source is."""
    path = _ref(folder, kept.spec)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(f".{os.getpid()}")
    made.write_bytes(msgspec.json.encode(kept, order="sorted"))
    made.replace(path)


def _read(folder: Path, spec: ModelSpec) -> Kept | None:
    """Return a source that a folder has, and note that it was asked for."""
    path = _ref(folder, spec)
    kept = _decoded(path)
    if kept is None or kept.spec != spec or not (folder / "trees" / kept.tree).is_dir():
        return None
    with contextlib.suppress(OSError):  # a bundle's can't be written
        os.utime(path)
    return kept


def _decoded(path: Path) -> Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Kept)
    except (OSError, msgspec.MsgspecError):
        return None


def _key(spec: ModelSpec) -> str:
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()[:32]


def _ref(folder: Path, spec: ModelSpec) -> Path:
    return folder / "refs" / f"{_key(spec)}.json"


def _place(folder: Path, kept: Kept) -> Path:
    tree = folder / "trees" / kept.tree
    return tree / next(iter(kept.files)) if kept.is_file else tree


def _here(spec: ModelSpec, base: Path) -> Path:
    path = (base / spec.source).expanduser()
    if not path.exists():
        raise ConfigError(f"{spec.source}: there is no such file in {base}")
    if spec.sha256 and not _is(path, spec.sha256):
        raise ConfigError(f"{path} is not the file with the sha256 {spec.sha256}")
    return path


def _is(path: Path, digest: str) -> bool:
    try:
        return _digest(path) == digest
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
