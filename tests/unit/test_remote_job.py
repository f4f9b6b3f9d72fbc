"""Handles of tasks: submit, wait, look, cancel, from services, from plain code, on any loop."""

import asyncio
import threading
from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest

import servekit as sk
from servekit.core.call import JSON, MSGPACK, Payload, Reply, now
from servekit.core.job import JobEvent, JobQuery, JobStatus
from servekit.errors import (
    Conflict,
    DeadlineExceeded,
    ExecutionError,
    NotFound,
    ReplicaLost,
    ServekitError,
    Unavailable,
)
from servekit.runtime import remote_job
from servekit.runtime.handle import Options, ServiceHandle
from servekit.spec.definition import definition

GO = threading.Event()
AT = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def go():
    GO.clear()
    yield
    GO.set()


@sk.service
class Reports:
    @sk.task(retries=0)
    async def double(self, n: int, *, steps: int = 0) -> int:
        for step in range(steps):
            sk.job().progress(step / steps)
        if n < 0:
            raise ValueError("negative")
        return 2 * n

    @sk.task
    def arrays(self, n: int) -> list[np.ndarray]:
        return [np.full(3, i, np.float32) for i in range(n)]

    @sk.task(max_concurrency=4)
    def waits(self) -> str:
        while not sk.job().cancelled and not GO.wait(0.005):
            pass
        return "done"


@sk.service
class Front:
    reports = sk.depends(Reports)

    @sk.endpoint
    async def all(self, n: int) -> list[int]:
        jobs = await asyncio.gather(*(self.reports.double.submit(i) for i in range(n)))
        return list(await asyncio.gather(*jobs))

    @sk.endpoint
    def in_a_thread(self, n: int) -> int:
        job = self.reports.double.submit(n).result(timeout=10)
        assert job.status().result().id == job.id
        return job.result(timeout=10) + self.reports.double.remote(n).result()

    @sk.endpoint
    async def plainly(self, n: int) -> int:
        return await self.reports.double(n)

    @sk.endpoint
    async def total(self, n: int) -> float:
        return float(sum(a.sum() for a in await self.reports.arrays.remote(n)))

    @sk.endpoint(timeout_s=0.2)
    async def impatient(self) -> str:
        return await self.reports.waits.remote()

    @sk.task
    async def nested(self, n: int) -> int:
        return await self.reports.double.remote(n) + 1


def test_services_use_each_others_tasks():
    with sk.local(Front) as front:
        assert front.all.remote(5).result(20) == [0, 2, 4, 6, 8]
        assert front.in_a_thread.remote(3).result(20) == 12
        assert front.plainly.remote(4).result(20) == 8
        assert front.total.remote(4).result(20) == 3.0 * 6
        assert front.nested.remote(4).result(20) == 9


def test_a_job_from_plain_code():
    with sk.local(Reports) as reports:
        job = reports.double.submit(2, steps=3).result(10)
        assert len(job.id) == 32
        assert job.result(10) == 4
        assert job.result(10) == 4, "as often as one likes"
        status = job.status().result()
        assert isinstance(status, JobStatus)
        assert (status.id, status.status) == (job.id, "succeeded")
        events = list(job.events().iter_sync())
        assert all(isinstance(event, JobEvent) for event in events)
        assert [event.status for event in events] == ["queued", *["running"] * 4, "succeeded"]
        assert repr(job) == f"<job {job.id}>"
        with pytest.raises(Conflict):
            job.cancel().result()


def test_a_job_on_an_event_loop_of_ones_own():
    async def use(reports: Reports) -> int:
        job = await reports.double.submit(2, steps=2)
        events = [event.status async for event in job.events()]
        assert events[-1] == "succeeded"
        assert (await job.status()).status == "succeeded"
        return await job + await reports.double(3) + await job

    with sk.local(Reports) as reports:
        assert asyncio.run(use(reports)) == 14


def test_errors_are_those_of_the_job():
    with sk.local(Reports) as reports:
        with pytest.raises(ExecutionError, match="ValueError"):
            reports.double.remote(-1).result(10)
        with pytest.raises(TypeError, match="n"):
            reports.double.submit("x")
        job = reports.double.submit(-1).result()
        with pytest.raises(ExecutionError):
            job.result(10)
        assert job.retry().result().status == "queued"


def test_cancel_and_time_outs():
    with sk.local(Reports) as reports:
        job = reports.waits.submit().result()
        with pytest.raises(TimeoutError):
            job.result(0.05)
        with pytest.raises(DeadlineExceeded, match="goes on"):
            reports.waits.options(timeout_s=0.05).remote().result(10)
        assert job.status().result().status == "running"
        job.cancel().result()
        with pytest.raises(Conflict) as caught:
            job.result(10)
        assert caught.value.reason == "cancelled"


def test_a_callers_deadline_ends_the_wait():
    with sk.local(Front) as front, pytest.raises(DeadlineExceeded):
        front.impatient.options(timeout_s=0.2).remote().result(10)


def test_one_key_is_one_job():
    with sk.local(Reports) as reports:
        keyed = reports.double.keyed("a")
        one, same = keyed.submit(1).result(), keyed.submit(1).result()
        assert one.id == same.id
        assert reports.double.submit(1).result().id != one.id
        assert keyed.options(timeout_s=5).submit(1).result().id == one.id


def test_a_blocking_wait_on_a_loop_is_refused():
    async def block(reports: Reports) -> None:
        job = await reports.double.submit(1)
        job.result(1)

    with sk.local(Reports) as reports, pytest.raises(ServekitError, match="block the event loop"):
        asyncio.run(block(reports))


class Fake:
    def double(self, n: int, *, steps: int = 0) -> int:
        return 100 + sk.job().attempt

    async def arrays(self, n: int) -> list[np.ndarray]:
        return [np.ones(n, np.float32)]


def test_a_fake_in_place_of_a_service_with_tasks():
    with sk.local(Front, overrides={Front.reports: Fake()}) as front:
        assert front.all.remote(2).result(20) == [101, 101]
        assert front.in_a_thread.remote(3).result(20) == 202
        assert front.total.remote(4).result(20) == 4.0


# -- what goes wrong on the way


class Flaky:
    """Fails as told before it answers; remembers the calls."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = []

    async def __call__(self, call):
        if call.endpoint.endswith("/get"):
            raise Unavailable("nobody knows")
        self.calls.append(call)
        if self.errors:
            raise self.errors.pop(0)
        raise NotFound("at last")


def handle(flaky: Flaky, **options) -> ServiceHandle:
    loop = asyncio.get_running_loop()
    return ServiceHandle(
        definition(Reports), "Reports", flaky, loop, Options(**options), internal=False
    )


def job(flaky: Flaky, **options) -> remote_job.RemoteJob:
    task = handle(flaky, **options).double
    accepted = JobStatus(id="j", status="queued", attempt=0, submitted_at=None)  # type: ignore[arg-type]
    return remote_job.RemoteJob(accepted, task, flaky, lambda p: p, asyncio.get_running_loop())


async def test_a_wait_outlasts_restarts(monkeypatch):
    monkeypatch.setattr(remote_job, "_AGAIN_S", 0.0)
    flaky = Flaky(
        Unavailable("starts"),
        ReplicaLost("gone"),
        Conflict("runs", reason="running", retry_after_s=1.0),
        Unavailable("starts"),
    )
    with pytest.raises(NotFound):
        await job(flaky)
    assert len(flaky.calls) == 5
    assert {c.endpoint for c in flaky.calls} == {"double/jobs/result"}


async def test_an_error_of_the_job_itself_is_not_waited_out(monkeypatch):
    monkeypatch.setattr(remote_job, "_AGAIN_S", 0.0)

    async def handler(call):
        if call.endpoint.endswith("/result"):
            raise Unavailable("the job's own")
        status = JobStatus(id="j", status="failed", attempt=1, submitted_at=AT)
        return Reply(Payload(JSON, (msgspec.json.encode(status),)))

    with pytest.raises(Unavailable, match="the job's own"):
        await job(handler)


async def test_a_wait_gives_up_when_nobody_answers(monkeypatch):
    monkeypatch.setattr(remote_job, "_AGAIN_S", 0.0)
    monkeypatch.setattr(remote_job, "_GIVE_UP_S", 0.0)
    with pytest.raises(Unavailable):
        await job(Flaky(*[Unavailable("gone")] * 1000))


async def test_events_go_on_past_a_loss(monkeypatch):
    monkeypatch.setattr("servekit.jobs.follow._AGAIN_S", 0.0)
    asked = []

    async def chunks(numbers, error):
        for number in numbers:
            event = JobEvent(number=number, at=AT, status="running", attempt=1)
            yield Payload(JSON, (msgspec.json.encode(event),))
        if error is not None:
            raise error

    async def handler(call):
        asked.append(msgspec.json.decode(call.payload.segments[0], type=JobQuery).after)
        if len(asked) == 1:
            return Reply(stream=chunks([1, 2], ReplicaLost("gone")))
        if len(asked) == 2:
            raise Unavailable("starts")
        return Reply(stream=chunks([3], None))

    events = job(handler).events()
    assert [event.number async for event in events] == [1, 2, 3]
    assert asked == [0, 2, 2]


async def test_a_submission_may_be_sent_again_with_its_key():
    flaky = Flaky()
    with pytest.raises(NotFound):
        await handle(flaky, timeout_s=7.0).double.submit(1)
    [call] = flaky.calls
    assert call.idempotent
    assert b"idempotency-key" in call.headers
    assert call.payload.content_type == MSGPACK
    assert 0 < call.deadline - now() <= 7.0
