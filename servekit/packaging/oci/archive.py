"""Images in files, as others write them: OCI layouts (folder or tar) and tars of `docker save`.

Everything in them goes into the blobs under the digest of what it is, not under the name that it
has; names are only looked up. So a wrong name finds nothing, and nothing is written anywhere else.
Refused are members that are neither file nor folder (but the links to layers in Docker's tars), names
that come twice, blobs that are not what they are called, and documents that are too large.
"""

import os
import posixpath
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from servekit.errors import ConfigError
from servekit.packaging.oci.blobs import CHUNK, Blobs, Progress
from servekit.packaging.oci.compression import inflated, is_gzip
from servekit.packaging.oci.documents import (
    MAX_DOCUMENT,
    OCI_INDEX,
    OCI_LAYER,
    OCI_LAYER_GZIP,
    Descriptor,
    ImageConfig,
    Index,
    Layer,
    Platform,
    decode,
    encode,
)
from servekit.packaging.oci.image import Image, check_image, load_image, nowhere, write_image
from servekit.packaging.oci.layer import LayerCache
from servekit.packaging.oci.tar import TarReader

REF_NAME: Final = "org.opencontainers.image.ref.name"
IMAGE_NAME: Final = "io.containerd.image.name"
_MAX_MEMBERS: Final = 10_000
_MEMBER: Final = re.compile(
    r"(oci-layout|index\.json|manifest\.json|repositories|blobs|[0-9a-f]{64}(\.json|\.tar)?)(/.*)?"
)


class DockerImage(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """One image in Docker's `manifest.json`: names of members, and of the image."""

    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


def is_archive(path: Path) -> bool:
    """Return whether a tar has images in it, rather than a root filesystem, by its first member.

    Raises:
        ConfigError: It can't be read, or is no tar.
    """
    for member in TarReader(inflated(file_chunks(path), where=str(path)), where=str(path)):
        if member.path:
            return _MEMBER.fullmatch(member.path) is not None
    raise ConfigError(f"{path} is empty")


def open_layout(path: Path, blobs: Blobs, *, platform: Platform, tag: str = "") -> Image:
    """Return an image of an OCI layout in a folder; its layers are copied when they are wanted.

    Args:
        path: The folder.
        blobs: Where its blobs go.
        platform: What the image must run on.
        tag: Which image, if there are several.

    Raises:
        ConfigError: There is no such image, or the layout is not one.
    """
    where = str(path)

    def fetch(descriptor: Descriptor, progress: Progress | None) -> None:
        source = path / "blobs" / blobs.path(descriptor.digest).relative_to(blobs.root)
        with blobs.writer(descriptor) as blob:
            for chunk in file_chunks(source, limit=descriptor.size):
                blob.write(chunk)
                if progress is not None:
                    progress(blob.size, descriptor.size)

    raw = b"".join(file_chunks(path / "index.json", limit=MAX_DOCUMENT))
    descriptor = _named(decode(raw, Index, where=where), blobs, tag, where)
    return load_image(blobs, descriptor, platform=platform, fetch=fetch, where=where)


def open_archive(
    path: Path,
    blobs: Blobs,
    *,
    platform: Platform,
    tag: str = "",
    known: Sequence[Layer] = (),
) -> Image:
    """Return an image of a tar: of an OCI layout, or of `docker save`.

    Args:
        path: The tar.
        blobs: Where its blobs go.
        platform: What the image must run on.
        tag: Which image, if there are several.
        known: Layers that are had elsewhere, and need not be compressed again.

    Raises:
        ConfigError: There is no such image, or the tar has what it should not.
    """
    where = str(path)
    members = _take(path, blobs)
    if "index.json" in members:
        raw = blobs.read(members["index.json"])
        descriptor = _named(decode(raw, Index, where=where), blobs, tag, where)
        return load_image(blobs, descriptor, platform=platform, fetch=nowhere, where=where)
    if "manifest.json" not in members:
        raise ConfigError(f"{where} has neither index.json nor manifest.json; it has no images")
    images = decode(blobs.read(members["manifest.json"]), list[DockerImage], where=where)
    found = [image for image in images if not tag or tag in _tags(image)]
    if len(found) != 1:
        raise _ambiguous(where, tag, [name for image in images for name in _tags(image)])
    missing = {found[0].config, *found[0].layers} - members.keys()
    if missing:
        raise ConfigError(f"{where} has no member {min(missing)!r}")
    config = decode(blobs.read(members[found[0].config]), ImageConfig, where=where)
    check_image(config, [members[name] for name in found[0].layers], platform, where)
    elsewhere = {layer.diff_id: layer for layer in known}
    layers = [
        elsewhere.get(diff_id) or _layer(blobs, members[name], diff_id)
        for name, diff_id in zip(found[0].layers, config.rootfs.diff_ids, strict=True)
    ]
    return write_image(blobs, config, layers)


def file_chunks(path: Path, *, limit: int | None = None) -> Iterator[bytes]:
    """Yield a file, 1 MiB at a time.

    Args:
        path: Of a regular file; a link is not followed.
        limit: Bytes that it may have.

    Raises:
        ConfigError: It can't be read, is no file, or has more.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
    with os.fdopen(number, "rb") as file:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is no file")
        if limit is not None and found.st_size > limit:
            raise ConfigError(f"{path} has {found.st_size} bytes; {limit} are the limit")
        while chunk := file.read(CHUNK):
            yield chunk


def _take(path: Path, blobs: Blobs) -> dict[str, Descriptor]:
    """Take all members of a tar into the blobs; return them by name."""
    where = str(path)
    found: dict[str, Descriptor] = {}
    links: dict[str, str] = {}
    tar = TarReader(inflated(file_chunks(path), where=where), where=where)
    for member in tar:
        name = member.path
        if member.kind == "directory":
            continue
        if name in found or name in links or len(found) + len(links) >= _MAX_MEMBERS:
            raise ConfigError(f"{where}: {name!r} comes twice, or behind {_MAX_MEMBERS} others")
        if member.kind == "symlink":
            links[name] = posixpath.normpath(f"{posixpath.dirname(name)}/{member.target}")
            continue
        if member.kind != "file":
            raise ConfigError(f"{where}: {name!r} is a {member.kind}; only files may be in it")
        with blobs.writer() as blob:
            for chunk in tar.content():
                blob.write(chunk)
        if name.startswith("blobs/sha256/") and name[13:] != blob.digest[7:]:
            raise ConfigError(f"{where}: {name!r} is not what it is called, but {blob.digest}")
        found[name] = Descriptor(media_type=OCI_LAYER, digest=blob.digest, size=blob.size)
    for name, target in links.items():
        if target.lstrip("/") not in found or not name.endswith("layer.tar"):
            raise ConfigError(f"{where}: {name!r} is a link to {target!r}; only files may be in it")
        found[name] = found[target.lstrip("/")]
    return found


def _layer(blobs: Blobs, descriptor: Descriptor, diff_id: str) -> Layer:
    """Return a layer of `docker save`, which doesn't compress them; other tools do."""
    if is_gzip(blobs.path(descriptor.digest)):
        gzip = msgspec.structs.replace(descriptor, media_type=OCI_LAYER_GZIP)
        return Layer(descriptor=gzip, diff_id=diff_id)
    return LayerCache(blobs).tar(blobs.chunks(descriptor), diff_id)


def _named(index: Index, blobs: Blobs, tag: str, where: str) -> Descriptor:
    """Return the image of a layout that has a tag, or the only one there; for many platforms, maybe."""
    found = [one for one in index.manifests if not tag or tag in _names(one)]
    many = len(found) > 1 and any(one.platform is None for one in found)
    if not found or many or (not tag and len({frozenset(_names(one)) for one in found}) > 1):
        raise _ambiguous(where, tag, sorted({n for one in index.manifests for n in _names(one)}))
    if len(found) == 1:
        return found[0]
    return blobs.put(encode(Index(schema_version=2, manifests=found)), OCI_INDEX)


def _names(descriptor: Descriptor) -> set[str]:
    annotations = descriptor.annotations or {}
    return {annotations[key] for key in (REF_NAME, IMAGE_NAME) if key in annotations}


def _tags(image: DockerImage) -> list[str]:
    return image.repo_tags or []


def _ambiguous(where: str, tag: str, names: list[str]) -> ConfigError:
    there = ", ".join(map(repr, names[:20])) or "images without a tag"
    if tag:
        return ConfigError(f"{where} has no image {tag!r}; it has {there}")
    return ConfigError(f"{where} has several images, or none; say which of {there}")
