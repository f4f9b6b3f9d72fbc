"""A bundle: a folder or one file with everything that an app needs to run elsewhere.

The file is a plain tar: the manifest first, then what it names, in its order. Equal content has
equal bytes. What comes from elsewhere is read with that in mind: nothing is written before the
manifest has been checked, and only what it names, with the size and the digest that it says.
"""

import contextlib
import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from servekit.errors import ConfigError
from servekit.packaging import manifest as m
from servekit.packaging.manifest import File, Manifest

SUFFIX = ".bundle"
MAX_BYTES = 256 << 30
"""Most that is unpacked of one bundle."""

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Bundle:
    """A bundle in a folder."""

    folder: Path
    manifest: Manifest

    @property
    def digest(self) -> str:
        """SHA-256 of its manifest, as hex digits."""
        return self.manifest.digest

    @property
    def title(self) -> str:
        """Its name and the start of its digest."""
        return f"{self.manifest.name}-{self.digest[:12]}"

    @classmethod
    def open(cls, folder: Path) -> "Bundle":
        """Open a folder that is trusted, such as one of the cache.

        Raises:
            ConfigError: It is no bundle.
        """
        try:
            data = (folder / m.NAME).read_bytes()
        except OSError as error:
            raise ConfigError(f"{folder}: is no bundle: {error.strerror}") from None
        return cls(folder, Manifest.from_json(data, str(folder)))

    def verify(self) -> None:
        """Compare every file with its digest.

        Raises:
            ConfigError: One is missing, another file, a link, or not of the bundle.
        """
        left = dict(self.manifest.files)
        for path in _walk(self.folder):
            name = path.relative_to(self.folder).as_posix()
            if name == m.NAME:
                continue
            wanted = left.pop(name, None)
            if wanted is None or path.is_symlink():
                raise ConfigError(f"{self.folder}: {name} does not belong to the bundle")
            if described(path) != wanted:
                raise ConfigError(f"{self.folder}: {name} is not the file that the bundle names")
        if left:
            raise ConfigError(f"{self.folder}: {next(iter(left))} is missing")

    def pack(self, file: Path, *, without: Collection[str] = ()) -> None:
        """Write it as one file.

        Args:
            file: Where.
            without: Files that go another way, and are `beside` it for who reads it.

        Raises:
            OSError: That can't be written.
        """
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".", delete=False) as made:
            try:
                with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as packed:
                    for name in (m.NAME, *self.manifest.files):
                        if name in without:
                            continue
                        path = self.folder / name
                        member = tarfile.TarInfo(name)
                        member.size = path.stat().st_size
                        entry = self.manifest.files.get(name)
                        member.mode = 0o755 if entry is not None and entry.executable else 0o644
                        with path.open("rb") as content:
                            packed.addfile(member, content)
                Path(made.name).chmod(0o644)
                Path(made.name).replace(file)
            except BaseException:
                Path(made.name).unlink()
                raise


def is_bundle(path: str) -> bool:
    """Return whether a path is meant as a bundle, not as an app's import string or file."""
    return path.endswith(SUFFIX) or (Path(path) / m.NAME).is_file()


def read(
    path: Path, cache: Path, *, beside: Mapping[str, Path] | None = None, where: str = ""
) -> Bundle:
    """Return a bundle that somebody gives, verified.

    Args:
        path: Its folder or file.
        cache: Where files are unpacked, each bundle once.
        beside: Files that it was packed without, by SHA-256.
        where: What errors call it; "" is `path`.

    Raises:
        ConfigError: It is no bundle, or not all of it is as its manifest says.
    """
    if path.is_dir():
        bundle = Bundle.open(path)
        bundle.verify()
        return bundle
    try:
        with path.open("rb") as opened:
            return _unpack(opened, where or str(path), cache, beside or {})
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def keep(folder: Path, manifest: Manifest, cache: Path) -> Bundle:
    """Move a folder with a bundle's files into the cache; an equal one that is there stays.

    Args:
        folder: On the cache's file system.
        manifest: What it has.
        cache: The folder of bundles.
    """
    (folder / m.NAME).write_bytes(manifest.to_json())
    home = cache / manifest.digest
    with contextlib.suppress(OSError):
        folder.rename(home)
    if not home.is_dir():
        raise ConfigError(f"can't write {home}")
    return Bundle(home, manifest)


def described(path: Path) -> File:
    """Return what a manifest says of a file."""
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    stat = path.stat()
    return File(sha256=digest, size=stat.st_size, executable=bool(stat.st_mode & 0o100))


def files_of(folder: Path) -> dict[str, File]:
    """Return what a manifest says of all files of a folder, in order."""
    found = {path.relative_to(folder).as_posix(): described(path) for path in _walk(folder)}
    return dict(sorted(found.items()))


def _walk(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place) / name for name in names)


def _unpack(opened: IO[bytes], where: str, cache: Path, beside: Mapping[str, Path]) -> Bundle:
    try:
        with tarfile.open(fileobj=opened, mode="r:") as packed:
            manifest = _manifest(packed, where)
            home = cache / manifest.digest
            if home.is_dir():
                return Bundle(home, manifest)
            cache.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=cache, prefix=".unpacking-"))
            try:
                _members(packed, manifest, where, made, beside)
                return keep(made, manifest, cache)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    except tarfile.TarError as error:
        raise ConfigError(f"{where}: is no bundle: {error}") from None


def _manifest(packed: tarfile.TarFile, where: str) -> Manifest:
    first = packed.next()
    if first is None or first.name != m.NAME or not first.isreg():
        raise ConfigError(f"{where}: is no bundle: it does not start with {m.NAME}")
    if first.size > m.MAX_BYTES:
        raise ConfigError(
            f"{where}: {m.NAME} has {first.size} bytes, and {m.MAX_BYTES} is the most"
        )
    content = packed.extractfile(first)
    assert content is not None
    manifest = Manifest.from_json(content.read(), where)
    if manifest.size > MAX_BYTES:
        raise ConfigError(f"{where}: has {manifest.size} bytes, and {MAX_BYTES} is the most")
    return manifest


def _members(
    packed: tarfile.TarFile,
    manifest: Manifest,
    where: str,
    folder: Path,
    beside: Mapping[str, Path],
) -> None:
    for name, wanted in manifest.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        if wanted.sha256 in beside:
            source: IO[bytes] = beside[wanted.sha256].open("rb")
        else:
            source = _next(packed, name, wanted, where)
        with source as content, path.open("xb") as written:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
                written.write(chunk)
        if digest.hexdigest() != wanted.sha256:
            raise ConfigError(f"{where}: {name} is not the file that the bundle names")
        path.chmod(0o755 if wanted.executable else 0o644)
    if packed.next() is not None:
        raise ConfigError(f"{where}: has more than its manifest names")


def _next(packed: tarfile.TarFile, name: str, wanted: File, where: str) -> IO[bytes]:
    """Return the content of the next member, which must be this file."""
    member = packed.next()
    if member is None or (member.name, member.size) != (name, wanted.size) or not member.isreg():
        found = "its end" if member is None else repr(member.name)
        raise ConfigError(f"{where}: has {found} where its manifest has {name!r}")
    content = packed.extractfile(member)
    assert content is not None
    return content
