"""The JSON of images: descriptors, manifests, indexes and configs, of OCI and of Docker.

Bytes in, structs out, and back: what we write has sorted keys and no defaults, so that equal documents
have equal digests. What others wrote keeps its own bytes; it is only read here. Digests that are not
SHA-256, negative sizes and what is no such document are refused.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Final, Self, TypeVar

import msgspec

from servekit.errors import ConfigError

T = TypeVar("T")

OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
OCI_EMPTY: Final = "application/vnd.oci.empty.v1+json"
OCI_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
OCI_LAYER_GZIP: Final = "application/vnd.oci.image.layer.v1.tar+gzip"
DOCKER_INDEX: Final = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"

INDEXES: Final = frozenset({OCI_INDEX, DOCKER_INDEX})
MANIFESTS: Final = frozenset({OCI_MANIFEST, DOCKER_MANIFEST})
CONFIGS: Final = frozenset({OCI_CONFIG, "application/vnd.docker.container.image.v1+json"})
LAYERS: Final = {
    OCI_LAYER: OCI_LAYER,
    OCI_LAYER_GZIP: OCI_LAYER_GZIP,
    "application/vnd.oci.image.layer.v1.tar+zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar": OCI_LAYER,
    "application/vnd.docker.image.rootfs.diff.tar.gzip": OCI_LAYER_GZIP,
}
"""Media types of layers, and what OCI calls the same bytes."""

MAX_DOCUMENT: Final = 4 << 20
"""Bytes that a manifest, an index or a config may have."""
MAX_LAYERS: Final = 127
"""What Docker's storage can stack."""

Digest = Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
Size = Annotated[int, msgspec.Meta(ge=0)]


class Platform(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a machine is, in Go's words: `linux/amd64`, `linux/arm64/v8`."""

    os: str
    architecture: str
    variant: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the platform of `os/architecture[/variant]`.

        Raises:
            ConfigError: It is none.
        """
        parts = text.split("/")
        if len(parts) not in (2, 3) or not all(part.isascii() and part.isalnum() for part in parts):
            raise ConfigError(f"{text!r} is no platform; write it like 'linux/amd64'")
        return cls(*parts)

    def takes(self, other: "Platform") -> bool:
        """Return whether an image for `other` runs here; a variant matters if both have one."""
        same = (self.os, self.architecture) == (other.os, other.architecture)
        return same and (not self.variant or not other.variant or self.variant == other.variant)

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))


class Descriptor(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"
):  # the order of fields doesn't matter: keys are sorted
    """Where content is: its digest, bytes and type."""

    media_type: str
    digest: Digest
    size: Size
    annotations: dict[str, str] | None = None
    artifact_type: str | None = None
    platform: Platform | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One image, or one artefact that is none."""

    config: Descriptor
    layers: list[Descriptor]
    schema_version: int = msgspec.field(default=0)
    media_type: str = ""
    artifact_type: str = ""
    annotations: dict[str, str] | None = None


class Index(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Several of them: one per platform, or per tag."""

    manifests: list[Descriptor]
    schema_version: int = 0
    media_type: str = ""
    annotations: dict[str, str] | None = None


class Healthcheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="pascal"):
    """Docker's extension of the config. Durations are in nanoseconds; 0 leaves it to the engine."""

    test: list[str] = []
    interval: int = 0
    timeout: int = 0
    start_period: int = 0
    retries: int = 0


class Settings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="pascal"):
    """How a container of the image is started; `config` in its config."""

    user: str = ""
    exposed_ports: dict[str, dict[str, str]] | None = None
    env: list[str] | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    volumes: dict[str, dict[str, str]] | None = None
    working_dir: str = ""
    labels: dict[str, str] | None = None
    stop_signal: str = ""
    stop_timeout: int | None = None
    shell: list[str] | None = None
    healthcheck: Healthcheck | None = None


class History(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a layer came from, or a change of settings, which has no layer."""

    created: str = ""
    created_by: str = ""
    author: str = ""
    comment: str = ""
    empty_layer: bool = False


class DiffIds(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of the layers before compression, from the lowest up."""

    diff_ids: list[Digest] = []
    type: str = "layers"


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image's config."""

    architecture: str
    os: str
    rootfs: DiffIds
    variant: str = ""
    created: str | None = None
    author: str = ""
    config: Settings | None = None
    history: list[History] | None = None

    @property
    def platform(self) -> Platform:
        """What it runs on."""
        return Platform(self.os, self.architecture, self.variant)


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of an image.

    Attributes:
        descriptor: Its bytes, as they are kept and sent.
        diff_id: Digest of the tar within.
    """

    descriptor: Descriptor
    diff_id: Digest


def digest_of(data: bytes) -> str:
    """Return `sha256:…` of some bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def encode(document: msgspec.Struct | Sequence[msgspec.Struct]) -> bytes:
    """Return the one way to write a document."""
    return msgspec.json.encode(document, order="sorted")


class _Typed(msgspec.Struct, frozen=True, rename="camel"):
    media_type: str = ""


def media_type_of(raw: bytes, *, where: str) -> str:
    """Return the media type that a manifest or an index says that it has, or ""."""
    return decode(raw, _Typed, where=where).media_type


def decode(raw: bytes, type_: type[T], *, where: str) -> T:
    """Read a document that someone else wrote.

    Raises:
        ConfigError: It is none; the message starts with `where`.
    """
    if len(raw) > MAX_DOCUMENT:
        raise ConfigError(f"{where}: {len(raw)} bytes are too many; {MAX_DOCUMENT} are the limit")
    try:
        return msgspec.json.decode(raw, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is no {type_.__name__} of an image: {error}") from error
