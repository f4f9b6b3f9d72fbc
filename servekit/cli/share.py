"""`servekit push` and `pull`: bundles to and from a folder or a registry."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli.build import bundle_of, put
from servekit.cli.console import Steps, write
from servekit.settings import Settings

if TYPE_CHECKING:
    from servekit.packaging.oci.reference import Reference

_OCI = "oci://"


def push(
    bundle: Annotated[
        str, typer.Argument(metavar="BUNDLE|APP", help="A bundle; or what to build.")
    ],
    place: Annotated[
        str, typer.Argument(metavar="PLACE", help="A folder, or oci://registry/repository:tag.")
    ],
) -> None:
    """Send a bundle to a folder or a registry.

    Large files that the registry has are not sent again.
    """
    from servekit.packaging.oci.blobs import Blobs  # noqa: PLC0415
    from servekit.packaging.share import push as send  # noqa: PLC0415

    settings = Settings.load()
    with Steps() as steps:
        found = bundle_of(bundle, settings, steps)
        if reference := _reference(place):
            steps.step(f"sending it to {reference.registry}")
            blobs = Blobs(settings.cache_dir / "blobs")
            digest = send(found, reference, blobs, progress=steps.progress)
        else:
            place = str(Path(place) / f"{found.title}.bundle")
            put(found, Path(place))
            digest = f"sha256:{found.digest}"
    write([("sent ", ""), (place, "bold")])
    write([(digest, "dim")])


def pull(
    place: Annotated[
        str, typer.Argument(metavar="PLACE", help="A bundle, or oci://registry/repository:tag.")
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="File, or without .bundle a folder."),
    ] = None,
) -> None:
    """Get a bundle from a folder or a registry, and verify it."""
    from servekit.packaging.bundle import SUFFIX, read  # noqa: PLC0415
    from servekit.packaging.oci.blobs import Blobs  # noqa: PLC0415
    from servekit.packaging.share import pull as fetch  # noqa: PLC0415

    settings = Settings.load()
    cache = settings.cache_dir / "bundles"
    with Steps() as steps:
        if reference := _reference(place):
            steps.step(f"getting it from {reference.registry}")
            blobs = Blobs(settings.cache_dir / "blobs")
            found = fetch(reference, blobs, cache, progress=steps.progress)
        else:
            found = read(Path(place), cache)
        path = output or Path(f"{found.title}{SUFFIX}")
        put(found, path)
    write([("got ", ""), (str(path), "bold")])
    write([(f"sha256:{found.digest}", "dim")])


def _reference(place: str) -> "Reference | None":
    from servekit.packaging.oci.reference import Reference  # noqa: PLC0415

    return Reference.parse(place.removeprefix(_OCI)) if place.startswith(_OCI) else None
