"""The routes of jobs in the gateway: requests to calls, and events that outlive a replica."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import httpx
import msgspec
import pytest

import servekit as sk
from servekit.core.call import JSON, Call, Payload, Reply
from servekit.core.job import JobEvent, JobQuery, JobStatus
from servekit.errors import Conflict, NotFound, ReplicaLost, Unavailable
from servekit.gateway import jobs as gateway_jobs
from servekit.gateway.jobs import JobRoutes
from servekit.gateway.site import Site
from servekit.spec.describe import describe

AT = datetime(2030, 1, 1, tzinfo=UTC)
STATUS = JobStatus(id="j1", status="running", attempt=1, submitted_at=AT)


@sk.service
class Inner:
    @sk.task
    def hidden(self) -> None: ...


@sk.service(prefix="/r")
class App:
    inner = sk.depends(Inner)

    @sk.task
    def render(self, n: int) -> int:
        return n

    @sk.task(internal=True)
    def private(self) -> None: ...

    @sk.endpoint
    def plain(self) -> None: ...


class Replicas:
    """Answers calls; `streams` are the events that each asked stream has, then an error or None."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.error: Exception | None = None
        self.streams: list[tuple[list[int], Exception | None]] = []
        self.closed = 0

    async def __call__(self, call: Call) -> Reply:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        if call.endpoint.endswith("/events"):
            return Reply(stream=self._stream(*self.streams.pop(0)))
        payload = Payload(JSON, (msgspec.json.encode(STATUS),))
        return Reply(payload, version="3", replica="App-1")

    async def _stream(self, numbers, error) -> AsyncIterator[Payload]:
        try:
            for number in numbers:
                event = JobEvent(number=number, at=AT, status="running", attempt=1)
                yield Payload(JSON, (msgspec.json.encode(event),))
            if error is not None:
                raise error
        finally:
            self.closed += 1

    def query(self, index: int = -1) -> JobQuery:
        return msgspec.json.decode(self.calls[index].payload.segments[0], type=JobQuery)


async def metrics() -> str:
    return ""


class Door:
    def __init__(self) -> None:
        self.replicas = Replicas()
        self.routes = JobRoutes(self.replicas)
        site = Site(dict, metrics, self.routes, dev=False)
        site.serve(describe(App))
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(site.app), base_url="http://gateway"
        )

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.http.aclose()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr("servekit.jobs.follow._AGAIN_S", 0.0)


@pytest.mark.parametrize(
    ("method", "path", "endpoint", "query"),
    [
        ("GET", "/r/render/jobs", "render/jobs", JobQuery()),
        (
            "GET",
            "/r/render/jobs?status=failed&limit=7",
            "render/jobs",
            JobQuery(status="failed", limit=7),
        ),
        ("GET", "/r/render/jobs/j1", "render/jobs/get", JobQuery(id="j1")),
        ("GET", "/r/render/jobs/j1/result", "render/jobs/result", JobQuery(id="j1")),
        (
            "GET",
            "/r/render/jobs/j1/result?wait=2.5s",
            "render/jobs/result",
            JobQuery(id="j1", wait_s=2.5),
        ),
        (
            "GET",
            "/r/render/jobs/j1/result?wait=9h",
            "render/jobs/result",
            JobQuery(id="j1", wait_s=60.0),
        ),
        ("POST", "/r/render/jobs/j1/cancel", "render/jobs/cancel", JobQuery(id="j1")),
        ("POST", "/r/render/jobs/j1/retry", "render/jobs/retry", JobQuery(id="j1")),
    ],
)
async def test_each_route_is_one_call(method, path, endpoint, query):
    async with Door() as door:
        answer = await door.http.request(
            method, path, headers={"x-request-id": "r-7", "accept": "application/json"}
        )
        assert answer.status_code == 200
        assert answer.content == msgspec.json.encode(STATUS)
        headers = [answer.headers[f"x-{h}"] for h in ("request-id", "servekit-version")]
        assert headers == ["r-7", "3"]
        [call] = door.replicas.calls
        assert (call.service, call.endpoint, call.request_id) == ("App", endpoint, "r-7")
        assert (call.accept, call.internal) == ("application/json", False)
        assert door.replicas.query() == query
        assert call.idempotent == (not endpoint.endswith("/retry"))
        assert call.deadline is not None


@pytest.mark.parametrize(
    "path",
    [
        "/r/render/jobs?limit=0",
        "/r/render/jobs?limit=1001",
        "/r/render/jobs?limit=-1",
        "/r/render/jobs?limit=" + "9" * 5000,
        "/r/render/jobs?status=lost",
        "/r/render/jobs/j1/result?wait=soon",
        "/r/render/jobs/j1/result?wait=-3s",
    ],
)
async def test_a_query_that_can_not_be_read_is_refused(path):
    async with Door() as door:
        answer = await door.http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")
        assert not door.replicas.calls


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/r/private/jobs", 404),
        ("GET", "/hidden/jobs", 404),
        ("GET", "/r/plain/jobs", 404),
        ("GET", "/r/render/jobs/j1/x", 404),
        ("GET", "/r/render/jobs/a%2Fb/result/x", 404),
        ("POST", "/r/render/jobs", 405),
        ("GET", "/r/render/jobs/j1/cancel", 405),
        ("DELETE", "/r/render/jobs/j1", 405),
    ],
)
async def test_there_are_no_other_routes(method, path, status):
    async with Door() as door:
        answer = await door.http.request(method, path)
        assert answer.status_code == status
        assert "message" in answer.json()["error"]
        assert not door.replicas.calls


async def test_errors_have_their_form():
    async with Door() as door:
        door.replicas.error = Conflict("is running", reason="running", retry_after_s=1.0)
        answer = await door.http.get("/r/render/jobs/j1/result", headers={"x-request-id": "r"})
        assert (answer.status_code, answer.headers["retry-after"]) == (409, "1")
        assert answer.json()["error"] == {
            "code": "conflict",
            "reason": "running",
            "message": "is running",
            "retry_after_s": 1.0,
            "request_id": "r",
        }
        door.replicas.error = NotFound("no job")
        assert (await door.http.get("/r/render/jobs/j1/events")).status_code == 404


def told(body: str) -> list[str]:
    return [event.partition("\n")[0] for event in body.split("\n\n") if event]


async def test_events_go_on_when_a_replica_is_lost():
    async with Door() as door:
        replicas = door.replicas
        replicas.streams = [
            ([1, 2], ReplicaLost("gone")),
            ([], Unavailable("none yet")),
            ([3, 4], None),
        ]
        answer = await door.http.get("/r/render/jobs/j1/events")
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-store"
        assert told(answer.text) == ["id: 1", "id: 2", "id: 3", "id: 4", "event: end"]
        assert [replicas.query(i).after for i in range(1, 4)] == [0, 2, 2]
        assert replicas.closed == 3


async def test_events_begin_behind_the_last_one_known():
    async with Door() as door:
        door.replicas.streams = [([6], None)]
        answer = await door.http.get("/r/render/jobs/j1/events", headers={"last-event-id": "5"})
        assert told(answer.text) == ["id: 6", "event: end"]
        assert door.replicas.query().after == 5
        for wrong in ("x", "-1", "9" * 30):
            answer = await door.http.get(
                "/r/render/jobs/j1/events", headers={"last-event-id": wrong}
            )
            assert answer.status_code == 400


async def test_an_error_ends_the_events():
    async with Door() as door:
        door.replicas.streams = [([1], NotFound("it was deleted"))]
        answer = await door.http.get("/r/render/jobs/j1/events")
        assert told(answer.text) == ["id: 1", "event: error"]
        assert "it was deleted" in answer.text


class Silent:
    def __init__(self, numbers):
        self.numbers = list(numbers)
        self.closed = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.numbers:
            await asyncio.get_running_loop().create_future()
        event = JobEvent(number=self.numbers.pop(0), at=AT, status="running", attempt=1)
        return Payload(JSON, (msgspec.json.encode(event),))

    async def aclose(self):
        self.closed = True


async def test_a_silent_stream_has_a_heartbeat_and_ends_when_the_gateway_leaves(monkeypatch):
    monkeypatch.setattr(gateway_jobs, "_HEARTBEAT_S", 0.01)
    async with Door() as door:
        silent = Silent([1])
        door.replicas._stream = lambda *_: silent
        door.replicas.streams = [([], None)]
        asking = asyncio.ensure_future(door.http.get("/r/render/jobs/j1/events"))
        await asyncio.sleep(0.1)
        assert not asking.done()
        door.routes.leave()
        answer = await asking
        first, *rest = told(answer.text)
        assert first == "id: 1"
        assert set(rest) == {": keep-alive"}
        assert silent.closed


async def test_a_wait_for_a_result_ends_when_the_gateway_leaves():
    async with Door() as door:
        cancelled = 0

        async def handle(call):
            nonlocal cancelled
            door.replicas.calls.append(call)
            if door.replicas.query().wait_s:
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    cancelled += 1
            raise Conflict("is running", reason="running", retry_after_s=1.0)

        door.routes._handler = handle
        asking = asyncio.ensure_future(door.http.get("/r/render/jobs/j1/result?wait=60s"))
        await asyncio.sleep(0.05)
        door.routes.leave()
        answer = await asking
        assert (answer.status_code, cancelled) == (409, 1)
