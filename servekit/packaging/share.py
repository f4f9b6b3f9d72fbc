"""Bundles in a registry: one artefact each, whose large files are blobs that other bundles share.

The small files are one tar, as a bundle's file is; a model that did not change is not sent again.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Final

from servekit.errors import ConfigError
from servekit.packaging.bundle import Bundle, read
from servekit.packaging.oci.blobs import CHUNK, Blobs, Progress
from servekit.packaging.oci.documents import Descriptor
from servekit.packaging.oci.reference import Reference
from servekit.packaging.oci.registry import Registry
from servekit.packaging.oci.transfer import pull_artifact, push_artifact, write_artifact

ARTIFACT: Final = "application/vnd.servekit.bundle.v1"

_TAR: Final = f"{ARTIFACT}+tar"
_FILE: Final = "application/octet-stream"
_LARGE: Final = 1 << 20
"""Bytes from which on a file is a blob of its own."""


def push(
    bundle: Bundle,
    reference: Reference,
    blobs: Blobs,
    *,
    progress: Progress | None = None,
) -> str:
    """Send a bundle, and return the digest of what the registry has then.

    Args:
        bundle: Verified.
        reference: Registry, and what it is called there.
        blobs: Where it is kept meanwhile.
        progress: Is told the bytes.

    Raises:
        ConfigError: The registry refuses it.
    """
    large = {name: f for name, f in bundle.manifest.files.items() if f.size >= _LARGE}
    with tempfile.TemporaryDirectory() as scratch:
        tar = Path(scratch) / "bundle"
        bundle.pack(tar, without=large)
        parts = [_put(blobs, tar, _TAR)]
    done: set[str] = set()
    for name, file in large.items():
        if file.sha256 not in done:
            done.add(file.sha256)
            parts.append(_put(blobs, bundle.folder / name, _FILE))
    annotations = {
        "org.opencontainers.image.title": bundle.manifest.name,
        "org.opencontainers.image.revision": bundle.digest,
    }
    artifact = write_artifact(blobs, ARTIFACT, parts, annotations=annotations)
    with Registry.logged_in(reference.registry) as registry:
        return push_artifact(registry, reference, artifact, blobs, progress=progress).digest


def pull(
    reference: Reference,
    blobs: Blobs,
    cache: Path,
    *,
    progress: Progress | None = None,
) -> Bundle:
    """Return a registry's bundle, verified.

    Args:
        reference: Registry, and what it is called there.
        blobs: Where its parts go.
        cache: The folder of bundles.
        progress: Is told the bytes.

    Raises:
        ConfigError: It is no bundle, is not as its manifest says, or can't be had.
    """
    with Registry.logged_in(reference.registry) as registry:
        artifact = pull_artifact(
            registry, reference, blobs, artifact_type=ARTIFACT, progress=progress
        )
    if [part.media_type for part in artifact.manifest.layers[:1]] != [_TAR]:
        raise ConfigError(f"{reference} does not start with a {_TAR!r}")
    tar, *files = artifact.manifest.layers
    beside = {file.digest.removeprefix("sha256:"): blobs.path(file.digest) for file in files}
    return read(blobs.path(tar.digest), cache, beside=beside, where=str(reference))


def _put(blobs: Blobs, path: Path, media_type: str) -> Descriptor:
    with path.open("rb") as source, blobs.writer() as writer:
        shutil.copyfileobj(source, writer, CHUNK)
        digest, size = writer.digest, writer.size
    return Descriptor(media_type=media_type, digest=digest, size=size)
