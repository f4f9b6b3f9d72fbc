"""The debug page: what it tells, and that nothing on it is more than text."""

import json
import re

import httpx
import msgspec
import pytest

from servekit.errors import Overloaded
from servekit.gateway.debug import Debug
from servekit.gateway.jobs import JobRoutes
from servekit.gateway.site import Site
from servekit.settings import Settings
from servekit.wire.connection import refuse
from tests.door import (
    Door,
    head,
    loop,  # noqa: F401  (each test runs on either loop)
    post,
)

EVIL = "</script><script>document.title='owned'</script><!--&\u2028"


class Socket:
    """Stands for uvicorn's protocol of a WebSocket."""


async def look(door: Door, app: object = None) -> dict:
    async def status() -> object:
        return app

    connections = lambda: [*door.state.connections, Socket()]  # noqa: E731
    debug = Debug("gateway-1", door.gateway, connections, status, {"host": "h"})
    return msgspec.json.decode(await debug.document())


async def test_at_rest():
    async with Door() as door:
        found = await look(door, {"target": "app"})
        assert (found["running"], found["oldest"], found["errors"]) == (0, [], [])
        assert (found["connections"], found["websockets"]) == (1, 1)
        assert found["gateway"] == "gateway-1"
        assert found["app"] == {"target": "app"}
        assert found["settings"] == {"host": "h"}


async def test_what_runs_oldest_first(until):
    async with Door() as door:
        door.reply = "hold"
        clients = [await door.connect() for _ in range(3)]
        for number, client in enumerate(clients):
            await client.send(post(b"1", "/echo", f"x-request-id: r-{number}"))
            await until(lambda number=number: len(door.calls) == number + 1)
        await door.connect()
        found = await look(door)
        assert (found["connections"], found["running"]) == (5, 3)
        assert [r["request_id"] for r in found["oldest"]] == ["r-0", "r-1", "r-2"]
        ages = [r["age_s"] for r in found["oldest"]]
        assert ages == sorted(ages, reverse=True)
        assert {r["route"] for r in found["oldest"]} == {"/echo"}
        door.go_on.set()
        for client in clients:
            assert (await client.answer()).status == 200
        assert (await look(door))["running"] == 0


async def test_what_is_no_endpoint_runs_too(until):
    async with Door() as door:
        client = await door.connect()
        await client.send(post(b"", "/page", length=1))
        await until(lambda: any(c.running for c in door.state.connections))
        [found] = (await look(door))["oldest"]
        assert found == {"route": "/page", "age_s": None, "caller": "", "request_id": ""}
        await client.ask(b"1")


async def test_a_list_of_what_runs_is_bounded(monkeypatch, until):
    monkeypatch.setattr("servekit.gateway.debug._MAX_RUNNING", 2)
    async with Door() as door:
        door.reply = "hold"
        for number in range(4):
            await (await door.connect()).send(post())
            await until(lambda number=number: len(door.calls) == number + 1)
        found = await look(door)
        assert (found["running"], len(found["oldest"])) == (4, 2)


async def test_the_latest_errors_newest_first():
    async with Door() as door:
        client = await door.connect()
        await client.ask(post())
        door.reply = Overloaded("full", reason="queue_full", started=False)
        for number in range(60):
            await client.ask(post(b"1", "/echo", f"x-request-id: r-{number}"))
        door.reply = ValueError("masked")
        await client.ask(post(b"1", "/echo", "x-request-id: bug"))
        await client.ask(post(b"", "/echo", "x-servekit-timeout: soon", "x-request-id: bad"))
        errors = (await look(door))["errors"]
        assert len(errors) == 50
        assert [(e["code"], e["reason"], e["request_id"]) for e in errors[:3]] == [
            (400, "bad_request", "bad"),
            (500, "execution_error", "bug"),
            (429, "queue_full", "r-59"),
        ]
        assert "masked" not in json.dumps(errors)
        assert all(e["route"] == "/echo" and e["at"] > 1e9 for e in errors)


async def test_a_body_is_not_kept_for_the_page():
    async with Door() as door:
        client = await door.connect()
        await client.ask(post(b"payload" * 1000))
        [protocol] = door.state.connections
        kept = {name: getattr(protocol.cycle, name) for name in type(protocol.cycle).__slots__}
        assert b"payload" not in repr(kept).encode()


# -- the page


async def fetch(path: str, *, debug: bool = True) -> httpx.Response:
    async def document() -> bytes:
        return msgspec.json.encode({"evil": EVIL, EVIL: "{{shared.js}} {{document}}"})

    async def metrics() -> str:
        return ""

    site = Site(dict, metrics, JobRoutes(refuse), dev=False, debug=document if debug else None)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(site.app), base_url="http://h"
    ) as client:
        return await client.get(path)


async def test_the_page_holds_its_data_as_text():
    page = (await fetch("/debug")).text
    [data] = re.findall(r'<script id="document" type="application/json">(.*?)</script>', page)
    assert json.loads(data) == {"evil": EVIL, EVIL: "{{shared.js}} {{document}}"}
    assert not set("<>&\u2028") & set(data)
    assert "owned'</script>" not in page
    assert page.count("<script") == 2


@pytest.mark.parametrize("path", ["/debug", "/debug.json"])
async def test_nobody_keeps_a_copy(path):
    answer = await fetch(path)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    if path == "/debug":
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    else:
        assert answer.json()["evil"] == EVIL


@pytest.mark.parametrize("path", ["/debug", "/debug.json"])
async def test_without_leave_it_is_not_there(path):
    assert (await fetch(path, debug=False)).status_code == 404


async def test_a_probe_is_not_an_error():
    async with Door() as door:
        client = await door.connect()
        await client.ask(head("GET /livez HTTP/1.1", "host: h"))
        assert (await look(door))["errors"] == []


# -- settings


def test_settings_are_shown_without_secrets(tmp_path):
    settings = Settings.load(
        tmp_path, {}, api_keys="keys.toml", jwt_algorithms="RS256, ES256", host="h"
    )
    shown = settings.shown()
    assert shown["api_keys"] == "keys.toml"  # where it is, not what it says
    assert shown["jwt_algorithms"] == "RS256, ES256"
    assert (shown["host"], shown["port"], shown["gpus"], shown["jwt_key"]) == ("h", "3000", "", "")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("hub_token", "s3cret", "…"),
        ("client_secret", "s3cret", "…"),
        ("db_password", "s3cret", "…"),
        ("signing_key", "s3cret", "…"),
        ("redis", "redis://user:s3cret@host:1/0", "redis://…@host:1/0"),
        ("redis", "redis://:s3cret@host", "redis://…@host"),
        ("redis", "redis://host/0?x=a@b", "redis://host/0?x=a@b"),
    ],
)
def test_what_may_be_a_secret_is_masked(name, value, text):
    from servekit.settings import _masked

    assert _masked(name, value) == text
