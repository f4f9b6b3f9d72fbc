"""The thread pool for sync user code: a hop of a few microseconds, and answers that come in bursts.

`concurrent.futures` wakes the event loop once per result; here all results that are there when
the loop wakes up are delivered in one go.
"""

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from servekit.errors import ServekitError


class _Job:
    __slots__ = ("call", "context", "error", "future", "value")

    def __init__(
        self, call: Callable[[], Any], context: contextvars.Context, future: "asyncio.Future[Any]"
    ) -> None:
        self.call = call
        self.context = context
        self.future = future
        self.value: Any = None
        self.error: BaseException | None = None


class Threads:
    """Runs functions in at most `limit` threads, started when first needed.

    Args:
        loop: The loop that waits for the results.
        limit: Most threads.
        name: Prefix of the threads' names.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int, *, name: str) -> None:
        self._loop = loop
        self._limit = limit
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._finished: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._lock = threading.Lock()
        self._notified = False

    def submit(self, call: Callable[[], Any]) -> "asyncio.Future[Any]":
        """Run `call()` in a thread, in a copy of the caller's context.

        The future resolves when the work has really ended. Cancelling it before the work began
        skips the work; later it has no effect on it.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        self._busy += 1
        if self._busy > len(self._threads) and len(self._threads) < self._limit:
            thread = threading.Thread(
                target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._jobs.put(_Job(call, contextvars.copy_context(), future))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.cancelled():
                try:
                    job.value = job.context.run(job.call)
                except (StopIteration, SystemExit) as error:  # it would end a future, or the loop
                    job.error = ServekitError(f"{type(error).__name__} raised: {error}")
                    job.error.__cause__ = error
                except BaseException as error:  # noqa: BLE001  (goes to the caller)
                    job.error = error
            self._finished.append(job)
            del job  # or its arrays would stay while this thread waits for the next
            with self._lock:
                notify, self._notified = not self._notified, True
            if notify:
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:
                    return  # the loop was closed; nobody waits any more

    def _deliver(self) -> None:
        with self._lock:
            self._notified = False
        finished = self._finished
        while finished:
            job = finished.popleft()
            self._busy -= 1
            if job.future.done():
                continue
            if job.error is None:
                job.future.set_result(job.value)
            else:
                job.future.set_exception(job.error)

    def close(self) -> None:
        """Let the threads end once their work has."""
        for _ in self._threads:
            self._jobs.put(None)
