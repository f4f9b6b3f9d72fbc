"""Origins, preflights and what answers carry, as plain data and over real connections."""

import pytest

from servekit.core.call import BINARY, Payload, Reply
from servekit.errors import Overloaded
from servekit.gateway.cors import Cors
from servekit.gateway.edge import Edge
from tests.door import (
    MAX_BODY,
    Door,
    chunks,
    head,
    loop,  # noqa: F401  (each test runs on either loop)
    post,
)

APP = "https://app.example"
OTHER = "http://localhost:5173"
EDGE = Edge(cors_origins=(APP, OTHER))
ALLOW = "access-control-allow-origin"


def asked(origin: str = APP, method: str = "POST", headers: str = "") -> dict[bytes, bytes]:
    fields = {b"origin": origin.encode(), b"access-control-request-method": method.encode()}
    return fields | ({b"access-control-request-headers": headers.encode()} if headers else {})


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "https://app.example.evil",
        "http://app.example",
        "https://app.example:8443",
        "https://APP.example",
        "https://app.example/",
        "https://sub.app.example",
        "https://app",
    ],
)
def test_only_that_origin_is_meant(origin):
    grant = Cors([APP, OTHER]).grant({b"origin": origin.encode()})
    assert not grant.allowed
    assert grant.fields == [(b"vary", b"origin")]
    assert Cors([APP]).preflight(b"OPTIONS", asked(origin), [b"POST"]) is None


@pytest.mark.parametrize("credentials", [True, False])
def test_an_origin_that_is_allowed(credentials):
    grant = Cors([APP, OTHER], credentials=credentials).grant({b"origin": OTHER.encode()})
    fields = dict(grant.fields)
    assert grant.allowed
    assert fields[b"access-control-allow-origin"] == OTHER.encode()
    assert fields.get(b"access-control-allow-credentials") == (b"true" if credentials else None)
    assert fields[b"vary"] == b"origin"
    assert b"retry-after" in fields[b"access-control-expose-headers"]
    assert all(b"%b: %b\r\n" % field in grant.lines for field in grant.fields)


@pytest.mark.parametrize("headers", [{}, {b"origin": b"https://any.example"}])
def test_everyone_is_told_the_same(headers):
    fields = dict(Cors(["*"]).grant(headers).fields)
    assert fields[b"access-control-allow-origin"] == b"*"
    assert b"vary" not in fields


@pytest.mark.parametrize(
    ("wanted", "granted"),
    [
        ("content-type", "content-type"),
        ("Authorization, X-API-Key,x-servekit-timeout", None),
        ("content-encoding,idempotency-key,traceparent,x-request-id,x-servekit-affinity", None),
        ("x-evil, content-type", "content-type"),
        ("x-servekit-, x-servekit-a b, x-servekit-a\tb, cookie", ""),
        (",,", ""),
        ("", ""),
    ],
)
def test_headers_that_a_page_may_set(wanted, granted):
    fields = dict(Cors([APP]).preflight(b"OPTIONS", asked(headers=wanted), [b"POST"]))
    expected = wanted.lower() if granted is None else granted
    got = fields.get(b"access-control-allow-headers", b"").decode()
    assert got.replace(" ", "") == expected.replace(" ", "")


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        (b"OPTIONS", {b"origin": APP.encode()}),
        (b"OPTIONS", {b"access-control-request-method": b"POST"}),
        (b"POST", asked()),
        (b"OPTIONS", {}),
    ],
)
def test_what_is_no_preflight(method, fields):
    for cors in (Cors([APP]), Cors(["*"])):
        assert cors.preflight(method, fields, [b"POST"]) is None


# -- over connections


def preflight(path: str, origin: str = APP) -> bytes:
    lines = ["host: h", f"origin: {origin}", "access-control-request-method: POST"]
    return head(
        f"OPTIONS {path} HTTP/1.1", *lines, "access-control-request-headers: content-type, x-evil"
    )


@pytest.mark.parametrize("behind", [b"", post(b"1")])
@pytest.mark.parametrize(
    ("path", "methods"),
    [("/echo", "POST"), ("/find?a=1", "GET"), ("/page", "GET, HEAD, POST, PUT, PATCH, DELETE")],
)
async def test_a_preflight(path, methods, behind):
    async with Door(edge=EDGE) as door:
        client = await door.connect()
        await client.send(preflight(path) + behind)
        answer = await client.answer("HEAD")
        assert answer.status == 204
        assert answer.headers[ALLOW] == APP
        assert answer.headers["vary"] == "origin"
        assert answer.headers["access-control-allow-methods"] == methods
        assert answer.headers["access-control-allow-headers"] == "content-type"
        assert answer.headers["access-control-max-age"] == "600"
        assert "content-length" not in answer.headers
        if behind:
            assert (await client.answer()).body == b"1"
        assert len(door.calls) == bool(behind)
        await client.lives()


@pytest.mark.parametrize("path", ["/echo", "/page"])
@pytest.mark.parametrize("edge", [EDGE, Edge()])
async def test_a_preflight_of_others_is_answered_as_ever(path, edge):
    async with Door(edge=edge) as door:
        client = await door.connect()
        answer = await client.ask(preflight(path, "https://evil.example"))
        assert answer.status == (405 if path == "/echo" else 200)
        assert not [name for name in answer.headers if name.startswith("access-control")]
        await client.lives()


@pytest.mark.parametrize(
    ("request_", "reply", "status"),
    [
        (post(b"1", "/echo", f"origin: {APP}"), None, 200),
        (post(b"1", "/echo", f"origin: {APP}"), Overloaded("full"), 429),
        (post(b"1", "/echo", f"origin: {APP}"), ValueError("x"), 500),
        (post(b"1" * 20_000, "/echo", f"origin: {APP}"), "large", 200),
        (post(b"ab", "/tokens", f"origin: {APP}"), None, 200),
        (post(b"ab", "/tokens", f"origin: {APP}", f"accept: {BINARY}"), None, 200),
        (post(b"", "/echo", f"origin: {APP}", length=MAX_BODY + 1), None, 413),
        (post(b"1", "/echo", f"origin: {APP}", "x-servekit-timeout: soon"), None, 400),
        (post(b"1", "/find", f"origin: {APP}"), None, 405),
        (post(b"1", "/page", f"origin: {APP}"), None, 200),
        (post(b"1", "/nothing", f"origin: {APP}"), None, 404),
    ],
)
async def test_every_answer_may_be_read(caplog, request_, reply, status):
    async with Door(edge=EDGE) as door:
        door.reply = reply
        if reply == "large":
            door.reply = Reply(Payload(BINARY, (bytes(300_000),)))
        client = await door.connect()
        answer = await client.ask(request_)
        assert answer.status == status
        assert answer.headers[ALLOW] == APP
        assert answer.headers["vary"] == "origin"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("path", ["/echo", "/tokens", "/page"])
@pytest.mark.parametrize("line", ["origin: https://evil.example", "x: y"])
async def test_others_are_answered_as_ever_but_caches_are_told(path, line):
    async with Door(edge=EDGE) as door:
        client = await door.connect()
        answer = await client.ask(post(b"ab", path, line))
        assert (answer.status, answer.headers["vary"]) == (200, "origin")
        assert ALLOW not in answer.headers
        await client.lives()


async def test_a_stream_that_fails_may_be_read():
    async with Door(edge=Edge(cors_origins=("*",))) as door:
        door.stream = chunks(b"1", error=Overloaded("enough"))
        client = await door.connect()
        answer = await client.ask(post(b"", "/tokens", f"origin: {APP}"))
        assert (answer.status, answer.headers[ALLOW]) == (200, "*")
        assert b"event: error" in answer.body
