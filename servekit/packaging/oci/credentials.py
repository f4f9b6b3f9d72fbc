"""Who we are at a registry: `~/.docker/config.json`, as `docker login` wrote it, in; credentials out.

Secrets stay out of every message, and out of `repr`.
"""

import base64
import binascii
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from servekit.errors import ConfigError

_HELPER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_IDENTITY: Final = "<token>"
"""The user name with which helpers say that the secret is an identity token."""
_LIMIT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user name with its password, or an identity token.

    Attributes:
        identity_token: Exchanged for access tokens in place of a password.
    """

    username: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """The value of an `Authorization` header."""
        pair = f"{self.username}:{self.password}".encode()
        return f"Basic {base64.b64encode(pair).decode()}"


class _Login(msgspec.Struct, frozen=True, rename={"identity_token": "identitytoken"}):
    auth: str = ""
    identity_token: str = ""


class _Config(msgspec.Struct, frozen=True, rename="camel"):
    auths: dict[str, _Login] = {}
    cred_helpers: dict[str, str] = {}
    creds_store: str = ""


class _Secret(msgspec.Struct, frozen=True, rename="pascal"):
    username: str
    secret: str


def docker_credentials(path: Path, registry: str) -> Credentials | None:
    """Return what Docker's configuration has for a registry, or None.

    Args:
        path: Of the `config.json`; it need not be there.
        registry: `host` or `host:port`.

    Raises:
        ConfigError: The file can't be used, or the credential helper that it names fails.
    """
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be used: {error}") from error
    helper = config.cred_helpers.get(registry, config.creds_store)
    if helper:
        found = _ask(helper, registry, path)
        if found is not None:
            return found
    for key, login in config.auths.items():
        if _host(key) == registry:
            return _decoded(login, key, path)
    return None


def _host(key: str) -> str:
    """Return the host of a key, which may be a URL: `https://host/v1/`."""
    return key.partition("://")[2].partition("/")[0] if "://" in key else key.partition("/")[0]


def _decoded(login: _Login, key: str, path: Path) -> Credentials | None:
    if not login.auth and not login.identity_token:
        return None  # the helper has it, or nobody
    try:
        pair = base64.b64decode(login.auth, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        pair = ""
    username, colon, password = pair.partition(":")
    if login.auth and not colon:
        raise ConfigError(f"{path}: 'auth' of {key!r} is not the base64 of 'name:password'")
    return Credentials(username, password.rstrip("\0"), login.identity_token)


def _ask(helper: str, registry: str, path: Path) -> Credentials | None:
    """Ask a credential helper; it may know nothing."""
    if not _HELPER.fullmatch(helper):
        raise ConfigError(f"{path}: {helper!r} is no name of a credential helper")
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(  # noqa: S603
            [program, "get"],
            input=registry.encode(),
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else f"no answer in {_LIMIT_S:.0f} s"
        raise ConfigError(f"{path} names {program}, which can't be asked: {why}") from error
    if done.returncode != 0:
        if b"credentials not found" in done.stdout:
            return None
        raise ConfigError(f"{path} names {program}, which failed with {done.returncode}")
    try:
        found = msgspec.json.decode(done.stdout, type=_Secret)
    except msgspec.DecodeError:
        raise ConfigError(f"{path} names {program}, whose answer is no JSON of its kind") from None
    if found.username == _IDENTITY:
        return Credentials(identity_token=found.secret)
    return Credentials(found.username, found.secret)
