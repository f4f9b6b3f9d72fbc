"""API keys: the file that lists them, and the check of one that a client presents.

A client has `sk_<id>_<secret>`; the file has the id and the SHA-256 of all of it. No slow hash: it
protects passwords, which can be guessed; 32 random bytes can't.
"""

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any, Final, Self, cast

import msgspec

from servekit.core.units import parse_rate
from servekit.errors import ConfigError, suggest
from servekit.resilience.limits import Rate

PREFIX: Final = b"sk_"
"""What all keys begin with, so that they can be told from other tokens, and found where they leaked."""

_FIELDS: Final = ("name", "id", "hash", "rate", "burst", "max_ongoing")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/-]{0,63}")
_ID: Final = re.compile(r"[A-Za-z0-9-]{8,64}")
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")
_NOBODY: Final = secrets.token_bytes(32)
"""Stands for the hash of a key that is not there."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One key, as the file has it.

    Attributes:
        name: Whose it is; several keys may have one name.
        id: Its public part.
        digest: SHA-256 of the whole key.
        rate: Requests that it is good for; None is any number.
        max_ongoing: Requests that may run at once; None is any number.
    """

    name: str
    id: str
    digest: bytes
    rate: Rate | None = None
    max_ongoing: int | None = None


class Keys:
    """All keys of a file.

    Args:
        keys: In the order of the file; each has an id of its own.
    """

    def __init__(self, keys: Mapping[bytes, Key]) -> None:
        self._keys = keys

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            ConfigError: It can't be read, or an entry can't be used.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_keys: can't read {path}: {error}") from None
        return cls.parse(text, where=str(path))

    @classmethod
    def parse(cls, text: str, *, where: str) -> Self:
        """Read a file's text.

        Raises:
            ConfigError: It is no TOML, or an entry can't be used; the message starts with `where`.
        """
        try:
            document: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{where}: {error}") from None
        entries: object = document.pop("key", [])
        for name in document:
            raise ConfigError(
                f"{where}: {name!r} has no meaning here; a key is a table [[key]] with "
                f"{', '.join(_FIELDS)}"
            )
        if not isinstance(entries, list):
            raise ConfigError(f"{where}: 'key' is no list of tables; write [[key]]")
        keys: dict[bytes, Key] = {}
        for number, entry in enumerate(cast("list[object]", entries), start=1):
            key = _key(entry, f"{where}: key {number}")
            if keys.setdefault(key.id.encode(), key) is not key:
                raise ConfigError(
                    f"{where}: key {number} ({key.name}): id = {key.id!r}: another key has it; "
                    "make a new one with `servekit keys add`"
                )
        return cls(keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    def check(self, presented: bytes) -> Key | None:
        """Return the key that a client presents, or None if it is none of these.

        How long that takes tells nothing of the keys: an id that is not there costs as much as one
        with a wrong secret.
        """
        key = self._keys.get(presented.removeprefix(PREFIX).partition(b"_")[0])
        expected = _NOBODY if key is None else key.digest
        return key if hmac.compare_digest(hashlib.sha256(presented).digest(), expected) else None


def new_key() -> tuple[str, str, str]:
    """Return a new key's id, the key as its client gets it, and its hash for the file."""
    id_, secret = secrets.token_hex(6), secrets.token_hex(32)
    text = f"{PREFIX.decode()}{id_}_{secret}"
    return id_, text, f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _key(entry: object, where: str) -> Key:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: is no table; write [[key]]")
    fields = cast("dict[str, object]", entry)
    name = fields.get("name")
    if isinstance(name, str) and _NAME.fullmatch(name):
        where = f"{where} ({name})"
    for field in fields:
        if field not in _FIELDS:
            raise ConfigError(f"{where}: there is no field {field!r}.{suggest(field, _FIELDS)}")
    name = _text(fields, "name", _NAME, "1 to 64 letters, digits and ._@:/-", where)[0]
    id_ = _text(fields, "id", _ID, "8 to 64 letters, digits and -", where)[0]
    digest = _text(fields, "hash", _HASH, "'sha256:' and 64 digits in lower-case hex", where)[1]
    return Key(
        name=name,
        id=id_,
        digest=bytes.fromhex(digest),
        rate=_rate(fields, where),
        max_ongoing=_count(fields, "max_ongoing", where),
    )


def _text(
    fields: Mapping[str, object], name: str, form: re.Pattern[str], need: str, where: str
) -> re.Match[str]:
    value = fields.get(name)
    match = form.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        if name not in fields:
            raise ConfigError(f"{where}: has no {name}; need {need}")
        if isinstance(value, str) and value.startswith(PREFIX.decode()):
            raise ConfigError(  # which must not stand in a log
                f"{where}: {name} is a key itself; it has leaked to this file, so make another "
                "with `servekit keys add`"
            )
        raise ConfigError(f"{where}: {name} = {repr(value)[:80]}: need {need}")
    return match


def _rate(fields: Mapping[str, object], where: str) -> Rate | None:
    rate, burst = fields.get("rate"), _count(fields, "burst", where)
    if rate is None:
        if burst is not None:
            raise ConfigError(f"{where}: burst = {burst}: has no meaning without rate = '10/s'")
        return None
    if not isinstance(rate, str):
        raise ConfigError(f"{where}: rate = {rate!r}: need text like '10/s', '600/m', '1000/h'")
    per_s = parse_rate(rate, where=f"{where}: rate")
    return Rate(per_s, burst or ceil(per_s))


def _count(fields: Mapping[str, object], name: str, where: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 10**9:
        raise ConfigError(f"{where}: {name} = {value!r}: need a whole number from 1")
    return value
