"""A task scope for tasks that come and go, and work that succeeds together or not at all."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """A scope that owns background tasks: none is lost, none outlives `close()`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, name: str = "") -> asyncio.Task[Any]:
        """Run a coroutine in this scope; an exception it raises goes to the loop's handler."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name or None)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {"message": f"background task {task.get_name()} failed", "exception": error}
            )

    async def close(self) -> None:
        """Cancel what still runs and wait until it has ended."""
        current = asyncio.current_task()
        while tasks := [task for task in self._tasks if task is not current]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def together(*works: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines side by side; the first that raises cancels the others, and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
