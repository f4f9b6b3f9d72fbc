import asyncio
import json
import socket
import tempfile
from pathlib import Path

import msgspec
import pytest

from servekit.cli.apps import App, Here, chosen, running, the_one
from servekit.cli.main import run
from servekit.cli.status import _duration
from servekit.engine.control import AppStatus, ProcessStatus, ServiceStatus, handler
from servekit.errors import ConfigError
from servekit.settings import Settings
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, Listener

APP = AppStatus(
    name="Search",
    target="app:Search",
    url="http://127.0.0.1:3000",
    pid=4,
    revision="0123456789ab",
    uptime_s=3723.0,
    gateways=[
        ProcessStatus(id="gateway-1", pid=7, state="ready", ongoing=2, finished=9, rss=2**25)
    ],
    services=[
        ServiceStatus(
            name="Search",
            version="1",
            state="up",
            bounds="1..2",
            desired=1,
            restarts=2,
            replicas=[
                ProcessStatus(
                    id="Search-1", pid=5, state="ready", ongoing=3, finished=44, rss=2**26
                ),
                ProcessStatus(
                    id="Search-2",
                    pid=6,
                    state="unready",
                    ongoing=0,
                    finished=0,
                    rss=0,
                    trouble="ill",
                ),
            ],
        ),
        ServiceStatus(
            name="Lazy",
            version="1",
            state="asleep",
            bounds="0..1",
            desired=0,
            restarts=0,
            replicas=[],
        ),
    ],
)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="sk", dir="/tmp") as path:
        yield Path(path)


def make(folder: Path, name: str) -> Path:
    (folder / name).mkdir(mode=0o700)
    return folder / name / "admin.sock"


async def ask_beside_others(folder: Path) -> list[App]:
    async def status(_: bytes) -> AppStatus:
        return APP

    listeners = [
        Listener(
            Address(f"unix:{make(folder, name)}"),
            lambda verbs=verbs: Connection(Hello(), client=False, handler=handler(verbs)),
        )
        for name, verbs in (("servekit-a", {"status": status}), ("servekit-other", {}))
    ]
    for listener in listeners:
        await listener.open()
    try:
        return await running(Settings(runtime_dir=folder))
    finally:
        for listener in listeners:
            await listener.close()


def test_finds_what_answers_and_leaves_out_what_does_not(folder):
    stale = make(folder, "servekit-stale")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    make(folder, "servekit-empty")
    make(folder, "servekit-file").write_text("no socket")
    make(folder, "else-b")
    [app] = asyncio.run(ask_beside_others(folder))
    assert (app.socket, app.status) == (folder / "servekit-a/admin.sock", APP)


def test_a_table_for_people(folder, monkeypatch, capsys):
    async def found(_: Settings) -> list[App]:
        return [Here(Path("admin.sock"), APP)]

    monkeypatch.setattr("servekit.cli.status.running", found)
    assert run(["status"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "app:Search  http://127.0.0.1:3000  pid 4, up 1 h 2 min, revision 0123456789ab",
        "  service    process     pid  state    ongoing  finished  memory",
        "  (gateway)  gateway-1   7    ready    2        9         32 MiB",
        "  Search     Search-1    5    ready    3        44        64 MiB",
        "             Search-2    6    unready  0        0         -       ill",
        "             2 restarts",
        "  Lazy       none             asleep",
    ]
    assert run(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["services"][0]["replicas"][0]["finished"] == 44


def test_one_app_is_chosen():
    other = msgspec.structs.replace(APP, url="http://127.0.0.1:4000", pid=9)
    apps = [Here(Path("a"), APP), Here(Path("b"), other)]
    assert the_one(apps[:1]).socket == Path("a")
    assert the_one(apps, url="http://127.0.0.1:4000/").socket == Path("b")
    assert the_one(apps, pid=4).socket == Path("a")
    assert chosen(apps) == apps
    assert chosen(apps, url="http://127.0.0.1:4000", pid=4) == []
    with pytest.raises(
        ConfigError, match=r"2 apps run here; choose one by --app, --url or --pid\n  Search  app:"
    ):
        the_one(apps)
    with pytest.raises(
        ConfigError, match=r"no such app\n  Search  app:Search  http://127.0.0.1:3000  pid 4"
    ):
        the_one(apps, pid=5)
    with pytest.raises(ConfigError, match="no app runs here; servekit serve"):
        the_one([])


def test_nothing_runs(folder, monkeypatch, capsys):
    monkeypatch.setenv("SERVEKIT_RUNTIME_DIR", str(folder))
    assert run(["status"]) == 0
    assert capsys.readouterr().out.startswith("no app runs here")
    assert run(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 min"), (3661, "1 h 1 min"), (90061, "1 d 1 h")],
)
def test_durations(seconds, text):
    assert _duration(seconds) == text
