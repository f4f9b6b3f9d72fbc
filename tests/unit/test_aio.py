"""Task scopes: nothing is lost, nothing outlives them."""

import asyncio

import pytest

from servekit.core.aio import Tasks, together


async def test_a_scope_cancels_what_still_runs():
    tasks = Tasks()
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    task = tasks.spawn(work(), name="work")
    assert task.get_name() == "work"
    await asyncio.sleep(0)
    await tasks.close()
    assert ended == ["work"]
    assert task.cancelled()


async def test_a_failure_in_the_background_reaches_the_loops_handler():
    seen: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: seen.append(context))
    tasks = Tasks()

    async def work() -> None:
        raise ValueError("broken")

    tasks.spawn(work(), name="fragile")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    loop.set_exception_handler(before)
    (context,) = seen
    assert "fragile" in str(context["message"])
    assert isinstance(context["exception"], ValueError)
    await tasks.close()


async def test_a_task_may_close_its_own_scope():
    tasks = Tasks()
    other = tasks.spawn(asyncio.sleep(60))

    async def work() -> str:
        await asyncio.sleep(0)
        await tasks.close()
        return "ended"

    assert await tasks.spawn(work()) == "ended"
    assert other.cancelled()


async def test_what_a_task_spawns_while_it_is_closed_is_closed_too():
    tasks = Tasks()
    late: list[asyncio.Task[None]] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            late.append(tasks.spawn(asyncio.sleep(60)))

    tasks.spawn(work())
    await asyncio.sleep(0)
    await tasks.close()
    assert late[0].done()


async def test_work_together_ends_at_its_first_failure():
    """The others are cancelled, and have ended when it is raised."""
    ended: list[str] = []

    async def work(name: str) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await together(work("a"), fail(), work("b"))
    assert sorted(ended) == ["a", "b"]


async def test_work_together_is_cancelled_together():
    ended: list[str] = []

    async def work(name: str) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(name)

    task = asyncio.ensure_future(together(work("a"), work("b")))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == ["a", "b"]
