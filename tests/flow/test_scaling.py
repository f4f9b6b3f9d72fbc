"""The number of replicas follows the load, down to none and back, without an error."""

import asyncio

from tests.flow.harness import serving, until
from tests.flow.load import Load


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

        async def asleep():
            return not await app.replicas("Sleeper") and not await app.replicas(
                "Sleeper", "draining"
            )

        for _ in range(2):
            await until(asleep, "it sleeps")
            assert (await app.get("/readyz")).status == 200
            answers = await asyncio.gather(*(app.post("/ask", {"x": n}) for n in range(5)))
            assert [answer.json for answer in answers] == list(range(5))
