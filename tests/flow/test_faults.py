"""Processes die, stop and hang under load: what is lost, and how long it takes."""

import asyncio
import contextlib
import os
import signal
import time

import pytest

from tests.flow.harness import alive, serving, show, until
from tests.flow.load import Load


@pytest.mark.parametrize("target", ["Root", "LoneRoot"])
async def test_kill_9_of_a_replica_loses_no_idempotent_call(target):
    """One of two replicas or the only one, at the entry or behind it: every call is answered."""
    child = target.replace("Root", "Child")
    async with serving(f"graph.py:{target}") as app:
        async with Load(app, "/echo", rate=120) as load:
            await load.goes_on()
            for service in (child, target):
                await kill_one(app, service)
                await load.goes_on()
        assert load.check().keys() == {"200"}


async def kill_one(app, service: str) -> None:
    """Kill a replica and wait until another is there in its place."""
    before = await app.replicas(service)
    victim, pid = next(iter(before.items()))
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()

    async def back():
        found = await app.replicas(service)
        return victim not in found and len(found) == len(before)

    await until(back, f"{victim} has been replaced")
    show(f"{victim} was replaced after {time.monotonic() - began:.2f} s")


async def test_kill_9_runs_no_other_call_twice():
    """What is not idempotent fails, if it was on board, as an explicit 503; it never runs twice."""
    async with serving("graph.py:Root") as app:
        async with Load(app, "/once", rate=100) as load:
            for _ in range(2):
                await load.goes_on()
                on_board = load.underway
                failed_before = sum(a[0].status != 200 for a in load.answers.values())
                await kill_one(app, "Root")
                await load.goes_on()
                failed = sum(a[0].status != 200 for a in load.answers.values()) - failed_before
                # A few may have been sent between the count and the end of the process.
                assert failed <= on_board + 10
        assert load.check().keys() <= {"200", "503 replica_lost"}
        runs = app.traced()
        assert len(runs) == len(set(runs))
        answered = {n for n, [answer] in load.answers.items() if answer.status == 200}
        assert {f"once {n}" for n in answered} <= set(runs)


async def test_replicas_that_die_again_and_again():
    """Calls are refused with a time to come back, the process says so, and all recovers."""
    async with serving("graph.py:LoneRoot") as app:

        async def kill_all():
            for pid in (await app.replicas("LoneChild")).values():
                os.kill(pid, signal.SIGKILL)
            return (await app.get("/readyz")).status == 503 and (
                await app.post("/echo", {"x": 1}, headers={"x-servekit-timeout": "0.2s"})
            ).status == 503

        await until(kill_all, "calls are refused")
        answer = await app.post("/echo", {"x": 1})
        assert answer.status == 503
        assert answer.reason == "no_replica"
        assert int(answer.headers["retry-after"]) >= 1
        assert (await app.get("/livez")).status == 200
        unready = await app.get("/readyz")
        assert unready.status == 503
        assert "LoneChild" in unready.json["unready"]

        async def answers():
            return (await app.post("/echo", {"x": 7})).status == 200

        await until(answers, "it answers again")
        assert (await app.get("/readyz")).status == 200


async def test_a_replica_that_stops_is_replaced():
    """SIGSTOP: the other one answers, the stopped one is killed, and its calls run again."""
    async with serving("graph.py:Root") as app:
        async with Load(app, "/echo", rate=80) as load:
            await load.goes_on()
            stopped, pid = next(iter((await app.replicas("Child")).items()))
            os.kill(pid, signal.SIGSTOP)
            await load.goes_on()

            async def replaced():
                found = await app.replicas("Child")
                return stopped not in found and len(found) == 2

            await until(replaced, "the stopped replica has been replaced")
            await load.goes_on()
        assert load.check().keys() == {"200"}
        assert "replica hangs" in app.text


async def test_a_gateway_that_stops_is_replaced():
    """SIGSTOP: it is killed, and another one answers on the same port."""
    async with serving("graph.py:Root") as app:
        gateway = app.process("gateway_worker")
        os.kill(gateway, signal.SIGSTOP)
        await until(lambda: not alive(gateway), "the stopped gateway is gone")

        async def answers():
            return (await app.post("/echo", {"x": 3})).status == 200

        await until(answers, "it answers again")
        assert app.process("gateway_worker") != gateway
        assert "gateway hangs" in app.text


async def test_kill_9_of_the_gateway():
    """Its sockets break, and only they: the same port answers again, the replicas live on."""
    async with serving("graph.py:Root") as app:
        async with Load(app, "/echo", rate=60) as load:
            await load.goes_on()
            before = await app.replicas("Root"), await app.replicas("Child"), app.url
            gateway = app.process("gateway_worker")
            on_board = load.underway + len(load.free)
            os.kill(gateway, signal.SIGKILL)
            await until(lambda: len(load.broken) or load.answered, "the sockets broke")
            await load.goes_on(100)
        assert load.check().keys() <= {"200", "broken"}
        assert len(load.broken) <= on_board + 5
        assert app.process("gateway_worker") != gateway
        after = await app.replicas("Root"), await app.replicas("Child"), (await app.status()).url
        assert before == after


async def test_kill_9_of_the_gateway_while_it_starts():
    """There is another one, as often as it takes."""
    async with serving("slow.py:Slow") as app:
        killed = set()

        def kill_new() -> bool:
            for pid, line in app.processes().items():
                if "gateway_worker" in line and pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            return len(killed) >= 3

        await until(kill_new, "three have been killed", every_s=0.01)

        async def answers():
            try:
                async with asyncio.timeout(2.0):
                    return (await app.post("/later", {"seconds": 0})).status == 200
            except (OSError, EOFError, TimeoutError):
                return False

        await until(answers, "it answers again")


async def test_a_health_hook_that_raises():
    """Makes the app unready (503, not 500) until it is content again; no process is ended."""
    async with serving("health.py:Moody") as app:
        before = await app.replicas("Moody", state=None)
        app.trace.with_name("trace.ill").touch()

        async def is_ready() -> bool:
            return (await app.get("/readyz")).status == 200

        async def is_unready() -> bool:
            answer = await app.get("/readyz")
            assert answer.status in (200, 503)
            return answer.status == 503

        await until(is_unready, "it is unready")
        assert (await app.get("/livez")).status == 200
        app.trace.with_name("trace.ill").unlink()
        await until(is_ready, "it is ready again")
        assert (await app.post("/echo", {"x": 1})).json == 1
        assert await app.replicas("Moody", state=None) == before


async def test_kill_9_of_the_supervisor_leaves_nothing():
    """Every process, also those that user code started, ends by itself, and so do the files."""
    async with serving("orphans.py:Root") as app:
        await app.post("/echo", {"x": 1})
        assert any("sleep 300" in line for line in app.processes().values())
        app.send(signal.SIGKILL)
        began = time.monotonic()
        await app.gone()
        show(f"gone after {time.monotonic() - began:.2f} s")


async def test_kill_9_of_the_supervisor_ends_a_blocked_child():
    """User code that blocks the event loop can't keep its process alive."""
    async with serving("orphans.py:Root") as app:
        pid = next(iter((await app.replicas("Root")).values()))
        with contextlib.suppress(OSError, EOFError):
            await app.post("/block", {"seconds": 300}, headers={"x-servekit-timeout": "0.3s"})
        await until(lambda: "block" in app.traced(), "the loop is blocked")
        assert pid in app.processes()
        app.send(signal.SIGKILL)
        await app.gone()
