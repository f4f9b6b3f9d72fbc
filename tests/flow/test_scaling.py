"""The number of replicas follows the load, down to none and back, without an error."""

import asyncio

from tests.flow.harness import Http, serving, until
from tests.flow.load import Load


async def asleep(app, service: str = "Sleeper") -> bool:
    """Return whether a service has no replica, not even one that leaves."""
    status = await app.status()
    return not any(found.replicas for found in status.services if found.name == service)


async def test_grows_under_load_and_comes_back():
    """Three replicas while many calls are on board, one when they have gone."""
    async with serving("scaling.py:Grows") as app:
        assert len(await app.replicas("Grows")) == 1
        async with Load(app, "/wait", rate=40, right=lambda _, value: value == "waited") as load:

            async def grown():
                return len(await app.replicas("Grows")) == 3

            await until(grown, "there are three replicas")
            await load.goes_on(100)
            spread = {a.replica for [a] in load.answers.values()}
            assert len(spread) == 3
        async with Load(app, "/quick", rate=10, right=lambda _, value: value == "quick") as few:

            async def shrunk():
                return len(await app.replicas("Grows")) == 1

            await until(shrunk, "there is one replica", timeout_s=100)
        assert load.check().keys() == {"200"}
        assert few.check().keys() == {"200"}


async def test_sleeps_and_wakes():
    """`min=0`: it sleeps when nobody calls; the first calls wake it and wait for it."""
    async with serving("scaling.py:Front") as app:
        assert (await app.post("/ask", {"x": 1})).json == 1
        for _ in range(2):
            await until(lambda: asleep(app), "it sleeps")
            assert (await app.get("/readyz")).status == 200
            answers = await asyncio.gather(*(app.post("/ask", {"x": n}) for n in range(5)))
            assert [answer.json for answer in answers] == list(range(5))


async def test_zero_and_back_under_load():
    """It sleeps and wakes again and again while calls come in bursts; none is lost."""
    async with serving("scaling.py:Front") as app:
        for _ in range(2):
            await until(lambda: asleep(app), "it sleeps")
            async with Load(app, "/ask", rate=60) as load:
                await load.goes_on(150)
            assert load.check().keys() == {"200"}
        assert "replica died" not in app.text


async def test_a_call_is_held_within_its_deadline():
    """An impatient call of a sleeping service gets 504 at its time, a patient one its answer."""
    async with serving("scaling.py:Slow", env={"LOAD_S": "3"}) as app:
        await until(lambda: asleep(app, "Slow"), "it sleeps")
        patient = asyncio.create_task(app.post("/ask", {"x": 1}))
        impatient = await app.post("/ask", {"x": 2}, headers={"x-servekit-timeout": "0.3s"})
        assert impatient.status == 504
        assert not patient.done()
        assert (await patient).json == 1


async def test_clients_that_leave_the_queue_let_it_sleep():
    """50 queued clients disconnect: the gauges fall to 0, and so does the number of replicas."""
    async with serving("scaling.py:Front") as app:
        clients = [await Http.open(app.url) for _ in range(50)]
        for http in clients:
            await http.send("POST", "/hold", body=b'{"seconds": 60}')

        async def queued():
            return await app.total("servekit_queued", 'service="Sleeper"') >= 40

        await until(queued, "they wait in line")
        for http in clients:
            http.abort()

        async def gone():
            gauges = [
                await app.total(family, f'service="{service}"')
                for family in ("servekit_queued", "servekit_in_flight")
                for service in ("Sleeper", "Front")
            ]
            return not any(gauges)

        await until(gone, "nothing is on board")
        await until(lambda: asleep(app), "it sleeps")


async def test_clients_that_leave_while_it_wakes_let_it_sleep_again():
    """Those who wait in the gateways for a replica count as load only as long as they are there."""
    env = {"LOAD_S": "4"}
    async with serving("scaling.py:Slow", env=env, options=("--gateway-workers", "2")) as app:
        await until(lambda: asleep(app, "Slow"), "it sleeps")
        clients = [await Http.open(app.url) for _ in range(50)]
        for http in clients:
            await http.send("POST", "/ask", body=b'{"x": 1}')

        async def wakes():
            return (await app.status()).services[0].desired

        await until(wakes, "it wakes")
        for http in clients:
            http.abort()
        assert (await app.command("scale", "Slow=0..1"))[0] == 0
        await until(lambda: asleep(app, "Slow"), "it sleeps again")
        assert (await app.post("/ask", {"x": 3})).json == 3
