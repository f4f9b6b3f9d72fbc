"""What a registry wants to see: its challenge goes in, the `Authorization` of requests comes out.

Basic, or a bearer token that another server gives for some scopes; tokens are kept until the registry
refuses one. Passwords and tokens go only to HTTPS, or to this machine.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from servekit.errors import ConfigError
from servekit.packaging.oci.credentials import Credentials

Scopes: TypeAlias = tuple[str, ...]
"""What is to be done, like `repository:team/app:pull,push`."""

Ask: TypeAlias = Callable[..., tuple[int, bytes]]
"""Sends a request to any server that is safe to talk to; returns status and body."""

_PARAMETER: Final = r"[a-z_]+=(?:\"[^\"]*\"|[^\s,\"]+)"
_CHALLENGE: Final = re.compile(rf"\b(basic|bearer)\b((?:[\s,]+{_PARAMETER})*)", re.IGNORECASE)
_PARAMETERS: Final = re.compile(r"([a-z_]+)=(?:\"([^\"]*)\"|([^\s,\"]+))", re.IGNORECASE)
_TOKEN: Final = re.compile(r"[\x21-\x7e]{1,65536}")
_CLIENT: Final = "servekit"


class Challenge(NamedTuple):
    """What a 401 asks for; `realm` and `service` are those of a bearer token."""

    scheme: str
    realm: str = ""
    service: str = ""


class _Answer(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""


def challenge_of(headers: Sequence[str]) -> Challenge | None:
    """Return what the `WWW-Authenticate` headers of a 401 ask for; a token rather than a password."""
    found: dict[str, Challenge] = {}
    for header in headers:
        for scheme, parameters in _CHALLENGE.findall(header):
            values = {
                name.lower(): quoted or plain
                for name, quoted, plain in _PARAMETERS.findall(parameters)
            }
            challenge = Challenge(
                scheme.lower(), values.get("realm", ""), values.get("service", "")
            )
            found.setdefault(challenge.scheme, challenge)
    return found.get("bearer") or found.get("basic")


class Authorization:
    """What is known of how to be let in at one registry.

    Args:
        registry: For messages.
        credentials: None stays anonymous.
        ask: Sends requests for tokens.
    """

    def __init__(self, registry: str, credentials: Credentials | None, ask: Ask) -> None:
        self._registry = registry
        self._credentials = credentials
        self._ask = ask
        self._known: dict[Scopes, str] = {}

    def header(self, scopes: Scopes) -> dict[str, str]:
        """Return the header for a request, as far as it is known what the registry wants."""
        value = self._known.get(scopes)
        return {} if value is None else {"authorization": value}

    def renew(self, headers: Sequence[str], scopes: Scopes) -> None:
        """Take in a 401.

        Args:
            headers: Its `WWW-Authenticate`.
            scopes: Of the request.

        Raises:
            ConfigError: There are no credentials, or they are refused.
        """
        challenge = challenge_of(headers)
        if challenge is None:
            raise ConfigError(f"{self._registry} wants to know who asks, but not in a known way")
        if challenge.scheme == "bearer":
            self._known[scopes] = f"Bearer {self._token(challenge, scopes)}"
        elif self._credentials is None or self._known.get(scopes) == self._credentials.basic:
            raise self._refused()
        else:
            self._known[scopes] = self._credentials.basic

    def _token(self, challenge: Challenge, scopes: Scopes) -> str:
        who = self._credentials
        service = [("service", challenge.service)] if challenge.service else []
        if who is not None and who.identity_token:
            form = {
                "grant_type": "refresh_token",
                "refresh_token": who.identity_token,
                "client_id": _CLIENT,
                "scope": " ".join(scopes),
                **dict(service),
            }
            status, body = self._ask("POST", challenge.realm, data=form)
        else:
            params = [*service, ("client_id", _CLIENT), *(("scope", scope) for scope in scopes)]
            headers = {"authorization": who.basic} if who is not None else {}
            status, body = self._ask("GET", challenge.realm, params=params, headers=headers)
        if status in (401, 403):
            raise self._refused()
        try:
            answer = msgspec.json.decode(body, type=_Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            answer = _Answer()
        token = answer.token or answer.access_token
        if status != 200 or not _TOKEN.fullmatch(token):
            raise ConfigError(f"{self._registry} has no token for us; its server answered {status}")
        return token

    def _refused(self) -> ConfigError:
        if self._credentials is None:
            return ConfigError(
                f"{self._registry} wants to know who asks; run 'docker login {self._registry}'"
            )
        who = self._credentials.username or "the identity token"
        return ConfigError(f"{self._registry} refuses the password or token of {who!r}")
