"""Callers that leave, and callers that have no time."""

import asyncio
import contextlib
import json
import random
import time

from tests.flow.harness import Http, Running, serving, until
from tests.soak.row import Mark, at_least, at_most, exactly, row


async def leave(app: Running, path: str, arguments: object, after_s: float) -> None:
    """Make a call, and be gone after a while."""
    async with await Http.open(app.url) as http:
        await http.send("POST", path, body=json.dumps(arguments).encode())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await http.answer()
        http.abort()


async def on_board(app: Running) -> int:
    """Return the calls that all replicas have on board, by their own count."""
    status = await app.status()
    assert status is not None
    return sum(replica.ongoing for service in status.services for replica in service.replicas)


@row("cancels at 0 to 20 ms, two stages, batched", quick={"count": 500}, full={"count": 5000})
async def cancels(count: int) -> list[Mark]:
    rng = random.Random(1)
    wrong = 0
    async with serving("leaving.py:Outer") as app:

        async def patient(number: int) -> None:
            nonlocal wrong
            for turn in range(10):
                x = 100_000 + 10 * number + turn
                answer = await app.post("/far", {"x": x})
                wrong += (answer.status, answer.json) != (200, f"label {x}")

        async def idle() -> bool:
            waiting = await app.total("servekit_in_flight") + await app.total("servekit_queued")
            return not waiting and not await on_board(app)

        neighbours = [asyncio.create_task(patient(number)) for number in range(10)]
        for first in range(0, count, 100):
            await asyncio.gather(
                *(leave(app, "/far", {"x": first + n}, rng.uniform(0, 0.02)) for n in range(100))
            )
        await asyncio.gather(*neighbours)
        began = time.monotonic()
        await until(idle, "nothing is on board, and the gauges say so", every_s=0.02)
        idle_s = time.monotonic() - began
    return [
        exactly("neighbours that were wrong", wrong, 0),
        # The supervisor asks for the figures once a second.
        at_most("until the gauges are at 0", idle_s, 1.0 + 1.2, "s", timing=True),
    ]


@row("a storm of deadlines of 1 to 5 ms", quick={"count": 2000}, full={"count": 10_000})
async def deadlines(count: int) -> list[Mark]:
    """The app notes how much time each call had left when it began to run."""
    rng = random.Random(2)
    statuses: dict[int, int] = {}
    wrong = 0
    async with serving("leaving.py:Outer") as app:

        async def client(first: int) -> None:
            nonlocal wrong
            async with await Http.open(app.url) as http:
                for number in range(first, first + count // 20):
                    limit = {"x-servekit-timeout": f"{rng.randint(1, 5)}ms"}
                    answer = await http.call("POST", "/late", body=b"%d" % number, headers=limit)
                    statuses[number] = answer.status
                    wrong += answer.status == 200 and answer.json != number

        await asyncio.gather(*(client(count * n) for n in range(20)))
        ran = [line.split() for line in app.traced() if line.startswith("ran ")]
        left = {int(number): float(remaining) for _, number, remaining in ran}
        refused = {number for number, status in statuses.items() if status == 429}
        calm = await app.post("/late", 7)
    late = [-seconds for seconds in left.values() if seconds <= 0]
    return [
        exactly("answered", len(statuses), count),
        exactly("answers but 200, 429, 504", sorted(set(statuses.values()) - {200, 429, 504}), []),
        exactly("wrong", wrong, 0),
        exactly("ran twice", len(ran) - len(left), 0),
        exactly("refused, and run all the same", len(refused & left.keys()), 0),
        # The app looks at the clock some microseconds after servekit did.
        at_most("run over 1 ms late", sum(seconds > 0.001 for seconds in late), 0, timing=True),
        at_least("run", len(left), 1, timing=True),
        exactly("the next call", calm.status, 200),
    ]
