"""Jobs as their callers and the methods that run them see them.

`JobStatus` and `JobEvent` are the documents that callers get; `RunningJob` is what a method has of
the job that it runs. How jobs are kept and handed out is `servekit/jobs/`.
"""

import math
from collections import deque
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec

from servekit.core.context import RequestContext
from servekit.errors import ServekitError

JobState: TypeAlias = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]

JOBS: Final = "/jobs"
"""Behind a task's path, and its endpoint's name: its jobs."""

FINAL: Final = frozenset[JobState]({"succeeded", "failed", "cancelled", "expired"})
"""States in which nothing happens any more by itself."""

MAX_WAIT_S: Final = 60.0
"""Longest wait for a result in one call."""
WAIT_S: Final = 20.0
"""How long a caller that has time waits for a result in one call, before it makes the next."""
WAIT_SLACK_S: Final = 10.0
"""What such a call may take beside that."""
MAX_LISTED: Final = 1000
"""Most jobs in one list."""
MAX_DETAIL_BYTES: Final = 64 * 1024
"""Largest detail of one progress report, as JSON."""
_MAX_MESSAGE: Final = 1000
_MAX_PENDING: Final = 100


class JobProgress(msgspec.Struct, frozen=True):
    """How far a job is.

    Attributes:
        fraction: From 0 to 1; None where the method can't tell.
        message: For people.
        detail: Any JSON value.
    """

    fraction: float | None = None
    message: str = ""
    detail: Any = None


class JobError(msgspec.Struct, frozen=True):
    """Why an attempt failed: what an endpoint's caller would have got."""

    code: str
    message: str
    reason: str = ""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One job at one moment.

    Attributes:
        id: Its id, 32 hex digits.
        status: Where it is in its life.
        attempt: Number of its latest attempt; 0 before the first.
        submitted_at: When it was accepted.
        started_at: When its latest attempt began.
        finished_at: When it came to its end.
        progress: What the method reported last, in this attempt.
        error: Why the latest attempt failed; of a queued job, the one that is tried again.
        position: Jobs of its task that are queued before it.
        cancelling: It runs, and was asked to stop.
    """

    id: str
    status: JobState
    attempt: int
    submitted_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    progress: JobProgress | None = None
    error: JobError | None = None
    position: int | None = None
    cancelling: bool = False


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a job: of its status, or of its progress.

    Attributes:
        number: Counts a job's events from 1; the id of the server-sent event.
        at: When it happened.
        status: The job's status from then on.
        attempt: The job's attempt.
        progress: Its progress.
        error: As in `JobStatus`.
    """

    number: int
    at: datetime
    status: JobState
    attempt: int
    progress: JobProgress | None = None
    error: JobError | None = None


class JobQuery(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is asked about jobs; the body of a call of `{task}/jobs/…`.

    Attributes:
        id: The job.
        wait_s: Longest wait for a result.
        after: Number of the last event that is known.
        status: Only jobs with this status.
        limit: Most jobs.
    """

    id: str = ""
    wait_s: float = 0.0
    after: int = 0
    status: JobState | None = None
    limit: int = 50


class RunningJob:
    """The job that a method runs. Safe in any thread.

    Attributes:
        id: Stays the same over all attempts.
        attempt: 1 for the first. An attempt may be repeated when its process dies, so use `id` and
            `attempt` to make effects outside of the job idempotent.
    """

    __slots__ = ("_context", "_pending", "attempt", "id")

    def __init__(self, id_: str, attempt: int, context: RequestContext) -> None:
        self.id = id_
        self.attempt = attempt
        self._context = context
        self._pending = deque[JobProgress](maxlen=_MAX_PENDING)

    @property
    def cancelled(self) -> bool:
        """Whether this attempt should stop.

        It was cancelled, is out of time, belongs to another worker by now, or its replica leaves.
        """
        return self._context.cancelled

    def progress(
        self, fraction: float | None = None, message: str = "", detail: object = None
    ) -> None:
        """Report how far the job is; returns at once, and the report is stored within a moment.

        Of more than 100 reports within a quarter of a second the oldest are dropped.

        Args:
            fraction: From 0 to 1, or None.
            message: For people; cut behind 1000 characters.
            detail: Any JSON value, up to 64 KiB.

        Raises:
            ServekitError: The fraction is no share, or the detail is no JSON or too large.
        """
        if fraction is not None and not (math.isfinite(fraction) and 0 <= fraction <= 1):
            raise ServekitError(
                f"job.progress(fraction={fraction}): must lie in [0, 1], or be None"
            )
        try:
            document = msgspec.json.encode(detail)
        except (TypeError, ValueError, RecursionError) as error:
            raise ServekitError(f"job.progress(detail=…): is no JSON value: {error}") from None
        if len(document) > MAX_DETAIL_BYTES:
            raise ServekitError(
                f"job.progress(detail=…): {len(document)} bytes as JSON; at most "
                f"{MAX_DETAIL_BYTES}. Large values belong into the result"
            )
        # Decoded again, so that what the method does to its own object later changes nothing here.
        shown = JobProgress(fraction, message[:_MAX_MESSAGE], msgspec.json.decode(document))
        self._pending.append(shown)

    def take_progress(self) -> list[JobProgress]:
        """Return the reports since the last look; for the runtime."""
        taken: list[JobProgress] = []
        while self._pending:
            taken.append(self._pending.popleft())
        return taken

    def __repr__(self) -> str:
        return f"RunningJob(id={self.id!r}, attempt={self.attempt})"


RUNNING_JOB: ContextVar[RunningJob | None] = ContextVar("servekit_job", default=None)
"""Set by the runtime around a task's method."""


def running_job() -> RunningJob:
    """Return the job that the running method works on.

    Raises:
        ServekitError: There is none: no task runs here.
    """
    job = RUNNING_JOB.get()
    if job is None:
        raise ServekitError(
            "there is no running job here: job() works inside a @sk.task method while it runs a "
            "job; in a test, run the service with sk.local"
        )
    return job
