"""What an operator says of the gateway's outside: the settings that its process needs."""

from pathlib import Path
from typing import Any, Final

import msgspec

from servekit.errors import ConfigError
from servekit.gateway.bodies import default_limit
from servekit.gateway.certificate import Certificate
from servekit.settings import Settings


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of that name, known to fit each other."""

    tls_cert: str = ""
    tls_key: str = ""
    cors_origins: tuple[str, ...] = ()
    cors_credentials: bool = False
    gzip_min_bytes: int | None = None
    max_connections: int = 10_000
    max_connections_per_address: int = 0
    max_bodies: int | None = None

    @classmethod
    def of(cls, settings: Settings) -> "Edge":
        """Return them, checked.

        Raises:
            ConfigError: Two don't go together, or the certificate can't be used.
        """
        if (settings.tls_cert is None) != (settings.tls_key is None):
            given, missing = (
                ("tls_cert", "tls_key") if settings.tls_cert else ("tls_key", "tls_cert")
            )
            raise ConfigError(f"{given} is set without {missing}; TLS needs both, or neither")
        if "*" in settings.cors_origins and settings.cors_credentials:
            raise ConfigError(
                "cors_origins = * with cors_credentials: browsers refuse it, as any page could act "
                "in its visitors' names; list the origins"
            )
        values: dict[str, Any] = {name: getattr(settings, name) for name in cls.__struct_fields__}
        for name in ("tls_cert", "tls_key"):
            path: Path | None = values[name]
            values[name] = "" if path is None else str(path.absolute())
        if settings.max_bodies is None:
            values["max_bodies"] = default_limit() // settings.gateway_workers
        edge = cls(**values)
        if edge.tls_cert:
            Certificate(edge.tls_cert, edge.tls_key).context()
        return edge

    @property
    def scheme(self) -> str:
        """What URLs of the gateway start with."""
        return "https" if self.tls_cert else "http"

    def url(self, host: str, port: int) -> str:
        """Return the URL of a gateway that listens there."""
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


PLAIN: Final = Edge()
"""The default of each."""
