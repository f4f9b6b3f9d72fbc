"""Processes that die, stop and hang, under load."""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

from tests.flow.harness import Http, Running, alive, serving, until
from tests.flow.load import Load
from tests.soak.row import Mark, at_most, exactly, row

RATE = 80.0
"""Half of what the smallest machine takes through this graph."""


def load_s(app: Running) -> float:
    """Return the longest time that a replica took to load."""
    lines = [json.loads(line) for line in app.lines if "replica ready" in line]
    return max(line["took_s"] for line in lines)


async def replaced(app: Running, service: str, victim: str, count: int) -> float:
    """Wait until a replica has been replaced; returns the seconds that it took."""
    began = time.monotonic()

    async def back() -> bool:
        found = await app.replicas(service)
        return victim not in found and len(found) == count

    await until(back, f"{victim} has been replaced")
    return time.monotonic() - began


@row("kill -9 of a replica at 50 % load", quick={"times": 4}, full={"times": 20})
async def kills(times: int) -> list[Mark]:
    rng = random.Random(7)
    slowest_s, on_board = 0.0, 0
    async with serving("graph.py:Root") as app:
        async with (
            Load(app, "/echo", rate=RATE) as again,
            Load(app, "/once", rate=RATE / 4) as once,
        ):
            await again.goes_on()
            for _ in range(times):
                service = rng.choice(["Root", "Child"])
                victim, pid = rng.choice(sorted((await app.replicas(service)).items()))
                on_board += once.underway
                os.kill(pid, signal.SIGKILL)
                slowest_s = max(slowest_s, await replaced(app, service, victim, 2))
                await again.goes_on(20)
        idempotent, others = again.check(), once.check()
        runs = app.traced()
        slack = times  # one may be sent between the count and the end of the process
        return [
            exactly("idempotent calls lost", idempotent.total() - idempotent["200"], 0),
            at_most("others lost", others.total() - others["200"], on_board + slack),
            exactly(
                "others lost, not as 503 replica_lost",
                others.total() - others["200"] - others["503 replica_lost"],
                0,
            ),
            exactly("run twice", len(runs) - len(set(runs)), 0),
            at_most("slowest to be back", slowest_s, 3.0 + load_s(app), "s", timing=True),
        ]


async def hangs(how: str) -> list[Mark]:
    """Let one of two replicas hang; measure when it gets no more calls, and when it is replaced."""
    async with serving("graph.py:Root") as app:
        async with Load(app, "/echo", rate=RATE) as load:
            await load.goes_on()
            service = "Child" if how == "stopped" else "Root"
            before = await app.replicas(service)
            began = time.monotonic()
            if how == "stopped":
                victim, pid = next(iter(before.items()))
                os.kill(pid, signal.SIGSTOP)
            else:
                blocking = asyncio.create_task(app.post("/block", {"seconds": 300}))
                await until(lambda: "block" in app.traced(), "the loop is blocked")
                victim = ""

            async def ejected() -> bool:
                return len(await app.replicas(service)) < 2

            await until(ejected, "it gets no more calls")
            ejected_s = time.monotonic() - began
            if not victim:
                [victim] = before.keys() - (await app.replicas(service)).keys()
            await replaced(app, service, victim, 2)
            replaced_s = time.monotonic() - began
            await load.goes_on(20)
            if how == "blocked":
                answer = await blocking
                assert (answer.status, answer.reason) == (503, "replica_lost")
        outcomes = load.check()
        return [
            exactly("retryable calls lost", outcomes.total() - outcomes["200"], 0),
            at_most("out of the table", ejected_s, 3.0, "s", timing=True),
            at_most("replaced", replaced_s, 10.0 + load_s(app), "s", timing=True),
        ]


@row("SIGSTOP of a replica")
async def stopped() -> list[Mark]:
    return await hangs("stopped")


@row("a blocked event loop")
async def blocked() -> list[Mark]:
    return await hangs("blocked")


@row("all replicas die 5 times in 10 s")
async def all_die() -> list[Mark]:
    lives: list[int] = []
    readies: list[int] = []
    async with serving("graph.py:LoneRoot") as app:

        async def watch() -> None:
            while True:
                lives.append((await app.get("/livez")).status)
                readies.append((await app.get("/readyz")).status)
                await asyncio.sleep(0.1)

        watching = asyncio.create_task(watch())
        async with Load(app, "/echo", rate=20, headers={"x-servekit-timeout": "2s"}) as load:
            await load.goes_on()
            began = time.monotonic()
            for turn in range(5):
                await asyncio.sleep(max(0.0, began + 2.0 * turn - time.monotonic()))
                for service in ("LoneRoot", "LoneChild"):
                    for state in ("ready", "starting", "unready"):
                        for pid in (await app.replicas(service, state)).values():
                            with contextlib.suppress(ProcessLookupError):
                                os.kill(pid, signal.SIGKILL)

            async def well() -> bool:
                return (await app.get("/readyz")).status == 200

            await until(well, "it is ready again")
            recovered_s = time.monotonic() - began - 8.0
            await load.goes_on()
        watching.cancel()
        outcomes = load.check()
        last = load.outcomes()[-20:]
        refused = [o for o in load.outcomes() if o.reason == "no_replica"]
        known = {"200", "429 no_replica", "503 no_replica", "503 replica_lost"}
        known |= {"504 deadline_exceeded"}
        return [
            exactly("/livez", sorted(set(lives)), [200]),
            exactly("/readyz", sorted(set(readies)), [200, 503]),
            exactly("other answers", sorted(outcomes.keys() - known), []),
            exactly("refused without Retry-After", sum(not o.retry_after for o in refused), 0),
            exactly("errors behind it", sum(o.status != 200 for o in last), 0),
            at_most("ready again", recovered_s, 30.0, "s", timing=True),
        ]


def owners(app: Running, ports: list[int]) -> dict[int, int]:
    """Return which process of an app holds the other end of each client's port."""
    server = urlsplit(app.url).port
    inodes = {}
    for line in Path("/proc/net/tcp").read_text("utf-8").splitlines()[1:]:
        _, own, other, *_, inode = line.split()[:10]
        if int(own.rpartition(":")[2], 16) == server:
            inodes[inode] = int(other.rpartition(":")[2], 16)
    found = {}
    for pid in app.all_of("gateway_worker"):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                port = inodes.get(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
                if port in ports:
                    found[port] = pid
    return found


@row("kill -9 of a gateway", quick={"times": 2}, full={"times": 10})
async def gateway_kills(times: int) -> list[Mark]:
    spared, broken_elsewhere, slowest_s = 0, 0, 0.0
    async with serving("graph.py:Root") as app:
        replicas = await app.replicas("Root") | await app.replicas("Child")
        async with Load(app, "/echo", rate=RATE / 2) as load:
            await load.goes_on()
            gateways = len(app.all_of("gateway_worker"))
            allowed = 0
            for _ in range(times):
                kept: dict[int, Http] = {}
                for number in range(20):
                    http = await Http.open(app.url)
                    assert (
                        await http.call("POST", "/echo", body=b'{"x": %d}' % number)
                    ).json == number
                    kept[http.writer.get_extra_info("sockname")[1]] = http
                owner = owners(app, list(kept))
                assert owner.keys() == kept.keys()
                victim = random.Random(9).choice(sorted(set(owner.values())))
                allowed += load.underway + len(load.free)
                began = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                assert (await app.post("/echo", {"x": 1})).json == 1  # with the others, or in line
                slowest_s = max(slowest_s, time.monotonic() - began)
                for port, http in kept.items():
                    if owner[port] != victim:
                        answer = await http.call("POST", "/echo", body=b'{"x": 5}')
                        spared += answer.json == 5
                        broken_elsewhere += answer.json != 5
                    await http.close()
                await until(lambda victim=victim: not alive(victim), "it is gone")
                await until(
                    lambda: len(app.all_of("gateway_worker")) == gateways, "there is another"
                )
                await load.goes_on(20)
        outcomes = load.check()
        after = await app.replicas("Root") | await app.replicas("Child")
        return [
            exactly("answers but 200", sorted(outcomes.keys() - {"200", "broken"}), []),
            at_most("sockets broken", len(load.broken), allowed + 5 * times),
            exactly(f"broken on {gateways - 1} other gateways", broken_elsewhere, 0),
            exactly("replicas that changed", len(replicas.items() ^ after.items()), 0),
            at_most("slowest next answer", slowest_s, 5.0, "s", timing=True),
        ]
