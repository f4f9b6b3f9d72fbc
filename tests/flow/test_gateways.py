"""Several gateways on one port: one dies, all know what runs, and together they have one count."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.flow.harness import Http, alive, serving, show, until
from tests.flow.load import Load

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")

TWO = ("--gateway-workers", "2")

ROLLS = """
import servekit as sk


@sk.service(version="{version}")
class Root:
    @sk.endpoint
    async def {name}(self, x: int) -> str:
        return "{version}"
"""


def peers(pid: int) -> set[int]:
    """Return the ports of the clients whose connections a process holds."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(link.readlink().name.removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]]
    return {int(row[2].rpartition(":")[2], 16) for row in rows if row[9] in inodes}


async def on_both(app, count: int = 64) -> list[Http]:
    """Open connections when both gateways take them; each has some."""

    async def ready():
        return [g.state for g in (await app.status()).gateways] == ["ready"] * 2

    await until(ready, "both gateways take connections")
    opened: list[Http] = []

    async def shared() -> bool:
        """Who accepts them is the kernel's choice: on a busy machine it may be one alone."""
        new = await asyncio.gather(*(Http.open(app.url) for _ in range(count)))
        opened.extend(new)
        for http in new:
            assert (await http.call("GET", "/livez")).status == 200
        ports = {http.port for http in opened}
        shares = [len(ports & peers(pid)) for pid in app.all_of("gateway_worker")]
        show(f"{len(opened)} connections: {shares}")
        assert sum(shares) == len(opened)
        return all(shares)

    await until(shared, "both have some", timeout_s=20)
    return opened


async def test_kill_9_of_one_gateway_under_load():
    """The connections that it had accepted break, no other does, and another takes its place."""
    async with serving("graph.py:Root", options=TWO) as app:
        victim, other = sorted(app.all_of("gateway_worker"))
        idle = await on_both(app)
        async with Load(app, "/echo", rate=120) as load:
            await load.goes_on(200)
            os.kill(victim, signal.SIGSTOP)  # so that it takes no more while we look
            doomed = peers(victim)
            os.kill(victim, signal.SIGKILL)
            await load.goes_on(100)
            await until(
                lambda: len(app.all_of("gateway_worker") - {victim}) == 2, "it was replaced"
            )
            await load.goes_on(200)
        assert load.check().keys() <= {"200", "broken"}
        broken = {load.ports[number] for number in load.broken}
        assert broken <= doomed
        show(f"{len(load.broken)} calls on {len(broken)} connections broke")
        assert alive(other)
        for http in idle:
            if http.port in doomed:
                assert await http.reader.read() == b""
            else:
                assert (await http.call("POST", "/echo", body=b'{"x": 1}')).json == 1
            await http.close()
        status = await app.status()
        assert {g.pid for g in status.gateways} == app.all_of("gateway_worker")
        assert [g.id for g in status.gateways] in (
            ["gateway-1", "gateway-3"],
            ["gateway-2", "gateway-3"],
        )


async def test_any_of_them_answers_for_all():
    """`/metrics` has the calls of both, whoever is asked, and of one that has died."""
    async with serving("graph.py:Root", options=TWO) as app:
        opened = await on_both(app)
        for number, http in enumerate(opened):
            assert (await http.call("POST", "/echo", body=b'{"x": %d}' % number)).json == number

        async def counted(http: Http) -> float:
            text = (await http.call("GET", "/metrics")).body.decode()
            [line] = [
                line
                for line in text.splitlines()
                if line.startswith("servekit_requests_total") and 'service="Root"' in line
            ]
            return float(line.rpartition(" ")[2])

        assert {await counted(http) for http in opened} == {float(len(opened))}
        victim = min(app.all_of("gateway_worker"))
        os.kill(victim, signal.SIGKILL)

        async def replaced():
            pids = app.all_of("gateway_worker")
            status = await app.status()
            return victim not in pids and [g.state for g in status.gateways] == ["ready"] * 2

        await until(replaced, "another took its place")
        assert (await app.post("/echo", {"x": 1})).json == 1
        assert await app.total("servekit_requests_total", 'service="Root"') == 65
        for http in opened:
            await http.close()
        assert (await app.command("status"))[1].count("gateway-") == 2


async def test_a_new_revision_reaches_all_of_them_first(tmp_path):
    """When the first old replica has left, no gateway answers for the old app any more."""
    file = tmp_path / "app.py"
    file.write_text(ROLLS.format(version="v1", name="first"))
    env = {"SERVEKIT_GATEWAY_WORKERS": "2"}
    async with serving(f"{file}:Root", verb="dev", cwd=tmp_path, env=env) as app:
        opened = await on_both(app)
        old = await app.replicas("Root")
        file.write_text(ROLLS.format(version="v2", name="second"))

        async def left():
            return not old.keys() & (await app.replicas("Root")).keys()

        await until(left, "the old replica does not take calls any more", every_s=0.005)
        for http in opened:
            assert (await http.call("POST", "/second", body=b'{"x": 1}')).json == "v2"
            assert (await http.call("POST", "/first", body=b'{"x": 1}')).status == 404
            await http.close()


async def test_the_calls_that_wait_in_all_of_them_are_one_load():
    """16 calls wait for a sleeping service, some in each: four replicas' worth, two alone are not."""
    async with serving("scaling.py:Slow", options=TWO, env={"LOAD_S": "12"}) as app:

        async def asleep():
            return not (await app.status()).services[0].replicas

        await until(asleep, "it sleeps")
        opened = await on_both(app)
        shares = [peers(pid) for pid in app.all_of("gateway_worker")]
        halves = [[http for http in opened if http.port in share][:8] for share in shares]
        chosen = [http for half in halves for http in half]
        assert len(chosen) == 16
        calls = [
            asyncio.create_task(http.call("POST", "/ask", body=b'{"x": 1}')) for http in chosen
        ]

        async def wanted():
            return (await app.status()).services[0].desired == 4

        await until(wanted, "four replicas are wanted")
        assert {answer.status for answer in await asyncio.gather(*calls)} == {200}
        for http in opened:
            await http.close()
