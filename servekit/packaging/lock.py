"""A bundle's dependencies: a hashed `pylock.toml` (PEP 751) of wheels, wherever the project keeps its own.

In this order: the lock file that the image names; `pylock.toml`; `uv.lock`; `pyproject.toml` or
`requirements.txt`, resolved by uv; else what is installed where servekit runs. What is only on this
machine (wheels in folders, packages that are installed from their source) goes along as a wheel.
What could not be installed again elsewhere is refused: hashes that miss, source without a wheel,
commits of repositories.
"""

import hashlib
import secrets
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from servekit.errors import ConfigError
from servekit.packaging import uv
from servekit.packaging.project import Project
from servekit.packaging.wheels import build_wheel, own_requirement
from servekit.settings import for_uv
from servekit.spec.container import Image

if TYPE_CHECKING:
    from packaging.pylock import Package, PackageArchive, PackageWheel

WHEELS = "wheels"
"""Folder beside the lock file for wheels that no index has."""

_FRESH_S = 600.0

_RELATED = (".cfg", ".in", ".toml", ".txt")
"""Suffixes of files that files with requirements may refer to."""


@dataclass(frozen=True)
class Options:
    """How uv resolves, beyond what the project's own configuration says.

    Attributes:
        index: URL of the package index in place of the usual one.
        find_links: Folders or pages with wheels.
        torch_backend: `cpu`, `cu130`, `auto`, …: which builds of PyTorch.
        locked: Refuse to resolve: the project has a lock file, and it fits.
    """

    index: str = ""
    find_links: tuple[str, ...] = ()
    torch_backend: str = ""
    locked: bool = False

    def words(self) -> list[str]:
        """Return the options as uv takes them."""
        backend = ["--torch-backend", self.torch_backend] if self.torch_backend else []
        return [*self.places(), *backend]

    def places(self) -> list[str]:
        """Return those of them that say where packages are."""
        found = ["--default-index", self.index] if self.index else []
        for link in self.find_links:
            found += ["--find-links", link]
        return found


@dataclass(frozen=True)
class Lock:
    """Dependencies that install the same everywhere.

    Attributes:
        packages: Wheels only, sorted by name.
        wheels: Files that go along, by their names.
        origin: What it was made from.
    """

    packages: tuple["Package", ...]
    wheels: dict[str, Path]
    origin: str

    def text(self, *, python: str) -> bytes:
        """Return the lock file; equal locks have equal bytes."""
        import tomli_w  # noqa: PLC0415
        from packaging.pylock import Pylock  # noqa: PLC0415
        from packaging.specifiers import SpecifierSet  # noqa: PLC0415
        from packaging.version import Version  # noqa: PLC0415

        lock = Pylock(
            lock_version=Version("1.0"),
            created_by="servekit",
            requires_python=SpecifierSet(f"=={python}.*"),
            packages=self.packages,
        )
        return tomli_w.dumps(lock.to_dict()).encode()

    def has(self, name: str) -> bool:
        """Return whether a package is among them."""
        return any(package.name == name for package in self.packages)


def make(
    root: Path, image: Image, options: Options, *, python: str, scratch: Path, cache: Path
) -> Lock:
    """Lock the dependencies of a project.

    Args:
        root: The project's folder.
        image: What it declares.
        options: How to resolve.
        python: Version of Python, like `"3.12"`.
        scratch: A folder for what is made on the way.
        cache: Where wheels are kept that are built, and what was resolved.

    Raises:
        ConfigError: They can't be resolved, or not installed elsewhere.
    """
    found = _locked(root, image, options)
    if found is None:
        if options.locked:
            raise ConfigError(
                f"{root} has no lock file, and --locked resolves nothing; `uv lock` makes one"
            )
        found = _resolved(root, image, options, python=python, scratch=scratch, cache=cache)
    elif image.requirements:
        raise ConfigError(
            f"{found.origin} has all dependencies, so Image.packages({image.requirements[0].text!r}) is "
            "too late; add it to the project and lock again"
        )
    origin = found.origin
    reader = _Reader(found, cache / "wheels")
    packages = [reader.package(p) for p in _packages(found.text, origin) if not _is_itself(p)]
    ordered = sorted(packages, key=lambda package: (package.name, str(package.marker or "")))
    lock = Lock(tuple(ordered), reader.wheels, origin)
    if not lock.has("servekit"):
        raise ConfigError(
            f"{origin} has no servekit, which the app runs on; add it to the project's dependencies "
            "and lock again"
        )
    return lock


@dataclass(frozen=True)
class _Found:
    """A lock file's text: what it is of, and the folder that its paths start from."""

    origin: str
    text: str
    folder: Path


def _locked(root: Path, image: Image, options: Options) -> _Found | None:
    """Return the project's lock file, if it has one."""
    names = (image.lock,) if image.lock else ("pylock.toml", "uv.lock")
    for name in names:
        file = root / name
        if file.is_file():
            if file.name != "uv.lock":
                _refuse(name, "--index", options.index)
                _refuse(name, "--find-links", options.find_links)
                _refuse(name, "--torch-backend", options.torch_backend)
                return _Found(name, file.read_text("utf-8"), file.parent)
            _refuse(name, "--torch-backend", options.torch_backend)
            words = ("export", "--locked", "--format", "pylock.toml", "--no-dev")
            text = uv.run(*words, *options.places(), cwd=file.parent, doing=f"read {name}")
            return _Found(name, text, file.parent)
    if image.lock:
        raise ConfigError(f"Image.lockfile({image.lock!r}): there is no such file in {root}")
    return None


def _refuse(lock: str, option: str, value: str | tuple[str, ...]) -> None:
    """Refuse an option, if it is given, that comes too late where there is a lock file."""
    if value:
        raise ConfigError(
            f"{lock} has all dependencies, so {option} is too late; lock again with it"
        )


def _resolved(
    root: Path, image: Image, options: Options, *, python: str, scratch: Path, cache: Path
) -> _Found:
    """Have uv resolve what the project and the image ask for, and servekit itself.

    What was resolved in the last minutes is taken as it is: for as long, uv does not ask indexes again.
    """
    import tomli_w  # noqa: PLC0415

    sources = [name for name in ("pyproject.toml", "requirements.txt") if _asks(root / name)][:1]
    origin = sources[0] if sources else "the environment of servekit"
    more = scratch / "image" / "pyproject.toml"
    more.parent.mkdir(parents=True, exist_ok=True)
    more.write_text(tomli_w.dumps(_as_project(image, python)), "utf-8")
    asked = [root / name for name in sources] or [scratch / "requirements.txt"]
    if not sources:
        asked[0].write_text(_frozen(), "utf-8")
    override = scratch / "override.txt"
    override.write_text(own_requirement(asked, cache / "wheels"), "utf-8")
    words = [
        *options.words(),
        *("--python-version", python, "--python-platform", uv.PLATFORMS[image.platform]),
    ]
    before = (
        cache / "locks" / f"pylock.{_question(root, [*asked, more, override], words, options)}.toml"
    )
    outside = any(b".." in file.read_bytes() for file in asked)  # what is there may change unseen
    if not outside and before.is_file() and time.time() - before.stat().st_mtime < _FRESH_S:
        return _Found(origin, before.read_text("utf-8"), before.parent)
    before.parent.mkdir(parents=True, exist_ok=True)
    made = before.with_name(f"pylock.{secrets.token_hex(4)}.toml")  # its paths are from its folder
    uv.run(
        *("pip", "compile", *map(str, asked), str(more), "--override", str(override)),
        *words,
        *("--only-binary", ":all:", "--generate-hashes", "--format", "pylock.toml"),
        *("--output-file", made),
        cwd=root,
        doing=f"lock the dependencies of {origin}",
    )
    made.replace(before)
    return _Found(origin, before.read_text("utf-8"), before.parent)


def _question(root: Path, files: Sequence[Path], words: Sequence[str], options: Options) -> str:
    """Return what is the same where uv would resolve the same from the same indexes."""
    found = hashlib.sha256("\0".join([Project(root, "").state(_RELATED), *words]).encode())
    for file in files:
        found.update(file.read_bytes())
    for link in options.find_links:
        if Path(link).is_dir():
            wheels = sorted(
                f"{path.name}{path.stat().st_mtime_ns}" for path in Path(link).iterdir()
            )
            found.update("\0".join(wheels).encode())
    for name, value in sorted(for_uv().items()):
        if name.startswith("UV_"):
            found.update(f"{name}={value}\0".encode())
    return found.hexdigest()[:16]


def _asks(file: Path) -> bool:
    """Return whether a file names dependencies."""
    if not file.is_file():
        return False
    return file.suffix == ".txt" or "project" in tomllib.loads(file.read_text("utf-8"))


def _as_project(image: Image, python: str) -> dict[str, Any]:
    """Return the image's own dependencies as a project, each index for what names it only."""
    from packaging.requirements import Requirement  # noqa: PLC0415

    indexes = sorted({one.index for one in image.requirements if one.index})
    names = {index: f"index-{number}" for number, index in enumerate(indexes)}
    return {
        "project": {
            "name": "image",
            "version": "0",
            "requires-python": f"=={python}.*",
            "dependencies": ["servekit", *(one.text for one in image.requirements)],
        },
        "tool": {
            "uv": {
                "index": [
                    {"name": name, "url": index, "explicit": True} for index, name in names.items()
                ],
                "sources": {
                    Requirement(one.text).name: {"index": names[one.index]}
                    for one in image.requirements
                    if one.index
                },
            }
        },
    }


def _frozen() -> str:
    """Return what is installed here, but what builds and what comes from a folder."""
    lines = uv.run("pip", "freeze", "--python", sys.executable, doing="list what is installed")
    left_out = ("-e ", "pip==", "setuptools==", "wheel==", "uv==")
    return "".join(
        f"{line}\n"
        for line in lines.splitlines()
        if not line.startswith(left_out) and " @ " not in line
    )


def _packages(text: str, origin: str) -> Sequence["Package"]:
    from packaging.pylock import Pylock, PylockValidationError  # noqa: PLC0415

    try:
        return Pylock.from_dict(tomllib.loads(text)).packages
    except (tomllib.TOMLDecodeError, PylockValidationError) as error:
        raise ConfigError(f"{origin}: is no lock file: {error}") from None


def _is_itself(package: "Package") -> bool:
    """Return whether a package is the project that the lock file is of."""
    return package.directory is not None and package.directory.path == "."


class _Reader:
    """Takes over packages of a lock file.

    Attributes:
        wheels: What goes along, by file name.
    """

    def __init__(self, found: _Found, built: Path) -> None:
        self._folder = found.folder
        self._origin = found.origin
        self._built = built
        self.wheels: dict[str, Path] = {}

    def package(self, package: "Package") -> "Package":
        """Return a package with what installs it: wheels by URL, or a file that goes along."""
        where = f"{self._origin}: {package.name} {package.version or ''}".rstrip()
        if package.vcs is not None:
            raise ConfigError(
                f"{where} is a commit of a repository, which has no hash; build a wheel of it, and "
                "give its folder: --find-links FOLDER"
            )
        if package.directory is not None:
            wheel = build_wheel((self._folder / package.directory.path).resolve(), self._built)
            return _of(package, (self._take(wheel, ""),))
        if package.archive is not None:
            return _of(package, (self._file(package.archive, where),))
        if not package.wheels:
            raise ConfigError(
                f"{where} has no wheel for this platform, and an image builds nothing; build one "
                "(`uv build`), and give its folder: --find-links FOLDER"
            )
        return _of(package, tuple(self._file(wheel, where) for wheel in package.wheels))

    def _file(self, entry: "PackageWheel | PackageArchive", where: str) -> "PackageWheel":
        """Return where a wheel is, and its hash: at a URL, or beside the lock file."""
        digest = entry.hashes.get("sha256", "")
        if not digest:
            raise ConfigError(f"{where} has no sha256; lock again with hashes")
        url = urlsplit(entry.url or "")
        path = entry.path or (unquote(url.path) if url.scheme == "file" else "")
        name = (path or url.path).rpartition("/")[2]
        if not name.endswith(".whl"):
            raise ConfigError(
                f"{where} is {name}, and an image builds nothing; build a wheel of it (`uv build`), "
                "and give its folder: --find-links FOLDER"
            )
        if path:
            return self._take(self._folder / path, digest)
        if url.username or url.password:
            raise ConfigError(
                f"{where}: its URL has credentials; keep them in ~/.netrc or a keyring, and lock "
                "again"
            )
        return _wheel(digest, url=entry.url)

    def _take(self, wheel: Path, digest: str) -> "PackageWheel":
        if not wheel.is_file():
            raise ConfigError(f"{self._origin}: there is no {wheel}; lock again")
        with wheel.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest not in ("", found):
            raise ConfigError(f"{self._origin}: {wheel} is another file now; lock again")
        self.wheels[wheel.name] = wheel
        return _wheel(found, path=f"{WHEELS}/{wheel.name}")


def _of(package: "Package", wheels: tuple["PackageWheel", ...]) -> "Package":
    """Return a package without all that does not install it."""
    from packaging.pylock import Package  # noqa: PLC0415

    return Package(name=package.name, version=package.version, marker=package.marker, wheels=wheels)


def _wheel(digest: str, *, url: str | None = None, path: str | None = None) -> "PackageWheel":
    from packaging.pylock import PackageWheel  # noqa: PLC0415

    return PackageWheel(url=url, path=path, hashes={"sha256": digest})
