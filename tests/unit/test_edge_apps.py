"""The edge in front of what comes by way of ASGI: WebSockets, mounted apps, pages."""

from collections.abc import AsyncIterator

import pytest
import websockets
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import servekit as sk
from servekit.gateway.edge import Edge
from tests.serving import served

APP, OTHER = "https://app.example", "https://other.example"
ALLOW = "access-control-allow-origin"


@sk.service
class Web:
    @sk.endpoint
    async def talk(self, words: AsyncIterator[str]) -> AsyncIterator[str]:
        async for word in words:
            yield word

    @sk.mount_asgi("/bare")
    def bare(self) -> Starlette:
        return Starlette(routes=[Route("/", lambda _: PlainTextResponse("bare" * 1000))])

    @sk.mount_asgi("/own")
    def own(self) -> CORSMiddleware:
        app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("own"), methods=["PUT"])])
        return CORSMiddleware(app, allow_origins=[APP, OTHER], allow_methods=["PUT"])


async def test_a_websocket_is_a_connection_until_it_ends(until):
    async with served(Web, Edge(max_connections=1)) as app:
        async with websockets.connect(f"ws://{app.address}/talk") as opened:
            await opened.send("hi")
            assert await opened.recv() == "hi"
            assert app.gateway.connections.count == 1
            with pytest.raises(websockets.InvalidStatus) as caught:
                await websockets.connect(f"ws://{app.address}/talk")
            assert caught.value.response.status_code == 503
        await until(lambda: app.gateway.connections.count == 0)


@pytest.mark.parametrize(
    ("path", "method", "origin", "status", "allowed"),
    [
        ("/bare/", "GET", APP, 200, APP),
        ("/bare/", "GET", OTHER, 200, None),
        ("/bare/", "POST", APP, 405, APP),
        ("/own/", "PUT", APP, 200, APP),
        ("/own/", "PUT", OTHER, 200, OTHER),
        ("/livez", "GET", APP, 200, APP),
    ],
)
async def test_an_origin_that_a_mounted_app_allows_itself(path, method, origin, status, allowed):
    async with served(Web, Edge(cors_origins=(APP,), gzip_min_bytes=100)) as app:
        asked = {"origin": origin, "access-control-request-method": method}
        preflight = await app.http.options(path, headers=asked)
        assert preflight.headers.get(ALLOW) == allowed
        if allowed:
            assert preflight.is_success
            assert method in preflight.headers["access-control-allow-methods"]
        answer = await app.http.request(method, path, headers={"origin": origin})
        assert answer.status_code == status
        assert answer.headers.get_list(ALLOW) == ([allowed] if allowed else [])
        assert "content-encoding" not in answer.headers  # that is the app's own affair
