"""The clients against a running app: what they leave is cancelled there, what is lost is sent again."""

import asyncio
import gc
import importlib.util
import os
import signal
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

import numpy as np
import pytest

import servekit as sk
from tests.flow.harness import APPS, COMMAND, ROOT, of_a_file, serving, until


@pytest.fixture(scope="module")
def app():
    yield from of_a_file("leaving.py:Outer")


def load(path, name):
    """Import a file as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def outer(tmp_path_factory):
    """The class of the app, as its client has it: written from the code alone."""
    path = tmp_path_factory.mktemp("client") / "outer_client.py"
    write("client", str(APPS / "leaving.py:Outer"), "-o", str(path))
    return load(path, "outer_client").Outer


def write(*words):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*COMMAND, *words], check=True, env=environment, timeout=60)


async def ongoing(app) -> int:
    status = await app.status()
    return sum(replica.ongoing for service in status.services for replica in service.replicas)


async def busy(app, count=1):
    async def look():
        return await ongoing(app) >= count

    await until(look, "the server works")


async def idle(app):
    async def look():
        return await ongoing(app) == 0

    await until(look, "nothing is on board", timeout_s=15)


@pytest.mark.parametrize("kind", ["typed", "async"])
async def test_cancelling_an_awaited_call_stops_the_work(app, outer, kind):
    async with sk.connect(outer, app.url) as typed, sk.AsyncClient(app.url) as client:
        work = (
            typed.far_wait.remote(seconds=50.0)
            if kind == "typed"
            else client.call("far_wait", seconds=50)
        )
        task = asyncio.ensure_future(work)
        await busy(app)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(app)


async def test_cancelling_a_remote_call_stops_the_work(app, outer):
    async with sk.connect(outer, app.url) as typed:
        call = typed.far_wait.remote(seconds=50.0)
        await busy(app)
        assert call.cancel()
        await idle(app)


async def test_an_interrupt_stops_the_work(app):
    """Ctrl-C in a script that waits for an answer: the server learns of it at once."""
    script = (
        "import signal, sys, time, servekit as sk\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's job may ignore it
        "client = sk.Client(sys.argv[1])\n"
        "try: client.call('far_wait', seconds=50)\n"
        "except KeyboardInterrupt: print('interrupted', flush=True); time.sleep(30)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        app.url,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        await busy(app, 2)
        process.send_signal(signal.SIGINT)
        assert await process.stdout.readline() == b"interrupted\n"
        await idle(app)
    finally:
        process.kill()
        await process.communicate()


@pytest.mark.parametrize("kind", ["tokens", "tokens_sync"])
@pytest.mark.parametrize("how", ["typed", "async", "plain", "dropped"])
async def test_leaving_a_stream_stops_its_generator(app, outer, kind, how):
    before = app.traced().count(f"{kind} closed")
    async with sk.connect(outer, app.url) as typed, sk.AsyncClient(app.url) as client:
        if how == "typed":
            stream = getattr(typed, kind).remote(count=100_000)
            async for chunk in stream:
                assert chunk == 0
                break
            await stream.aclose()
        elif how == "async":
            async for chunk in client.stream(kind, count=100_000):
                assert chunk == 0
                break
        elif how == "plain":

            def read():
                with sk.Client(app.url) as plain:
                    return next(iter(plain.stream(kind, count=100_000)))

            assert await asyncio.to_thread(read) == 0
        else:
            stream = getattr(typed, kind).remote(count=100_000)
            assert await anext(stream) == 0
            del stream
            gc.collect()
        await until(
            lambda: app.traced().count(f"{kind} closed") > before, "it was closed", timeout_s=15
        )
        await idle(app)


async def test_leaving_connect_stops_what_runs(app, outer):
    async with sk.connect(outer, app.url) as typed:
        calls = [typed.far_wait.remote(seconds=50.0) for _ in range(20)]
        await busy(app, 20)
    got = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in got} == {sk.errors.Cancelled}
    await idle(app)


async def test_many_loops_and_threads_share_one_connection(app, outer):
    with sk.connect(outer, app.url) as typed:

        def work(first):
            async def ask():
                numbers = range(first, first + 20)
                return await asyncio.gather(*(typed.label.remote(n) for n in numbers))

            return asyncio.run(ask())

        answers = await asyncio.gather(*(asyncio.to_thread(work, 100 * n) for n in range(8)))
    assert answers == [[f"label {100 * n + i}" for i in range(20)] for n in range(8)]


async def test_calls_outlive_a_replica_and_a_gateway():
    """An idempotent call whose gateway is killed under it is sent again by the client alone."""
    async with (
        serving("leaving.py:Outer") as app,
        sk.AsyncClient(app.url, retries=50, timeout_s=60) as client,
    ):
        ask = [
            asyncio.create_task(client.call("far_wait", seconds=1.0, idempotent=True))
            for _ in range(3)
        ]
        await busy(app, 3)
        os.kill(app.process("gateway_worker"), signal.SIGKILL)
        assert await asyncio.gather(*ask) == ["waited"] * 3


# -- written clients


async def test_a_written_client_calls_every_kind_of_endpoint(tmp_path):
    async with serving("everything.py:Everything") as app:
        path = tmp_path / "everything_client.py"
        other = tmp_path / "by_url.py"
        await asyncio.to_thread(write, "client", str(APPS / "everything.py"), "-o", str(path))
        await asyncio.to_thread(write, "client", "--url", app.url, "-o", str(other))
        assert path.read_text() == other.read_text()
        await asyncio.to_thread(_call_everything, load(path, "everything_client"), app.url)


def _call_everything(m, url):
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    with sk.connect(m.Everything, url) as s, sk.connect(m.ImageLab, url) as images:
        assert s.numbers(a=1, b=2.0, d=None) == 3.0
        assert s.texts() == 'it\'s "so"\n'
        assert s.texts(text="", words=["a"], more={"z", "y"}) == "ayz"
        assert s.times(
            at=datetime(2026, 1, 1, tzinfo=UTC),
            day=date(2026, 1, 2),
            wait=timedelta(1),
            id=UUID(int=1),
        ) == {
            "at": "2026-01-01T00:00:00+00:00",
            "day": "2026-01-02",
            "wait": "1 day, 0:00:00",
            "id": str(UUID(int=1)),
        }
        assert s.choose(color="blue", size=3) == "blue"
        assert s.long_choice(of="beta") == "beta"
        box = m.Box(width=1.0, made=date(2026, 1, 1))
        assert s.pack(box=box, times=2) == [box, box]
        assert s.whole(box) == box
        leaf = {"label": "b", "children": []}
        assert s.tree(root={"label": "a", "children": [{"label": "b"}]})["children"] == [leaf]
        assert s.pet(pet=m.Dog(name="Rex")) == m.Dog(name="Rex")
        assert s.pet(pet=m.Cat(lives=3)) == m.Cat(lives=3)
        assert s.sparse(value={"a": 3}) == {"a": 3}
        odd = {"from": "x", "list": [1], "two words": 5}
        assert s.odd(value=odd) == odd
        assert s.anything(value={"x": 1}, table={}, pair=(1, "b")) == [{"x": 1}, {}, [1, "b"]]
        assert s.many(values={"a": [(1, {"b": [1.0, None]}, "c")]}) == 1
        np.testing.assert_array_equal(s.arrays(x=x, mask=np.array([True, False, True])), x[::2])
        assert s.tensor(x).dtype == np.float64
        assert s.reverse(b"abc") == b"cba"
        [hit] = s.hits(data=b"q", id=UUID(int=3))
        assert (hit.id, hit.when) == (UUID(int=3), datetime(2026, 1, 2, 3, 4, tzinfo=UTC))
        assert hit.vector.dtype == np.float32
        assert s.find(text="a b&c", color="blue", exact=True) == "a b&c 3 True blue"
        assert s.find(text="null", k=-1) == "null -1 False None"
        assert (s.list_(), s.print_(list=[1]), s.report(title="t")) == (["a"], None, "# t")
        assert list(s.count(upto=3)) == [0, 1, 2]
        assert list(s.pieces(data=b"abc")) == [b"a", b"bc"]
        assert [type(chunk) for chunk in s.boxes(upto=2)] == [m.Hit, m.Hit]
        assert list(s.measure(iter([box, box]), unit="cm", factor=2.0)) == ["2.0 cm"] * 2
        assert list(s.measure(iter([box]))) == ["1.0 m"]
        assert s.size(iter([b"ab", b"c"])) == 3
        assert images.label(b"xyz") == "3 bytes"
        np.testing.assert_array_equal(images.rows(x), x * 2)
        with pytest.raises(TypeError, match="numbers: a: Input should be a valid integer"):
            s.numbers(a="x")
        with pytest.raises(sk.errors.InvalidInput, match="name: String should have at most 40"):
            s.pet(pet=m.Dog(name="x" * 41))


async def test_a_written_client_in_async_code(app, outer):
    async with sk.connect(outer, app.url) as typed:
        assert await typed.label.remote(3) == "label 3"
        assert [chunk async for chunk in typed.tokens.remote(count=3)] == [0, 1, 2]
