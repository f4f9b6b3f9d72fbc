"""`bundle.json`: what a bundle is, and the digest of every file in it; its own digest is the bundle's."""

import hashlib
import re
from functools import cached_property

import msgspec

from servekit.errors import ConfigError
from servekit.spec.app import AppSpec
from servekit.spec.container import Image

NAME = "bundle.json"
CODE = "code"
LOCK = "pylock.toml"
MODELS = "models"
OPENAPI = "openapi.json"
SBOM = "sbom.cdx.json"
FORMAT = 1
MAX_BYTES = 64 << 20
"""Of a manifest that is read."""

_PART = re.compile(r"[^/\\\x00-\x1f\x7f]{1,255}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class File(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file: its digest and size in bytes, and whether it may be run."""

    sha256: str
    size: int
    executable: bool = False


class Manifest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A bundle as data.

    Attributes:
        name: For people.
        target: The app, as it is named from the folder `code`.
        python: Version of Python that it is locked for, like `"3.12"`.
        platform: Where it runs, like `"linux/amd64"`.
        app: The graph, with all schemas.
        files: All files but this one, by path, in order.
        image: What its container has besides.
        servekit: The version that built it.
        format: Of this document.
    """

    name: str
    target: str
    python: str
    platform: str
    app: AppSpec
    files: dict[str, File]
    image: Image = Image()
    servekit: str = ""
    format: int = FORMAT

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the document, as hex digits."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def to_json(self) -> bytes:
        """Serialise; equal manifests have equal bytes."""
        return msgspec.json.encode(self, order="sorted")

    @classmethod
    def from_json(cls, data: bytes, where: str) -> "Manifest":
        """Read what `to_json` wrote; whoever wrote it is not trusted.

        Raises:
            ConfigError: It is none, or has a path that leads elsewhere.
        """
        try:
            found = msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            written = _format(data)
            if written not in (None, FORMAT):
                raise ConfigError(
                    f"{where}: is of format {written}, and this servekit reads {FORMAT}; use the "
                    "version that built it"
                ) from None
            raise ConfigError(f"{where}: {NAME} can't be read: {error}") from None
        if found.to_json() != data:
            raise ConfigError(f"{where}: {NAME} is not as servekit writes it")
        for path, file in found.files.items():
            check_path(path, where)
            if not _DIGEST.fullmatch(file.sha256) or file.size < 0:
                raise ConfigError(f"{where}: {NAME}: {path!r} has no digest or size")
        return found


def check_path(path: str, where: str) -> None:
    """Refuse a path that could lead out of a bundle's folder.

    Raises:
        ConfigError: It is absolute, has `..`, is empty, or is the manifest's own.
    """
    parts = path.split("/")
    if path == NAME or not all(_PART.fullmatch(part) and part not in (".", "..") for part in parts):
        raise ConfigError(f"{where}: {path!r} is no path in a bundle")


class _Format(msgspec.Struct):
    format: int | None = None


def _format(data: bytes) -> int | None:
    try:
        return msgspec.json.decode(data, type=_Format).format
    except msgspec.MsgspecError:
        return None
