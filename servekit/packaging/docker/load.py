"""An image of ours comes into an engine: as a tar, if it isn't there yet."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from servekit.errors import SetupError
from servekit.packaging.oci.blobs import Progress
from servekit.packaging.oci.image import Image
from servekit.packaging.oci.layout import write_tar
from servekit.packaging.oci.reference import Reference

if TYPE_CHECKING:
    from docker import DockerClient


def load(
    client: "DockerClient",
    image: Image,
    *,
    names: Sequence[Reference] = (),
    progress: Progress | None = None,
) -> str:
    """Have an image in an engine; returns its id there.

    Args:
        client: The engine.
        image: What it gets.
        names: What it is called there.
        progress: Is told the bytes that are written.

    Raises:
        SetupError: The engine does not take it.
    """
    from docker.errors import APIError, ImageLoadError  # noqa: PLC0415

    digests = image.manifest.config.digest, image.descriptor.digest  # an engine's id is one of them
    there = next((one for one in client.images.list(all=True) if one.id in digests), None)
    if there is None:
        with tempfile.TemporaryDirectory(dir=image.blobs.root) as scratch:
            tar = Path(scratch) / "image.tar"
            write_tar(image, tar, progress=progress)
            try:
                with tar.open("rb") as opened:
                    [there] = client.images.load(opened)  # pyright: ignore[reportUnknownMemberType]
            except (APIError, ImageLoadError) as error:
                raise SetupError(f"the engine does not take the image: {error}") from None
    for name in names:
        there.tag(name.name, name.tag or "latest")
    assert there.id is not None
    return there.id
