"""What an image starts from, when it is in a file: a layout, a tar of `docker save`, or a root filesystem.

A registry's are in `transfer`, and nothing at all is `scratch`.
"""

from pathlib import Path
from typing import Final

import msgspec

from servekit.errors import ConfigError
from servekit.packaging.oci.archive import file_chunks, is_archive, open_archive, open_layout
from servekit.packaging.oci.blobs import Blobs
from servekit.packaging.oci.compression import inflated
from servekit.packaging.oci.documents import DiffIds, History, ImageConfig, Platform, Settings
from servekit.packaging.oci.image import Image, write_image
from servekit.packaging.oci.layer import LayerCache
from servekit.packaging.oci.rootfs import index_layer, read_index, write_index

_ORIGIN: Final = "servekit: root filesystem"
_PATH: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def open_base(path: Path, blobs: Blobs, *, platform: Platform, tag: str = "") -> Image:
    """Return the image of a file or folder.

    Args:
        path: An OCI layout (a folder or a tar), a tar of `docker save`, or a tar of a root filesystem
            (of `docker export` or mmdebstrap); tars may be compressed by gzip.
        blobs: Where its layers go.
        platform: What it must run on; a root filesystem doesn't say what it does.
        tag: Which image, if there are several.

    Raises:
        ConfigError: It is none of these, has no such image, or what it has can't be used.
    """
    path = path.resolve()  # a link that the user names is followed; one within a layout isn't
    if path.is_dir():
        if not (path / "oci-layout").is_file():
            raise ConfigError(f"{path} is no OCI layout; write a root filesystem to a tar first")
        return open_layout(path, blobs, platform=platform, tag=tag)
    if is_archive(path):
        return open_archive(path, blobs, platform=platform, tag=tag)
    if tag:
        raise ConfigError(f"{path} is a root filesystem, which has no image {tag!r}")
    return _root_filesystem(path, blobs, platform)


def scratch(blobs: Blobs, platform: Platform) -> Image:
    """Return an image with nothing in it."""
    return write_image(blobs, _config(platform, ()), ())


def _root_filesystem(path: Path, blobs: Blobs, platform: Platform) -> Image:
    where = str(path)
    layers = LayerCache(blobs)
    stat = path.stat()
    key = [["root", where, str(stat.st_size), str(stat.st_mtime_ns), str(stat.st_ino)]]
    layer = layers.get(key)
    if layer is None or read_index(blobs, layer.diff_id) is None:
        index, diff_id = index_layer(file_chunks(path), where=where)
        layer = layers.tar(inflated(file_chunks(path), where=where), diff_id)
        write_index(blobs, diff_id, index)
        layers.put(key, layer)
    history = [History(created_by=_ORIGIN)]  # a line for each layer, or engines mix them up
    config = msgspec.structs.replace(_config(platform, (layer.diff_id,)), history=history)
    return write_image(blobs, config, (layer,))


def _config(platform: Platform, diff_ids: tuple[str, ...]) -> ImageConfig:
    return ImageConfig(
        architecture=platform.architecture,
        os=platform.os,
        variant=platform.variant,
        rootfs=DiffIds(diff_ids=list(diff_ids)),
        config=Settings(env=[_PATH]),
    )
