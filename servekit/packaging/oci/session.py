"""Requests to one registry: sent again when that may help, answered only from where it is safe.

Only HTTPS is spoken, but to this machine. Who we are is told to the registry itself and to its server for
tokens; an answer that leads elsewhere is followed without. Every answer has a limit.
"""

import contextlib
import ipaddress
import random
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urljoin, urlsplit

import msgspec

from servekit.errors import ConfigError
from servekit.packaging.oci.authorization import Authorization, Scopes
from servekit.packaging.oci.blobs import CHUNK
from servekit.packaging.oci.credentials import Credentials
from servekit.packaging.oci.documents import INDEXES, MANIFESTS
from servekit.version import __version__

if TYPE_CHECKING:
    import ssl

    import httpx

T = TypeVar("T")

_ATTEMPTS: Final = 5
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 60.0
_TIMEOUT_S: Final = 60.0
_CONNECT_S: Final = 10.0
_MAX_REDIRECTS: Final = 5
_MAX_ANSWER: Final = 1 << 20
_BUSY: Final = frozenset({408, 429, 500, 502, 503, 504})
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})


class Trouble(Exception):
    """A step failed in a way that may pass.

    Args:
        text: What went wrong.
        after_s: The server wants to be left alone for so long.
    """

    def __init__(self, text: str, *, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s


class _Problem(msgspec.Struct, frozen=True):
    code: str = ""
    message: str | None = None


class _Problems(msgspec.Struct, frozen=True):
    errors: list[_Problem] = []


class Session:
    """Requests to one registry, one after the other.

    Args:
        host: `host` or `host:port`.
        credentials: Who we are there; None is anonymous.
        ca: A file with more certificates to trust.
        sleep: Waits between attempts.
    """

    def __init__(
        self,
        host: str,
        *,
        credentials: Credentials | None,
        ca: Path | None,
        sleep: Callable[[float], None],
    ) -> None:
        self.host = host
        self._is_local = _is_loopback(host)
        self.root = f"{'http' if self._is_local else 'https'}://{host}/v2/"
        self._sleep = sleep
        self._http = _client(ca, environment=not self._is_local)
        self._authorization = Authorization(host, credentials, self._ask)

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def tried(self, step: Callable[[], T]) -> T:
        """Take a step, until it works or fails for good.

        Raises:
            ConfigError: It failed.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return step()
            except Trouble as trouble:
                if attempt == _ATTEMPTS - 1:
                    raise ConfigError(
                        f"{self.host}: {trouble}; tried {_ATTEMPTS} times"
                    ) from trouble.__cause__
                pause = _FIRST_PAUSE_S * 2**attempt * (1 + random.random()) / 2  # noqa: S311
                self._sleep(min(max(pause, trouble.after_s), _LONGEST_PAUSE_S))
        raise AssertionError

    @contextmanager
    def open(
        self,
        method: str,
        url: str,
        scopes: Scopes,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | Iterator[bytes] | None = None,
        follow: bool = False,
    ) -> Generator["httpx.Response"]:
        """Send a request, as who we are, and hand out the answer while it comes.

        Args:
            method: Of the request.
            url: Anywhere that is safe; only the registry itself learns who we are.
            scopes: What the request is for.
            headers: More of them.
            content: An iterator is good for one attempt.
            follow: Go where the answer leads.

        Raises:
            Trouble: The connection broke, or the registry has trouble.
            ConfigError: It wants to know who we are, or leads to where we don't go.
        """
        import httpx  # noqa: PLC0415

        try:
            with contextlib.closing(
                self._answer(method, url, scopes, headers or {}, content, follow=follow)
            ) as response:
                if response.status_code in _BUSY:
                    after = response.headers.get("retry-after", "")
                    raise Trouble(
                        f"it answers {response.status_code}",
                        after_s=float(after) if after.isdecimal() else 0.0,
                    )
                yield response
                if not response.is_stream_consumed:
                    body_of(response, _MAX_ANSWER)  # or the connection could not be used again
        except httpx.TransportError as error:
            raise Trouble(str(error) or type(error).__name__) from error

    def _answer(
        self,
        method: str,
        url: str,
        scopes: Scopes,
        headers: Mapping[str, str],
        content: bytes | Iterator[bytes] | None,
        *,
        follow: bool,
    ) -> "httpx.Response":
        import httpx  # noqa: PLC0415

        root = httpx.URL(self.root)
        is_renewed = False
        for _ in range(_MAX_REDIRECTS + 1):
            at = httpx.URL(url)
            is_own = (at.scheme, at.host, at.port) == (root.scheme, root.host, root.port)
            known = self._authorization.header(scopes) if is_own else {}
            response = self._http.send(
                self._http.build_request(method, at, headers={**headers, **known}, content=content),
                stream=True,
            )
            if response.status_code == 401 and is_own and not is_renewed:
                response.close()
                self._authorization.renew(response.headers.get_list("www-authenticate"), scopes)
                is_renewed = True
                if isinstance(content, Iterator):
                    raise Trouble("it asks who we are in the middle of an upload")
            elif follow and response.status_code in _REDIRECTS:
                response.close()
                url = self.location(response)
            else:
                return response
        raise ConfigError(f"{self.host} leads from one place to the next without end")

    def _ask(self, method: str, url: str, **arguments: Any) -> tuple[int, bytes]:
        """Send a request for a token."""
        with self._http.stream(method, self._safe(url), **arguments) as response:
            if response.status_code in _BUSY:
                raise Trouble(f"its server for tokens answers {response.status_code}")
            return response.status_code, body_of(response, _MAX_ANSWER)

    def location(self, response: "httpx.Response") -> str:
        """Return where an answer leads, if that is safe."""
        location = response.headers.get("location")
        if location is None:
            raise ConfigError(f"{self.host} answers {response.status_code} without a location")
        return self._safe(urljoin(str(response.url), location))

    def _safe(self, url: str) -> str:
        """Refuse a place that others could listen to, or that only this machine can reach."""
        import httpx  # noqa: PLC0415

        try:
            at = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{self.host} leads to what is no URL: {error}") from error
        is_local = at.scheme == "http" and self._is_local and _is_loopback(at.host)
        if at.userinfo or not at.host or not (at.scheme == "https" or is_local):
            raise ConfigError(f"{self.host} leads to {at.scheme}://{at.host}, which is not safe")
        return url

    def expect(self, response: "httpx.Response", *statuses: int, what: str) -> None:
        """Refuse an answer with another status.

        Raises:
            ConfigError: It has one; the message has what the registry says about it.
        """
        status = response.status_code
        if status in statuses:
            return
        if status == 404 and response.request.method in ("GET", "HEAD"):
            raise ConfigError(f"{self.host} has no {what}, or not for us")
        try:
            problems = msgspec.json.decode(body_of(response, _MAX_ANSWER), type=_Problems).errors
        except (msgspec.MsgspecError, UnicodeDecodeError):
            problems = []
        said = "; ".join(f"{problem.code} {problem.message or ''}".strip() for problem in problems)
        text = "".join(letter if letter.isprintable() else "?" for letter in said[:200])
        raise ConfigError(
            f"{self.host} refuses {response.request.method} {what}: {status} {text}".rstrip()
        )


def _client(ca: Path | None, *, environment: bool) -> "httpx.Client":
    import httpx  # noqa: PLC0415

    verify = True if ca is None else _trust(ca)
    return httpx.Client(
        verify=verify,
        trust_env=environment,  # proxies
        headers={
            "accept": ", ".join((*sorted(INDEXES | MANIFESTS), "*/*")),
            "accept-encoding": "identity",
            "user-agent": f"servekit/{__version__}",
        },
        timeout=httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S),
    )


def _trust(ca: Path) -> "ssl.SSLContext":
    import ssl  # noqa: PLC0415

    context = ssl.create_default_context()
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca} has no certificates that can be used: {error}") from error
    return context


def body_of(response: "httpx.Response", limit: int) -> bytes:
    """Return an answer's body.

    Raises:
        ConfigError: It has more bytes than the limit.
    """
    body = bytearray()
    for chunk in response.iter_raw(CHUNK):
        body += chunk
        if len(body) > limit:
            raise ConfigError(f"{response.url.host} answers more than {limit} bytes")
    return bytes(body)


def _is_loopback(host: str) -> bool:
    """Return whether a host, with or without a port, is this machine."""
    name = host if host.count(":") > 1 and "[" not in host else urlsplit(f"//{host}").hostname
    try:
        return ipaddress.ip_address(name or "").is_loopback
    except ValueError:
        return name == "localhost"
