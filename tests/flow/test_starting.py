"""Replicas that load in turns, and apps that this machine can't hold."""

from tests.flow.harness import serving

SOURCE = """
import os
import time
from pathlib import Path

import servekit as sk


def note(text: str) -> None:
    with Path(os.environ["TRACE"]).open("ab", buffering=0) as trace:
        trace.write(f"{text}\\n".encode())


class Loads:
    def __init__(self) -> None:
        note(f"+ {type(self).__name__}")
        time.sleep(0.2)
        note(f"- {type(self).__name__}")


@sk.service(replicas=2)
class Child(Loads):
    @sk.endpoint
    def ask(self) -> int:
        return 1


@sk.service(replicas=2)
class Root(Loads):
    child = sk.depends(Child)

    @sk.setup
    async def look(self) -> None:
        assert await self.child.ask.remote() == 1

    @sk.endpoint
    def ask(self) -> int:
        return 2


@sk.service(memory="100TiB", replicas=2)
class Huge(Loads): ...
"""


async def test_dependencies_load_first_and_no_more_at_once_than_may(tmp_path):
    file = tmp_path / "app.py"
    file.write_text(SOURCE)
    async with serving(f"{file}:Root", env={"SERVEKIT_START_PARALLEL": "1"}) as app:
        assert app.traced() == ["+ Child", "- Child"] * 2 + ["+ Root", "- Root"] * 2
        assert (await app.post("/ask")).json == 2


async def test_memory_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    file = tmp_path / "app.py"
    file.write_text(SOURCE)
    async with serving(f"{file}:Huge", ready=False) as app:
        assert await app.exit_code() == 1
        assert "asks for 204800 GiB of memory" in app.text
        assert "Huge 2 of 102400 GiB" in app.text
        assert app.traced() == []
