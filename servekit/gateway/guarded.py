"""An ASGI app behind a guard: everything that is no endpoint."""

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from servekit.core.call import now
from servekit.errors import CallError
from servekit.gateway.answer import error_document, error_headers
from servekit.gateway.guard import Guard
from servekit.gateway.request import request_id_of

_OPEN: Final = frozenset({"/livez", "/readyz", "/startupz"})
"""Probes: whoever sends them has no credential, and they tell nothing but health."""


class GuardedApp:
    """Lets only those through to an app that may come in.

    Args:
        app: Answers them.
        guard: Knows who may.
    """

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it before its body is read."""
        if scope["path"] in _OPEN:
            await self._app(scope, receive, send)
            return
        try:
            guest = self._guard.identify(scope["headers"])
            leave = self._guard.enter(guest, now())
        except CallError as error:
            await _refuse(scope, send, error)
            return
        try:
            await self._app({**scope, "headers": guest.headers}, receive, send)
        finally:
            leave()


async def _refuse(scope: Scope, send: Send, error: CallError) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})  # the server answers 403
        return
    request_id = request_id_of(scope["headers"])
    body = error_document(error, request_id)
    headers = [(n.encode(), v.encode("latin-1")) for n, v in error_headers(error, request_id)]
    headers.append((b"content-length", b"%d" % len(body)))
    if any(name == b"expect" for name, _ in scope["headers"]):
        # A body that was not asked for may come, or may not (RFC 9110, 10.1.1).
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
