"""A `Store` in dicts: the plainest thing that keeps the interface's promises, but for durability."""

from collections.abc import Sequence

from servekit.core.job import JobError, JobEvent, JobProgress, JobState
from servekit.errors import NotFound, Overloaded
from servekit.jobs import job as life
from servekit.jobs.job import MAX_EVENTS, Job
from servekit.jobs.store import Store, TaskCount


class MemoryStore(Store):
    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}  # in the order of submission
        self.arguments: dict[str, bytes] = {}
        self.results: dict[str, bytes] = {}
        self.events: dict[str, list[JobEvent]] = {}

    def _put(self, job: Job) -> Job:
        self.jobs[job.id] = job
        told = self.events.setdefault(job.id, [])
        if not told or told[-1].number < job.events:
            told.append(life.event_of(job))
        del told[:-MAX_EVENTS]
        return job

    def _of(self, service: str, task: str) -> list[Job]:
        return [j for j in self.jobs.values() if (j.service, j.task) == (service, task)]

    def _check_room(self, job: Job) -> None:
        queued = [j for j in self._of(job.service, job.task) if j.status == "queued"]
        if len(queued) >= job.policy.max_queued:
            raise Overloaded("full", reason="queue_full", started=False)

    async def submit(self, job: Job, arguments: bytes) -> Job:
        for known in self._of(job.service, job.task):
            if job.key and known.key == job.key:
                return known
        self._check_room(job)
        self.arguments[job.id] = arguments
        return self._put(job)

    async def claim(
        self, service: str, task: str, *, worker: str, now: float
    ) -> tuple[Job, bytes] | None:
        for job in self._of(service, task):
            taken = life.claimed(job, now, worker)
            if taken is not None and job.expires_at is not None and job.expires_at > now:
                return self._put(taken), self.arguments[job.id]
        return None

    async def reap(self, service: str, task: str, *, now: float, jitter: float) -> list[Job]:
        ended = [life.lost(job, now, jitter=jitter) for job in self._of(service, task)]
        return [self._put(job) for job in ended if job is not None]

    def _change(self, id_: str, after: Job | None) -> Job | None:
        return None if after is None else self._put(after)

    async def renew(self, id_: str, attempt: int, *, now: float) -> Job | None:
        job = self.jobs.get(id_)
        return job and self._change(id_, life.renewed(job, attempt, now))

    async def progress(
        self, id_: str, attempt: int, steps: Sequence[JobProgress], *, now: float
    ) -> Job | None:
        job = self.jobs.get(id_)
        for step in steps:
            job = job and self._change(id_, life.progressed(job, attempt, step, now))
        return job

    async def succeed(self, id_: str, attempt: int, result: bytes, *, now: float) -> Job | None:
        job = self.jobs.get(id_)
        after = job and self._change(id_, life.succeeded(job, attempt, now))
        if after and after.status == "succeeded":
            self.results[id_] = result
        return after

    async def fail(
        self,
        id_: str,
        attempt: int,
        error: JobError,
        *,
        now: float,
        jitter: float,
        permanent: bool = False,
    ) -> Job | None:
        job = self.jobs.get(id_)
        return job and self._change(
            id_, life.failed(job, attempt, error, now, jitter=jitter, permanent=permanent)
        )

    async def give_back(self, id_: str, attempt: int, *, now: float) -> Job | None:
        job = self.jobs.get(id_)
        return job and self._change(id_, life.given_back(job, attempt, now))

    async def cancel(self, id_: str, *, now: float) -> Job:
        return self._put(life.cancelled(await self.get(id_), now))

    async def retry(self, id_: str, *, now: float) -> Job:
        job = await self.get(id_)
        again = life.retried(job, now)
        self._check_room(job)
        return self._put(again)

    async def get(self, id_: str) -> Job:
        if id_ not in self.jobs:
            raise NotFound(f"there is no job {id_!r}")
        return self.jobs[id_]

    async def position(self, job: Job) -> int:
        queued = [j.id for j in self._of(job.service, job.task) if j.status == "queued"]
        return queued.index(job.id)

    async def result(self, id_: str) -> bytes:
        if id_ not in self.results:
            raise NotFound(f"there is no result of job {id_!r}")
        return self.results[id_]

    async def newest(
        self, service: str, task: str, *, status: JobState | None = None, limit: int = 50
    ) -> list[Job]:
        found = [j for j in self._of(service, task) if status in (None, j.status)]
        return found[::-1][:limit]

    async def events_after(self, id_: str, number: int, *, limit: int = 100) -> list[JobEvent]:
        return [e for e in self.events.get(id_, []) if e.number > number][:limit]

    async def purge(self, *, now: float) -> list[Job]:
        ended: list[Job] = []
        for job in list(self.jobs.values()):
            if job.expires_at is None or job.expires_at > now:
                continue
            if (expired := life.expired(job, now)) is not None:
                ended.append(self._put(expired))
            else:
                for table in (self.jobs, self.arguments, self.results, self.events):
                    table.pop(job.id, None)
        return ended

    async def counts(self, *, now: float) -> list[TaskCount]:
        counts: dict[tuple[str, str], list[int]] = {}
        for job in self.jobs.values():
            if job.due is not None:
                count = counts.setdefault((job.service, job.task), [0, 0, 0])
                count[0] += job.status == "queued"
                count[1] += job.status == "running"
                count[2] += job.due <= now
        return [TaskCount(*task, *count) for task, count in sorted(counts.items())]

    async def close(self) -> None:
        pass
