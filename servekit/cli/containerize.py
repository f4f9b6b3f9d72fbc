"""`servekit containerize`: an app becomes a container image, without a daemon."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli.build import (
    AllowSecret,
    FindLinks,
    Here,
    Index,
    Locked,
    TorchBackend,
    bundle_of,
)
from servekit.cli.console import Line, Steps, rows, write
from servekit.cli.run import Target
from servekit.core.units import shown_bytes
from servekit.errors import ConfigError
from servekit.settings import Settings

if TYPE_CHECKING:
    from servekit.packaging.bundle import Bundle
    from servekit.packaging.containerize import Containerized
    from servekit.packaging.oci.blobs import Blobs
    from servekit.packaging.oci.documents import Platform
    from servekit.packaging.oci.image import Image
    from servekit.packaging.oci.reference import Reference

Base = Annotated[
    str,
    typer.Option(
        metavar="REFERENCE|PATH",
        help="Base image: in a registry, or a tar or folder; else what sk.Image(base) says.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="A .tar for `docker load`, or a new folder (OCI layout); else dist/NAME-DIGEST.tar.",
    ),
]
Tag = Annotated[str, typer.Option("--tag", "-t", metavar="NAME[:TAG]", help="What it is called.")]
Push = Annotated[
    str, typer.Option(metavar="REFERENCE", help="Send it to a registry, instead of a file.")
]


def containerize(
    app: Target,
    *,
    base: Base = "",
    output: Output = None,
    tag: Tag = "",
    push: Push = "",
    index: Index = "",
    find_links: FindLinks = None,
    torch_backend: TorchBackend = "",
    locked: Locked = False,
    allow_secret: AllowSecret = None,
    import_here: Here = False,
) -> None:
    """Make a container image of an app.

    No daemon is needed. Layers are base, dependencies, models, code: an edit of the code makes one
    small layer anew. Equal apps on equal bases make equal images.
    """
    from servekit.packaging.oci.reference import Reference  # noqa: PLC0415

    settings = Settings.load()
    names = [Reference.parse(tag, default="")] if tag else []
    target = Reference.parse(push) if push else None
    began = time.monotonic()
    with Steps() as steps:
        bundle = bundle_of(
            app,
            settings,
            steps,
            index=index,
            find_links=find_links,
            torch_backend=torch_backend,
            locked=locked,
            allow_secret=allow_secret,
            import_here=import_here,
        )
        done = image_of(bundle, base, settings, steps)
        where = _delivered(done.image, bundle.title, output, names, target, steps)
    write(*rows(list(_table(done)), indent="  "))
    took = f"{time.monotonic() - began:.1f} s"
    write([("made ", ""), (where, "bold"), (f"  {took}", "dim")])
    write([(done.image.descriptor.digest, "dim")])


def image_of(bundle: "Bundle", base: str, settings: Settings, steps: Steps) -> "Containerized":
    """Return the image of a bundle, on the base that a command or the bundle names.

    Raises:
        ConfigError: There is no such base, or the image can't be made on it.
    """
    from servekit.packaging.containerize import containerize as made  # noqa: PLC0415
    from servekit.packaging.oci.blobs import Blobs  # noqa: PLC0415
    from servekit.packaging.oci.documents import Platform  # noqa: PLC0415

    blobs = Blobs(settings.cache_dir / "blobs")
    platform = Platform.parse(bundle.manifest.platform)
    steps.step("reading the base image")
    on = _base(base or bundle.manifest.image.base, blobs, platform)
    return made(bundle, on, cache=settings.cache_dir, told=steps.step, progress=steps.progress)


def _base(base: str, blobs: "Blobs", platform: "Platform") -> "Image":
    from servekit.packaging.oci.base import open_base  # noqa: PLC0415
    from servekit.packaging.oci.reference import Reference  # noqa: PLC0415
    from servekit.packaging.oci.registry import Registry  # noqa: PLC0415
    from servekit.packaging.oci.transfer import pull_image  # noqa: PLC0415

    if not base:
        raise ConfigError(
            "there is no base image; name one with a Python, like --base "
            "registry.example.com/python:3.11-slim or --base base.tar, or in sk.Image(…)"
        )
    if Path(base).exists():
        return open_base(Path(base), blobs, platform=platform)
    reference = Reference.parse(base)
    return pull_image(Registry.logged_in(reference.registry), reference, blobs, platform=platform)


def _delivered(
    image: "Image",
    title: str,
    output: Path | None,
    names: "list[Reference]",
    target: "Reference | None",
    steps: Steps,
) -> str:
    """Put an image where it is wanted; returns where that is."""
    from servekit.packaging.oci.layout import write_folder, write_tar  # noqa: PLC0415
    from servekit.packaging.oci.registry import Registry  # noqa: PLC0415
    from servekit.packaging.oci.transfer import push_image  # noqa: PLC0415

    if target is not None:
        steps.step(f"sending it to {target.registry}")
        with Registry.logged_in(target.registry) as registry:
            push_image(registry, target, image, progress=steps.progress)
        if output is None:
            return str(target)
    path = output or Path("dist") / f"{title}.tar"
    path.parent.mkdir(parents=True, exist_ok=True)
    steps.step(f"writing {path}")
    write = write_tar if path.suffix == ".tar" else write_folder
    write(image, path, names=names, progress=steps.progress)
    return str(path)


def _table(done: "Containerized") -> list[Line]:
    image = done.image
    base = sum(layer.descriptor.size for layer in image.layers[: -len(done.steps)])
    lines: list[Line] = [[("base", ""), (shown_bytes(base), ""), ("", "")]]
    for step in done.steps:
        how = "cached" if step.cached else f"{step.took_s:.1f} s"
        lines.append([(step.name, ""), (shown_bytes(step.size), ""), (how, "dim")])
    return lines
