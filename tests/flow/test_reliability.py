"""Rows of the soak suite at sizes of seconds; what depends on the machine's speed is only shown.

docs/reliability.md says where each figure is measured, and where each report is a test.
"""

import asyncio
import os
import signal

import pytest

from tests.flow.harness import serving, show, until
from tests.soak import deaths, hostile, steady
from tests.soak.callers import leave

SIZES = {
    steady.steady: {"seconds": 3.0, "compared_s": 1.5},
    steady.overload_of_batches: {"seconds": 3.0, "relief_s": 3.0},
    deaths.blocked: {},
    deaths.gateway_kills: {"times": 1},
    hostile.bodies: {"times": 1},
    hostile.traversal: {},
    hostile.pickles: {},
}
"""Those that no other test has."""


@pytest.mark.parametrize("measure", SIZES, ids=lambda measure: measure.__name__)
async def test_figures(measure):
    marks = await measure(**SIZES[measure])
    for mark in marks:
        show(f"{mark.figure}: {mark.value} (wanted {mark.wanted})")
    missed = [mark for mark in marks if not mark.ok and not mark.timing]
    assert not missed
    assert marks


async def test_a_killed_worker_is_missed_at_once():
    """Readiness is false while it is away, no call hangs, and it comes back."""
    async with serving("graph.py:LoneRoot") as app:
        seen: list[int] = []

        async def watch() -> None:
            while True:
                seen.append((await app.get("/readyz")).status)
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        [(victim, pid)] = (await app.replicas("LoneChild")).items()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: 503 in seen, "/readyz is 503", timeout_s=10)
        assert (await app.post("/echo", {"x": 1})).json == 1  # it waited for the new one
        assert victim not in await app.replicas("LoneChild")
        await until(lambda: seen[-1] == 200, "/readyz is 200 again")
        watching.cancel()


async def test_callers_that_left_do_not_keep_a_service_awake():
    """50 queued clients disconnect: the gauge falls to 0, and the service goes to sleep."""
    async with serving("scaling.py:Front") as app:
        assert (await app.post("/ask", {"x": 1})).json == 1
        rest = asyncio.create_task(app.post("/nap", {"name": "rest"}))
        await until(lambda: "nap rest" in app.traced(), "one runs")
        calls = [asyncio.create_task(leave(app, "/nap", {"name": "next"}, 60)) for _ in range(50)]

        async def queued() -> float:
            return await app.total("servekit_queued", 'service="Sleeper"')

        async def full() -> bool:
            return await queued() >= 40

        async def empty() -> bool:
            return await queued() == 0

        async def idle() -> bool:
            names = "servekit_queued", "servekit_in_flight"
            return not sum([await app.total(name, 'service="Sleeper"') for name in names])

        async def asleep() -> bool:
            return not await app.replicas("Sleeper") and not await app.replicas(
                "Sleeper", "draining"
            )

        await until(full, "they wait")
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(empty, "nobody waits")
        app.let_go("rest")
        assert (await rest).status == 200
        await until(idle, "nothing is queued or in flight")
        await until(asleep, "it sleeps")
        assert (await app.post("/ask", {"x": 2})).json == 2
