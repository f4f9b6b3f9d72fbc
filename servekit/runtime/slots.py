"""Bounded concurrency with a bounded queue: who may run now, who waits, who is refused."""

import asyncio
from collections import deque

from servekit.errors import Overloaded


class Slots:
    """A semaphore whose queue has an end.

    A slot is taken with `take` or `wait` and held until the work really ends, also when its caller has
    left meanwhile; only then is it given back with `release`. First come, first served.

    Args:
        limit: Slots.
        max_queued: How many may wait.
        where: Name for messages.
    """

    def __init__(self, limit: int, max_queued: int, where: str) -> None:
        self.limit = limit
        self.max_queued = max_queued
        self.running = 0
        self._where = where
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.queued = 0

    def check(self, retry_after_s: float) -> None:
        """Refuse early, before a body is decoded for nothing.

        Raises:
            Overloaded: No slot is free and the queue is full.
        """
        if self.running >= self.limit and self.queued >= self.max_queued:
            raise Overloaded(
                f"{self._where}: {self.running} calls run and {self.queued} wait, which is the limit",
                reason="queue_full",
                retry_after_s=max(0.05, retry_after_s),
                started=False,
            )

    def take(self) -> bool:
        """Take a slot if one is free and nobody waits for it."""
        if self.running < self.limit and not self.queued:
            self.running += 1
            return True
        return False

    async def wait(self) -> None:
        """Take a slot when it is this caller's turn; cancelling the wait leaves the queue."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.queued += 1
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self.queued -= 1
                self._hand_over()  # somebody may have queued behind this one while slots were free
            else:
                self.release()  # the slot was handed over in the same turn
            raise

    def release(self) -> None:
        """Give a slot back; the longest waiter gets it."""
        self.running -= 1
        if self._waiters:
            self._hand_over()

    def _hand_over(self) -> None:
        while self._waiters and self.running < self.limit:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.queued -= 1
                self.running += 1
                waiter.set_result(None)
