"""Images and other artefacts, to and from a registry.

What is there already is not sent again, and layers that the same registry has elsewhere are mounted.
A pulled image's layers come when they are wanted, so that a base costs its manifest only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from servekit.errors import ConfigError
from servekit.packaging.oci.blobs import Blobs, Progress
from servekit.packaging.oci.documents import (
    MANIFESTS,
    OCI_EMPTY,
    OCI_MANIFEST,
    Descriptor,
    Manifest,
    Platform,
    decode,
    encode,
    media_type_of,
)
from servekit.packaging.oci.image import Image, load_image
from servekit.packaging.oci.reference import Reference
from servekit.packaging.oci.registry import Registry

MAX_ARTIFACT: Final = 64 << 30
"""Bytes that the files of an artefact may have."""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What a push did; sizes in bytes.

    Attributes:
        digest: Of the manifest.
        sent: Uploaded.
        mounted: Had from another repository of the registry.
        kept: There before.
    """

    digest: str
    sent: int = 0
    mounted: int = 0
    kept: int = 0


def pull_image(
    registry: Registry, reference: Reference, blobs: Blobs, *, platform: Platform
) -> Image:
    """Return an image of a registry; its layers are fetched when they are wanted.

    Args:
        registry: A connection that stays open as long as the image is used.
        reference: The image; a digest is best, as a tag moves.
        blobs: Where its documents and layers go.
        platform: Which, if there is one for each of several.

    Raises:
        ConfigError: It can't be had, or can't be used.
    """

    def fetch(descriptor: Descriptor, progress: Progress | None) -> None:
        registry.fetch(reference.repository, descriptor, blobs, progress)

    descriptor = _manifest(registry, reference, blobs)
    return load_image(
        blobs,
        descriptor,
        platform=platform,
        fetch=fetch,
        where=str(reference),
        origin=reference,
    )


def push_image(
    registry: Registry, reference: Reference, image: Image, *, progress: Progress | None = None
) -> Pushed:
    """Send an image.

    Args:
        registry: Where to.
        reference: What it is called there; without a tag it is `latest`.
        image: What is sent.
        progress: Is told the bytes of layers and config, also of those that were there.

    Raises:
        ConfigError: The registry refuses, or a layer can't be had.
    """
    descriptors = [*(layer.descriptor for layer in image.layers), image.manifest.config]
    origin = image.origin
    source = origin.repository if origin and origin.registry == registry.host else ""
    raw = image.blobs.read(image.descriptor)

    def upload(descriptor: Descriptor, seen: Progress) -> None:
        image.ensure(descriptor)
        registry.upload(reference.repository, descriptor, image.blobs, seen)

    return _push(registry, reference, image.descriptor, raw, descriptors, source, upload, progress)


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """Files in a registry that are no image, like a bundle.

    Attributes:
        descriptor: Of the manifest.
        manifest: Its `layers` are the files, its `artifact_type` says what they are.
    """

    descriptor: Descriptor
    manifest: Manifest


def write_artifact(
    blobs: Blobs,
    artifact_type: str,
    files: Sequence[Descriptor],
    *,
    annotations: Mapping[str, str] | None = None,
) -> Artifact:
    """Return an artefact of files that are in the blobs.

    Args:
        blobs: Where its manifest goes.
        artifact_type: A media type that says what it is.
        files: Media types are free; an `org.opencontainers.image.title` annotation is a file's name.
        annotations: Of the whole.
    """
    manifest = Manifest(
        schema_version=2,
        media_type=OCI_MANIFEST,
        artifact_type=artifact_type,
        config=blobs.put(b"{}", OCI_EMPTY),
        layers=list(files),
        annotations=dict(annotations or {}) or None,
    )
    descriptor = blobs.put(encode(manifest), OCI_MANIFEST)
    return Artifact(descriptor=descriptor, manifest=manifest)


def push_artifact(
    registry: Registry,
    reference: Reference,
    artifact: Artifact,
    blobs: Blobs,
    *,
    progress: Progress | None = None,
) -> Pushed:
    """Send an artefact, whose manifest and files are in the blobs; otherwise as `push_image`."""
    descriptors = [*artifact.manifest.layers, artifact.manifest.config]
    raw = blobs.read(artifact.descriptor)

    def upload(descriptor: Descriptor, seen: Progress) -> None:
        registry.upload(reference.repository, descriptor, blobs, seen)

    return _push(registry, reference, artifact.descriptor, raw, descriptors, "", upload, progress)


def pull_artifact(
    registry: Registry,
    reference: Reference,
    blobs: Blobs,
    *,
    artifact_type: str,
    limit: int = MAX_ARTIFACT,
    progress: Progress | None = None,
) -> Artifact:
    """Return an artefact, with all its files in the blobs.

    Args:
        registry: Where it is.
        reference: What it is called.
        blobs: Where it goes.
        artifact_type: What it must be.
        limit: Bytes that its files may have.
        progress: Is told the bytes of files.

    Raises:
        ConfigError: It is something else or too large, or can't be had.
    """
    where = str(reference)
    descriptor = _manifest(registry, reference, blobs)
    if descriptor.media_type not in MANIFESTS:
        raise ConfigError(f"{where} is a {descriptor.media_type!r}, not one artefact")
    manifest = decode(blobs.read(descriptor), Manifest, where=where)
    if manifest.artifact_type != artifact_type:
        kind = manifest.artifact_type or manifest.config.media_type
        raise ConfigError(f"{where} is a {kind!r}, not a {artifact_type!r}")
    total = sum(file.size for file in manifest.layers)
    if total > limit:
        raise ConfigError(f"{where} has {total} bytes; {limit} are the limit")
    count = _Count(progress, total)
    for file in manifest.layers:
        if not blobs.has(file):
            registry.fetch(reference.repository, file, blobs, count.part)
        count.add(file.size)
    return Artifact(descriptor=descriptor, manifest=manifest)


def _manifest(registry: Registry, reference: Reference, blobs: Blobs) -> Descriptor:
    """Bring a manifest or an index into the blobs; one of a known digest may be there."""
    _check_host(registry, reference)
    if reference.digest and (path := blobs.path(reference.digest)).is_file():
        known = Descriptor(media_type="", digest=reference.digest, size=path.stat().st_size)
        kind = media_type_of(blobs.read(known), where=str(reference))
        if kind:
            return msgspec.structs.replace(known, media_type=kind)
    descriptor, raw = registry.manifest(reference.repository, reference.target)
    return blobs.put(raw, descriptor.media_type)


def _push(
    registry: Registry,
    reference: Reference,
    manifest: Descriptor,
    raw: bytes,
    descriptors: Sequence[Descriptor],
    source: str,
    upload: Callable[[Descriptor, Progress], None],
    progress: Progress | None,
) -> Pushed:
    """Send blobs, then the manifest; `source` is a repository that may have them, or ""."""
    _check_host(registry, reference)
    repository = reference.repository
    every = {descriptor.digest: descriptor for descriptor in descriptors}
    count = _Count(progress, sum(descriptor.size for descriptor in every.values()))
    sent = mounted = kept = 0
    for descriptor in every.values():
        if registry.has(repository, descriptor):
            kept += descriptor.size
        elif source and source != repository and registry.mount(repository, descriptor, source):
            mounted += descriptor.size
        else:
            upload(descriptor, count.part)
            sent += descriptor.size
        count.add(descriptor.size)
    target = reference.tag or reference.digest or "latest"
    if registry.digest(repository, target) != manifest.digest:
        registry.put_manifest(repository, target, manifest, raw)
    return Pushed(digest=manifest.digest, sent=sent, mounted=mounted, kept=kept)


class _Count:
    """The progress of several blobs as one."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def part(self, done: int, _: int) -> None:
        """Be the progress of the blob that is under way."""
        if self._progress is not None:
            self._progress(self._done + done, self._total)

    def add(self, size: int) -> None:
        """Count a blob that is done."""
        self._done += size
        self.part(0, 0)


def _check_host(registry: Registry, reference: Reference) -> None:
    if reference.registry != registry.host:
        raise ConfigError(f"{reference} is in another registry than {registry.host}")
