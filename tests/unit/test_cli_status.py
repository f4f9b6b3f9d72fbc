import asyncio
import json
import socket
import tempfile
from pathlib import Path

import pytest

from servekit.cli.main import run
from servekit.cli.status import _duration, running
from servekit.engine.control import AppStatus, ReplicaStatus, ServiceStatus, handler
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, Listener

APP = AppStatus(
    target="app:Search",
    url="http://127.0.0.1:3000",
    pid=4,
    revision="0123456789ab",
    uptime_s=3723.0,
    services=[
        ServiceStatus(
            name="Search",
            version="1",
            state="up",
            desired=1,
            restarts=2,
            replicas=[
                ReplicaStatus(
                    id="Search-1", pid=5, state="ready", ongoing=3, finished=44, rss=2**26
                ),
                ReplicaStatus(
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
        ServiceStatus(name="Lazy", version="1", state="asleep", desired=0, restarts=0, replicas=[]),
    ],
)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="sk", dir="/tmp") as path:
        yield Path(path)


def make(folder: Path, name: str) -> Path:
    (folder / name).mkdir(mode=0o700)
    return folder / name / "admin.sock"


async def ask_beside_others(folder: Path) -> list[AppStatus]:
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
        return await running(folder)
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
    assert asyncio.run(ask_beside_others(folder)) == [APP]


def test_a_table_for_people(folder, monkeypatch, capsys):
    async def found(_: Path) -> list[AppStatus]:
        return [APP]

    monkeypatch.setattr("servekit.cli.status.running", found)
    assert run(["status"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "app:Search  http://127.0.0.1:3000  pid 4, up 1 h 2 min, revision 0123456789ab",
        "  service  replica     pid  state    ongoing  finished  memory",
        "  Search   Search-1    5    ready    3        44        64 MiB",
        "           Search-2    6    unready  0        0         -       ill",
        "           2 restarts",
        "  Lazy     none             asleep",
    ]
    assert run(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["services"][0]["replicas"][0]["finished"] == 44


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
