"""A task in a replica: submissions, what is asked about jobs, and how attempts at them end."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

import servekit as sk
from servekit.core.call import BINARY, JSON, MSGPACK, NPY, Payload, now
from servekit.core.job import JobQuery, JobStatus
from servekit.errors import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    ExecutionError,
    InvalidInput,
    InvalidOutput,
    NotFound,
    Overloaded,
    ServekitError,
    SetupError,
    SpecError,
    Unavailable,
    UnsupportedMedia,
)
from servekit.jobs.job import LEASE_S, new_job
from servekit.runtime import attempt as attempt_module
from servekit.runtime import task as task_module
from servekit.runtime.replica import Replica
from servekit.spec.app import ServiceSpec
from servekit.spec.definition import definition
from servekit.spec.describe import describe
from servekit.spec.form import document
from servekit.spec.policy import TaskPolicy
from tests.calls import make_call
from tests.memory_store import MemoryStore


class Probe:
    def __init__(self) -> None:
        self.go = threading.Event()
        self.ids: list[tuple[str, int]] = []
        self.saw_cancel = 0
        self.contexts: list[object] = []


PROBE = Probe()


@pytest.fixture(autouse=True)
def probe():
    global PROBE
    PROBE = Probe()
    yield PROBE
    PROBE.go.set()


def enter() -> Probe:
    PROBE.ids.append((sk.job().id, sk.job().attempt))
    PROBE.contexts.append(sk.context())
    return PROBE


@sk.service(limits=sk.Limits(max_ongoing=4))
class S:
    @sk.task(retries=2, backoff_s=0.0)
    async def double(self, n: int) -> int:
        enter()
        return 2 * n

    @sk.task(retries=2, backoff_s=0.0)
    def fails(self, times: int, permanent: bool = False) -> int:
        enter()
        if sk.job().attempt <= times:
            if permanent:
                raise NotFound("no such thing", reason="gone")
            raise ValueError("a secret")
        return sk.job().attempt

    @sk.task(max_concurrency=2, retries=1, backoff_s=0.0, timeout_s=None)
    async def waits(self) -> str:
        seen = enter()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            seen.saw_cancel += 1
            raise
        return ""

    @sk.task(retries=0)
    def blocks(self) -> str:
        seen = enter()
        job = sk.job()
        while not job.cancelled and not seen.go.wait(0.005):
            pass
        seen.saw_cancel += job.cancelled
        return "done"

    @sk.task(retries=1, backoff_s=0.0, timeout_s=0.2)
    async def late(self) -> None:
        enter()
        await asyncio.sleep(60)

    @sk.task(retries=0, timeout_s=0.2)
    def late_in_a_thread(self) -> None:
        enter().go.wait(20)

    @sk.task(max_queued=2)
    async def array(self, n: int) -> np.ndarray:
        return np.arange(n, dtype=np.float32)

    @sk.task(media_type="application/pdf")
    def pdf(self, data: bytes, /) -> bytes:
        return data * 2

    @sk.task
    def measure(self, file: sk.File, note: str = "") -> str:
        return f"{file.name} {file.content_type} {file.size} {note}"

    @sk.task(retries=0)
    def lies(self) -> int:
        return "no number"  # type: ignore[return-value]

    @sk.task
    async def reports(self) -> str:
        job = sk.job()
        detail = {"page": 1}
        job.progress(0.5, "half", detail)
        detail["page"] = 2
        job.progress(message="x" * 5000)
        for wrong in (-0.1, 1.1, float("nan")):
            with pytest.raises(ServekitError, match="fraction"):
                job.progress(wrong)
        for wrong in (object(), "x" * 70_000, {1: float("nan")}.keys()):
            with pytest.raises(ServekitError, match="detail"):
                job.progress(detail=wrong)
        return repr(job)


class Running:
    """A replica with tasks, and what is asked of it."""

    def __init__(self, store, name="S-0") -> None:
        self.store = store
        spec = ServiceSpec(name="S", target="t:T", limits=definition(S).limits)
        self.replica = Replica(definition(S), spec, replica_id=name, store=store)

    async def ask(self, endpoint: str, query: JobQuery | None = None, **settings):
        document = b"" if query is None else msgspec.json.encode(query)
        reply = await self.replica(
            make_call("S", endpoint, Payload(JSON, (document,)), request_id="r-1", **settings)
        )
        return reply if reply.payload is None else reply.payload

    async def submit(self, task: str, key: str = "", **arguments) -> JobStatus:
        headers = msgspec.msgpack.encode([["Idempotency-Key", key]] if key else [])
        body = Payload(JSON, (msgspec.json.encode(arguments),))
        call = make_call("S", task, body, request_id="r-1", headers=headers, traceparent="00-t")
        reply = await self.replica(call)
        return msgspec.json.decode(reply.payload.segments[0], type=JobStatus)

    async def status(self, task: str, id_: str, verb: str = "get") -> JobStatus:
        payload = await self.ask(f"{task}/jobs/{verb}", JobQuery(id=id_))
        return msgspec.json.decode(payload.segments[0], type=JobStatus)

    async def ends(self, task: str, id_: str) -> JobStatus:
        with contextlib.suppress(Exception):
            await self.ask(f"{task}/jobs/result", JobQuery(id=id_, wait_s=10))
        return await self.status(task, id_)

    async def value(self, task: str, id_: str):
        payload = await self.ask(f"{task}/jobs/result", JobQuery(id=id_, wait_s=10))
        return msgspec.json.decode(payload.segments[0])

    def counted(self) -> dict[tuple[str, str], float]:
        found = [f for f in self.replica.metrics() if f.name == "servekit_jobs_ended_total"]
        return {s.labels[1:]: s.value for f in found for s in f.samples}

    async def leave(self) -> None:
        self.replica.drain()
        await self.replica.stop()


@pytest.fixture
def running():
    """Return a context of a replica that runs the tasks of `S`."""

    @contextlib.asynccontextmanager
    async def run(store=None, name="S-0"):
        app = Running(store or MemoryStore(), name)
        await app.replica.start({})
        try:
            yield app
        finally:
            PROBE.go.set()
            await app.leave()

    return run


# -- submissions


async def test_a_job_runs_and_leaves_its_result(running, until):
    async with running() as app:
        accepted = await app.submit("double", n=21)
        assert (accepted.status, accepted.attempt, accepted.position) == ("queued", 0, 0)
        assert len(accepted.id) == 32
        assert await app.value("double", accepted.id) == 42
        done = await app.status("double", accepted.id)
        assert (done.status, done.attempt, done.position) == ("succeeded", 1, None)
        assert done.submitted_at <= done.started_at <= done.finished_at
        assert PROBE.ids == [(accepted.id, 1)]
        [context] = PROBE.contexts
        assert (context.request_id, context.traceparent) == ("r-1", "00-t")
        assert dict(context.headers) == {}
        assert 3500 < context.remaining() <= 3600
        await until(lambda: app.counted() == {("double", "succeeded"): 1.0})


async def test_wrong_input_is_refused_before_anything_is_queued(running):
    async with running() as app:
        with pytest.raises(InvalidInput, match="n: Input should be a valid integer"):
            await app.submit("double", n="x")
        with pytest.raises(BadRequest):
            await app.replica(make_call("S", "double", Payload(JSON, (b"{",))))
        with pytest.raises(BadRequest, match="256 characters; at most 255"):
            await app.submit("double", "k" * 256, n=1)
        assert not app.store.jobs


async def test_what_can_not_be_answered_is_not_kept(running):
    async with running() as app:
        body = Payload(JSON, (b'{"n": 1}',))
        with pytest.raises(UnsupportedMedia):
            await app.replica(make_call("S", "double", body, accept="text/html"))
        assert not app.store.jobs


async def test_a_key_belongs_to_its_arguments(running):
    async with running() as app:
        one = await app.submit("double", "k", n=1)
        assert (await app.submit("double", "k", n=1)).id == one.id
        with pytest.raises(InvalidInput, match=one.id) as caught:
            await app.submit("double", "k", n=2)
        assert caught.value.reason == "idempotency_key"
        assert (await app.submit("fails", "k", times=0)).id != one.id


async def test_a_full_queue_refuses(running):
    async with running() as app:
        app.replica._tasks[6].worker.drain()
        assert app.replica._tasks[6]._name == "array"
        for n in range(2):
            await app.submit("array", n=n)
        with pytest.raises(Overloaded):
            await app.submit("array", n=1)


async def test_a_service_with_tasks_needs_a_store():
    replica = Running(None).replica
    with pytest.raises(SetupError, match="no store"):
        await replica.start({})
    await replica.stop()


# -- results


async def test_arrays_travel_as_an_endpoint_would_send_them(running):
    async with running() as app:
        one = await app.submit("array", n=3)
        await app.ends("array", one.id)
        query = JobQuery(id=one.id)
        packed = await app.ask("array/jobs/result", query, accept=MSGPACK)
        assert packed.content_type == MSGPACK
        plain = await app.ask("array/jobs/result", query)
        assert msgspec.json.decode(plain.segments[0]) == [0.0, 1.0, 2.0]
        inside = await app.ask("array/jobs/result", query, internal=True)
        assert len(inside.segments) == 2
        value = definition(S).endpoints["array"].schemas[1].decode(inside)
        np.testing.assert_array_equal(value, np.arange(3, dtype=np.float32))
        assert NPY not in (packed.content_type, plain.content_type)


async def test_bytes_travel_with_their_media_type(running):
    async with running() as app:
        call = make_call("S", "pdf", Payload(BINARY, (b"%PDF\xff",)))
        reply = await app.replica(call)
        id_ = msgspec.json.decode(reply.payload.segments[0], type=JobStatus).id
        await app.ends("pdf", id_)
        found = await app.ask("pdf/jobs/result", JobQuery(id=id_), accept="*/*")
        assert (found.content_type, found.segments[0]) == ("application/pdf", b"%PDF\xff" * 2)


async def test_a_file_is_kept_with_its_name(running):
    schema = definition(S).endpoints["measure"].schemas[0].json_schema
    file = sk.File(b"0123", name="a.txt", content_type="text/plain")
    segments = document([("file", file), ("note", "hi")], schema)
    async with running() as app:
        reply = await app.replica(make_call("S", "measure", Payload(JSON, segments)))
        id_ = msgspec.json.decode(reply.payload.segments[0], type=JobStatus).id
        assert await app.value("measure", id_) == "a.txt text/plain 4 hi"


async def test_a_job_that_is_not_done_is_a_conflict(running):
    async with running() as app:
        one = await app.submit("waits")
        with pytest.raises(Conflict) as caught:
            await app.ask("waits/jobs/result", JobQuery(id=one.id))
        assert caught.value.reason in ("queued", "running")
        assert caught.value.retry_after_s == 1.0


@pytest.mark.parametrize("verb", ["get", "result", "cancel", "retry", "events"])
async def test_an_unknown_job_or_that_of_another_task_is_not_found(running, verb):
    async with running() as app:
        one = await app.submit("double", n=1)
        for id_, task in (("nobody", "double"), (one.id, "fails"), ("", "double")):
            with pytest.raises(NotFound):
                await app.ask(f"{task}/jobs/{verb}", JobQuery(id=id_))


async def test_what_is_no_query_is_refused(running):
    async with running() as app:
        for body in (b"[]", b"{", b'{"id": 3}', b'{"status": "lost"}'):
            with pytest.raises(InvalidInput):
                await app.replica(make_call("S", "double/jobs", Payload(JSON, (body,))))


async def test_a_result_of_the_wrong_type_fails_the_job(running):
    async with running() as app:
        one = await app.submit("lies")
        with pytest.raises(InvalidOutput):
            await app.value("lies", one.id)


async def test_arguments_that_fit_no_longer_fail_the_job_for_good(running):
    store = MemoryStore()
    old = new_job("S", "double", TaskPolicy(retries=5), now=time.time())
    await store.submit(old, msgspec.msgpack.encode((JSON, False, [b'{"m": 1}'])))
    async with running(store) as app:
        done = await app.ends("double", old.id)
        assert (done.status, done.attempt, done.error.code) == ("failed", 1, "invalid_input")


# -- attempts that fail


async def test_exceptions_are_tried_again_and_masked(running):
    async with running() as app:
        one = await app.submit("fails", times=2)
        assert await app.value("fails", one.id) == 3
        assert [attempt for _, attempt in PROBE.ids] == [1, 2, 3]
        other = await app.submit("fails", times=9)
        with pytest.raises(ExecutionError, match=r"S\.fails raised ValueError") as caught:
            await app.value("fails", other.id)
        assert "secret" not in str(caught.value)
        done = await app.status("fails", other.id)
        assert (done.status, done.attempt) == ("failed", 3)
        again = await app.status("fails", other.id, "retry")
        assert (again.status, again.error) == ("queued", None)
        assert (await app.ends("fails", other.id)).attempt == 6


async def test_the_callers_kind_of_error_is_not_tried_again(running):
    async with running() as app:
        one = await app.submit("fails", times=9, permanent=True)
        with pytest.raises(NotFound, match="no such thing") as caught:
            await app.value("fails", one.id)
        assert caught.value.reason == "gone"
        assert len(PROBE.ids) == 1


async def test_an_attempt_has_a_time_limit(running):
    async with running() as app:
        one = await app.submit("late")
        with pytest.raises(DeadlineExceeded, match=r"over 0\.2 s"):
            await app.value("late", one.id)
        assert len(PROBE.ids) == 2


async def test_a_thread_that_is_out_of_time_fails_the_attempt_and_keeps_its_slot(
    running, monkeypatch
):
    monkeypatch.setattr(attempt_module, "_GRACE_S", 0.1)
    async with running() as app:
        one = await app.submit("late_in_a_thread")
        with pytest.raises(DeadlineExceeded):
            await app.value("late_in_a_thread", one.id)
        assert app.replica.load().ongoing == 1
        PROBE.go.set()
        async with asyncio.timeout(5):
            while app.replica.load().ongoing:
                await asyncio.sleep(0.01)


# -- cancelling


async def test_a_queued_job_is_cancelled_at_once(running, until):
    async with running() as app:
        first = await app.submit("blocks")
        second = await app.submit("blocks")
        assert (await app.status("blocks", second.id, "cancel")).status == "cancelled"
        assert (await app.status("blocks", second.id, "cancel")).status == "cancelled"
        PROBE.go.set()
        assert (await app.ends("blocks", first.id)).status == "succeeded"
        assert [id_ for id_, _ in PROBE.ids] == [first.id]
        counted = {("blocks", "cancelled"): 1.0, ("blocks", "succeeded"): 1.0}
        await until(lambda: app.counted() == counted)
        with pytest.raises(Conflict):
            await app.status("blocks", first.id, "cancel")


@pytest.mark.parametrize("task", ["waits", "blocks"])
async def test_a_running_job_is_cancelled(running, until, task):
    async with running() as app:
        one = await app.submit(task)
        await until(lambda: PROBE.ids)
        asked = await app.status(task, one.id, "cancel")
        assert (asked.status, asked.cancelling) == ("running", True)
        began = now()
        done = await app.ends(task, one.id)
        assert now() - began < 5
        assert (done.status, done.cancelling, done.error) == ("cancelled", False, None)
        assert PROBE.saw_cancel == 1
        with pytest.raises(Conflict, match="was cancelled") as caught:
            await app.value(task, one.id)
        assert (caught.value.reason, caught.value.retry_after_s) == ("cancelled", None)


async def test_a_thread_that_ignores_the_cancel_ends_with_its_time(running, until, monkeypatch):
    monkeypatch.setattr(attempt_module, "_GRACE_S", 0.1)
    async with running() as app:
        one = await app.submit("late_in_a_thread")
        await until(lambda: PROBE.ids)
        await app.status("late_in_a_thread", one.id, "cancel")
        assert (await app.ends("late_in_a_thread", one.id)).status == "cancelled"
        assert app.replica.load().ongoing == 1, "its thread goes on"


# -- leases


async def test_a_job_that_another_worker_has_is_let_go(running, until, monkeypatch):
    """As if this process had stood still for longer than its lease."""
    monkeypatch.setattr(attempt_module, "_RENEW_S", 0.0)
    store = MemoryStore()
    async with running(store) as app:
        one = await app.submit("waits")
        await until(lambda: PROBE.ids)
        late = time.time() + 10 * LEASE_S
        assert [j.id for j in await store.reap("S", "waits", now=late, jitter=0)] == [one.id]
        stolen, _ = await store.claim("S", "waits", worker="other", now=late)
        assert stolen.attempt == 2
        await until(lambda: PROBE.saw_cancel == 1)
        await until(lambda: not app.replica.load().ongoing)
        assert (await app.status("waits", one.id)).status == "running"
        assert await store.succeed(one.id, 2, msgspec.msgpack.encode((JSON, True, [b'"x"'])), now=1)
        assert await app.value("waits", one.id) == "x"


async def test_a_late_result_does_not_replace_that_of_its_successor(running, until):
    store = MemoryStore()
    async with running(store) as app:
        one = await app.submit("blocks")
        await until(lambda: PROBE.ids)
        job = store.jobs[one.id]
        later = msgspec.structs.replace(job, attempt=2, worker="other")
        store.jobs[one.id] = later
        PROBE.go.set()
        await until(lambda: not app.replica.load().ongoing)
        assert store.jobs[one.id] == later
        assert not store.results


async def test_the_lease_is_renewed_while_the_method_runs(running, until, monkeypatch):
    monkeypatch.setattr(attempt_module, "_RENEW_S", 0.0)
    store = MemoryStore()
    async with running(store) as app:
        one = await app.submit("blocks")
        await until(lambda: PROBE.ids)
        first = store.jobs[one.id].due
        await until(lambda: store.jobs[one.id].due > first + 0.2)


# -- draining


async def test_a_replica_that_leaves_gives_back_what_it_runs(running, until):
    store = MemoryStore()
    async with running(store) as app:
        one = await app.submit("waits")
        await until(lambda: PROBE.ids)
        app.replica.drain()
        await app.submit("waits")
        await app.replica.stop()
        kept = store.jobs[one.id]
        assert (kept.status, kept.attempt, kept.failures) == ("queued", 1, 0)
    async with running(store, "S-1") as other:
        await until(lambda: len(PROBE.ids) == 3)
        assert PROBE.ids[1] == (one.id, 2)
        assert other.replica.load().ongoing == 2


async def test_an_attempt_that_has_not_begun_is_given_back(running):
    store = MemoryStore()
    async with running(store) as app:
        app.replica.drain()
        one = await app.submit("double", n=1)
        claimed = await store.claim("S", "double", worker="w", now=time.time())
        worker = app.replica._tasks[0].worker
        await worker.idle()
        app.replica._async_slots.take()
        worker._begin(*claimed)
        next(iter(worker._running.values())).leave()
        await app.replica.stop()
        assert (store.jobs[one.id].status, store.jobs[one.id].failures) == ("queued", 0)
        assert PROBE.ids == []


async def test_a_draining_replica_finishes_what_it_runs(running, until):
    async with running() as app:
        one = await app.submit("blocks")
        await until(lambda: PROBE.ids)
        app.replica.drain()
        idle = asyncio.ensure_future(app.replica.idle())
        await asyncio.sleep(0.05)
        assert not idle.done()
        PROBE.go.set()
        await idle
        assert (await app.status("blocks", one.id)).status == "succeeded"


async def test_who_waits_at_a_draining_replica_is_sent_elsewhere(running, until):
    async with running() as app:
        one = await app.submit("blocks")
        query = JobQuery(id=one.id, wait_s=30)
        waits = asyncio.ensure_future(app.ask("blocks/jobs/result", query))
        await until(lambda: PROBE.ids)
        app.replica.drain()
        with pytest.raises(Unavailable) as caught:
            await waits
        assert (caught.value.reason, caught.value.started) == ("draining", False)


# -- concurrency


async def test_no_more_jobs_run_at_once_than_may(running, until):
    async with running() as app:
        jobs = [await app.submit("waits") for _ in range(4)]
        await until(lambda: len(PROBE.ids) == 2)
        await asyncio.sleep(0.05)
        assert len(PROBE.ids) == 2
        await app.status("waits", jobs[0].id, "cancel")
        await until(lambda: len(PROBE.ids) == 3)


async def test_jobs_take_slots_and_calls_go_first(running, until):
    async with running() as app:
        app.replica._async_slots.running = 4
        one = await app.submit("double", n=1)
        await asyncio.sleep(0.05)
        assert (await app.status("double", one.id)).status == "queued"
        app.replica._async_slots.running = 0
        assert await app.value("double", one.id) == 2
        await until(lambda: app.replica._async_slots.running == 0)


# -- events


async def test_events_are_told_from_the_start_and_end_with_the_job(running):
    async with running() as app:
        one = await app.submit("reports")
        reply = await app.ask("reports/jobs/events", JobQuery(id=one.id))
        events = [msgspec.json.decode(chunk.segments[0]) async for chunk in reply.stream]
        assert [e["number"] for e in events] == list(range(1, 6))
        assert [e["status"] for e in events] == ["queued", *["running"] * 3, "succeeded"]
        first, second = (e["progress"] for e in events[2:4])
        assert first == {"fraction": 0.5, "message": "half", "detail": {"page": 1}}
        assert second == {"fraction": None, "message": "x" * 1000, "detail": None}
        assert (await app.value("reports", one.id)) == f"RunningJob(id={one.id!r}, attempt=1)"
        reply = await app.ask("reports/jobs/events", JobQuery(id=one.id, after=4))
        assert [msgspec.json.decode(c.segments[0]) async for c in reply.stream] == events[4:]


async def test_those_who_watch_have_a_bound(running, until, monkeypatch):
    monkeypatch.setattr(task_module, "_MAX_WATCHERS", 1)
    async with running() as app:
        one = await app.submit("blocks")
        query = JobQuery(id=one.id, wait_s=30)
        waits = asyncio.ensure_future(app.ask("blocks/jobs/result", query))
        await until(lambda: app.replica._tasks[3]._watchers)
        with pytest.raises(Overloaded):
            await app.ask("blocks/jobs/result", query)
        PROBE.go.set()
        assert (await waits).segments[0] == b'"done"'


async def test_the_newest_jobs_are_listed(running):
    async with running() as app:
        made = [(await app.submit("double", n=n)).id for n in range(3)]
        for id_ in made:
            await app.ends("double", id_)
        payload = await app.ask("double/jobs", JobQuery(limit=2), accept=MSGPACK)
        listed = msgspec.msgpack.decode(payload.segments[0])
        assert [job["id"] for job in listed] == made[:0:-1]
        assert listed[0]["submitted_at"].endswith("Z")
        payload = await app.ask("double/jobs", JobQuery(status="failed"))
        assert payload.segments[0] == b"[]"


# -- declaring


def test_what_can_not_be_a_task_is_refused():
    with pytest.raises(SpecError, match=r"can't stream"):

        class _Stream:
            @sk.task
            def f(self):
                yield 1

    with pytest.raises(SpecError, match=r"_Many\.f: task\(retries=-1\)"):

        class _Many:
            @sk.task(retries=-1)
            def f(self) -> None: ...

    with pytest.raises(SpecError, match="write a list"):

        class _Tags:
            @sk.task(tags="x")
            def f(self) -> None: ...


def test_input_that_streams_is_refused():
    @sk.service
    class _Streams:
        @sk.task
        async def f(self, chunks: AsyncIterator[bytes]) -> int:
            return 0

    with pytest.raises(SpecError, match="'chunks' streams, and a job keeps its input whole"):
        describe(_Streams)


def test_the_routes_of_its_jobs_are_taken():
    with pytest.raises(SpecError, match="have the same path '/f/jobs'"):

        @sk.service
        class _Two:
            @sk.task
            def f(self) -> None: ...

            @sk.endpoint(path="/f/jobs")
            def g(self) -> None: ...


def test_there_is_no_job_outside_of_one():
    with pytest.raises(ServekitError, match="no running job"):
        sk.job()
    with pytest.raises(ServekitError, match="needs a handle"):
        S().double.submit(1)
