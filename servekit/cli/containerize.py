"""`servekit containerize`: an app becomes a container image, without a daemon if it runs nothing."""

import dataclasses
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
from servekit.settings import Settings, given

if TYPE_CHECKING:
    from docker import DockerClient

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
Engine = Annotated[
    Literal["none", "docker"],
    typer.Option(
        help="docker: carries out Image.apt and Image.run, and gets the image if no file does."
    ),
]
BuildNetwork = Annotated[
    str,
    typer.Option(
        metavar="NETWORK", help="Docker: network of what Image.apt and Image.run start; or host."
    ),
]


def containerize(
    app: Target,
    *,
    base: Base = "",
    output: Output = None,
    tag: Tag = "",
    push: Push = "",
    engine: Engine = "none",
    build_network: BuildNetwork = "",
    without_models: Annotated[
        bool, typer.Option("--without-models", help="Models are fetched where it starts.")
    ] = False,
    index: Index = "",
    find_links: FindLinks = None,
    torch_backend: TorchBackend = "",
    locked: Locked = False,
    allow_secret: AllowSecret = None,
    import_here: Here = False,
) -> None:
    """Make a container image of an app.

    No daemon is needed, but for Image.apt and Image.run. Layers are base, dependencies, models, code: an edit of the code makes one
    small layer anew. Equal apps on equal bases make equal images.
    """
    from servekit.packaging.docker.deployment import connect  # noqa: PLC0415
    from servekit.packaging.oci.reference import Reference  # noqa: PLC0415

    settings = Settings.load()
    if engine == "docker":  # what builds is ended as by Ctrl-C: no container or secret is left
        signal.signal(signal.SIGTERM, signal.default_int_handler)
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
        done = image_of(
            bundle,
            base,
            settings,
            steps,
            connect=connect if engine == "docker" else None,
            network=build_network,
            with_models=not without_models,
        )
        if engine == "docker" and not push and output is None:
            where = loaded(connect(), done.image, names or [local_name(bundle)], steps)
        else:
            where = _delivered(done.image, bundle.title, output, names, target, steps)
    write(*rows(list(_table(done)), indent="  "))
    took = f"{time.monotonic() - began:.1f} s"
    write([("made ", ""), (where, "bold"), (f"  {took}", "dim")])
    write([(done.image.descriptor.digest, "dim")])


def image_of(
    bundle: "Bundle",
    base: str,
    settings: Settings,
    steps: Steps,
    *,
    connect: "Callable[[], DockerClient] | None" = None,
    network: str = "",
    with_models: bool = True,
) -> "Containerized":
    """Return the image of a bundle, on the base that a command or the bundle names.

    Args:
        bundle: Verified.
        base: What the command names, or "".
        settings: Say where the cache is.
        steps: Tell what goes on.
        connect: Returns the engine that carries out `Image.apt` and `Image.run`, if there is one.
        network: Of the containers that do.
        with_models: Have the models that were fetched in it.

    Raises:
        ConfigError: There is no such base, or the image can't be made on it.
        SetupError: A command of the image failed.
    """
    from servekit.packaging.containerize import containerize as made  # noqa: PLC0415
    from servekit.packaging.docker.prepare import prepare  # noqa: PLC0415
    from servekit.packaging.oci.blobs import Blobs  # noqa: PLC0415
    from servekit.packaging.oci.documents import Platform  # noqa: PLC0415

    declared = bundle.manifest.image
    blobs = Blobs(settings.cache_dir / "blobs")
    platform = Platform.parse(bundle.manifest.platform)
    steps.step("reading the base image")
    on = _base(base or declared.base, blobs, platform)
    finished = partial(
        made,
        bundle,
        on,
        cache=settings.cache_dir,
        with_models=with_models,
        told=steps.step,
        progress=steps.progress,
    )
    if connect is None:
        return finished()
    prepared = prepare(
        connect,
        on,
        declared,
        secrets=given(name for command in declared.commands for name in command.secrets),
        network=network,
        told=steps.step,
        logged=steps.log,
        progress=steps.progress,
    )
    done = finished(prepared=prepared.image)
    return dataclasses.replace(done, steps=(*prepared.steps, *done.steps))


def local_name(bundle: "Bundle", name: str = "") -> "Reference":
    """Return what an engine calls the image of a bundle that nobody gave a name."""
    from servekit.packaging.oci.reference import Reference  # noqa: PLC0415

    called = (name or bundle.manifest.name).lower()
    return Reference.parse(f"servekit/{called}:{bundle.digest[:12]}", default="")


def loaded(client: "DockerClient", image: "Image", names: "list[Reference]", steps: Steps) -> str:
    """Have an image in an engine; returns what it is called there."""
    from servekit.packaging.docker.load import load  # noqa: PLC0415

    steps.step("loading the image into the engine")
    load(client, image, names=names, progress=steps.progress)
    return f"{names[0].name}:{names[0].tag or 'latest'}"


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
    every = sum(layer.descriptor.size for layer in image.layers)
    base = every - sum(step.size for step in done.steps)
    lines: list[Line] = [[("base", ""), (shown_bytes(base), ""), ("", "")]]
    for step in done.steps:
        how = "cached" if step.cached else f"{step.took_s:.1f} s"
        lines.append([(step.name, ""), (shown_bytes(step.size), ""), (how, "dim")])
    return lines
