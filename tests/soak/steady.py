"""Load that an app can bear, and more than it can."""

import asyncio
import itertools
import json
import time

from tests.flow.harness import Http, Running, descriptors, rss_mb, serving, show, until
from tests.flow.load import Load
from tests.soak.row import Mark, at_least, at_most, exactly, percentile, row

CLIENTS = 64
"""As many calls at once as saturate the app, and few enough that none is refused."""
EXPECTED = ("200", "429 queue_full")
"""A machine that has less time than when its capacity was measured has to refuse some."""
TIME_S = 1.0
"""What a call under overload may take."""


def body_of(path: str):
    """Return a function from a call's number to its arguments."""
    return (lambda number: {"x": number}) if path == "/label" else (lambda number: number)


async def capacity(app: Running, path: str, seconds: float = 2.0) -> float:
    """Return how many calls a second the app answers when there is always one more."""
    numbers = itertools.count()
    body = body_of(path)
    finished = 0

    async def client() -> None:
        nonlocal finished
        async with await Http.open(app.url) as http:
            while time.monotonic() < end:
                number = next(numbers)
                answer = await http.call("POST", path, body=json.dumps(body(number)).encode())
                if answer.status == 200 and begin <= time.monotonic() < end:
                    assert answer.json == number
                    finished += 1

    begin = time.monotonic() + 1.0
    end = begin + seconds
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    show(f"{path}: {finished / seconds:.0f} calls/s")
    return finished / seconds


def punctual(load: Load) -> Mark:
    """Return whether the load was what it was said to be: this machine may be too slow for it."""
    lag_s = percentile([o.lag_s for o in load.outcomes()], 99)
    return at_most("calls were sent late (P99)", 1000 * lag_s, 20.0, "ms", timing=True)


@row(
    "open loop at 80 % of capacity",
    quick={"seconds": 20.0, "compared_s": 8.0},
    full={"seconds": 600.0, "compared_s": 60.0},
)
async def steady(seconds: float, compared_s: float) -> list[Mark]:
    async with serving("capacity.py:Model") as app:
        most = await capacity(app, "/label")

        async def run(share: float, for_s: float) -> tuple[Load, float]:
            async with Load(app, "/label", rate=share * most) as load:
                await asyncio.sleep(for_s)
            return load, percentile([o.took_s for o in load.outcomes()], 99)

        half, half_p99 = await run(0.5, compared_s)
        before = app.processes()
        memory = sum(map(rss_mb, before))
        files = {pid: descriptors(pid) for pid in before}
        load, p99 = await run(0.8, seconds)
        outcomes = load.check() + half.check()
        await until(
            lambda: all(descriptors(pid) <= files[pid] for pid in before),
            "the clients' sockets are closed",
        )
        grown = {pid: descriptors(pid) - files[pid] for pid in before}
        return [
            exactly(
                "errors", {kind: n for kind, n in outcomes.items() if kind not in EXPECTED}, {}
            ),
            at_most("refused", outcomes["429 queue_full"], 0, timing=True),
            at_most("P99", 1000 * p99, 1500 * half_p99, "ms", timing=True),
            punctual(load),
            exactly("processes that ended", len(before.keys() - app.processes().keys()), 0),
            at_most("descriptors more", max(grown.values()), 0),
            at_most("resident memory more", sum(map(rss_mb, before)) - memory, 20.0, "MiB"),
        ]


async def overload(path: str, seconds: float, relief_s: float) -> list[Mark]:
    """Send twice what it can take, then half of it."""
    async with serving("capacity.py:Model") as app:
        most = await capacity(app, path)
        headers = {"x-servekit-timeout": f"{TIME_S:g}s"}
        load = Load(app, path, rate=2 * most, body=body_of(path), headers=headers)
        async with load:
            began = time.monotonic()
            await asyncio.sleep(seconds)
            relief = time.monotonic()
            load.rate = most / 2
            await asyncio.sleep(relief_s)
        outcomes = load.check()
        steady_state = began + min(2.0, seconds / 2)
        high = load.outcomes(steady_state, relief)
        good = [o for o in high if o.status == 200 and o.took_s <= TIME_S]
        refused = [o for o in load.outcomes() if o.status in (429, 503)]
        # The batcher also drops calls that it has held in vain, so that those behind are in time.
        at_the_door = [o for o in refused if o.reason != "overload"]
        late = [o for o in high if o.status == 504 or (o.status == 200 and o.took_s > TIME_S)]
        calm = load.outcomes(relief + min(5.0, relief_s / 2))
        goodput = len(good) / (relief - steady_state) / most
        return [
            at_least("goodput at 2 x", 100 * goodput, 90.0, "%", timing=True),
            at_most("admitted but late", 100 * len(late) / len(high), 1.0, "%", timing=True),
            at_least("refused at the door", len(at_the_door), 1),
            at_most("refused from the queue", len(refused) - len(at_the_door), len(at_the_door)),
            exactly("refused without Retry-After", sum(not o.retry_after for o in refused), 0),
            exactly("other answers", _others(outcomes), {}),
            at_most(
                "P99 of a refusal at the door",
                1000 * percentile([o.took_s - o.lag_s for o in at_the_door], 99),
                20.0,
                "ms",
                timing=True,
            ),
            punctual(load),
            Mark(
                "errors 5 s after",
                str(sum(o.status != 200 for o in calm)),
                f"0 of {len(calm)}",
                all(o.status == 200 for o in calm),
                timing=True,
            ),
        ]


def _others(outcomes) -> dict[str, int]:
    known = ("200", "429 ", "504 ", "503 no_replica")
    return {name: count for name, count in outcomes.items() if not name.startswith(known)}


SIZES = {
    "quick": {"seconds": 8.0, "relief_s": 8.0},
    "full": {"seconds": 60.0, "relief_s": 30.0},
}


@row("2 x capacity, then 0.5 x", **SIZES)
async def overload_of_slots(seconds: float, relief_s: float) -> list[Mark]:
    return await overload("/label", seconds, relief_s)


@row("2 x capacity, then 0.5 x, batched", **SIZES)
async def overload_of_batches(seconds: float, relief_s: float) -> list[Mark]:
    return await overload("/batch", seconds, relief_s)
