"""The figures on `/metrics`: complete, merged, monotone, and few."""

import asyncio
import os
import random
import signal

from tests.flow.harness import serving, show, until


async def test_figures():
    async with serving("counted.py:Counted") as app:
        await outcomes_are_counted_by_class(app)
        await every_replica_is_in_the_figures(app)
        await batches_are_measured(app)
        await a_running_call_is_in_flight_once(app)
        await strangers_make_no_series(app)
        await counters_survive_a_replica(app)


async def outcomes_are_counted_by_class(app):
    """10 bad calls of each kind are there, each under its code."""
    for _ in range(10):
        assert (await app.post("/echo", {"x": "no"})).status == 422
        assert (await app.call("POST", "/echo", body=b"{")).status == 400
        assert (await app.post("/boom")).status == 500
        assert (await app.post("/echo", {}, headers={"content-type": "text/csv"})).status == 415
    for code in ("422", "400", "415"):
        labels = 'endpoint="echo"', f'code="{code}"'
        assert await app.total("servekit_requests_total", *labels) == 10, code
    assert await app.total("servekit_requests_total", 'endpoint="boom"', 'code="500"') == 10


async def every_replica_is_in_the_figures(app):
    """What two replicas did for a third party is summed."""
    answers = await asyncio.gather(*(app.post("/far", {"x": n}) for n in range(40)))
    assert [a.json for a in answers] == list(range(40))
    assert len({a.headers["x-servekit-replica"] for a in answers}) == 2
    for labels in (('endpoint="far"', 'code="200"'), ('endpoint="label"', 'code="200"')):
        assert await app.total("servekit_requests_total", *labels) == 40
    assert await app.total("servekit_request_seconds_count", 'endpoint="far"') == 40
    assert await app.total("servekit_queue_seconds_count", 'endpoint="far"') == 40


async def batches_are_measured(app):
    rows = await app.total("servekit_batch_size_sum", 'endpoint="label"')
    batches = await app.total("servekit_batch_size_count", 'endpoint="label"')
    assert rows == 40
    assert 40 / 8 <= batches <= 40
    assert await app.total("servekit_batch_fill_ratio_count", 'endpoint="label"') == batches


async def a_running_call_is_in_flight_once(app):
    work = asyncio.create_task(app.post("/hold", {"name": "one"}))
    await until(lambda: "hold" in app.traced(), "it runs")
    assert await app.total("servekit_in_flight", 'endpoint="hold"') == 1
    assert await app.total("servekit_queued", 'endpoint="hold"') == 0
    app.let_go("one")
    await work
    assert await app.total("servekit_in_flight", 'endpoint="hold"') == 0


async def strangers_make_no_series(app):
    """Thousands of random paths, ids and methods add no series: below 300 in all."""
    rng = random.Random(3)

    async def client():
        for _ in range(60):
            name = f"{rng.getrandbits(64):x}"
            await app.get(f"/{name}?{name}={name}")
            await app.post("/echo", {"x": 1}, headers={"x-request-id": name, "user-agent": name})
            await app.post("/far", {"x": name}, headers={"x-servekit-affinity": name})

    await asyncio.gather(*(client() for _ in range(8)))
    before = len(await app.metrics())
    await asyncio.gather(*(client() for _ in range(4)))
    series = await app.metrics()
    show(f"{len(series)} series")
    assert len(series) == before
    names = {n.partition("{")[0] for n in series if not n.partition("{")[0].endswith("_bucket")}
    # A histogram is one series to a reader; its buckets are bounded by the number of endpoints.
    assert sum(not n.partition("{")[0].endswith("_bucket") for n in series) < 300, names


async def counters_survive_a_replica(app):
    """What a replica counted stays when it dies; nothing ever falls."""
    before = await app.metrics()
    for pid in (await app.replicas("Counted")).values():
        os.kill(pid, signal.SIGKILL)

    async def back():
        return len(await app.replicas("Counted")) == 2

    async def restarts():
        return await app.total("servekit_replica_restarts_total", 'service="Counted"') == 2

    await until(restarts, "both restarts are counted")
    await until(back, "both are back")
    assert (await app.post("/far", {"x": 1})).status == 200
    after = await app.metrics()
    for name, value in before.items():
        if name.partition("{")[0].endswith(("_total", "_count", "_sum", "_bucket")):
            assert after.get(name, 0) >= value, name
