"""Names of images: `registry.example.com:5000/team/app:1.2@sha256:…` in, its parts out.

The grammar is that of the distribution specification. No registry is assumed: a name without a host is
refused unless the caller says where it belongs.
"""

import re
from typing import Final, Self

import msgspec

from servekit.errors import ConfigError

_HOST: Final = re.compile(
    r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*"
    r"|\[[0-9a-fA-F:]+\])(?::(?P<port>[0-9]{1,5}))?"
)
_PART: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY: Final = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST: Final = 255


class Reference(msgspec.Struct, frozen=True):
    """An image, or another artefact, in a registry.

    Attributes:
        registry: `host` or `host:port`; "" for a name that only local engines know.
        repository: Path in the registry, lower case.
        tag: A name that may move, or "".
        digest: `sha256:…` of a manifest, which never moves, or "". It wins over the tag.
    """

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def parse(cls, text: str, *, default: str | None = None) -> Self:
        """Return the parts of a name.

        Args:
            text: `[host[:port]/]repository[:tag][@digest]`.
            default: The registry of a name without a host; "" leaves it without. None refuses it.

        Raises:
            ConfigError: It is no such name.
        """
        name, at, digest = text.partition("@")
        if at and not _DIGEST.fullmatch(digest):
            raise ConfigError(
                f"image {text!r}: {digest!r} is no digest; write 'sha256:' and 64 lower-case hex digits"
            )
        first, slash, rest = name.partition("/")
        is_host = bool(slash) and (
            any(mark in first for mark in ".:[") or first == "localhost" or first != first.lower()
        )
        path = rest if is_host else name
        if not is_host and default is None:
            raise ConfigError(
                f"image {text!r} names no registry; write 'registry.example.com/{name}', "
                "with the host that has it"
            )
        path, colon, tag = path.partition(":")
        if colon and not _TAG.fullmatch(tag):
            raise ConfigError(
                f"image {text!r}: {tag!r} is no tag; write up to 128 letters, digits, '_', '.' and "
                "'-', the first of them no '.' or '-'"
            )
        registry = first if is_host else default or ""
        if registry:
            check_registry(registry, where=f"image {text!r}")
        if not _REPOSITORY.fullmatch(path):
            lower = f", like {path.lower()!r}" if _REPOSITORY.fullmatch(path.lower()) else ""
            raise ConfigError(
                f"image {text!r}: {path!r} is no repository; write lower-case letters and digits, "
                f"separated by '/', '.', '_' or '-'{lower}"
            )
        if len(registry) + 1 + len(path) > _LONGEST:
            raise ConfigError(f"image {text!r}: the name has more than {_LONGEST} characters")
        return cls(registry, path, tag, digest)

    @property
    def name(self) -> str:
        """Registry and repository."""
        return f"{self.registry}/{self.repository}" if self.registry else self.repository

    @property
    def target(self) -> str:
        """What is asked for: the digest, else the tag, else `latest`."""
        return self.digest or self.tag or "latest"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.name}{tag}{digest}"


def check_registry(host: str, *, where: str) -> None:
    """Refuse what is no `host` or `host:port`.

    Raises:
        ConfigError: It is none; the message starts with `where`.
    """
    match = _HOST.fullmatch(host)
    if match is None or not 0 < int(match["port"] or 443) < 65536:
        raise ConfigError(
            f"{where}: {host!r} is no registry; write 'host' or 'host:port', without a scheme"
        )
