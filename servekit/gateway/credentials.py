"""Which credentials a gateway accepts: its settings, as they go to its process."""

from pathlib import Path

import msgspec

from servekit.errors import ConfigError
from servekit.settings import Settings


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the same names; paths are absolute, "" and () are what is not set."""

    api_keys: str = ""
    jwt_key: str = ""
    jwt_algorithms: tuple[str, ...] = ()
    jwt_issuer: str = ""
    jwt_audience: str = ""

    @classmethod
    def of(cls, settings: Settings) -> "Credentials | None":
        """Return those that a process was told to ask for; None if anybody may call.

        Raises:
            ConfigError: There are conditions for tokens, but no key to check tokens with.
        """
        if settings.jwt_key is None:
            for name in ("jwt_algorithms", "jwt_issuer", "jwt_audience"):
                if getattr(settings, name):
                    raise ConfigError(f"{name} is set, but without jwt_key no token is checked")
            if settings.api_keys is None:
                return None
        return cls(
            api_keys=_absolute(settings.api_keys),
            jwt_key=_absolute(settings.jwt_key),
            jwt_algorithms=settings.jwt_algorithms,
            jwt_issuer=settings.jwt_issuer or "",
            jwt_audience=settings.jwt_audience or "",
        )


def _absolute(path: Path | None) -> str:
    # Links are not followed: where secrets are mounted, a link is what changes.
    return "" if path is None else str(path.absolute())
