"""What keeps jobs: the interface, with the atomicity that each operation needs.

An operation is one transaction: it happens as a whole or not at all, and of two that touch the same
job one sees what the other did. What a job becomes is decided by the transitions of `jobs/job.py`,
applied within that transaction to the job as it is then. "Durable" means that it outlives `kill -9`
and a loss of power once the operation has returned.

A store knows no clock: the time comes in, as seconds since the epoch. It is called from one event
loop. An operation that the storage could not do raises `Unavailable` with reason `job_store`.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from servekit.core.job import JobError, JobEvent, JobProgress, JobState
from servekit.jobs.job import Job


class TaskCount(msgspec.Struct, frozen=True):
    """How many jobs of one task have not ended.

    Attributes:
        queued: All that are queued.
        running: All that are running.
        ready: Those that a worker could claim now: queued and due, or with a lease that has ended.
    """

    service: str
    task: str
    queued: int
    running: int
    ready: int


class Store(Protocol):
    """Keeps jobs for all processes of an app."""

    async def submit(self, job: Job, arguments: bytes) -> Job:
        """Keep a new job and its arguments. Durable.

        Atomic with the look for its key: of all submissions with one key of one task, one job is
        kept, and each of them gets that one.

        Raises:
            Overloaded: `max_queued` jobs of its task are queued.
        """
        ...

    async def claim(
        self, service: str, task: str, *, worker: str, now: float
    ) -> tuple[Job, bytes] | None:
        """Hand the oldest job that is due to a worker, with its arguments; None if there is none.

        Exactly one of all that claim at the same time gets a job. Durable: an attempt's number is
        used once.
        """
        ...

    async def reap(self, service: str, task: str, *, now: float, jitter: float) -> list[Job]:
        """End the attempts whose lease has ended; see `job.lost`. Returns their jobs. Durable."""
        ...

    async def renew(self, id_: str, attempt: int, *, now: float) -> Job | None:
        """Prolong a lease; None if the job is not this attempt's any more. Not durable."""
        ...

    async def progress(
        self, id_: str, attempt: int, steps: Sequence[JobProgress], *, now: float
    ) -> Job | None:
        """Keep progress as one event each; None as for `renew`. Not durable."""
        ...

    async def succeed(self, id_: str, attempt: int, result: bytes, *, now: float) -> Job | None:
        """Keep a result and end the job, as one; None as for `renew`. Durable."""
        ...

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
        """End an attempt; see `job.failed`. None as for `renew`. Durable."""
        ...

    async def give_back(self, id_: str, attempt: int, *, now: float) -> Job | None:
        """Queue a job again for another worker; None as for `renew`. Durable."""
        ...

    async def cancel(self, id_: str, *, now: float) -> Job:
        """Drop a queued job, or mark a running one. Durable.

        Raises:
            NotFound: There is no such job.
            Conflict: It has ended otherwise.
        """
        ...

    async def retry(self, id_: str, *, now: float) -> Job:
        """Queue a job again. Durable.

        Raises:
            NotFound: There is no such job.
            Conflict: It has succeeded, or has not ended.
            Overloaded: `max_queued` jobs of its task are queued.
        """
        ...

    async def get(self, id_: str) -> Job:
        """Return a job.

        Raises:
            NotFound: There is no such job.
        """
        ...

    async def position(self, job: Job) -> int:
        """Return how many jobs of its task are queued before a job."""
        ...

    async def result(self, id_: str) -> bytes:
        """Return what a job that succeeded left.

        Raises:
            NotFound: There is no such job, or no result.
        """
        ...

    async def newest(
        self, service: str, task: str, *, status: JobState | None = None, limit: int = 50
    ) -> list[Job]:
        """Return jobs of a task, the newest first."""
        ...

    async def events_after(self, id_: str, number: int, *, limit: int = 100) -> list[JobEvent]:
        """Return a job's events behind a number, in order; those over `MAX_EVENTS` are gone."""
        ...

    async def purge(self, *, now: float) -> list[Job]:
        """End queued jobs that have expired, and delete finished ones that have; returns the former.

        May do a part of it at a time. One job's change or deletion is atomic.
        """
        ...

    async def counts(self, *, now: float) -> list[TaskCount]:
        """Return the jobs that have not ended, by task."""
        ...

    async def close(self) -> None:
        """Let go of the storage; what is durable stays."""
        ...
