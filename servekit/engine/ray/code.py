"""The author's code on its way to the nodes: an archive of the modules that an app is made of.

It travels in the orders (`orders.py`), so each replica runs the code that its revision was described
from, also after the files have changed, and a rollback has what it needs.
"""

import hashlib
import io
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import cloudpickle

from servekit.engine.ray.orders import Code
from servekit.errors import ConfigError
from servekit.spec.app import ServiceSpec
from servekit.spec.target import load

MAX_BYTES = 8 << 20
"""Largest archive; it is kept in the cluster's state."""
_SINCE = (1980, 1, 1, 0, 0, 0)  # as old as a zip can be: what is equal has one digest


def archive(sources: Iterable[str], search_path: tuple[str, ...]) -> Code:
    """Pack modules.

    Args:
        sources: The files of the author's modules.
        search_path: Folders that they are imported from; what is elsewhere is not packed.

    Raises:
        ConfigError: They are too large.
    """
    folders = sorted((Path(folder).resolve() for folder in search_path), key=lambda f: -len(str(f)))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for source in sorted(Path(source).resolve() for source in sources):
            folder = next((f for f in folders if source.is_relative_to(f)), None)
            if folder is not None:
                member = zipfile.ZipInfo(str(source.relative_to(folder)), _SINCE)
                packed.writestr(member, source.read_bytes(), zipfile.ZIP_DEFLATED)
        if not packed.namelist():
            return Code(search_path=search_path)
    data = buffer.getvalue()
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"the app's modules are {len(data) >> 20} MiB, and {MAX_BYTES >> 20} MiB is the most; "
            "install them on the nodes, as a package"
        )
    digest = hashlib.sha256(data).hexdigest()[:16]
    return Code(archive=data, digest=digest, search_path=search_path)


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
