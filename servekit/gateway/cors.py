"""Which pages of other origins may read answers: the server's side of the CORS protocol.

It protects people whose browser is made to send requests, not the server: a request from an
origin that is not allowed is answered as ever, and its browser keeps the answer from the page.

Source: Fetch standard, 3.3 "CORS protocol".
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from servekit.gateway.bodies import much_may_come
from servekit.gateway.edge import Edge

_HEADERS: Final = frozenset(
    b"accept accept-language content-language content-type content-encoding authorization "
    b"x-api-key x-request-id idempotency-key traceparent tracestate".split()
)
"""Request headers that a page may set, besides `x-servekit-…`."""
_OURS: Final = re.compile(rb"x-servekit-[a-z0-9-]+")
_ALLOW: Final = b"access-control-allow-origin"
_EXPOSED: Final = (
    b"x-request-id, x-servekit-version, x-servekit-replica, retry-after, www-authenticate"
)
_MAX_AGE_S: Final = b"600"
_ANY: Final = (b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE")

Fields = Iterable[tuple[bytes, bytes]]


class Grant(NamedTuple):
    """What an origin may do.

    Attributes:
        allowed: Its pages may read answers.
        fields: Header fields of every answer to it.
        lines: The same, as they are sent.
    """

    allowed: bool
    fields: list[tuple[bytes, bytes]]
    lines: bytes


def _grant(*fields: tuple[bytes, bytes], allowed: bool = True) -> Grant:
    return Grant(allowed, list(fields), lines_of(fields))


def lines_of(fields: Fields) -> bytes:
    """Return header fields as they are sent."""
    return b"".join([b"%b: %b\r\n" % field for field in fields])


class Cors:
    """The origins that are allowed.

    Args:
        origins: As browsers write them; `*` alone is every one.
        credentials: Their requests may carry cookies and credentials of the browser's.
    """

    def __init__(self, origins: Iterable[str], *, credentials: bool = False) -> None:
        own = [(b"access-control-allow-credentials", b"true")] if credentials else []
        own.append((b"access-control-expose-headers", _EXPOSED))
        # As the answer depends on it, a cache must not give it to others (ibid., 3.3.6).
        vary = (b"vary", b"origin")
        self._everyone: Grant | None = None
        self._others = _grant(vary, allowed=False)
        self._grants: dict[bytes, Grant] = {}
        for origin in origins:
            if origin == "*":
                self._everyone = _grant((_ALLOW, b"*"), *own)
            else:
                name = origin.encode()
                self._grants[name] = _grant((_ALLOW, name), *own, vary)

    @classmethod
    def of(cls, edge: Edge) -> "Cors | None":
        """Return what the settings say; None is no CORS at all."""
        if not edge.cors_origins:
            return None
        return cls(edge.cors_origins, credentials=edge.cors_credentials)

    def grant(self, headers: Mapping[bytes, bytes]) -> Grant:
        """Return what the sender of a request may do."""
        return self._everyone or self._grants.get(headers.get(b"origin", b""), self._others)

    def preflight(
        self, method: bytes, headers: Mapping[bytes, bytes], methods: Iterable[bytes]
    ) -> list[tuple[bytes, bytes]] | None:
        """Return the fields of the answer to a browser that asks before it sends a request.

        It never carries credentials, so it is answered before any are looked for.

        Args:
            method: Of the request.
            headers: Names in lower case.
            methods: That the path has.

        Returns:
            None if it is no such question, or its origin is not allowed.
        """
        if method != b"OPTIONS" or b"access-control-request-method" not in headers:
            return None
        if b"origin" not in headers or not (grant := self.grant(headers)).allowed:
            return None
        asked = headers.get(b"access-control-request-headers", b"").lower().split(b",")
        names = [name for name in map(bytes.strip, asked) if _may_be_set(name)]
        fields = [
            *grant.fields,
            (b"access-control-allow-methods", b", ".join(methods)),
            (b"access-control-max-age", _MAX_AGE_S),
        ]
        if names:
            fields.append((b"access-control-allow-headers", b", ".join(names)))
        return fields


def _may_be_set(name: bytes) -> bool:
    return name in _HEADERS or _OURS.fullmatch(name) is not None


class CorsPages:
    """The same for pages and mounted apps: an ASGI app around theirs.

    It does not know their methods, so a browser may send any: those that a page lacks are 405. An
    app that answers other origins itself does so for those that are not allowed here.

    Args:
        app: Theirs.
        cors: The origins.
    """

    def __init__(self, app: ASGIApp, cors: Cors) -> None:
        self._app = app
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        preflight = self._cors.preflight(scope["method"].encode(), headers, _ANY)
        if preflight is not None:
            if b"expect" in headers or much_may_come(headers):
                preflight.append((b"connection", b"close"))
            await send({"type": "http.response.start", "status": 204, "headers": preflight})
            await send({"type": "http.response.body"})
            return
        fields = self._cors.grant(headers).fields

        async def send_with_fields(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(bytes(name).lower(), value) for name, value in message.get("headers", ())]
                if _ALLOW not in dict(own):
                    message["headers"] = [*own, *fields]
            await send(message)

        await self._app(scope, receive, send_with_fields)
