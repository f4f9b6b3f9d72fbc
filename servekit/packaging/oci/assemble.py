"""Images are put together: a base, layers and settings go in; a manifest and a config come out.

Nothing is read from the clock or the machine: the same input has the same digest.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from servekit.errors import ConfigError
from servekit.packaging.oci.documents import (
    LAYERS,
    MAX_LAYERS,
    Descriptor,
    DiffIds,
    Healthcheck,
    History,
    Layer,
    Settings,
)
from servekit.packaging.oci.image import Image, write_image

_NS: Final = 1_000_000_000
BASE_DIGEST: Final = "org.opencontainers.image.base.digest"
_BASE_NAME: Final = "org.opencontainers.image.base.name"
_CREATED: Final = "org.opencontainers.image.created"


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine asks a container whether it is well. Times are in seconds.

    Attributes:
        command: Run in the container; it exits with 0 if all is well.
        start_period_s: Failures before it has passed don't count.
        retries: Failures in a row that do.
    """

    command: Sequence[str]
    interval_s: float = 10.0
    timeout_s: float = 5.0
    start_period_s: float = 60.0
    retries: int = 3


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What an image changes of its base's settings; None and empty leave them as they are.

    Attributes:
        env: Variables that are set.
        entrypoint: A new one does away with the base's `cmd`, as in a Dockerfile.
        user: `uid` or `uid:gid`; a name must be in the image's /etc/passwd.
        workdir: Absolute.
        ports: Like `3000/tcp`.
        stop_signal: Like `SIGTERM`.
        annotations: Of the manifest; they win over what it would say by itself.
    """

    env: Mapping[str, str] = {}
    entrypoint: Sequence[str] | None = None
    cmd: Sequence[str] | None = None
    user: str = ""
    workdir: str = ""
    labels: Mapping[str, str] = {}
    ports: Sequence[str] = ()
    stop_signal: str = ""
    probe: Probe | None = None
    annotations: Mapping[str, str] = {}


def assemble(
    base: Image,
    layers: Sequence[tuple[str, Layer]],
    changes: Changes,
    *,
    epoch: int,
) -> Image:
    """Return an image on top of another.

    Args:
        base: What it starts from.
        layers: What comes on top, in this order: a line for its history, and the layer.
        changes: To the base's settings.
        epoch: When it was made, in seconds since 1970.

    Raises:
        ConfigError: It has more layers than engines take.
    """
    every = [_plain(layer) for layer in (*base.layers, *(layer for _, layer in layers))]
    if len(every) > MAX_LAYERS:
        raise ConfigError(f"an image with {len(every)} layers; {MAX_LAYERS} are the limit")
    created = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    history = [
        *(base.config.history or ()),
        *(History(created=created, created_by=line) for line, _ in layers),
        History(created=created, created_by="servekit: settings", empty_layer=True),
    ]
    config = msgspec.structs.replace(
        base.config,
        created=created,
        author="",
        config=_changed(base.settings, changes),
        rootfs=DiffIds(diff_ids=[layer.diff_id for layer in every]),
        history=history,
    )
    annotations = {_CREATED: created}
    if base.layers:
        annotations[BASE_DIGEST] = base.descriptor.digest
    if base.origin is not None:
        annotations[_BASE_NAME] = str(base.origin)
    annotations |= changes.annotations
    return write_image(
        base.blobs, config, every, annotations=annotations, fetch=base.fetch, origin=base.origin
    )


def _plain(layer: Layer) -> Layer:
    """Return a layer as OCI describes it."""
    descriptor = Descriptor(
        media_type=LAYERS[layer.descriptor.media_type],
        digest=layer.descriptor.digest,
        size=layer.descriptor.size,
    )
    return Layer(descriptor=descriptor, diff_id=layer.diff_id)


def _changed(settings: Settings, changes: Changes) -> Settings:
    pairs = (line.partition("=") for line in settings.env or ())
    env = {**{name: value for name, _, value in pairs}, **changes.env}
    ports = {**(settings.exposed_ports or {}), **{port: {} for port in changes.ports}}
    labels = {**(settings.labels or {}), **changes.labels}
    cmd = settings.cmd if changes.entrypoint is None else None
    return msgspec.structs.replace(
        settings,
        env=[f"{name}={value}" for name, value in env.items()] or None,
        entrypoint=_words(changes.entrypoint, settings.entrypoint),
        cmd=_words(changes.cmd, cmd),
        user=changes.user or settings.user,
        working_dir=changes.workdir or settings.working_dir,
        labels=labels or None,
        exposed_ports=ports or None,
        stop_signal=changes.stop_signal or settings.stop_signal,
        healthcheck=settings.healthcheck if changes.probe is None else _healthcheck(changes.probe),
    )


def _words(new: Sequence[str] | None, old: list[str] | None) -> list[str] | None:
    return old if new is None else list(new)


def _healthcheck(probe: Probe) -> Healthcheck:
    return Healthcheck(
        test=["CMD", *probe.command],
        interval=round(probe.interval_s * _NS),
        timeout=round(probe.timeout_s * _NS),
        start_period=round(probe.start_period_s * _NS),
        retries=probe.retries,
    )
