"""What comes by way of ASGI: WebSockets to endpoints, the site's own pages, mounted apps."""

from starlette.types import ASGIApp, Receive, Scope, Send

from servekit.errors import BadRequest, CallError, NotFound
from servekit.gateway.answer import asgi_error
from servekit.gateway.http import Gateway
from servekit.gateway.mount import Mount
from servekit.gateway.routes import mounts_of
from servekit.gateway.site import PAGES
from servekit.gateway.websocket import WebSocket
from servekit.spec.app import AppSpec


class AsgiApp:
    """The ASGI app of a gateway.

    Args:
        gateway: Answers what does not come by way of ASGI; knows the routes.
        site: Answers for servekit's own pages, and for paths that nobody has.
    """

    def __init__(self, gateway: Gateway, site: ASGIApp) -> None:
        self._gateway = gateway
        self._site = site
        self._sockets: dict[str, WebSocket] = {}
        self._mounts: list[tuple[str, Mount]] = []

    def serve(self, app: AppSpec) -> None:
        """Answer for this app from now on; what is under way is not touched."""
        gateway = self._gateway
        gateway.serve(app)
        self._sockets = {
            route.path: WebSocket(route, gateway.handler)
            for methods in gateway.routes.values()
            for route in methods.values()
            if route.spec.inbound is not None
        }
        self._mounts = [
            (route.path.rstrip("/"), Mount(route, gateway.handler))
            for route in mounts_of(app, gateway.families)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or serve one WebSocket."""
        path: str = scope["path"]
        is_socket = scope["type"] == "websocket"
        if is_socket and (socket := self._sockets.get(path)) is not None:
            await socket(scope, receive, send)
        elif (mount := self._mounted(path)) is not None and (is_socket or path not in PAGES):
            await mount(scope, receive, send)
        elif is_socket:
            error: CallError = NotFound(f"there is no WebSocket {path}")
            if path.encode() in self._gateway.routes:
                error = BadRequest(f"{path} takes no WebSocket, as its input does not stream")
            await asgi_error(error, scope, receive, send)
        else:
            await self._site(scope, receive, send)

    def _mounted(self, path: str) -> Mount | None:
        for prefix, mount in self._mounts:
            if path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("", "/"):
                return mount
        return None
