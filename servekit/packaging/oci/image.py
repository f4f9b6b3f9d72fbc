"""An image: its documents, and where its layers are had from when they are wanted.

What a manifest says is checked as a whole before anything is fetched: known types, as many layers as
the config has digests, sizes within limits, the right platform.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

from servekit.errors import ConfigError
from servekit.packaging.oci.blobs import Blobs, Progress
from servekit.packaging.oci.compression import MAX_UNPACKED, inflated
from servekit.packaging.oci.documents import (
    CONFIGS,
    INDEXES,
    LAYERS,
    MANIFESTS,
    MAX_LAYERS,
    OCI_CONFIG,
    OCI_MANIFEST,
    Descriptor,
    ImageConfig,
    Index,
    Layer,
    Manifest,
    Platform,
    Settings,
    decode,
    encode,
)
from servekit.packaging.oci.reference import Reference
from servekit.packaging.oci.rootfs import (
    LayerIndex,
    RootFiles,
    index_layer,
    read_index,
    write_index,
)
from servekit.packaging.oci.tar import TarReader

Fetch: TypeAlias = Callable[[Descriptor, Progress | None], None]
"""Brings a blob, a manifest or an index into the image's blobs."""

_MAX_DEPTH: Final = 3
_MAX_FILE: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image; one thread uses it at a time.

    Attributes:
        blobs: Where its documents are, and its layers once they were wanted.
        descriptor: Of its manifest, whose digest is the image's.
        layers: From the lowest up.
        fetch: Brings a layer that is not in `blobs`.
        origin: The registry that has its layers, or those of its base.
    """

    blobs: Blobs
    descriptor: Descriptor
    manifest: Manifest
    config: ImageConfig
    layers: tuple[Layer, ...]
    fetch: Fetch
    origin: Reference | None = None

    @property
    def settings(self) -> Settings:
        """How a container of it is started."""
        return self.config.config or Settings()

    def ensure(self, descriptor: Descriptor, progress: Progress | None = None) -> None:
        """Have a blob of it in `blobs`.

        Raises:
            ConfigError: It can't be had.
        """
        if not self.blobs.has(descriptor):
            self.fetch(descriptor, progress)

    @cached_property
    def files(self) -> RootFiles:
        """What is in it, by name. Layers that nobody has looked into yet are fetched for that."""
        return RootFiles(self._index(layer) for layer in self.layers)

    def read(self, path: str, *, limit: int = _MAX_FILE) -> bytes | None:
        """Return a small file's content, or None if there is no such file; links are followed.

        Args:
            path: From the root.
            limit: Bytes that it may have.

        Raises:
            ConfigError: It is larger, or its layer can't be had or read.
        """
        found = self.files.find(path)
        if found is None or found.kind != "file":
            return None
        if found.size > limit:
            raise ConfigError(f"{path!r} has {found.size} bytes; {limit} are the limit")
        descriptor = self.layers[found.layer].descriptor
        self.ensure(descriptor)
        where = f"layer {descriptor.digest}"
        tar = TarReader(inflated(self.blobs.chunks(descriptor), where=where), where=where)
        content = b""
        for member in tar:
            if member.path == (found.target or found.path) and member.kind == "file":
                content = b"".join(tar.content()) if member.size <= limit else b""
        return content

    def _index(self, layer: Layer) -> LayerIndex:
        known = read_index(self.blobs, layer.diff_id)
        if known is not None:
            return known
        self.ensure(layer.descriptor)
        where = f"layer {layer.descriptor.digest}"
        index, diff_id = index_layer(self.blobs.chunks(layer.descriptor), where=where)
        if diff_id != layer.diff_id:
            raise ConfigError(f"{where} unpacks to {diff_id} instead of {layer.diff_id}")
        write_index(self.blobs, diff_id, index)
        return index


def load_image(
    blobs: Blobs,
    descriptor: Descriptor,
    *,
    platform: Platform,
    fetch: Fetch,
    where: str,
    origin: Reference | None = None,
) -> Image:
    """Return an image by its manifest, or by an index that has one for a platform.

    Args:
        blobs: Where its documents come.
        descriptor: Of the manifest or index.
        platform: What it must run on.
        fetch: Brings what is not in `blobs`.
        where: What errors call it.
        origin: The registry that it is in.

    Raises:
        ConfigError: It is no image for the platform, or none that can be used.
    """

    def document(wanted: Descriptor) -> bytes:
        if not blobs.has(wanted):
            fetch(wanted, None)
        return blobs.read(wanted)

    for _ in range(_MAX_DEPTH):
        if descriptor.media_type not in INDEXES:
            break
        index = decode(document(descriptor), Index, where=where)
        descriptor = _choose(index, platform, where)
    if descriptor.media_type not in MANIFESTS:
        raise ConfigError(f"{where}: a {descriptor.media_type!r} is no image that can be used")
    manifest = decode(document(descriptor), Manifest, where=where)
    if manifest.schema_version != 2 or manifest.media_type not in ("", descriptor.media_type):
        raise ConfigError(f"{where}: its manifest is not of the type that it says")
    if manifest.artifact_type or manifest.config.media_type not in CONFIGS:
        kind = manifest.artifact_type or manifest.config.media_type
        raise ConfigError(f"{where} is no image, but a {kind!r}")
    config = decode(document(manifest.config), ImageConfig, where=where)
    for layer in manifest.layers:
        if layer.media_type not in LAYERS:
            raise ConfigError(f"{where} has a layer of the type {layer.media_type!r}")
    check_image(config, manifest.layers, platform, where)
    diff_ids = config.rootfs.diff_ids
    return Image(
        blobs=blobs,
        descriptor=descriptor,
        manifest=manifest,
        config=config,
        layers=tuple(
            Layer(descriptor=layer, diff_id=diff_id)
            for layer, diff_id in zip(manifest.layers, diff_ids, strict=True)
        ),
        fetch=fetch,
        origin=origin,
    )


def check_image(
    config: ImageConfig, layers: Sequence[Descriptor], platform: Platform, where: str
) -> None:
    """Refuse an image that is for another platform, or whose parts don't fit.

    Raises:
        ConfigError: It is one; the message starts with `where`.
    """
    if not platform.takes(config.platform):
        raise ConfigError(f"{where} is for {config.platform}, not for {platform}")
    digests = len(config.rootfs.diff_ids)
    if digests != len(layers) or digests > MAX_LAYERS:
        raise ConfigError(
            f"{where} has {len(layers)} layers and {digests} digests of them; {MAX_LAYERS} are "
            "the limit"
        )
    for layer in layers:
        if layer.size > MAX_UNPACKED:
            raise ConfigError(f"{where} has a layer of {layer.size} bytes")


def nowhere(descriptor: Descriptor, progress: Progress | None) -> None:  # noqa: ARG001
    """Be the `fetch` of an image whose blobs are all there."""
    raise ConfigError(f"blob {descriptor.digest} is missing")


def write_image(
    blobs: Blobs,
    config: ImageConfig,
    layers: Sequence[Layer],
    *,
    annotations: Mapping[str, str] | None = None,
    fetch: Fetch = nowhere,
    origin: Reference | None = None,
) -> Image:
    """Write the documents of an image, and return it; `annotations` are its manifest's."""
    manifest = Manifest(
        schema_version=2,
        media_type=OCI_MANIFEST,
        config=blobs.put(encode(config), OCI_CONFIG),
        layers=[layer.descriptor for layer in layers],
        annotations=dict(annotations or {}) or None,
    )
    return Image(
        blobs=blobs,
        descriptor=blobs.put(encode(manifest), OCI_MANIFEST),
        manifest=manifest,
        config=config,
        layers=tuple(layers),
        fetch=fetch,
        origin=origin,
    )


def _choose(index: Index, platform: Platform, where: str) -> Descriptor:
    for descriptor in index.manifests:
        if descriptor.platform is not None and platform.takes(descriptor.platform):
            return descriptor
    if len(index.manifests) == 1 and index.manifests[0].platform is None:
        return index.manifests[0]
    there = sorted({str(found.platform) for found in index.manifests if found.platform})
    raise ConfigError(f"{where} has nothing for {platform}; it has {', '.join(there) or 'nothing'}")
