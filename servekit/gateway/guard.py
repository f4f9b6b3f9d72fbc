"""Who may come in, and how much they may ask: from a request's headers to the caller's name.

A request brings an API key or a token as `Authorization: Bearer …`, or a key as `x-api-key`. What
it brings is checked before its body is read, and goes no further than this process.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from servekit.core.files import fingerprint
from servekit.errors import Overloaded, Unauthorized
from servekit.gateway.credentials import Credentials
from servekit.gateway.keys import PREFIX, Key, Keys
from servekit.gateway.tokens import Tokens
from servekit.observe.log import get_logger
from servekit.resilience.limits import OngoingLimiter, RateLimiter

_log = get_logger("servekit.gateway")

_MISSING: Final = "missing_credentials"
_CHALLENGE: Final = {"www-authenticate": 'Bearer realm="servekit"'}
_CHALLENGE_AGAIN: Final = {"www-authenticate": 'Bearer realm="servekit", error="invalid_token"'}
"""RFC 6750, section 3."""
_TRY_AGAIN_S: Final = 1.0

T = TypeVar("T")
Header = tuple[bytes, bytes]


class Guest(NamedTuple):
    """Who sent a request.

    Attributes:
        caller: Name of its key, or its token's subject.
        headers: Its headers without our credentials.
        key: Its key, which may have limits; None if it brought a token.
    """

    caller: str
    headers: list[Header]
    key: Key | None


class Guard:
    """Knows who may come in.

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

    # -- who it is ---------------------------------------------------------------------------

    def identify(self, headers: list[Header]) -> Guest:
        """Return who sent a request.

        `x-api-key` counts before `authorization`, which may then be for the app.

        Args:
            headers: Names in lower case, and values.

        Raises:
            Unauthorized: It has no good credential.
        """
        rest: list[Header] = []
        api_keys: list[bytes] = []
        authorizations: list[bytes] = []
        for header in headers:
            if header[0] == b"authorization":
                authorizations.append(header[1])
            elif header[0] == b"x-api-key" and self._keys is not None:
                api_keys.append(header[1])
            else:
                rest.append(header)
        key: Key | None
        try:
            if given := _only(api_keys, "x-api-key"):
                caller, key = self._holder(given)
                theirs = [a for a in authorizations if not _token(a).startswith(PREFIX)]
                rest += [(b"authorization", value) for value in theirs]
            else:
                caller, key = self._bearer(_token(_only(authorizations, "authorization")))
        except Unauthorized as error:
            missing = error.reason == _MISSING
            error.headers = _CHALLENGE if missing else _CHALLENGE_AGAIN
            raise
        return Guest(caller, rest, key)

    def _bearer(self, token: bytes) -> tuple[str, Key | None]:
        if not token:
            raise Unauthorized(
                "a credential is needed: send the header `authorization: Bearer …`",
                reason=_MISSING,
                started=False,
            )
        if self._tokens is None or (self._keys is not None and token.startswith(PREFIX)):
            return self._holder(token)
        return self._tokens.content.check(token), None

    def _holder(self, presented: bytes) -> tuple[str, Key]:
        assert self._keys is not None
        key = self._keys.content.check(presented)
        if key is None:
            raise _wrong("the API key is not known here")
        return key.name, key

    # -- how much it may ask -----------------------------------------------------------------

    def enter(self, guest: Guest, at: float) -> Callable[[], None]:
        """Count a request for its key.

        Args:
            guest: Who sent it.
            at: Now, on the monotonic clock.

        Returns:
            What must be called once, when it has been answered or is given up.

        Raises:
            Overloaded: Its key's limits are reached; then it does not count.
        """
        key = guest.key
        leave: Callable[[], None] = _nothing
        if key is None:
            return leave
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
    """Return the value of a header that may come once; b"" if it does not come."""
    if len(values) > 1:
        raise _wrong(f"header {name}: was sent {len(values)} times; send one")
    return values[0] if values else b""


def _token(authorization: bytes) -> bytes:
    """Return the token of a bearer's header; b"" if it has another scheme."""
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _wrong(message: str) -> Unauthorized:
    return Unauthorized(message, reason="invalid_credentials", started=False)


class _File(Generic[T]):
    """What a file says; the last good version of it.

    Raises:
        ConfigError: It can't be used from the start.
    """

    def __init__(self, path: str, read: Callable[[Path], T]) -> None:
        self._path = Path(path)
        self._read = read
        self._seen = fingerprint(self._path)
        self.content = read(self._path)

    def refresh(self) -> None:
        seen = fingerprint(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self.content = self._read(self._path)
        except Exception as error:  # noqa: BLE001  (else a removed key would be good for ever)
            _log.error(
                "credentials can't be read, the old ones go on",
                file=str(self._path),
                why=str(error),
            )
        else:
            _log.info("credentials read again", file=str(self._path))
