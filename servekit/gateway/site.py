"""Everything that is no endpoint: docs, OpenAPI, playground, probes, metrics, debug. A Starlette app."""

from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from servekit.errors import CallError, NotFound, suggest
from servekit.gateway.credentials import Credentials
from servekit.gateway.jobs import JobRoutes
from servekit.gateway.request import request_id_of
from servekit.protocols.openapi import document
from servekit.spec.app import AppSpec
from servekit.spec.definition import RESERVED

PAGES = frozenset({*RESERVED, "/"})
"""Paths that come before those of mounted apps."""

Unready = Callable[[], dict[str, str]]
"""Returns what is not ready and why, by service; empty when all is."""


_POLICY: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
_PRIVATE: Final = {"cache-control": "no-store"}


class Site:
    """The pages and probes of one gateway.

    Args:
        unready: Asked by `/readyz`.
        metrics: Makes the text of `/metrics`.
        jobs: Makes the routes of jobs.
        dev: Serve the playground.
        debug: Makes the document of the debug page; None serves none.
        credentials: One of which every page asks for, but the open ones; for `/openapi.json`.
    """

    def __init__(
        self,
        unready: Unready,
        metrics: Callable[[], Awaitable[str]],
        jobs: JobRoutes,
        *,
        dev: bool,
        debug: Callable[[], Awaitable[bytes]] | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._dev = dev
        self._credentials = credentials or Credentials()
        self._unready = unready
        self._metrics = metrics
        self._jobs = jobs
        self._openapi = b"{}"
        self._paths: list[str] = []
        self._has_started = False
        self._routes = routes = [
            Route("/openapi.json", self._send_openapi),
            Route("/docs", _page("docs.html")),
            Route("/livez", self._livez),
            Route("/readyz", self._readyz),
            Route("/startupz", self._startupz),
            Route("/metrics", self._send_metrics),
        ]
        if dev:
            routes.append(Route("/playground", _page("playground.html")))
            routes.append(Route("/", _to_playground))
        if debug is not None:
            routes.append(Route("/debug", _debug_page(debug)))
            routes.append(Route("/debug.json", _debug_document(debug)))
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: self._error})

    def serve(self, app: AppSpec) -> None:
        """Describe this app from now on."""
        accepted = self._credentials
        described = document(app, keys=bool(accepted.api_keys), tokens=bool(accepted.jwt_key))
        self._openapi = msgspec.json.encode(described)
        self._paths = list(described["paths"])
        self.app.router.routes[:] = [*self._routes, *self._jobs.of(app)]

    async def _send_openapi(self, _: Request) -> Response:
        headers = {"x-servekit-playground": "/playground"} if self._dev else None
        return Response(self._openapi, media_type="application/json", headers=headers)

    async def _livez(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, _: Request) -> Response:
        unready = self._unready()
        if not unready:
            self._has_started = True
            return PlainTextResponse("ok\n")
        return JSONResponse({"unready": unready}, status_code=503)

    async def _startupz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n") if self._has_started else await self._readyz(request)

    async def _send_metrics(self, _: Request) -> Response:
        text = await self._metrics()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        shown: CallError
        if error.status_code == NotFound.status:
            path = request.url.path
            # An open page that is not there must not tell strangers what else there is.
            hint = "" if path in PAGES else suggest(path, self._paths)
            shown = NotFound(f"there is no route {path}.{hint}")
        else:
            shown = CallError(error.detail)
        request_id = request_id_of(request.scope["headers"])
        body = {"error": shown.details() | {"request_id": request_id}}
        headers = {**(error.headers or {}), "x-request-id": request_id}
        return JSONResponse(body, error.status_code, headers=headers)


def _page(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(_: Request) -> Response:
        return HTMLResponse(_text(name), headers=_POLICY)

    return send


def _debug_page(debug: Callable[[], Awaitable[bytes]]) -> Callable[[Request], Awaitable[Response]]:
    async def send(_: Request) -> Response:
        # Whole with its data, so that what `curl` has saved can be looked at: a browser by itself
        # sends no credential.
        document = (await debug()).decode()
        for harmful in "<>&\u2028\u2029":
            document = document.replace(harmful, f"\\u{ord(harmful):04x}")
        page = _text("debug.html").replace("{{document}}", document)
        return HTMLResponse(page, headers=_POLICY | _PRIVATE)

    return send


def _debug_document(
    debug: Callable[[], Awaitable[bytes]],
) -> Callable[[Request], Awaitable[Response]]:
    async def send(_: Request) -> Response:
        return Response(await debug(), media_type="application/json", headers=_PRIVATE)

    return send


@cache
def _text(name: str) -> str:
    """Return a page of one piece; `{{shared.css}}` stands for the file of that name."""
    folder = files("servekit.gateway") / "pages"
    text = (folder / name).read_text("utf-8")
    for shared in ("shared.css", "shared.js"):
        text = text.replace("{{" + shared + "}}", (folder / shared).read_text("utf-8"))
    return text


async def _to_playground(_: Request) -> Response:
    return Response(status_code=307, headers={"location": "/playground"})
