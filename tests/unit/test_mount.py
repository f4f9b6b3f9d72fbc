"""Mounted ASGI apps: Starlette and FastAPI, bare callables, bodies both ways, sockets, lifespan."""

import asyncio
import contextlib

import pytest
import websockets
from fastapi import BackgroundTasks, FastAPI, Request, WebSocket
from fastapi.responses import StreamingResponse
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import servekit as sk
from servekit.core.call import Call, now
from servekit.core.context import RequestContext
from servekit.errors import DeadlineExceeded, SetupError, SpecError
from servekit.gateway import inflow
from servekit.observe.families import Families
from servekit.observe.metrics import Metrics
from servekit.runtime.meter import Meter, Pace
from servekit.runtime.mount import Mounted
from servekit.runtime.replica import Replica
from servekit.runtime.slots import Slots
from servekit.spec.definition import definition
from servekit.spec.describe import describe
from tests.serving import served


async def bare(scope, receive, send) -> None:
    """An app that knows no lifespan."""
    assert scope["type"] == "http"
    what = scope["path"].rpartition("/")[2]
    if what == "early":
        raise ValueError("secret")
    await send({"type": "http.response.start", "status": 203, "headers": [(b"x-a", b"1")]})
    await send({"type": "http.response.body", "body": b"one,", "more_body": True})
    if what == "late":
        raise ValueError("secret")
    if what == "wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        Web.seen.append("left")
        return
    if what == "deaf":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            Web.seen.append("cancelled")
            raise
    await send({"type": "http.response.body", "body": b"two"})


@sk.service(limits=sk.Limits(max_body=300_000))
class Web:
    seen: list[str] = []

    def __init__(self) -> None:
        self.name = "model"

    @sk.endpoint
    async def plain(self, n: int) -> int:
        return n

    @sk.mount_asgi("/bare")
    def bare(self):
        return bare

    @sk.mount_asgi("/api")
    def api(self) -> FastAPI:
        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI):
            Web.seen.append("up")
            yield {"key": "value"}
            Web.seen.append("down")

        app = FastAPI(lifespan=lifespan)

        @app.get("/who/{number}")
        async def who(number: int, request: Request) -> dict[str, object]:
            return {
                "id": number,
                "name": self.name,
                "state": request.state.key,
                "root": request.scope["root_path"],
                "url": str(request.url),
                "request_id": sk.context().request_id,
                "client": request.client.host,
                "header": request.headers["x-test"],
            }

        @app.post("/upper")
        async def upper(request: Request) -> StreamingResponse:
            async def pieces():
                async for piece in request.stream():
                    yield piece.upper()

            return StreamingResponse(pieces(), media_type="text/plain")

        @app.post("/later")
        async def later(tasks: BackgroundTasks) -> str:
            async def work() -> None:
                await asyncio.sleep(0.05)
                Web.seen.append("later")

            tasks.add_task(work)
            return "now"

        @app.websocket("/mirror")
        async def mirror(socket: WebSocket) -> None:
            await socket.accept(subprotocol="b" if "b" in socket.scope["subprotocols"] else None)
            while True:
                message = await socket.receive_text()
                if message == "boom":
                    raise ValueError("secret")
                if message == "bye":
                    await socket.close(4321, "so long")
                    return
                await socket.send_text(message[::-1])

        @app.websocket("/no")
        async def no(socket: WebSocket) -> None:
            await socket.close()

        return app

    @sk.mount_asgi("/api/inner")
    def inner(self) -> Starlette:
        return Starlette(routes=[Route("/x", lambda _: PlainTextResponse("inner"))])


@pytest.fixture(autouse=True)
def _forget():
    Web.seen.clear()


async def test_an_app_has_the_service_the_request_and_its_own_state():
    async with served(Web) as app:
        response = await app.http.get(
            "/api/who/7?a=b", headers={"x-test": "yes", "x-request-id": "r1"}
        )
        assert response.json() == {
            "id": 7,
            "name": "model",
            "state": "value",
            "root": "/api",
            "url": f"http://{app.address}/api/who/7?a=b",
            "request_id": "r1",
            "client": "127.0.0.1",
            "header": "yes",
        }
        assert "/api/openapi.json" in (await app.http.get("/api/docs")).text
        assert app.counted() == {("api", "200"): 2}


async def test_the_longest_path_wins_and_only_whole_steps_count():
    async with served(Web) as app:
        assert (await app.http.get("/api/inner/x")).text == "inner"
        assert (await app.http.get("/api/innerx")).json() == {"detail": "Not Found"}
        assert (await app.http.get("/apix")).json()["error"]["code"] == "not_found"
        assert (await app.http.post("/plain", json={"n": 1})).text == "1"
        assert (await app.http.get("/livez")).text == "ok\n"


async def test_bodies_stream_both_ways():
    async def pieces():
        for _ in range(20):
            yield b"x" * 10_000

    async with served(Web) as app:
        for content in (b"abc", b"y" * 250_000, pieces()):
            response = await app.http.post("/api/upper", content=content)
            assert response.status_code == 200
            assert set(response.text) <= set("ABCXY")
        assert len(response.content) == 200_000
        await app.idle()


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_has_the_services_limit(declared: bool):
    async def pieces():
        for _ in range(4):
            yield b"x" * 100_000

    async with served(Web) as app:
        content = b"x" * 400_000 if declared else pieces()
        with contextlib.suppress(Exception):  # an answer under way breaks off
            response = await app.http.post("/api/upper", content=content)
            assert response.status_code == 413
        await app.idle()
        assert (await app.http.post("/api/upper", content=b"a")).text == "A"


async def test_errors_before_and_within_an_answer():
    async with served(Web) as app:
        response = await app.http.get("/bare/early")
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "execution_error"
        assert "secret" not in response.text
        with pytest.raises(Exception, match="peer closed|incomplete"):
            await app.http.get("/bare/late")
        response = await app.http.get("/bare/good")
        assert (response.status_code, response.text) == (203, "one,two")
        assert response.headers["x-a"] == "1"
        await app.idle()
        async with asyncio.timeout(10):
            while sum(app.counted().values()) < 3:
                await asyncio.sleep(0.01)
        assert app.counted() == {("bare", "500"): 2, ("bare", "203"): 1}


@pytest.mark.parametrize(("path", "noticed"), [("wait", "left"), ("deaf", "cancelled")])
async def test_a_client_that_leaves_is_noticed(path: str, noticed: str, monkeypatch):
    monkeypatch.setattr(inflow, "_LEAVE_S", 0.3)
    async with served(Web) as app:
        host, port = app.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /bare/%b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
        await reader.readuntil(b"one,")
        writer.close()
        await app.idle()
        assert noticed in Web.seen


async def test_a_background_task_goes_on_after_the_answer_and_the_next_request():
    async with served(Web) as app:
        assert (await app.http.post("/api/later")).json() == "now"
        assert (await app.http.post("/plain", json={"n": 1})).text == "1"
        assert "later" not in Web.seen
        await app.idle()
        assert "later" in Web.seen


async def test_sockets_of_an_app():
    async with served(Web) as app:
        url = f"ws://{app.address}/api"
        async with websockets.connect(f"{url}/mirror", subprotocols=["a", "b"]) as ws:
            assert ws.subprotocol == "b"
            await ws.send("abc")
            assert await ws.recv() == "cba"
            await ws.send("bye")
            with pytest.raises(websockets.ConnectionClosed):
                await ws.recv()
            assert (ws.close_code, ws.close_reason) == (4321, "so long")
        async with websockets.connect(f"{url}/mirror") as ws:
            await ws.send("boom")
            with pytest.raises(websockets.ConnectionClosed):
                await ws.recv()
            assert ws.close_code == 4500
        async with websockets.connect(f"{url}/mirror") as ws:
            await ws.send("abc")
        for path in ("/no", "/nowhere"):
            with pytest.raises(websockets.InvalidStatus):
                await websockets.connect(url + path)
        await app.idle()


async def test_the_lifespan_is_that_of_the_replica():
    async with served(Web) as app:
        assert Web.seen == ["up"]
        assert (await app.http.get("/api/inner/x")).status_code == 200
    assert Web.seen == ["up", "down"]


async def test_a_start_up_that_fails_fails_the_replica():
    @sk.service
    class Broken:
        @sk.mount_asgi("/")
        def web(self):
            async def app(scope, receive, send):
                await receive()
                await send({"type": "lifespan.startup.failed", "message": "no database"})

            return app

    app = describe(Broken)
    replica = Replica(definition(Broken), app.services[0], replica_id="r")
    with pytest.raises(SetupError, match="no database"):
        await replica.start({})


async def test_an_app_at_the_root_takes_what_is_left():
    @sk.service
    class Root:
        @sk.endpoint
        async def hello(self) -> str:
            return "endpoint"

        @sk.mount_asgi("/")
        def web(self):
            return Starlette(routes=[Route("/any/{x}", lambda _: PlainTextResponse("app"))])

    async with served(Root) as app:
        assert (await app.http.get("/any/where")).text == "app"
        assert (await app.http.post("/hello")).json() == "endpoint"
        assert (await app.http.get("/docs")).text.startswith("<!doctype html>")
        assert (await app.http.get("/nope")).text == "Not Found"


async def test_slots_are_held_until_the_conversation_ends():
    @sk.service(limits=sk.Limits(max_ongoing=1, max_queued=0))
    class Narrow:
        @sk.mount_asgi("/")
        def web(self):
            return bare

    async with served(Narrow) as app:
        host, port = app.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"one,")
        response = await app.http.get("/good")
        assert (response.status_code, response.json()["error"]["reason"]) == (429, "queue_full")
        writer.close()
        await app.idle()
        assert (await app.http.get("/good")).status_code == 203


async def test_a_conversation_whose_turn_comes_too_late_does_not_begin(until):
    begun = []

    async def app(scope, receive, send):
        begun.append(scope)

    families = Families(Metrics(replica="r-0"))
    meter = Meter(families, Pace(), service="S", endpoint="web", version="1")
    mounted = Mounted(app, "S.web", Slots(1, 1, "S"), meter)
    first = Call("S", "web")
    assert mounted._admission.enter(first)
    late = Call("S", "web")
    late.deadline = now() + 0.05
    waiting = asyncio.create_task(mounted(late, RequestContext(late)))
    await until(lambda: meter.ongoing == 2)
    await until(lambda: now() > late.deadline)
    mounted._admission.leave()
    with pytest.raises(DeadlineExceeded, match="in the queue"):
        await waiting
    assert not begun
    assert (meter.ongoing, meter.running, mounted._admission.slots.running) == (0, 0, 0)


# -- mistakes of the author


@pytest.mark.parametrize("path", ["web", "/web/", "/a b", "/../x"])
def test_a_path_that_is_none_is_refused(path: str):
    with pytest.raises(SpecError, match=r"Bad.web: path="):

        class Bad:
            @sk.mount_asgi(path)
            def web(self):
                return bare


def test_a_method_with_arguments_is_refused():
    with pytest.raises(SpecError, match=r"plain `def web\(self\)`"):

        class Bad:
            @sk.mount_asgi("/web")
            def web(self, settings: dict):
                return bare


def test_two_apps_at_one_path_are_refused():
    with pytest.raises(SpecError, match="same path '/web'"):

        @sk.service
        class Bad:
            @sk.mount_asgi("/web")
            def one(self):
                return bare

            @sk.mount_asgi("/web")
            def two(self):
                return bare


def test_servekits_own_pages_can_not_be_mounted_over():
    with pytest.raises(SpecError, match="'/docs' is a page of servekit"):

        @sk.service
        class Bad:
            @sk.mount_asgi("/docs")
            def web(self):
                return bare


def test_apps_of_two_services_need_two_paths():
    @sk.service(prefix="/a")
    class One:
        @sk.mount_asgi("/web")
        def web(self):
            return bare

    @sk.service
    class Two:
        one = sk.depends(One)

        @sk.mount_asgi("/a/web")
        def web(self):
            return bare

    with pytest.raises(SpecError, match="mount apps at the same path '/a/web'"):
        describe(Two)
