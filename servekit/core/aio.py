"""Small asyncio pieces that the standard library lacks: coarse deadlines and a task scope."""

import asyncio
import heapq
import math
from collections.abc import Callable, Coroutine
from typing import Any

from servekit.core.call import now


class Deadlines:
    """Timers for very many calls of which nearly none ever fire.

    Adding and removing one costs a dict operation: all deadlines within one tick share a bucket,
    and only the earliest bucket holds a timer of the event loop. An idle loop is never woken.
    Deadlines fire up to one tick late, never early.

    Args:
        loop: The loop whose thread all methods are called on.
        tick_s: Resolution in seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tick_s: float = 0.005) -> None:
        self._loop = loop
        self._tick_s = tick_s
        self._buckets: dict[int, dict[int, Callable[[], None]]] = {}
        self._ticks: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._armed = math.inf
        self._next_id = 0

    def add(self, when: float, callback: Callable[[], None]) -> tuple[int, int]:
        """Call `callback()` once `when` (on `now`'s clock) has passed; returns a key to discard."""
        tick = math.ceil(when / self._tick_s)
        self._next_id += 1
        bucket = self._buckets.get(tick)
        if bucket is None:
            bucket = self._buckets[tick] = {}
            heapq.heappush(self._ticks, tick)
            if tick < self._armed:
                self._arm(tick)
        bucket[self._next_id] = callback
        return tick, self._next_id

    def discard(self, key: tuple[int, int]) -> None:
        """Forget a deadline; one that has fired, or was discarded before, is no error."""
        tick, id_ = key
        if (bucket := self._buckets.get(tick)) is not None:
            bucket.pop(id_, None)  # an empty bucket stays: the next call soon has the same tick

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._buckets.values())

    def close(self) -> None:
        """Forget all."""
        self._buckets.clear()
        self._ticks.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, tick: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed = tick
        self._timer = self._loop.call_later(max(0.0, tick * self._tick_s - now()), self._fire)

    def _fire(self) -> None:
        self._timer, self._armed = None, math.inf
        current = math.floor(now() / self._tick_s)
        due: list[Callable[[], None]] = []
        while self._ticks and (self._ticks[0] <= current or not self._buckets[self._ticks[0]]):
            due.extend(self._buckets.pop(heapq.heappop(self._ticks)).values())
        if self._ticks:
            self._arm(self._ticks[0])
        for callback in due:
            callback()


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
