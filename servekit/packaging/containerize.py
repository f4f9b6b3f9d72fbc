"""A bundle becomes an image: base → dependencies → models → code, so that what changes often is on top.

In the image all is below `/app`, owned by root and read-only: any user may run it. It needs `/tmp`, and
nothing else that can be written.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from servekit.errors import ConfigError
from servekit.packaging import manifest as m
from servekit.packaging import uv
from servekit.packaging.bundle import Bundle
from servekit.packaging.manifest import Manifest
from servekit.packaging.oci.assemble import BASE_DIGEST, Changes, Probe, assemble
from servekit.packaging.oci.blobs import Progress
from servekit.packaging.oci.documents import Layer
from servekit.packaging.oci.entry import Entry, walk
from servekit.packaging.oci.image import Image
from servekit.packaging.oci.layer import LayerCache
from servekit.packaging.site import compile_all, site

HOME = "/app"
ENVIRONMENT = f"{HOME}/env"
PYTHON = f"{ENVIRONMENT}/bin/python"
PROBE = (PYTHON, "-m", "servekit.engine.probe")
"""Exits with 0 in a container whose app is ready."""
DOORS = "/run/servekit"
"""Where containers of one app that share a volume hand their port over."""
PORT = 3000

_NOBODY = "65532:65532"
_VARIABLES = {
    "HOME": "/tmp",  # noqa: S108
    "ORT_DISABLE_TELEMETRY": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "SERVEKIT_BUNDLE_DIR": HOME,
    "SERVEKIT_HOST": "0.0.0.0",  # noqa: S104
    "SERVEKIT_JOBS_DIR": "/tmp/servekit-jobs",  # noqa: S108
    "SERVEKIT_LOG_FORMAT": "json",
    "SERVEKIT_PORT": str(PORT),
    "SERVEKIT_RUNTIME_DIR": "/tmp",  # noqa: S108
}


@dataclass(frozen=True)
class Step:
    """One layer, as it came about: sizes in bytes, time in seconds."""

    name: str
    size: int
    cached: bool
    took_s: float


@dataclass(frozen=True)
class Containerized:
    """An image, and what it took: its own layers, from the lowest up."""

    image: Image
    steps: tuple[Step, ...]


def containerize(
    bundle: Bundle,
    base: Image,
    *,
    cache: Path,
    prepared: Image | None = None,
    with_models: bool = True,
    epoch: int = 0,
    told: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> Containerized:
    """Return the image of a bundle; equal bundles on equal bases have equal ones.

    Args:
        bundle: Verified.
        base: Has a Python of the bundle's version.
        cache: For installed dependencies.
        prepared: The base after the `apt` and `run` of the image, which an engine has carried out.
        with_models: Have the models in it that were fetched; else its app fetches them at its start.
        epoch: The time of everything in it, in seconds since 1970.
        told: Called with each step as it begins.
        progress: Is told the bytes of a layer that is written.

    Raises:
        ConfigError: The base has no such Python, or the image declares what only an engine can do.
    """
    manifest = bundle.manifest
    if prepared is None:
        _check(manifest)
    below = prepared or base
    python = _python(below, manifest)
    layers = LayerCache(base.blobs)
    interpreter = _interpreter(manifest.python, cache / "interpreters")
    found: list[tuple[str, Layer]] = []
    steps: list[Step] = []

    def add(name: str, entries: Callable[[], list[Entry]], *, same: str = "") -> None:
        told(f"writing the layer of {name}")
        began = time.monotonic()
        key = [["named", same, str(epoch)]]
        layer = layers.get(key) if same else None
        cached = layer is not None
        if layer is None:
            layer, cached = layers.layer(entries(), epoch=epoch, progress=progress)
        if same:
            layers.put(key, layer)
        took_s = time.monotonic() - began
        found.append((f"servekit: {name}", layer))
        steps.append(Step(name, layer.descriptor.size, cached, took_s))

    told("installing the dependencies")
    folder = site(
        bundle.folder / m.LOCK,
        python=manifest.python,
        platform=manifest.platform,
        at=ENVIRONMENT,
        interpreter=interpreter,
        cache=cache / "sites",
    )
    environment = [*_environment(python, manifest.python)]
    add(
        "dependencies",
        lambda: [*walk(folder, ENVIRONMENT[1:]), *environment],
        same=f"{folder.name} {python}",  # thousands of files that nobody changes
    )
    fetched = f"{HOME[1:]}/{m.MODELS}/"
    models = [
        entry
        for entry in _files(bundle, of_models=True)
        if with_models or not entry.path.startswith(fetched)
    ]
    if models:
        add("models", lambda: models)
    add("code", lambda: _code(bundle, interpreter))
    annotations = {BASE_DIGEST: base.descriptor.digest} if base.layers else {}
    changes = _changes(bundle, annotations, offline=with_models)
    image = assemble(below, found, changes, epoch=epoch)
    return Containerized(image, tuple(steps))


def _check(manifest: Manifest) -> None:
    image = manifest.image
    for what, values in (("apt", image.system_packages), ("run", image.commands)):
        if values:
            raise ConfigError(
                f"Image.{what}({str(values[0])!r}) runs something, which needs a Docker engine: "
                "--engine docker; or take a base image that has what it would make"
            )


def _python(base: Image, manifest: Manifest) -> str:
    """Return where the base has the bundle's Python."""
    for folder in ("usr/local/bin", "usr/bin", "bin"):
        path = f"{folder}/python{manifest.python}"
        if base.files.find(path) is not None:
            return f"/{path}"
    raise ConfigError(
        f"the base image has no Python {manifest.python}, which {manifest.name} is locked for; take "
        f"one that has it, or say which it has with sk.Image(python=…)"
    )


def _interpreter(python: str, cache: Path) -> Path:
    """Return a Python of a version, on this machine."""
    home = cache / python
    if not (home / "bin" / "python").exists():
        uv.run("venv", "--python", python, "--clear", home, doing=f"find a Python {python}")
    return home / "bin" / "python"


def _environment(python: str, version: str) -> Iterator[Entry]:
    """Yield what makes a folder with packages the environment of the base's Python."""
    home = python.rpartition("/")[0]
    settings = f"home = {home}\ninclude-system-site-packages = false\nversion = {version}\n"
    yield Entry.file(f"{ENVIRONMENT[1:]}/pyvenv.cfg", settings.encode())
    for name in ("python", "python3"):
        yield Entry.symlink(f"{ENVIRONMENT[1:]}/bin/{name}", python)


def _files(bundle: Bundle, *, of_models: bool) -> Iterator[Entry]:
    services = bundle.manifest.app.everything().values()
    models = [
        PurePosixPath(m.MODELS),
        *(
            PurePosixPath(m.CODE, model.source)
            for service in services
            for model in service.models.values()
            if not model.scheme
        ),
    ]
    for path, file in bundle.manifest.files.items():
        is_model = any(PurePosixPath(path).is_relative_to(model) for model in models)
        if path.startswith("wheels/") or is_model != of_models:
            continue
        yield Entry.file(
            f"{HOME[1:]}/{path}",
            bundle.folder / path,
            executable=file.executable,
            digest=f"sha256:{file.sha256}",
        )


def _code(bundle: Bundle, interpreter: Path) -> list[Entry]:
    """Return the bundle's files but its models, with the bytecode of its modules."""
    code = f"{HOME}/{m.CODE}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / m.CODE
        shutil.copytree(bundle.folder / m.CODE, folder, ignore=_but_modules)
        compile_all(folder, code, interpreter)
        bytecode = [
            Entry.file(f"{code[1:]}/{path.relative_to(folder)}", path.read_bytes())
            for path in sorted(folder.rglob("*.pyc"))
        ]
    manifest = Entry.file(f"{HOME[1:]}/{m.NAME}", bundle.manifest.to_json())
    doors = Entry.directory(DOORS[1:], shared=True)
    return [manifest, doors, *_files(bundle, of_models=False), *bytecode]


def _but_modules(folder: str, names: list[str]) -> list[str]:
    return [n for n in names if not n.endswith(".py") and not Path(folder, n).is_dir()]


def _changes(bundle: Bundle, annotations: Mapping[str, str], *, offline: bool) -> Changes:
    manifest = bundle.manifest
    path = f"{ENVIRONMENT}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    labels = {
        "org.opencontainers.image.title": manifest.name,
        "org.opencontainers.image.revision": bundle.digest,
        "io.servekit.app": manifest.target,
        "io.servekit.version": manifest.servekit,
    }
    if manifest.image.secret_names:
        labels["io.servekit.secrets"] = ",".join(manifest.image.secret_names)
    return Changes(
        env={
            **_VARIABLES,
            "SERVEKIT_OFFLINE": str(offline).lower(),
            "PATH": path,
            **manifest.image.variables,
        },
        entrypoint=[PYTHON, "-m", "servekit"],
        cmd=["serve", manifest.target],
        user=_NOBODY,
        workdir=f"{HOME}/{m.CODE}",
        labels=labels,
        annotations=annotations,
        ports=[f"{PORT}/tcp"],
        stop_signal="SIGTERM",
        probe=Probe(command=PROBE),
    )
