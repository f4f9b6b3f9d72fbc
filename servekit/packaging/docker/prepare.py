"""The base of an image whose `apt` and `run` an engine has carried out: a base in, a base out.

The engine makes layers and nothing else. What comes out has the settings of what went in, and its layers
as they were, with those on top that the steps have made. They are kept by what made them, so that
the next time the engine isn't asked, and equal apps have equal images again.
"""

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from servekit.errors import ConfigError, SetupError
from servekit.packaging.containerize import Step
from servekit.packaging.docker.builder import Builder
from servekit.packaging.docker.load import load
from servekit.packaging.docker.step import BuildStep, steps_of
from servekit.packaging.oci.archive import open_archive
from servekit.packaging.oci.blobs import Blobs, Progress
from servekit.packaging.oci.documents import DiffIds, History, Layer
from servekit.packaging.oci.image import Image, write_image
from servekit.spec.container import Image as Declared

if TYPE_CHECKING:
    from docker import DockerClient

_FORMAT: Final = "prepared 1"


@dataclass(frozen=True)
class Prepared:
    """A base that has what an image declares, and what that took."""

    image: Image
    steps: tuple[Step, ...]


def prepare(
    connect: "Callable[[], DockerClient]",
    base: Image,
    declared: Declared,
    *,
    secrets: Mapping[str, str],
    network: str = "",
    told: Callable[[str], None] = lambda _: None,
    logged: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> Prepared:
    """Return a base with the packages and after the commands of an image.

    Args:
        connect: Returns the engine; called only if a step was not carried out here before.
        base: What it starts from; has our own blobs, which the new layers go to.
        declared: What the app says.
        secrets: Values of variables that commands ask for.
        network: Of the containers that run; "" is what the engine gives them.
        told: Called with each step as it begins.
        logged: Called with each line that a step prints; secrets are masked.
        progress: Is told the bytes of the base on its way to the engine.

    Raises:
        ConfigError: A secret is missing.
        SetupError: A step failed.
    """
    steps = steps_of(declared)
    if not steps:
        return Prepared(base, ())
    kept = _Kept(base, steps)
    if (layers := kept.get()) is not None:
        shown = [_shown(step, own, cached=True) for step, own in zip(steps, layers, strict=True)]
        return Prepared(_stacked(base, steps, layers), tuple(shown))
    client = connect()
    told("loading the base image into the engine")
    image = load(client, base, progress=progress)
    builder = Builder(client, network=network, logged=logged)
    ends = [len(builder.layers(image))]
    took: list[float | None] = []
    for number, step in enumerate(steps):
        began = time.monotonic()
        known = builder.known(image, step)
        if known is None:
            _check(steps[number:], secrets)
            told(step.title)
            image = builder.make(image, step, {name: secrets[name] for name in step.secrets})
        else:
            image = known
        took.append(None if known else time.monotonic() - began)
        ends.append(len(builder.layers(image)))
    told("taking its layers from the engine")
    new = _fetched(client, image, base)
    layers = [new[a - ends[0] : b - ends[0]] for a, b in itertools.pairwise(ends)]
    kept.put(layers)
    shown = [
        _shown(step, own, cached=s is None, took_s=s or 0.0)
        for step, own, s in zip(steps, layers, took, strict=True)
    ]
    return Prepared(_stacked(base, steps, layers), tuple(shown))


class _Kept:
    """Layers of steps that were carried out before, beside the blobs."""

    def __init__(self, base: Image, steps: Sequence[BuildStep]) -> None:
        key = base.descriptor.digest
        for step in steps:
            key = step.key(f"{_FORMAT} {key}")
        self._blobs = base.blobs
        self._path = base.blobs.root / "prepared" / f"{key}.json"

    def get(self) -> list[list[Layer]] | None:
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=list[list[Layer]])
        except (OSError, msgspec.MsgspecError):
            return None
        there = all(self._blobs.has(layer.descriptor) for own in found for layer in own)
        return found if there else None

    def put(self, layers: list[list[Layer]]) -> None:
        self._blobs.note(self._path, msgspec.json.encode(layers, order="sorted"))


def _check(steps: Sequence[BuildStep], secrets: Mapping[str, str]) -> None:
    """Refuse to begin if a later step could not run."""
    for step in steps:
        for name in step.secrets:
            if name not in secrets:
                raise ConfigError(
                    f"{step.title}: asks for the secret {name}, which is not set here; set it in "
                    "the environment where you build"
                )


def _fetched(client: "DockerClient", image: str, base: Image) -> list[Layer]:
    """Take the layers of an engine's image that are on top of a base into the base's blobs."""
    below = base.config.rootfs.diff_ids
    with tempfile.TemporaryDirectory(dir=base.blobs.root) as scratch:
        tar = Path(scratch) / "saved.tar"
        with tar.open("wb") as file:
            for chunk in client.images.get(image).save():
                file.write(chunk)
        saved = open_archive(
            tar, Blobs(Path(scratch) / "blobs"), platform=base.config.platform, known=base.layers
        )
        if saved.config.rootfs.diff_ids[: len(below)] != below:
            raise SetupError("the engine has other layers of the base image than it was given")
        new = list(saved.layers[len(below) :])
        for layer in new:
            with (
                base.blobs.writer(layer.descriptor) as blob,
                saved.blobs.path(layer.descriptor.digest).open("rb") as file,
            ):
                shutil.copyfileobj(file, blob)
    return new


def _stacked(base: Image, steps: Sequence[BuildStep], layers: Sequence[Sequence[Layer]]) -> Image:
    """Return the base with layers on top, and with nothing else of the image that the engine has."""
    every = [*base.layers, *(layer for own in layers for layer in own)]
    lines = [
        History(created_by=f"servekit: {step.title}", empty_layer=not own)
        for step, own in zip(steps, layers, strict=True)
    ]
    config = msgspec.structs.replace(
        base.config,
        rootfs=DiffIds(diff_ids=[layer.diff_id for layer in every]),
        history=[*(base.config.history or ()), *lines],
    )
    return write_image(base.blobs, config, every, fetch=base.fetch, origin=base.origin)


def _shown(step: BuildStep, own: Sequence[Layer], *, cached: bool, took_s: float = 0.0) -> Step:
    size = sum(layer.descriptor.size for layer in own)
    return Step(step.title, size, cached=cached, took_s=took_s)
