"""An ASGI app behind a guard: pages, mounted apps, WebSockets."""

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from servekit.core.call import now
from servekit.errors import CallError
from servekit.gateway.answer import asgi_error
from servekit.gateway.bodies import much_may_come
from servekit.gateway.guard import Guard

_OPEN: Final = frozenset({"/livez", "/readyz", "/startupz", "/docs", "/playground"})
"""Probes, whose senders have no credential, and tell nothing but health; and pages that tell nothing
by themselves: a browser shows them, asks for a credential, and has them load `/openapi.json`."""
CALLER: Final = "servekit.caller"
"""Where a scope has the caller's name."""


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
        if scope["type"] == "http" and scope["path"] in _OPEN:
            await self._app(scope, receive, send)
            return
        try:
            guest = self._guard.identify(scope["headers"])
            leave = self._guard.enter(guest, now())
        except CallError as error:
            hang_up = much_may_come(dict(scope["headers"]))
            await asgi_error(error, scope, receive, send, hang_up=hang_up)
            return
        try:
            known = {**scope, "headers": guest.headers, CALLER: guest.caller}
            await self._app(known, receive, send)
        finally:
            leave()
