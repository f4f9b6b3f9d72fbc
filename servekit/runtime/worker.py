"""A replica's worker for one task: claims jobs while there is room, and runs them.

It looks at once when a job was submitted here, or one has ended, and every half second for what other
processes did. A job takes one of the service's slots; calls that wait for one go first.
"""

import asyncio
from random import random
from time import time
from typing import Final

from servekit.core.aio import Pulse, Tasks
from servekit.core.call import now
from servekit.errors import Unavailable
from servekit.jobs.job import Job, is_final
from servekit.jobs.store import Store
from servekit.observe.families import Families
from servekit.observe.log import get_logger
from servekit.runtime.attempt import Attempt
from servekit.runtime.meter import Meter
from servekit.runtime.slots import Slots
from servekit.runtime.threads import Threads
from servekit.spec.definition import EndpointDefinition

POLL_S: Final = 0.5
_PURGE_S: Final = 10.0
_LEAVE_S: Final = 1.5
_log = get_logger("servekit.replica")


class Worker:
    """Runs the jobs of one task.

    Args:
        instance: The service object.
        definition: The task.
        store: Keeps the jobs.
        pulse: Beaten when something was stored.
        slots: The service's.
        threads: Where a sync method runs.
        meter: Gets the figures of what runs.
        families: Gets those of jobs.
        service: Name of the service in the graph.
        replica: Id of the replica.
    """

    def __init__(
        self,
        instance: object,
        definition: EndpointDefinition,
        store: Store,
        pulse: Pulse,
        slots: Slots,
        threads: Threads,
        meter: Meter,
        families: Families,
        *,
        service: str,
        replica: str,
    ) -> None:
        assert definition.task is not None
        self._instance = instance
        self._definition = definition
        self._policy = definition.task
        self._store = store
        self._pulse = pulse
        self._slots = slots
        self._threads = threads
        self._meter = meter
        self._service = service
        self._replica = replica
        self._tasks = Tasks()
        self._running: dict[asyncio.Task[None], Attempt] = {}
        self._claiming: asyncio.Task[None] | None = None
        self._draining = False
        labels = {"service": service, "endpoint": definition.name}
        self._ended = families.jobs_ended
        self._queue_seconds = families.job_queue_seconds.labels(**labels)
        self._run_seconds = families.job_run_seconds.labels(**labels)

    def start(self) -> None:
        """Claim jobs from now on."""
        name = f"jobs of {self._definition.where}"
        self._claiming = self._tasks.spawn(self._claim_all(), name=name)

    def count(self, job: Job) -> None:
        """Count a job if it has ended."""
        if is_final(job):
            self._ended.labels(service=job.service, endpoint=job.task, status=job.status).inc()

    def drain(self) -> None:
        """Claim no more jobs; those that run go on."""
        self._draining = True
        self._pulse.beat()

    async def idle(self) -> None:
        """Wait until no job runs here; `drain` it first."""
        if self._claiming is not None:
            await asyncio.wait([self._claiming])
        while self._running:
            await asyncio.wait(list(self._running))

    async def close(self) -> None:
        """Give back what still runs."""
        self.drain()
        if self._claiming is not None:
            await asyncio.wait([self._claiming])  # a claim is not cut short: nobody would have it
        for attempt in self._running.values():
            attempt.leave()
        if self._running:
            await asyncio.wait(list(self._running), timeout=_LEAVE_S)
        await self._tasks.close()

    # -- claiming ----------------------------------------------------------------------------

    async def _claim_all(self) -> None:
        purge_at = now()
        while not self._draining:
            try:
                await self._reap()
                await self._fill()
                if now() >= purge_at:
                    purge_at = now() + _PURGE_S
                    for job in await self._store.purge(now=time()):
                        self.count(job)
            except Unavailable as error:
                _log.error("no jobs claimed", task=self._definition.where, why=error.message)
            await self._pulse.wait(POLL_S)

    async def _reap(self) -> None:
        """Queue again, or end, what workers that died or stood still have left."""
        lost = await self._store.reap(
            self._service,
            self._definition.name,
            now=time(),
            jitter=random(),  # noqa: S311
        )
        for job in lost:
            _log.warning("a worker has lost its job", job=job.id, worker=job.worker, now=job.status)
            self.count(job)
        if lost:
            self._pulse.beat()

    async def _fill(self) -> None:
        """Claim while there is room and something to claim."""
        while not self._draining and len(self._running) < self._policy.max_concurrency:
            if not self._slots.take():
                return
            claimed = None
            try:
                claimed = await self._store.claim(
                    self._service,
                    self._definition.name,
                    worker=self._replica,
                    now=time(),
                )
            finally:
                if claimed is None:
                    self._slots.release()
            if claimed is None:
                return
            self._begin(*claimed)

    def _begin(self, job: Job, arguments: bytes) -> None:
        attempt = Attempt(
            job,
            arguments,
            self._definition,
            self._instance,
            self._threads,
            self._store,
            self._pulse,
        )
        task = self._tasks.spawn(self._run(job, attempt), name=f"attempt at {job.id}")
        self._running[task] = attempt
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        del self._running[task]
        self._pulse.beat()

    async def _run(self, job: Job, attempt: Attempt) -> None:
        meter, began = self._meter, now()
        meter.ongoing += 1
        meter.running += 1
        self._queue_seconds.observe(job.waited_s)
        self._pulse.beat()
        try:
            after = await attempt.run()
            if after is not None:
                self.count(after)
        finally:
            self._slots.release()
            meter.ongoing -= 1
            meter.running -= 1
            meter.finished += 1
            self._run_seconds.observe(now() - began)
