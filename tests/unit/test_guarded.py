"""A gateway that asks for credentials, over real sockets: refusals stay in their turn and in step."""

import asyncio
import gzip

import httpx
import msgspec
import pytest

import servekit as sk
from servekit.gateway.bodies import UNWANTED
from servekit.gateway.credentials import Credentials
from servekit.gateway.edge import Edge
from servekit.gateway.guard import Guard
from servekit.gateway.guarded import _OPEN, GuardedApp
from servekit.gateway.jobs import JobRoutes
from servekit.gateway.keys import new_key
from servekit.gateway.site import PAGES, Site
from servekit.spec.describe import describe
from servekit.wire.connection import refuse
from tests.door import (
    MAX_BODY,
    Door,
    bytes_of,
    chunked,
    get,
    head,
    loop,  # noqa: F401  (each test runs on either loop)
    post,
    turns,
)

MADE = new_key()
KEY = MADE[1]
GOOD = f"authorization: Bearer {KEY}"
BAD = f"authorization: Bearer {KEY[:-1]}x"
APP = "https://app.example"
EDGE = Edge(cors_origins=(APP,), gzip_min_bytes=100)
ALLOW = "access-control-allow-origin"


@pytest.fixture
def guarded(tmp_path):
    """Return `guarded(*limits, **door)`: a door that knows one key."""

    def make(*limits: str, **door) -> Door:
        path = tmp_path / "keys.toml"
        lines = ["[[key]]", 'name = "a"', f'id = "{MADE[0]}"', f'hash = "{MADE[2]}"', *limits]
        path.write_text("\n".join(lines))
        return Door(guard=Guard(Credentials(api_keys=str(path))), **door)

    return make


def error(answer) -> dict:
    return msgspec.json.decode(answer.body)["error"]


async def lives(client) -> None:
    """The connection is in step: a good request has its own answer, and nothing is left over."""
    answer = await client.ask(head("GET /find?still=here HTTP/1.1", "host: h", GOOD))
    assert (answer.status, answer.body) == (200, b'{"still":"here"}')
    assert client._here == b""


PATHS = [
    "/echo",
    "/tokens",
    "/page",
    "/find",
    "/nothing",
    "/metrics",
    "/livez/",
    "/livez2",
    "/LIVEZ",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("line", [None, BAD, "authorization: Basic abc", "x-api-key: x"])
async def test_everything_needs_a_credential(guarded, path, line):
    async with guarded() as door:
        client = await door.connect()
        answer = await client.ask(post(b"1", path, *([line] if line else [])))
        assert (answer.status, answer.code) == (401, "unauthorized")
        missing = line is None or "Basic" in line
        assert error(answer)["reason"] == (
            "missing_credentials" if missing else "invalid_credentials"
        )
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.headers["x-request-id"] == error(answer)["request_id"]
        assert "connection" not in answer.headers
        assert KEY[20:60].encode() not in answer.body
        assert door.calls == []
        await lives(client)


@pytest.mark.parametrize(
    "path", ["/livez", "/readyz", "/startupz", "/%6civez", "/livez?x", "/docs", "/playground"]
)
async def test_what_tells_nothing_needs_none(guarded, path):
    async with guarded() as door:
        client = await door.connect()
        answer = await client.ask(head(f"GET {path} HTTP/1.1", "host: h"))
        assert answer.status == 404  # it came to the app, which has no such pages here
        await lives(client)


async def test_a_good_one_is_let_in_and_the_call_knows_whose_it_is(guarded):
    async with guarded() as door:
        client = await door.connect()
        for line in (GOOD, f"x-api-key: {KEY}"):
            answer = await client.ask(post(b"1", "/echo", line, "x-tenant: t"))
            assert (answer.status, answer.body) == (200, b"1")
            assert door.calls[-1].caller == "a"
            headers = msgspec.msgpack.decode(door.calls[-1].headers)
            assert [name for name, _ in headers] == [b"host", b"content-length", b"x-tenant"]
        assert (await client.ask(post(b"1", "/page", GOOD))).body == b"POST? 1"


async def test_without_a_guard_a_call_has_no_caller_and_keeps_its_headers():
    async with Door() as door:
        client = await door.connect()
        assert (await client.ask(post(b"1", "/echo", GOOD))).status == 200
        assert door.calls[-1].caller == ""
        assert [b"authorization", f"Bearer {KEY}".encode()] in msgspec.msgpack.decode(
            door.calls[-1].headers
        )


async def test_what_is_counted(guarded):
    async with guarded() as door:
        client = await door.connect()
        await client.ask(post(b"1"))
        await client.ask(post(b"1", "/echo", GOOD))
        assert door.counted() == {"401": 1, "200": 1}
        assert list(door.gateway.failures) == []  # strangers don't push out others


async def test_a_wrong_method_is_told_only_to_those_who_may_come_in(guarded):
    async with guarded() as door:
        client = await door.connect()
        assert (await client.ask(post(b"1", "/find"))).status == 401
        answer = await client.ask(post(b"1", "/find", GOOD))
        assert (answer.status, answer.headers["allow"]) == (405, "GET")
        await lives(client)


@pytest.mark.parametrize("path", ["/echo", "/page"])
async def test_refusals_in_a_pipeline_have_their_turn(guarded, path):
    async with guarded() as door:
        client = await door.connect()
        lines = [GOOD, BAD, GOOD, "x-nothing: 1", BAD, GOOD]
        data = b"".join(post(b"%d" % n, path, line) for n, line in enumerate(lines))
        for cuts in ((), range(1, len(data), 37)):
            await client.send(data, cuts=cuts)
            answers = [await client.answer() for _ in lines]
            assert [a.status for a in answers] == [200, 401, 200, 401, 401, 200]
            good = [a.body for a in answers if a.status == 200]
            assert good == ([b"0", b"2", b"5"] if path == "/echo" else [b"POST? 1"] * 3)
            await lives(client)


@pytest.mark.parametrize("size", [10, 70_000, 600_000, 9_000_000])
@pytest.mark.parametrize("path", ["/echo", "/page", "/nothing"])
@pytest.mark.parametrize("line", ["x-nothing: 1", BAD])
async def test_a_large_body_that_nobody_reads(guarded, size, path, line):
    async with guarded() as door:
        client = await door.connect()
        data = post(bytes_of(size), path, line)
        begin = len(data) - size + size // 10
        answer = await client.ask(data[:begin])
        assert answer.status == 401  # before the body is here
        if size > UNWANTED:
            assert answer.headers["connection"] == "close"
            assert await client.rest() == b""
        else:
            await client.send(data[begin:])
            await lives(client)
            assert [call.endpoint for call in door.calls] == ["find"]


@pytest.mark.parametrize("size", [10, 70_000, 600_000, 9_000_000])
@pytest.mark.parametrize("path", ["/echo", "/page", "/nothing"])
@pytest.mark.slow
async def test_a_body_without_a_declared_size_that_nobody_reads(guarded, size, path):
    async with guarded() as door:
        client = await door.connect()
        parts = [bytes_of(size)[i : i + 100_000] for i in range(0, size, 100_000)]
        assert (await client.ask(chunked(*parts, path=path))).status == 401
        if path == "/echo" and size < UNWANTED:  # what has come of it is counted
            await lives(client)
        else:
            assert await client.rest() == b""
        assert client.protocol.sender.received < 2 * UNWANTED


async def test_for_strangers_no_memory_is_reserved(guarded, monkeypatch):
    reserved = []
    room = "servekit.gateway.exchange.room"
    monkeypatch.setattr(room, lambda size: reserved.append(size) or bytearray(size))
    async with guarded() as door:
        client = await door.connect()
        assert (await client.ask(post(bytes_of(8_000_000)))).status == 401
        assert reserved == []
        client = await door.connect()
        body = bytes_of(8_000_000)
        assert (await client.ask(post(body, "/echo", GOOD))).status == 200
        assert door.bodies == [body]
        assert reserved == [8_000_000]
        await lives(client)


@pytest.mark.parametrize("path", ["/echo", "/page"])
async def test_a_body_that_is_not_asked_for_may_never_come_so_the_connection_ends(guarded, path):
    async with guarded() as door:
        client = await door.connect()
        answer = await client.ask(post(b"", path, "expect: 100-continue", length=MAX_BODY))
        assert (answer.status, answer.headers["connection"]) == (401, "close")
        assert await client.rest() == b""
        client = await door.connect()
        request = post(b"", path, "expect: 100-continue", GOOD, length=1)
        assert (await client.ask(request)).status == 100
        assert (await client.ask(b"1")).status == 200


async def test_head_and_http10(guarded):
    async with guarded() as door:
        client = await door.connect()
        answer = await client.ask(head("HEAD /metrics HTTP/1.1", "host: h"), "HEAD")
        assert (answer.status, answer.body) == (401, b"")
        await lives(client)
        answer = await client.ask(post(b"1").replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert answer.status == 401
        assert await client.rest() == b""


@pytest.mark.parametrize("path", ["/echo", "/page"])
async def test_an_offer_to_upgrade_is_no_way_in(guarded, path):
    async with guarded() as door:
        client = await door.connect()
        for upgrade in ("h2c", "websocket"):
            lines = (f"upgrade: {upgrade}", "connection: upgrade")
            assert (await client.ask(post(b"1", path, *lines))).status == 401
        await lives(client)


# -- limits


@pytest.mark.parametrize("path", ["/echo", "/page", "/nothing", "/find"])
async def test_a_rate(guarded, path):
    async with guarded('rate = "1/h"', "burst = 2") as door:
        client = await door.connect()
        for _ in range(2):
            assert (await client.ask(post(b"1", path, GOOD))).status in (200, 404, 405)
        answer = await client.ask(post(b"1", path, GOOD))
        assert (answer.status, answer.code) == (429, "overloaded")
        assert error(answer)["reason"] == "rate_limited"
        wait_s = error(answer)["retry_after_s"]
        assert 3000 < wait_s <= 3600
        assert wait_s <= int(answer.headers["retry-after"]) < wait_s + 1.001
        assert (await client.ask(post(b"1", path, BAD))).status == 401
        assert (await client.ask(get("still=here"))).status == 401


async def test_a_shed_call_is_counted_and_noted_with_its_caller(guarded):
    async with guarded('rate = "1/h"', "burst = 1") as door:
        client = await door.connect()
        await client.ask(post(b"1", "/echo", GOOD))
        await client.ask(post(b"1", "/echo", GOOD, "x-request-id: r-2"))
        [failure] = door.gateway.failures
        assert (failure.route, failure.code, failure.reason) == ("/echo", 429, "rate_limited")
        assert (failure.caller, failure.request_id) == ("a", "r-2")
        [shed] = [f for f in door.metrics.snapshot() if f.name == "servekit_shed_total"]
        assert [(s.labels[-1], s.value) for s in shed.samples] == [("rate_limited", 1)]


@pytest.mark.parametrize("way", ["answered", "left", "streamed"])
async def test_so_many_at_once(guarded, until, way):
    async with guarded("max_ongoing = 1") as door:
        door.reply = "hold"
        first, second = await door.connect(), await door.connect()
        await first.send(post(b"1", "/tokens" if way == "streamed" else "/echo", GOOD))
        await until(lambda: door.calls)
        for path in ("/echo", "/page"):
            answer = await second.ask(post(b"2", path, GOOD))
            assert (answer.status, error(answer)["reason"]) == (429, "too_many_ongoing")
            assert int(answer.headers["retry-after"]) >= 1
        if way == "left":
            first.leave()
            await until(lambda: door.cancelled)
            await turns(20)
        door.go_on.set()
        if way != "left":
            assert (await first.answer()).status == 200
        await lives(second)


async def test_a_page_that_fails_gives_its_place_back(guarded):
    guard = guarded("max_ongoing = 1").gateway.guard

    async def fails(scope, receive, send):
        raise RuntimeError("a bug")

    app = GuardedApp(fails, guard)
    scope = {"type": "http", "path": "/x", "headers": [(b"x-api-key", KEY.encode())]}
    for _ in range(3):
        with pytest.raises(RuntimeError, match="a bug"):
            await app(scope, None, None)


@pytest.mark.parametrize("path", ["/ws", "/livez", "/docs"])
async def test_a_websocket_is_closed_before_it_is_open(guarded, path):
    """Also where a page is open: a mounted app may have it."""
    guard, sent = guarded().gateway.guard, []

    async def send(message):
        sent.append(message)

    async def never(*_):
        raise AssertionError

    async def receive():
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": path, "headers": []}
    await GuardedApp(never, guard)(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 4401}]


async def test_an_app_does_not_see_our_credentials(guarded):
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["headers"])

    headers = [(b"host", b"h"), (b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "http", "path": "/x", "headers": headers}
    await GuardedApp(app, guarded().gateway.guard)(scope, None, None)
    assert seen == [[(b"host", b"h")]]


# -- with the settings of the edge


async def test_strangers_take_nothing_of_the_account_for_bodies(guarded, until):
    async with guarded(edge=Edge(max_bodies=11 << 20)) as door:
        door.reply = "hold"
        client = await door.connect()
        await client.send(post(b"1", "/echo", GOOD))
        await until(lambda: door.calls)
        # In line behind it: who sent it has not been asked yet.
        await client.send(post(bytes_of(MAX_BODY), "/echo", BAD)[:50_000])
        await until(lambda: client.protocol.pipeline)
        await turns(10)
        assert door.gateway.bodies.held <= 50_000
        door.go_on.set()
        assert [(await client.answer()).status for _ in range(2)] == [200, 401]
        assert await client.rest() == b""


@pytest.mark.parametrize("here", [50_000, 200_000])
async def test_what_was_declared_is_held_once_its_sender_is_known(guarded, until, here):
    async with guarded(edge=Edge(max_bodies=11 << 20)) as door:
        first, second = await door.connect(), await door.connect()
        body = bytes_of(6_000_000)
        data = post(body, "/echo", GOOD)
        await first.send(data[:here])
        await until(lambda: door.gateway.bodies.held == len(body))
        assert (await second.ask(data)).status == 503
        assert (await first.ask(data[here:])).status == 200
        assert (await second.ask(data)).status == 200


@pytest.mark.parametrize("path", ["/echo", "/find", "/page", "/nothing", "/metrics"])
@pytest.mark.parametrize("origin", [APP, "https://evil.example"])
async def test_a_preflight_brings_no_credential(guarded, path, origin):
    lines = [f"origin: {origin}", "access-control-request-method: POST"]
    wanted = "access-control-request-headers: authorization, x-api-key, x-evil"
    async with guarded(edge=EDGE) as door:
        client = await door.connect()
        answer = await client.ask(head(f"OPTIONS {path} HTTP/1.1", "host: h", *lines, wanted))
        if origin == APP:
            assert (answer.status, answer.headers[ALLOW]) == (204, APP)
            assert answer.headers["access-control-allow-headers"] == "authorization, x-api-key"
        else:
            assert answer.status == 401
            assert ALLOW not in answer.headers
        assert door.calls == []
        await lives(client)


@pytest.mark.parametrize("path", ["/echo", "/find", "/page", "/nothing"])
async def test_a_page_of_another_origin_sees_why_it_was_refused(guarded, path):
    async with guarded("rate = '1/h'", "burst = 1", edge=EDGE) as door:
        client = await door.connect()
        seen = []
        for line in ("x: y", BAD, GOOD, GOOD):
            answer = await client.ask(post(b"1", path, line, f"origin: {APP}"))
            assert (answer.headers[ALLOW], answer.headers["vary"]) == (APP, "origin")
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            assert {"www-authenticate", "retry-after", "x-request-id"} <= set(exposed)
            seen.append(answer.status)
        assert seen == [401, 401, {"/find": 405, "/nothing": 404}.get(path, 200), 429]


@pytest.mark.parametrize("coding", ["gzip", "br", "gzip, gzip"])
async def test_a_strangers_body_is_not_unpacked(guarded, monkeypatch, coding):
    monkeypatch.setattr("servekit.gateway.request.inflate", None)
    async with guarded(edge=EDGE) as door:
        client = await door.connect()
        bomb = post(gzip.compress(bytes(500_000)), "/echo", f"content-encoding: {coding}")
        assert (await client.ask(bomb)).status == 401
        await lives(client)


async def test_many_clients_good_and_bad(guarded):
    async with guarded() as door:

        async def ask(number: int) -> None:
            client = await door.connect()
            for turn in range(10):
                good = (number + turn) % 3 == 0
                body = b"%d-%d" % (number, turn)
                answer = await client.ask(post(body, "/echo", GOOD if good else BAD))
                assert answer.status == (200 if good else 401)
                assert not good or answer.body == body

        await asyncio.gather(*(ask(number) for number in range(12)))
        assert door.counted() == {"200": 40, "401": 80}


# -- what is open


def test_all_that_is_open_is_servekits_own():
    """So no mounted app has it: those come behind these pages."""
    assert _OPEN <= PAGES


async def test_an_open_page_that_is_not_there_tells_of_no_other():
    @sk.service
    class Near:
        @sk.endpoint(path="/playgrounds")
        def near(self) -> None: ...

    async def metrics() -> str:
        return ""

    site = Site(dict, metrics, JobRoutes(refuse), dev=False)
    site.serve(describe(Near))
    transport = httpx.ASGITransport(site.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://h") as http:
        assert "/playgrounds" in (await http.get("/playgroundz")).text
        answer = await http.get("/playground")
        assert answer.status_code == 404
        assert "/playgrounds" not in answer.text
