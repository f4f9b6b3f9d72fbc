"""How an app ends: by a signal, with work on board, while it loads, or because it can't start."""

import asyncio
import signal
import socket
import time

from tests.flow.harness import PATIENCE_S, Http, serving, until


async def test_sigterm_lets_running_calls_finish():
    """Sync work, async work and a stream that are on board are answered whole; then it exits 0."""
    async with serving("slow.py:Slow") as app:
        async with await Http.open(app.url) as http:
            await http.send("POST", "/ticks", body=b'{"count": 12, "every_s": 0.1}')
            work = [
                asyncio.create_task(app.post("/sync", {"seconds": 1.2})),
                asyncio.create_task(app.post("/later", {"seconds": 1.2})),
            ]
            await until(lambda: set(app.traced()) >= {"sync", "later", "ticks"}, "all run")
            app.send(signal.SIGTERM)
            answers = await asyncio.gather(*work)
            stream = await http.answer()
        assert [answer.status for answer in answers] == [200, 200]
        assert [answer.json for answer in answers] == ["done", "done"]
        assert stream.status == 200
        assert stream.body.decode().count("data: ") == 13  # with the one of the end
        assert stream.body.decode().rstrip().endswith("event: end\ndata:")
        assert await app.exit_code() == 0
        assert app.traced()[-1] == "teardown"
        await app.gone()


async def test_new_connections_while_it_drains():
    """Are refused at once, so that a balancer goes elsewhere; none is taken and left waiting."""
    async with serving("slow.py:Slow") as app:
        work = asyncio.create_task(app.post("/sync", {"seconds": 5}))
        await until(lambda: "sync" in app.traced(), "it runs")
        app.send(signal.SIGTERM)

        async def refuses() -> bool:
            try:
                async with asyncio.timeout(2.0):
                    await app.get("/livez")
            except ConnectionRefusedError:
                return True
            except (OSError, EOFError):  # it came just before
                return False
            return False

        await until(refuses, "connections are refused", timeout_s=4)
        assert not work.done()
        assert (await work).json == "done"
        assert await app.exit_code() == 0


async def test_work_longer_than_the_drain_is_cut():
    """`--drain-s` bounds how long running calls may hold the end up."""
    async with serving("slow.py:Slow", options=("--drain-s", "1")) as app:
        work = asyncio.create_task(app.post("/sync", {"seconds": 120}))
        await until(lambda: "sync" in app.traced(), "it runs")
        began = time.monotonic()
        app.send(signal.SIGTERM)
        await app.exit_code()
        assert time.monotonic() - began < 20
        (outcome,) = await asyncio.gather(work, return_exceptions=True)
        assert isinstance(outcome, (OSError, EOFError)) or outcome.status >= 500


async def test_a_second_interrupt_ends_at_once():
    """Ctrl-C waits for running calls; Ctrl-C again doesn't."""
    async with serving("slow.py:Slow") as app:
        work = asyncio.create_task(app.post("/sync", {"seconds": 300}))
        await until(lambda: "sync" in app.traced(), "it runs")
        app.send(signal.SIGINT)
        await until(lambda: unready(app), "it drains")
        began = time.monotonic()
        app.send(signal.SIGINT)
        await app.exit_code()
        assert time.monotonic() - began < 10
        (outcome,) = await asyncio.gather(work, return_exceptions=True)
        assert isinstance(outcome, (OSError, EOFError)) or outcome.status >= 500


async def unready(app) -> bool:
    try:
        async with asyncio.timeout(1.0):
            return (await app.get("/readyz")).status != 200
    except (OSError, EOFError, TimeoutError):
        return True


async def test_sigterm_while_it_loads():
    """A replica whose `__init__` takes for ever does not hold the end up."""
    async with serving("slow.py:Loads", ready=False) as app:
        await until(lambda: "loading" in app.traced(), "it loads")
        began = time.monotonic()
        app.send(signal.SIGTERM)
        assert await app.exit_code() == 0
        assert time.monotonic() - began < 15
        await app.gone()


async def test_setup_raises():
    """The exit code says so, the traceback shows the line, and nothing is left running."""
    async with serving("slow.py:Raises", ready=False) as app:
        assert await app.exit_code() not in (0, None)
        assert "RuntimeError: the weights are not there" in app.text
        assert "in prepare" in app.text
        await app.gone()


async def test_setup_raises_while_another_service_loads():
    """A service that still loads does not delay the bad news."""
    async with serving("slow.py:RaisesBesideSlow", ready=False) as app:
        await until(lambda: "setup" in app.traced(), "the set-up raises")
        began = time.monotonic()
        assert await app.exit_code() not in (0, None)
        assert time.monotonic() - began < 15
        assert "the weights are not there" in app.text
        await app.gone()


async def test_a_port_in_use():
    """The error names the address; nothing was started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with serving("slow.py:Slow", ready=False, port=port) as app:
            assert await app.exit_code() not in (0, None)
            assert f"127.0.0.1:{port}" in app.text
            assert "in use" in app.text
            assert "Traceback" not in app.text


async def test_gpus_that_are_not_there():
    """Fails before anything starts, and says what is there and what was asked."""
    async with serving("slow.py:WantsGpus", ready=False, env={"SERVEKIT_GPUS": "0"}) as app:
        assert await app.exit_code() not in (0, None)
        assert "gpu=2" in app.text
        assert "no GPU" in app.text
        assert app.traced() == []


async def test_an_app_that_can_not_be_imported():
    """The user's own exception is shown, with its line."""
    async with serving("broken.py:Broken", ready=False) as app:
        assert await app.exit_code(PATIENCE_S) not in (0, None)
        assert "ZeroDivisionError" in app.text
        assert "broken.py" in app.text
