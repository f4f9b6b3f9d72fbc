"""Who may come in, and how much they may ask: from a request's headers to the caller's name.

A request brings an API key or a token as `Authorization: Bearer …`, or a key as `x-api-key`. What
it brings is checked before its body is read, and goes no further than this process.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from servekit.errors import ConfigError, Overloaded, Unauthorized
from servekit.gateway.credentials import Credentials
from servekit.gateway.keys import PREFIX, Key, Keys
from servekit.gateway.tokens import Tokens
from servekit.observe.log import get_logger
from servekit.resilience.limits import OngoingLimiter, RateLimiter

_log = get_logger("servekit.gateway")

_MISSING: Final = {"www-authenticate": 'Bearer realm="servekit"'}
_WRONG: Final = {"www-authenticate": 'Bearer realm="servekit", error="invalid_token"'}
"""RFC 6750, section 3."""
_TRY_AGAIN_S: Final = 1.0

T = TypeVar("T")
Header = tuple[bytes, bytes]


class Guest(NamedTuple):
    """A request that may come in.

    Attributes:
        caller: Whose it is.
        headers: Its headers without our credentials.
        leave: To be called once, when it has been answered or is given up.
    """

    caller: str
    headers: list[Header]
    leave: Callable[[], None]


class Guard:
    """Lets requests in.

    Args:
        accepted: What to check, and against which files.
        share: Part of each key's limits that counts here, where several gateways share the load.

    Raises:
        ConfigError: A file can't be used.
    """

    def __init__(self, accepted: Credentials, *, share: float = 1.0) -> None:
        self._keys: _File[Keys] | None = None
        self._tokens: _File[Tokens] | None = None
        if accepted.api_keys:
            self._keys = _File(accepted.api_keys, Keys.read)
        if accepted.jwt_key:
            self._tokens = _File(
                accepted.jwt_key,
                lambda path: Tokens(
                    path,
                    algorithms=accepted.jwt_algorithms,
                    issuer=accepted.jwt_issuer,
                    audience=accepted.jwt_audience,
                ),
            )
        self._rates = RateLimiter(share=share)
        self._ongoing = OngoingLimiter(share=share)

    def refresh(self) -> None:
        """Read files again that have changed; one that can't be used changes nothing.

        Reads from disk; may run in any thread.
        """
        for file in (self._keys, self._tokens):
            if file is not None:
                file.refresh()

    def admit(self, headers: list[Header], at: float) -> Guest:
        """Let a request in.

        Args:
            headers: Names in lower case, and values.
            at: Now, on the monotonic clock.

        Raises:
            Unauthorized: It has no good credential.
            Overloaded: Its key's limits are reached.
        """
        try:
            return self._admit(headers, at)
        except Unauthorized as error:
            missing = error.reason == "missing_credentials"
            error.headers = _MISSING if missing else _WRONG
            raise

    def _admit(self, headers: list[Header], at: float) -> Guest:
        api_keys = self._values(headers, b"x-api-key") if self._keys is not None else []
        authorizations = self._values(headers, b"authorization")
        key: Key | None = None
        bearer = False
        if api_keys:
            key, caller = self._check_key(_only(api_keys, "x-api-key"))
        else:
            credential = _bearer(_only(authorizations, "authorization"))
            bearer = True
            if self._keys is not None and (credential.startswith(PREFIX) or self._tokens is None):
                key, caller = self._check_key(credential)
            else:
                assert self._tokens is not None
                caller = self._tokens.content.check(credential)
        rest = [field for field in headers if not self._is_ours(field, bearer=bearer)]
        return Guest(caller, rest, _nothing if key is None else self._take_place(key, at))

    @staticmethod
    def _values(headers: list[Header], name: bytes) -> list[bytes]:
        return [value for found, value in headers if found == name]

    def _check_key(self, credential: bytes) -> tuple[Key, str]:
        assert self._keys is not None
        key = self._keys.content.check(credential)
        if key is None:
            raise Unauthorized(
                "the API key is not known here", reason="invalid_credentials", started=False
            )
        return key, key.name

    def _is_ours(self, field: Header, *, bearer: bool) -> bool:
        """Whether a header must go no further; an `authorization` that was not asked may."""
        name, value = field
        if name == b"authorization":
            return bearer or _token(value).startswith(PREFIX)
        return name == b"x-api-key" and self._keys is not None

    def _take_place(self, key: Key, at: float) -> Callable[[], None]:
        """Count a request for its key; returns what ends it."""
        leave: Callable[[], None] = _nothing
        if key.max_ongoing is not None:
            if not self._ongoing.enter(key.id, key.max_ongoing):
                raise Overloaded(
                    f"{key.max_ongoing} requests with this key are running; wait for one to end",
                    reason="too_many_ongoing",
                    retry_after_s=_TRY_AGAIN_S,
                    started=False,
                )
            leave = partial(self._ongoing.leave, key.id)
        if key.rate is not None and (wait_s := self._rates.admit(key.id, key.rate, at)) > 0:
            leave()
            raise Overloaded(
                f"this key is good for {key.rate.per_s:g} requests a second",
                reason="rate_limited",
                retry_after_s=wait_s,
                started=False,
            )
        return leave


def _nothing() -> None: ...


def _only(values: list[bytes], name: str) -> bytes:
    if not values:
        raise _missing()
    if len(values) > 1:
        raise Unauthorized(
            f"header {name}: was sent {len(values)} times; send one",
            reason="invalid_credentials",
            started=False,
        )
    return values[0]


def _token(authorization: bytes) -> bytes:
    """Return the token of a bearer's header; b"" if it has another scheme."""
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _bearer(authorization: bytes) -> bytes:
    token = _token(authorization)
    if not token:
        raise _missing()
    return token


def _missing() -> Unauthorized:
    return Unauthorized(
        "a credential is needed: send the header `authorization: Bearer …`",
        reason="missing_credentials",
        started=False,
    )


class _File(Generic[T]):
    """What a file says; the last good version of it.

    Raises:
        ConfigError: It can't be used from the start.
    """

    def __init__(self, path: str, read: Callable[[Path], T]) -> None:
        self._path = Path(path)
        self._read = read
        self._seen = self._look()
        self.content = read(self._path)

    def refresh(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self.content = self._read(self._path)
        except ConfigError as error:
            _log.error("credentials can't be read, the old ones go on", why=str(error))
        else:
            _log.info("credentials read again", file=str(self._path))

    def _look(self) -> tuple[int, ...] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
