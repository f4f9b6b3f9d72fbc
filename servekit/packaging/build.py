"""`build`: an app in a project becomes a bundle, whose bytes depend on nothing but what goes in.

The author's code is not imported here but in an environment made of the bundle's own lock, from a
copy of the project that has only what the bundle will have. So what is missing there is found now.
"""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from servekit.engine.description import Described, describe_elsewhere
from servekit.errors import ConfigError, SetupError
from servekit.packaging import bundle as bundles
from servekit.packaging import hooks, portable, sbom, secrets
from servekit.packaging import lock as locks
from servekit.packaging import manifest as m
from servekit.packaging.bundle import Bundle
from servekit.packaging.declared import image_of
from servekit.packaging.environment import environment
from servekit.packaging.lock import Lock
from servekit.packaging.manifest import Manifest
from servekit.packaging.project import IGNORE, Project
from servekit.spec.app import AppSpec
from servekit.spec.container import Image
from servekit.spec.target import split
from servekit.store.store import Store
from servekit.version import __version__

_THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to build, and how.

    Attributes:
        target: Import string or file.
        cwd: From where.
        cache: Folder for bundles and environments.
        name: Of the bundle; "" is the root service's.
        lock: How dependencies are resolved.
        models: Where models are had from.
        allowed: Patterns of files that may look as if they had secrets.
        import_here: Import the app where servekit runs, and not in an environment of its own.
        told: Called with each step as it begins.
    """

    target: str
    cwd: Path
    cache: Path
    models: Store
    name: str = ""
    lock: locks.Options = field(default_factory=locks.Options)
    allowed: tuple[str, ...] = ()
    import_here: bool = False
    told: Callable[[str], None] = lambda _: None


def build(request: Request) -> Bundle:
    """Return the bundle of an app; one that is equal to an earlier one is that one.

    Raises:
        ConfigError: Something would not be the same elsewhere, or can't be locked.
        AuthorError: The app can't be described.
    """
    request.told("reading the project")
    project = Project.of(request.target, request.cwd)
    image = _image(project)
    files = [*project.files(image.included)]
    secrets.refuse(secrets.search(project.root, files), request.allowed)
    cache = request.cache / "bundles"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".building-") as scratch:
        folder = Path(scratch) / "bundle"
        _copy(project.root, files, folder / m.CODE)
        python = image.python or _THIS_PYTHON
        request.told("locking the dependencies")
        work = Path(scratch) / "work"
        work.mkdir()
        locked = locks.make(
            project.root, image, request.lock, python=python, scratch=work, cache=request.cache
        )
        _write_lock(locked, folder, python)
        interpreter = None
        if not request.import_here:
            request.told(f"installing {len(locked.packages)} packages")
            environments = request.cache / "environments"
            interpreter = environment(folder / m.LOCK, python=python, cache=environments)
        request.told("describing the app")
        described = _described(project, folder / m.CODE, interpreter, locked, image)
        app = described.app
        assert app is not None
        models = _models(app, folder, request)
        if described.has_build_hooks:
            request.told("running the build hooks")
            hooks.run(project.target, folder, interpreter)
        request.told("writing the bundle")
        name = request.name or app.root.lower()
        (folder / m.OPENAPI).write_bytes(_openapi(app))
        (folder / m.SBOM).write_bytes(sbom.document(name, locked, models))
        manifest = Manifest(
            name=name,
            target=project.target,
            python=python,
            platform=image.platform,
            app=app,
            files=bundles.files_of(folder),
            image=image,
            servekit=__version__,
        )
        return bundles.keep(folder, manifest, cache)


def _image(project: Project) -> Image:
    """Return the image that the app's module declares, if the module is found as a file."""
    module, service = split(project.target)
    inner = module if module.endswith(".py") else f"{module.replace('.', '/')}.py"
    for folder in (project.root, project.root / "src"):
        if (folder / inner).is_file():
            return image_of(folder / inner, service)
    return Image()


def _copy(root: Path, files: Iterable[PurePosixPath], into: Path) -> None:
    for file in files:
        there = into / file
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, there)
        there.chmod(0o755 if (root / file).stat().st_mode & 0o100 else 0o644)


def _models(app: AppSpec, folder: Path, request: Request) -> dict[str, str]:
    """Put the models into a bundle; returns their digests, by where they are from."""
    digests: dict[str, str] = {}
    for service in app.everything().values():
        for attribute, spec in service.models.items():
            if spec.scheme:
                request.told(f"adding {spec.title}")
                digests[spec.title] = request.models.export(spec, folder / m.MODELS).digest
            elif Path(spec.source).is_absolute() or not (folder / m.CODE / spec.source).exists():
                raise ConfigError(
                    f"{service.name}.{attribute}: {spec.source} is not in the bundle: it is outside "
                    f"of the project, is not there, or is left out; see {IGNORE} and Image.include"
                )
    return digests


def _write_lock(locked: Lock, folder: Path, python: str) -> None:
    (folder / m.LOCK).write_bytes(locked.text(python=python))
    if locked.wheels:
        (folder / locks.WHEELS).mkdir()
    for name, wheel in locked.wheels.items():
        shutil.copyfile(wheel, folder / locks.WHEELS / name)


def _described(
    project: Project, code: Path, interpreter: Path | None, locked: Lock, image: Image
) -> Described:
    described = _describe(project.target, code, interpreter, locked)
    assert described.app is not None
    portable.check(map(Path, described.sources), code)
    if described.app.image != image:
        raise ConfigError(
            f"{project.target}: the image that the module makes is not the one that stands there; "
            "write sk.Image(…) with literals in @sk.service(image=…) of the root service"
        )
    return described


def _describe(target: str, code: Path, interpreter: Path | None, locked: Lock) -> Described:
    try:
        return asyncio.run(describe_elsewhere(target, python=interpreter, cwd=code))
    except SetupError as error:
        if interpreter is None or "ModuleNotFoundError" not in f"{error.message}{error.trace}":
            raise
        raise SetupError(
            f"{error.message}\nin the bundle's own environment, which has what {locked.origin} "
            "names, and in a copy of the project without what .servekitignore names; add what is "
            "missing there",
            trace=error.trace,
        ) from None


def _openapi(app: AppSpec) -> bytes:
    import msgspec  # noqa: PLC0415

    from servekit.protocols.openapi import document  # noqa: PLC0415

    return msgspec.json.encode(document(app), order="sorted")
