"""Calls as arguments of calls, between real processes."""

import asyncio
import os
import signal

import pytest

from tests.flow.harness import Http, serving, until


@pytest.mark.parametrize("size", [3, 200_000])
async def test_a_result_goes_on(size):
    """Small, and through shared memory."""
    async with serving("promises.py:Front") as app:
        for _ in range(20):
            answer = await app.post("/norm", {"size": size})
            assert (answer.status, answer.json) == (200, sum(n * n for n in range(size)))


async def test_who_makes_it_may_die():
    """The call is made again by another replica, and nobody else learns of it."""
    async with serving("promises.py:Front") as app:
        arguments = {"size": 3, "name": "all"}
        work = [asyncio.create_task(app.post("/norm", arguments)) for _ in range(8)]
        await until(lambda: app.traced().count("made") >= 16, "all are made")
        os.kill(next(iter((await app.replicas("Maker")).values())), signal.SIGKILL)
        app.let_go("all")
        answers = await asyncio.gather(*work)
        assert [(answer.status, answer.json) for answer in answers] == [(200, 5.0)] * 8
        assert app.traced().count("made") > 16


async def test_a_client_that_leaves_ends_all_of_it():
    async with serving("promises.py:Front") as app:
        http = await Http.open(app.url)
        await http.send("POST", "/norm", body=b'{"size": 3, "name": "never"}')
        await until(lambda: app.traced().count("made") == 2, "both are made")
        http.abort()
        await until(lambda: "cancelled" in app.traced(), "it is cancelled")
