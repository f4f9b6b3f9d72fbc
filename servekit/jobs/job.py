"""A job's life, as pure transitions: a job and the time go in, the job as it is then comes out.

::

    queued ──claim──▶ running ──▶ succeeded | failed | cancelled
      ▲ │                │
      │ ├──▶ cancelled   └── raised, timed out, lease ended: queued again while retries are left
      │ └──▶ expired
      └── retry ── failed | cancelled | expired

A worker holds a job by a lease that it renews. A claim makes a new attempt, and its number is the
worker's token: what an earlier attempt says is refused, so a worker that was stopped and wakes up
can't overwrite what its successor did. A transition that a worker may not make returns None; one
that a caller may not make raises `Conflict`.

Times are seconds since the epoch: they must outlive the process and the machine's uptime.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from servekit.core.call import Buffer, Payload
from servekit.core.job import FINAL, JobError, JobEvent, JobProgress, JobState, JobStatus
from servekit.errors import Conflict
from servekit.spec.policy import TaskPolicy

LEASE_S: Final = 15.0
"""How long a worker may be silent before its job is handed to another one."""
MAX_BACKOFF_S: Final = 600.0
MAX_EVENTS: Final = 10_000
"""Events of one job that are kept; the oldest go first."""

_LOST: Final = JobError(
    "execution_error", "the process that ran the job died, or stood still", "worker_lost"
)
_EXPIRED: Final = JobError("expired", "the job was queued for longer than its time to live")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job as it is kept, without its arguments and its result.

    Attributes:
        id: 32 hex digits, at random: who knows it may ask for the job.
        service: The service's name in the app.
        task: The task's name in the service.
        policy: Its task's policy when it was submitted.
        submitted_at: When it was accepted.
        due: Queued: when it may be claimed. Running: when the lease ends. Else None.
        expires_at: Queued: when it expires. Finished: when it is deleted. Else None.
        key: The submitter's idempotency key, or "".
        digest: Of the arguments, where there is a key.
        request_id: Of the call that submitted it.
        traceparent: The same.
        status: Where it is in its life.
        attempt: Claims so far.
        failures: Attempts that counted against the retries.
        waited_s: Seconds from when the latest attempt could have begun until it did.
        worker: Who made the latest attempt.
        cancelling: It runs, and should stop.
        events: Number of its latest event.
        changed_at: When that was.
    """

    id: str
    service: str
    task: str
    policy: TaskPolicy
    submitted_at: float
    due: float | None
    expires_at: float | None
    key: str = ""
    digest: str = ""
    request_id: str = ""
    traceparent: str = ""
    status: JobState = "queued"
    attempt: int = 0
    failures: int = 0
    started_at: float | None = None
    finished_at: float | None = None
    waited_s: float = 0.0
    worker: str = ""
    cancelling: bool = False
    progress: JobProgress | None = None
    error: JobError | None = None
    events: int = 1
    changed_at: float = 0.0


def new_job(
    service: str,
    task: str,
    policy: TaskPolicy,
    *,
    now: float,
    key: str = "",
    digest: str = "",
    request_id: str = "",
    traceparent: str = "",
) -> Job:
    """Return a job that is about to be queued."""
    return Job(
        id=os.urandom(16).hex(),
        service=service,
        task=task,
        policy=policy,
        submitted_at=now,
        due=now,
        expires_at=now + policy.ttl_s,
        key=key,
        digest=digest,
        request_id=request_id,
        traceparent=traceparent,
        changed_at=now,
    )


# ---- what a worker does


def claimed(job: Job, now: float, worker: str) -> Job | None:
    """Hand a queued job that is due to a worker."""
    if job.status != "queued" or job.due is None or job.due > now:
        return None
    return _changed(
        job,
        now,
        status="running",
        attempt=job.attempt + 1,
        worker=worker,
        started_at=now,
        waited_s=now - job.due,
        due=now + LEASE_S,
        expires_at=None,
        progress=None,
        error=None,
    )


def holds(job: Job, attempt: int) -> bool:
    """Whether a worker's attempt is the one that counts."""
    return job.status == "running" and job.attempt == attempt


def renewed(job: Job, attempt: int, now: float) -> Job | None:
    """Prolong a lease."""
    return replace(job, due=now + LEASE_S) if holds(job, attempt) else None


def progressed(job: Job, attempt: int, progress: JobProgress, now: float) -> Job | None:
    """Take note of progress; that prolongs the lease, too."""
    if not holds(job, attempt):
        return None
    return _changed(job, now, progress=progress, due=now + LEASE_S)


def succeeded(job: Job, attempt: int, now: float) -> Job | None:
    """End an attempt well; the result of one that was to be cancelled is dropped."""
    if not holds(job, attempt):
        return None
    return _finished(job, now, "cancelled" if job.cancelling else "succeeded")


def failed(
    job: Job, attempt: int, error: JobError, now: float, *, jitter: float, permanent: bool = False
) -> Job | None:
    """End an attempt that raised or took too long: queue the job again, or end it.

    Args:
        job: The job.
        attempt: The worker's.
        error: Why.
        now: The time.
        jitter: From 0 to 1, at random; shortens the wait by up to a half, so that jobs that failed
            together do not come back together.
        permanent: Another attempt would fail as well.
    """
    return _failed(job, error, now, jitter, permanent=permanent) if holds(job, attempt) else None


def lost(job: Job, now: float, *, jitter: float) -> Job | None:
    """End the attempt of a worker that did not renew its lease; counts against the retries.

    So a job that kills its worker is not handed out for ever.
    """
    if job.status != "running" or job.due is None or job.due > now:
        return None
    return _failed(job, _LOST, now, jitter, permanent=False)


def given_back(job: Job, attempt: int, now: float) -> Job | None:
    """Queue the job of a worker that has to leave; does not count against the retries."""
    if not holds(job, attempt):
        return None
    return _finished(job, now, "cancelled") if job.cancelling else _queued(job, now)


# ---- what a caller does


def cancelled(job: Job, now: float) -> Job:
    """Drop a queued job, or ask a running one to stop.

    Raises:
        Conflict: It has ended otherwise.
    """
    if job.status == "queued":
        return _finished(job, now, "cancelled")
    if job.status == "running":
        return replace(job, cancelling=True)
    if job.status == "cancelled":
        return job
    raise Conflict(f"job {job.id} has {job.status} already", reason=job.status, started=False)


def retried(job: Job, now: float) -> Job:
    """Queue a job again, with all its retries.

    Raises:
        Conflict: It has succeeded, or has not ended.
    """
    if job.status not in ("failed", "cancelled", "expired"):
        raise Conflict(
            f"job {job.id} is {job.status}; only one that failed, was cancelled or has expired can "
            "be tried again",
            reason=job.status,
            started=False,
        )
    return replace(_queued(job, now, error=None), failures=0)


# ---- what time does


def expired(job: Job, now: float) -> Job | None:
    """End a job that was queued for longer than its time to live."""
    if job.status != "queued" or job.expires_at is None or job.expires_at > now:
        return None
    return _finished(job, now, "expired", error=_EXPIRED)


# ---- parts of the above


def _failed(job: Job, error: JobError, now: float, jitter: float, *, permanent: bool) -> Job:
    if job.cancelling:
        return _finished(job, now, "cancelled")
    failures = job.failures + 1
    job = replace(job, failures=failures)
    if permanent or failures > job.policy.retries:
        return _finished(job, now, "failed", error=error)
    delay = min(job.policy.backoff_s * 2.0 ** min(failures - 1, 64), MAX_BACKOFF_S)
    return _queued(job, now, due=now + delay * (1 - jitter / 2), error=error)


def _queued(job: Job, now: float, *, due: float = 0.0, error: JobError | None = None) -> Job:
    due = max(now, due)
    return _changed(
        job,
        now,
        status="queued",
        due=due,
        expires_at=due + job.policy.ttl_s,
        finished_at=None,
        cancelling=False,
        progress=None,
        error=error,
    )


def _finished(job: Job, now: float, status: JobState, *, error: JobError | None = None) -> Job:
    return _changed(
        job,
        now,
        status=status,
        due=None,
        expires_at=now + job.policy.ttl_s,
        finished_at=now,
        cancelling=False,
        error=error,
    )


def _changed(job: Job, now: float, **fields: object) -> Job:
    """Return a job with a change that its callers are told of."""
    return replace(job, events=job.events + 1, changed_at=now, **fields)


# ---- how it looks from outside


def status_of(job: Job, position: int | None = None) -> JobStatus:
    """Return the job as its callers see it."""
    return JobStatus(
        id=job.id,
        status=job.status,
        attempt=job.attempt,
        submitted_at=_time(job.submitted_at),
        started_at=None if job.started_at is None else _time(job.started_at),
        finished_at=None if job.finished_at is None else _time(job.finished_at),
        progress=job.progress,
        error=job.error,
        position=position,
        cancelling=job.cancelling,
    )


def event_of(job: Job) -> JobEvent:
    """Return a job's latest event."""
    return JobEvent(
        number=job.events,
        at=_time(job.changed_at),
        status=job.status,
        attempt=job.attempt,
        progress=job.progress,
        error=job.error,
    )


def is_final(job: Job) -> bool:
    """Whether nothing happens to the job any more by itself."""
    return job.status in FINAL


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


# ---- payloads at rest


class _Kept(msgspec.Struct, array_like=True, frozen=True):
    content_type: str
    internal: bool
    segments: Sequence[bytes]


def pack_payload(payload: Payload, *, internal: bool) -> bytes:
    """Return a payload as bytes to be kept, with whether a part of the app made it."""
    parts: list[Buffer] = list(payload.segments)
    return msgspec.msgpack.encode((payload.content_type, internal, parts))


def unpack_payload(data: bytes) -> tuple[Payload, bool]:
    """Return what `pack_payload` took."""
    kept = msgspec.msgpack.decode(data, type=_Kept)
    return Payload(kept.content_type, kept.segments), kept.internal
