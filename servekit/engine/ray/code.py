"""The author's code on its way to the nodes: an archive of the modules that an app is made of, with small models.

It travels in the orders (`orders.py`), so each replica runs the code that its revision was described
from, also after the files have changed, and a rollback has what it needs.
"""

import hashlib
import io
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import cloudpickle
import msgspec

from servekit.engine.ray.orders import Code
from servekit.errors import ConfigError
from servekit.spec.app import ServiceSpec
from servekit.spec.target import load

MAX_BYTES = 8 << 20
"""Largest archive; it is kept in the cluster's state."""
_END = 1 << 20
_SINCE = (1980, 1, 1, 0, 0, 0)  # as old as a zip can be: what is equal has one digest


def archive(
    sources: Iterable[str], search_path: tuple[str, ...], models: Iterable[Path] = ()
) -> Code:
    """Pack modules, and models as long as there is room.

    Args:
        sources: The files of the author's modules.
        search_path: Folders that they are imported from; what is elsewhere is not packed.
        models: Files and folders that the modules look for beside them.

    Raises:
        ConfigError: The modules are too large.
    """
    folders = sorted((Path(folder).resolve() for folder in search_path), key=lambda f: -len(str(f)))
    content = {inner: source for source, inner in _inner(map(Path, sources), folders)}
    if not content:
        return Code(search_path=search_path)
    links: dict[str, str] = {}
    room = MAX_BYTES
    for model, inner in _inner(models, folders):
        files = files_of(model)
        room -= sum(file.stat().st_size for file in files)
        if room >= 0:
            content |= {f"{inner}{str(file)[len(str(model)) :]}": file for file in files}
        else:
            links[inner] = str(model)
    data = _zipped(content)
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"the app's modules are {len(data) >> 20} MiB, and {MAX_BYTES >> 20} MiB is the most; "
            "install them on the nodes, as a package"
        )
    digest = hashlib.sha256(data + msgspec.json.encode(links, order="sorted")).hexdigest()[:16]
    return Code(archive=data, links=links, digest=digest, search_path=search_path)


def fingerprint(models: Iterable[Path]) -> str:
    """Return what another model has not, without reading large files whole: of their sizes and ends."""
    found = hashlib.sha256()
    for model in models:
        for file in files_of(model):
            size = file.stat().st_size
            with file.open("rb") as opened:
                start = opened.read(_END)
                opened.seek(max(size - _END, 0))
                ends = start + opened.read()
            found.update(f"{str(file)[len(str(model)) :]}\0{size}\0".encode() + ends)
    return found.hexdigest()


def files_of(model: Path) -> list[Path]:
    """Return the files of a model: its own, or all of its folder."""
    return sorted(path for path in model.rglob("*") if path.is_file()) or [model]


def _inner(paths: Iterable[Path], folders: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the paths that are in one of the folders, with their names in the innermost of those."""
    for path in sorted(path.resolve() for path in paths):
        folder = next((f for f in folders if path.is_relative_to(f)), None)
        if folder is not None:
            yield path, path.relative_to(folder).as_posix()


def _zipped(content: Mapping[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for inner, source in sorted(content.items()):
            member = zipfile.ZipInfo(inner, _SINCE)
            packed.writestr(member, source.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def unpack(code: Code, folder: Path) -> None:
    """Make the code importable in this process.

    Args:
        code: What to import from now on.
        folder: Where it is unpacked, once for all processes of this node.

    Raises:
        OSError: It can't be written.
    """
    if code.archive:
        home = folder / f"code-{code.digest}"
        if not home.exists():
            with tempfile.TemporaryDirectory(dir=folder) as made:
                with zipfile.ZipFile(io.BytesIO(code.archive)) as packed:
                    packed.extractall(Path(made) / "code")
                for inner, there in code.links.items():
                    link = Path(made) / "code" / inner
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(there)
                try:
                    (Path(made) / "code").rename(home)
                except OSError:
                    if not home.exists():  # else another process was faster
                        raise
        sys.path.insert(0, str(home))
    sys.path.extend(path for path in code.search_path if path not in sys.path)


def class_of(spec: ServiceSpec, code: Code) -> type:
    """Return a service's class.

    Raises:
        AuthorError: It can't be loaded.
    """
    pickled = code.classes.get(spec.name)
    return load(spec.target) if pickled is None else cloudpickle.loads(pickled)
