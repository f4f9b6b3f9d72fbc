"""A `Store` in one SQLite file that all processes of an app on this machine share.

SQLite's write-ahead log lets readers go on while one process writes, and writers wait for each other
for up to `_BUSY_S`. Every transaction that changes something begins with `BEGIN IMMEDIATE`: from
then on nobody else writes, so reading a job, asking a transition what becomes of it, and writing that
is one step. Durable ones are on the disk when they return (`synchronous=FULL`); renewals and progress
are handed to the kernel only.

Not for network file systems: the log needs memory shared between its processes.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from typing_extensions import override

from servekit.core.job import JobError, JobEvent, JobProgress, JobState
from servekit.errors import ConfigError, NotFound, Overloaded, Unavailable
from servekit.jobs import job as life
from servekit.jobs.job import MAX_EVENTS, Job
from servekit.jobs.store import Store, TaskCount

T = TypeVar("T")

FILE: Final = "jobs.sqlite"
"""Name of the file in its folder."""
MEMORY: Final = ":memory:"
"""In place of a path: kept by this store alone, until it is closed."""

_VERSION: Final = 1
_BUSY_S: Final = 10.0
_PURGED_AT_ONCE: Final = 500

# What is looked for has a column; the job itself is `document`, so that a new field needs no new
# schema. `seq` is the order of submission.
_SCHEMA: Final = """
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    service TEXT NOT NULL,
    task TEXT NOT NULL,
    key TEXT,
    status TEXT NOT NULL,
    due REAL,
    expires_at REAL,
    document TEXT NOT NULL
);
CREATE INDEX jobs_by_status ON jobs (service, task, status, seq);
CREATE INDEX jobs_by_age ON jobs (service, task, seq);
CREATE INDEX jobs_open ON jobs (service, task, status, due) WHERE due IS NOT NULL;
CREATE INDEX jobs_expiring ON jobs (expires_at) WHERE expires_at IS NOT NULL;
CREATE UNIQUE INDEX jobs_by_key ON jobs (service, task, key) WHERE key IS NOT NULL;
CREATE TABLE arguments (
    seq INTEGER PRIMARY KEY REFERENCES jobs ON DELETE CASCADE,
    payload BLOB NOT NULL
);
CREATE TABLE results (
    seq INTEGER PRIMARY KEY REFERENCES jobs ON DELETE CASCADE,
    payload BLOB NOT NULL
);
CREATE TABLE events (
    seq INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE,
    number INTEGER NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (seq, number)
) WITHOUT ROWID;
"""

_decode_job = msgspec.json.Decoder(Job).decode
_decode_event = msgspec.json.Decoder(JobEvent).decode

_Transition = Callable[[Job], Job | None]


class SqliteStore(Store):
    """A `Store` in a file.

    Its connection belongs to one thread of its own, so that the event loop never waits for a disk.

    Args:
        path: The file; made, with mode 0600, if it is not there. `MEMORY` has none.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = str(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="servekit-jobs")
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Open the file.

        Raises:
            ConfigError: It can't be opened, is no such file, or is of another version of servekit.
        """
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._open)
        except BaseException as error:
            await self.close()
            if isinstance(error, sqlite3.Error | OSError):
                raise ConfigError(f"{self._path} can't keep jobs: {error}") from error
            raise

    def _open(self) -> None:
        if self._path != MEMORY:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        db = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
        self._connection = db
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA foreign_keys = ON")
        with self._transaction(durable=True):
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {_VERSION}")
            elif version != _VERSION:
                raise ConfigError(
                    f"{self._path} has schema {version}, and this servekit knows {_VERSION}; use "
                    "the version that wrote it, or another jobs_dir"
                )

    @override
    async def close(self) -> None:
        """Close the file."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- transactions ------------------------------------------------------------------------

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise Unavailable(
                f"the job store failed: {error}",
                reason="job_store",
                retry_after_s=1.0,
                started=False,
            ) from error

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            raise sqlite3.ProgrammingError("it is closed")
        return self._connection

    @contextmanager
    def _transaction(self, *, durable: bool) -> Generator[sqlite3.Connection]:
        """Write, alone; what is durable is flushed with all that was written before it."""
        db = self._db
        db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # a full disk has rolled back already
                db.execute("ROLLBACK")
            raise

    def _find(self, where: str, *values: object) -> tuple[int, Job] | None:
        row = self._db.execute(f"SELECT seq, document FROM jobs WHERE {where}", values).fetchone()  # noqa: S608
        return None if row is None else (row[0], _decode_job(row[1]))

    def _put(self, seq: int, job: Job) -> Job:
        """Write a job, and its latest event."""
        self._db.execute(
            "UPDATE jobs SET status = ?, due = ?, expires_at = ?, document = ? WHERE seq = ?",
            (job.status, job.due, job.expires_at, msgspec.json.encode(job).decode(), seq),
        )
        # A renewal or a mark is no event: then this one is there already.
        self._db.execute(
            "INSERT OR IGNORE INTO events VALUES (?, ?, ?)",
            (seq, job.events, msgspec.json.encode(life.event_of(job)).decode()),
        )
        return job

    def _change(
        self, id_: str, transition: _Transition, *, durable: bool = True, result: bytes = b""
    ) -> Job | None:
        """Apply a transition; None if there is no such job, or it may not be made."""
        with self._transaction(durable=durable) as db:
            found = self._find("id = ?", id_)
            if found is None or (job := transition(found[1])) is None:
                return None
            if job.status == "succeeded":
                db.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", (found[0], result))
            return self._put(found[0], job)

    def _check_room(self, job: Job) -> None:
        (queued,) = self._db.execute(
            "SELECT count(*) FROM jobs WHERE service = ? AND task = ? AND status = 'queued'",
            (job.service, job.task),
        ).fetchone()
        if queued >= job.policy.max_queued:
            raise Overloaded(
                f"{job.service}.{job.task}: {queued} jobs are queued, which is the limit",
                reason="queue_full",
                retry_after_s=1.0,
                started=False,
            )

    # -- what workers do ---------------------------------------------------------------------

    @override
    async def claim(
        self, service: str, task: str, *, worker: str, now: float
    ) -> tuple[Job, bytes] | None:
        return await self._do(partial(self._claim, service, task, worker, now))

    def _claim(self, service: str, task: str, worker: str, now: float) -> tuple[Job, bytes] | None:
        def find() -> tuple[int, Job] | None:
            due = "service = ? AND task = ? AND status = 'queued' AND due <= ? AND expires_at > ?"
            return self._find(f"{due} ORDER BY seq LIMIT 1", service, task, now, now)

        if find() is None:
            return None  # without the write lock, as most looks find nothing
        with self._transaction(durable=True) as db:
            found = find()
            job = None if found is None else life.claimed(found[1], now, worker)
            if found is None or job is None:
                return None
            self._put(found[0], job)
            (arguments,) = db.execute(
                "SELECT payload FROM arguments WHERE seq = ?", (found[0],)
            ).fetchone()
            return job, arguments

    @override
    async def reap(self, service: str, task: str, *, now: float, jitter: float) -> list[Job]:
        return await self._do(partial(self._reap, service, task, now, jitter))

    def _reap(self, service: str, task: str, now: float, jitter: float) -> list[Job]:
        query = (
            "SELECT seq, document FROM jobs "
            "WHERE service = ? AND task = ? AND status = 'running' AND due <= ? ORDER BY seq"
        )
        if self._db.execute(query, (service, task, now)).fetchone() is None:
            return []
        with self._transaction(durable=True) as db:
            rows = db.execute(query, (service, task, now)).fetchall()
            jobs = ((seq, life.lost(_decode_job(row), now, jitter=jitter)) for seq, row in rows)
            return [self._put(seq, job) for seq, job in jobs if job is not None]

    @override
    async def renew(self, id_: str, attempt: int, *, now: float) -> Job | None:
        def transition(job: Job) -> Job | None:
            return life.renewed(job, attempt, now)

        return await self._do(partial(self._change, id_, transition, durable=False))

    @override
    async def progress(
        self, id_: str, attempt: int, steps: Sequence[JobProgress], *, now: float
    ) -> Job | None:
        return await self._do(partial(self._progress, id_, attempt, steps, now))

    def _progress(
        self, id_: str, attempt: int, steps: Sequence[JobProgress], now: float
    ) -> Job | None:
        with self._transaction(durable=False) as db:
            found = self._find("id = ?", id_)
            if found is None:
                return None
            seq, job = found
            for step in steps:
                after = life.progressed(job, attempt, step, now)
                if after is None:
                    return None
                job = self._put(seq, after)
            db.execute(
                "DELETE FROM events WHERE seq = ? AND number <= ?", (seq, job.events - MAX_EVENTS)
            )
            return job

    @override
    async def succeed(self, id_: str, attempt: int, result: bytes, *, now: float) -> Job | None:
        def transition(job: Job) -> Job | None:
            return life.succeeded(job, attempt, now)

        return await self._do(partial(self._change, id_, transition, result=result))

    @override
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
        def transition(job: Job) -> Job | None:
            return life.failed(job, attempt, error, now, jitter=jitter, permanent=permanent)

        return await self._do(partial(self._change, id_, transition))

    @override
    async def give_back(self, id_: str, attempt: int, *, now: float) -> Job | None:
        def transition(job: Job) -> Job | None:
            return life.given_back(job, attempt, now)

        return await self._do(partial(self._change, id_, transition))

    # -- what callers do ---------------------------------------------------------------------

    @override
    async def submit(self, job: Job, arguments: bytes) -> Job:
        return await self._do(partial(self._submit, job, arguments))

    def _submit(self, job: Job, arguments: bytes) -> Job:
        with self._transaction(durable=True) as db:
            if job.key:
                same = self._find(
                    "service = ? AND task = ? AND key = ?", job.service, job.task, job.key
                )
                if same is not None:
                    return same[1]
            self._check_room(job)
            cursor = db.execute(
                "INSERT INTO jobs (id, service, task, key, status, document) "
                "VALUES (?, ?, ?, ?, ?, '')",
                (job.id, job.service, job.task, job.key or None, job.status),
            )
            seq = cursor.lastrowid
            assert seq is not None
            db.execute("INSERT INTO arguments VALUES (?, ?)", (seq, arguments))
            return self._put(seq, job)

    @override
    async def cancel(self, id_: str, *, now: float) -> Job:
        job = await self._do(partial(self._change, id_, partial(life.cancelled, now=now)))
        return _there(job, id_)

    @override
    async def retry(self, id_: str, *, now: float) -> Job:
        def transition(job: Job) -> Job:
            again = life.retried(job, now)
            self._check_room(job)
            return again

        return _there(await self._do(partial(self._change, id_, transition)), id_)

    @override
    async def get(self, id_: str) -> Job:
        found = await self._do(partial(self._find, "id = ?", id_))
        return _there(None if found is None else found[1], id_)

    @override
    async def position(self, job: Job) -> int:
        row = await self._one(
            "SELECT count(*) FROM jobs WHERE service = ? AND task = ? AND status = 'queued' "
            "AND seq < (SELECT seq FROM jobs WHERE id = ?)",
            (job.service, job.task, job.id),
        )
        return 0 if row is None else row[0]

    @override
    async def result(self, id_: str) -> bytes:
        row = await self._one(
            "SELECT payload FROM results JOIN jobs USING (seq) WHERE id = ?", (id_,)
        )
        if row is None:
            raise NotFound(f"there is no result of job {id_!r}", started=False)
        return bytes(row[0])

    @override
    async def newest(
        self, service: str, task: str, *, status: JobState | None = None, limit: int = 50
    ) -> list[Job]:
        where = "" if status is None else " AND status = ?"
        rows = await self._all(
            f"SELECT document FROM jobs WHERE service = ? AND task = ?{where} "  # noqa: S608
            "ORDER BY seq DESC LIMIT ?",
            (service, task, *(() if status is None else (status,)), limit),
        )
        return [_decode_job(row[0]) for row in rows]

    @override
    async def events_after(self, id_: str, number: int, *, limit: int = 100) -> list[JobEvent]:
        rows = await self._all(
            "SELECT events.document FROM events JOIN jobs USING (seq) "
            "WHERE id = ? AND number > ? ORDER BY number LIMIT ?",
            (id_, number, limit),
        )
        return [_decode_event(row[0]) for row in rows]

    # -- the whole ---------------------------------------------------------------------------

    @override
    async def purge(self, *, now: float) -> list[Job]:
        return await self._do(partial(self._purge, now))

    def _purge(self, now: float) -> list[Job]:
        if self._find("expires_at <= ? LIMIT 1", now) is None:
            return []
        ended: list[Job] = []
        with self._transaction(durable=True) as db:
            rows = db.execute(
                "SELECT seq, document FROM jobs WHERE expires_at <= ? LIMIT ?",
                (now, _PURGED_AT_ONCE),
            ).fetchall()
            for seq, document in rows:
                job = life.expired(_decode_job(document), now)
                if job is None:
                    db.execute("DELETE FROM jobs WHERE seq = ?", (seq,))
                else:
                    ended.append(self._put(seq, job))
        return ended

    @override
    async def counts(self, *, now: float) -> list[TaskCount]:
        rows = await self._all(
            "SELECT service, task, sum(status = 'queued'), sum(status = 'running'), sum(due <= ?) "
            "FROM jobs WHERE due IS NOT NULL GROUP BY service, task",
            (now,),
        )
        return [TaskCount(*row) for row in rows]

    async def _one(self, query: str, values: Sequence[object]) -> Any:
        return await self._do(lambda: self._db.execute(query, values).fetchone())

    async def _all(self, query: str, values: Sequence[object]) -> list[Any]:
        return await self._do(lambda: self._db.execute(query, values).fetchall())


def _there(job: Job | None, id_: str) -> Job:
    if job is None:
        raise NotFound(f"there is no job {id_!r}", started=False)
    return job
