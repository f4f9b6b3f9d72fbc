"""An app takes over the port of another one: whoever connects is answered, and nobody is cut off."""

import asyncio
import signal
import socket
from collections import Counter
from contextlib import AsyncExitStack

from tests.flow.harness import Running, serving, show, until


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


async def serves(app: Running) -> None:
    """Wait until an app itself is ready; the port may be answered by another one."""
    await until(lambda: " is serving at " in app.text, "it is ready")


async def test_one_app_after_another_under_load(tmp_path):
    """Three times, with eight clients that connect anew for each call: not one is lost."""
    port, folder = free_port(), tmp_path / "doors"
    env = {"SERVEKIT_HANDOVER_DIR": str(folder), "SERVEKIT_DRAIN_DELAY_S": "0.3"}
    outcomes: Counter[object] = Counter()

    async def client(app: Running) -> None:
        while True:
            try:
                answer = await app.post("/echo", {"x": 7})
                outcomes[answer.status, answer.json] += 1
            except (OSError, EOFError, TimeoutError) as error:
                outcomes[repr(error)] += 1

    async def more(count: int) -> None:
        wanted = outcomes.total() + count
        await until(lambda: outcomes.total() >= wanted, f"{count} more calls")

    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(serving("graph.py:Root", env=env, port=port))
        clients = [asyncio.create_task(client(old)) for _ in range(8)]
        for _ in range(3):
            new = await stack.enter_async_context(
                serving("graph.py:Root", env=env, port=port, ready=False)
            )
            await serves(new)
            await more(100)
            old.send(signal.SIGTERM)
            assert await old.exit_code() == 0
            await more(100)
            old = new
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        show(str(outcomes))
        assert outcomes.keys() == {(200, 7)}
        old.send(signal.SIGTERM)
        assert await old.exit_code() == 0
    assert [*folder.iterdir()] == []


async def test_who_was_killed_hands_over_nothing(tmp_path):
    """The next one binds the port anew."""
    port, folder = free_port(), tmp_path / "doors"
    env = {"SERVEKIT_HANDOVER_DIR": str(folder)}
    async with serving("graph.py:Root", env=env, port=port) as first:
        first.send(signal.SIGKILL)
        await first.gone()
    async with serving("graph.py:Root", env=env, port=port) as second:
        assert (await second.post("/echo", {"x": 1})).json == 1
