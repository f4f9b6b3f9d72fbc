"""How an app ends: by a signal, with work on board, while it loads, or because it can't start."""

import asyncio
import contextlib
import os
import signal
import socket
import time

import pytest

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


async def refuses(app) -> bool:
    """Return whether there is no port any more."""
    try:
        async with asyncio.timeout(2.0):
            await app.get("/livez")
    except ConnectionRefusedError:
        return True
    except (OSError, EOFError):  # it came just before
        return False
    return False


async def test_new_connections_while_it_drains():
    """Are refused at once, so that a balancer goes elsewhere; none is taken and left waiting."""
    async with serving("slow.py:Slow") as app:
        work = asyncio.create_task(app.post("/hold", {"name": "work"}))
        await until(lambda: "hold" in app.traced(), "it runs")
        app.send(signal.SIGTERM)

        await until(lambda: refuses(app), "connections are refused", timeout_s=4)
        assert not work.done()
        app.let_go("work")
        assert (await work).json == "work"
        assert await app.exit_code() == 0


@pytest.mark.parametrize("path", ["/sync", "/later"])
async def test_work_longer_than_the_drain_is_cut(path):
    """`--drain-s` bounds how long running calls may hold the end up; then they are answered 503."""
    async with serving("slow.py:Slow", options=("--drain-s", "1")) as app:
        work = asyncio.create_task(app.post(path, {"seconds": 10}))
        await until(lambda: path[1:] in app.traced(), "it runs")
        began = time.monotonic()
        app.send(signal.SIGTERM)
        answer = await work
        assert (answer.status, answer.reason) == (503, "shutdown")
        assert answer.headers["connection"] == "close"
        assert await app.exit_code() == 0
        assert time.monotonic() - began < 9  # it did not wait for the work


async def test_a_stream_longer_than_the_drain_is_cut():
    """It ends with an error event, so that nobody takes what came for the whole."""
    async with serving("slow.py:Slow", options=("--drain-s", "1")) as app:
        async with await Http.open(app.url) as http:
            await http.send("POST", "/ticks", body=b'{"count": 1000, "every_s": 0.1}')
            await until(lambda: "ticks" in app.traced(), "it runs")
            app.send(signal.SIGTERM)
            events = (await http.answer()).body.decode().rstrip().split("\n\n")
        assert events[0] == "data: 0"
        assert events[-1].startswith("event: error\n")
        assert '"reason":"shutdown"' in events[-1]
        assert await app.exit_code() == 0


# -- the delay


DELAY = ("--drain-delay-s", "300")
TWO = ("--gateway-workers", "2")


@pytest.mark.parametrize("workers", [(), TWO], ids=["one", "two"])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_sigterm_tells_balancers_first(workers, second):
    """It is not ready any more, and answers all the same; a second signal ends the wait."""
    async with serving("slow.py:Slow", options=(*DELAY, *workers)) as app:
        async with await Http.open(app.url) as kept, await Http.open(app.url) as idle:
            await kept.call("GET", "/livez")
            await idle.call("GET", "/livez")
            app.send(signal.SIGTERM)
            await unready_for_good(app)
            for _ in range(20):
                answer = await app.post("/later", {"seconds": 0})
                assert (answer.status, answer.json) == (200, "done")
                assert answer.headers["connection"] == "close"
            ready = await app.get("/readyz")
            assert (ready.status, ready.json) == (503, {"unready": {"gateway": "draining"}})
            assert (await app.get("/livez")).status == 200

            async def all_drain() -> bool:
                return {g.state for g in (await app.status()).gateways} == {"draining"}

            await until(all_drain, "also the one that started last does")

            answer = await kept.call("POST", "/later", body=b'{"seconds": 0}')
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await kept.reader.read() == b""

            work = asyncio.create_task(app.post("/sync", {"seconds": 1}))
            await until(lambda: "sync" in app.traced(), "it runs")
            app.send(second)
            assert await idle.reader.read() == b""
            assert (await work).json == "done"
        assert await app.exit_code() == 0
        await app.gone()


async def unready_for_good(app) -> None:
    """Wait until no gateway says that it is ready: 10 of 10 answers are 503."""

    async def look() -> bool:
        return {(await app.get("/readyz")).status for _ in range(10)} == {503}

    await until(look, "it is not ready")


async def test_who_keeps_asking_gets_answers_until_there_is_no_port():
    """During the delay new connections are answered with 200 only; then they are refused."""
    async with serving("slow.py:Slow", options=("--drain-delay-s", "1.5", *TWO)) as app:
        app.send(signal.SIGTERM)
        statuses, began = [], time.monotonic()
        with contextlib.suppress(OSError, EOFError):
            while True:
                statuses.append((await app.post("/later", {"seconds": 0})).status)
        assert set(statuses) == {200}
        assert time.monotonic() - began > 1.4
        await until(lambda: refuses(app), "connections are refused")
        assert await app.exit_code() == 0


async def test_sigterm_between_the_first_gateway_and_the_last():
    """The delay is for all who were told that the app is ready, be it before all of it started."""
    async with serving("slow.py:Slow", options=(*DELAY, *TWO), ready=False) as app:
        gateways = await until(
            lambda: len(found := app.all_of("gateway_worker")) == 2 and found, "two", every_s=0.01
        )
        os.kill(max(gateways), signal.SIGSTOP)
        await app.ready()
        app.send(signal.SIGTERM)
        await unready_for_good(app)
        for _ in range(20):
            assert (await app.post("/later", {"seconds": 0})).status == 200
        app.send(signal.SIGTERM)
        assert await app.exit_code() == 0
        await app.gone()


async def test_a_gateway_that_dies_during_the_delay_is_replaced():
    """Who still comes is still answered, and still told that the app is not ready."""
    async with serving("slow.py:Slow", options=DELAY) as app:
        app.send(signal.SIGTERM)
        await unready_for_good(app)
        gateway = app.process("gateway_worker")
        os.kill(gateway, signal.SIGKILL)

        async def answers() -> bool:
            try:
                return (await app.post("/later", {"seconds": 0})).status == 200
            except (OSError, EOFError):
                return False

        await until(answers, "another answers")
        assert (await app.get("/readyz")).json == {"unready": {"gateway": "draining"}}
        assert app.process("gateway_worker") != gateway
        app.send(signal.SIGTERM)
        assert await app.exit_code() == 0


async def test_ctrl_c_does_not_wait():
    """A person waits for it: the delay is for orchestrators."""
    async with serving("slow.py:Slow", options=DELAY) as app:
        app.send(signal.SIGINT)
        assert await app.exit_code() == 0


async def test_dev_does_not_wait():
    async with serving("slow.py:Slow", verb="dev", env={"SERVEKIT_DRAIN_DELAY_S": "300"}) as app:
        app.send(signal.SIGTERM)
        assert await app.exit_code() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_to_the_whole_group_ends_it_as_well(number):
    """As a shell or a supervisor of jobs sends it: running calls finish, nothing is left."""
    async with serving("slow.py:Slow", options=TWO) as app:
        work = asyncio.create_task(app.post("/sync", {"seconds": 1}))
        await until(lambda: "sync" in app.traced(), "it runs")
        app.send(number, group=True)
        assert (await work).json == "done"
        assert await app.exit_code() == 0
        await app.gone()


@pytest.mark.parametrize(
    "phase", ["description", "gateway_worker", "replica_worker", "both", "folder"]
)
@pytest.mark.parametrize("group", [False, True], ids=["supervisor", "group"])
async def test_sigterm_at_any_moment_of_the_start(phase, group):
    """Whatever is on its way then ends, too; there is no delay for what was never ready."""
    options = (*DELAY, *TWO)
    async with serving("slow.py:Slow", ready=False, options=options) as app:

        def is_there() -> bool:
            text = " ".join(app.processes().values())
            if phase == "both":
                return "gateway_worker" in text and "replica_worker" in text
            if phase == "folder":
                return app.folder() is not None
            return f"engine.{phase}" in text

        await until(is_there, phase, every_s=0.002)
        app.send(signal.SIGTERM, group=group)
        assert await app.exit_code() == 0
        await app.gone()


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
