"""A replica's life, its health, and its figures."""

import asyncio
import logging

import pytest

import servekit as sk
from servekit.errors import ExecutionError, InvalidInput, NotFound, SetupError
from servekit.runtime import replica as replica_module
from servekit.runtime.replica import Replica
from servekit.spec.app import ServiceSpec
from servekit.spec.definition import definition


def make(cls, **spec) -> Replica:
    found = definition(cls)
    return Replica(found, ServiceSpec(name=found.name, target="t:T", **spec), replica_id="r-0")


# -- life


async def test_hooks_run_in_their_order_and_the_replica_is_ready_behind_them(ask):
    events: list[str] = []
    states: list[str] = []

    class Base:
        @sk.setup
        def connect(self) -> None:
            events.append("base setup")

        @sk.teardown
        def disconnect(self) -> None:
            events.append("base teardown")

    @sk.service
    class S(Base):
        def __init__(self, size: int = 1) -> None:
            events.append(f"init {size} {self.helper}")

        @sk.setup(order=-1)
        async def first(self) -> None:
            await asyncio.sleep(0)
            events.append("first")

        @sk.setup
        def load(self) -> None:
            events.append("setup")
            states.append(replica.state)

        @sk.warmup
        async def warm(self) -> None:
            states.append(replica.state)
            events.append("warmup")

        @sk.teardown
        async def stop(self) -> None:
            events.append("teardown")

        @sk.endpoint
        def f(self) -> int:
            return 1

    replica = make(S, args={"size": 3})
    assert replica.state == "loading"
    await replica.start({"helper": "handle"})
    assert replica.state == "ready"
    assert events == ["init 3 handle", "first", "base setup", "setup", "warmup"]
    assert states == ["loading", "warming"]
    assert await ask(replica, "f") == 1
    replica.drain()
    assert replica.state == "draining"
    assert await ask(replica, "f") == 1  # what is on board is finished
    await replica.stop()
    assert events[5:] == ["teardown", "base teardown"]
    assert replica.state == "stopped"


async def test_other_arguments_go_to_the_hooks_that_take_them():
    calls: list[object] = []

    @sk.service
    class S:
        def __init__(self, low: int = 0, high: int = 9, name: str = "x") -> None: ...

        @sk.reconfigure
        def between(self, low: int, high: int) -> None:
            calls.append((low, high))
            if low > high:
                raise ValueError("nothing is between")

        @sk.reconfigure
        async def call(self, name: str) -> None:
            calls.append(name)

    replica = make(S, args={"low": 1})
    await replica.start({})

    async def configure(**args) -> list[object]:
        calls.clear()
        await replica.configure(ServiceSpec(name="S", target="t:T", args=args))
        return calls

    assert await configure(low=1) == []
    assert await configure(low=1, high=9, name="x") == []  # the defaults
    assert await configure(high=5) == [(0, 5)]
    assert await configure(high=5, name="y") == ["y"]
    assert await configure() == [(0, 9), "x"]
    with pytest.raises(SetupError, match="S: between raised ValueError: nothing is between"):
        await configure(low=10)
    assert await configure() == [(0, 9)]  # also behind one that failed
    await replica.stop()


@pytest.mark.parametrize("where", ["init", "setup", "warmup"])
async def test_set_up_that_raises_keeps_its_cause(where):
    @sk.service
    class S:
        def __init__(self) -> None:
            if where == "init":
                raise OSError("no weights")

        @sk.setup
        async def load(self) -> None:
            if where == "setup":
                raise OSError("no weights")

        @sk.warmup
        def warm(self) -> None:
            if where == "warmup":
                raise OSError("no weights")

        @sk.endpoint
        def f(self) -> int:
            return 1

    replica = make(S)
    with pytest.raises(SetupError, match=r"S: set-up raised OSError: no weights") as caught:
        await replica.start({})
    assert isinstance(caught.value.__cause__, OSError)
    assert replica.state != "ready"
    await replica.stop()


async def test_a_tear_down_that_raises_is_logged(caplog):
    @sk.service
    class S:
        @sk.teardown
        def stop(self) -> None:
            raise OSError("still open")

        @sk.endpoint
        def f(self) -> int:
            return 1

    replica = make(S)
    await replica.start({})
    await replica.stop()
    assert "still open" in caplog.text
    assert replica.state == "stopped"


async def test_stop_ends_the_threads(ask, until):
    @sk.service
    class S:
        @sk.endpoint
        def f(self) -> int:
            return 1

    replica = make(S)
    await replica.start({})
    await ask(replica, "f")
    threads = replica._threads._threads[:]
    assert threads
    await replica.stop()
    await until(lambda: not any(thread.is_alive() for thread in threads))


# -- health


@sk.service
class Sick:
    answer: object = True

    def say(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @sk.ready
    async def is_ready(self) -> object:
        return self.say()

    @sk.live
    def is_live(self) -> object:
        return self.say()

    @sk.endpoint
    def f(self) -> int:
        return 1


@pytest.mark.parametrize("kind", ["ready", "live"])
@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (True, ""),
        (None, ""),
        (0, ""),
        (False, "returned False"),
        (ValueError("x"), "raised ValueError"),
        (TimeoutError(), "took over"),
    ],
    ids=repr,
)
async def test_health_hooks(kind, answer, trouble, start):
    replica = await start(Sick)
    replica._instance.answer = answer
    said = await replica.check(kind)
    if trouble:
        assert f"@sk.{kind} hook is_{kind} {trouble}" in said
    else:
        assert said == ""
    replica._instance.answer = True
    assert await replica.check(kind) == ""


async def test_a_health_hook_that_hangs_is_trouble(start, monkeypatch):
    monkeypatch.setattr(replica_module, "_HEALTH_TIMEOUT_S", 0.01)

    @sk.service
    class S:
        @sk.live
        async def hang(self) -> None:
            await asyncio.get_running_loop().create_future()

        @sk.endpoint
        def f(self) -> int:
            return 1

    replica = await start(S)
    assert "took over" in await replica.check("live")


async def test_only_a_ready_replica_is_ready(start):
    replica = await start(Sick)
    replica.drain()
    assert await replica.check("ready") == "the replica is draining"
    assert await replica.check("live") == ""


# -- calls and figures


@sk.service
class Counted:
    @sk.endpoint
    async def half(self, n: int) -> int:
        if n % 2:
            raise ValueError(n)
        await asyncio.sleep(0)
        return n // 2

    @sk.batched(max_size=4)
    async def same(self, xs: list[int]) -> list[int]:
        return xs


async def test_an_unknown_endpoint(start, ask):
    replica = await start(Counted)
    with pytest.raises(NotFound, match="no endpoint 'hlaf'. Did you mean 'half'") as caught:
        await ask(replica, "hlaf", {"n": 1})
    assert not caught.value.started
    for name in ("__init__", "half/batch", "start", ""):
        with pytest.raises(NotFound):
            await ask(replica, name, {"n": 1})


def counted(replica, family: str) -> dict[tuple[str, ...], float]:
    (found,) = [f for f in replica.metrics() if f.name == family]
    return {sample.labels: sample.value for sample in found.samples}


async def test_calls_of_other_services_are_counted_by_their_outcome(start, ask, caplog):
    caplog.set_level(logging.CRITICAL)
    replica = await start(Counted)
    for n in range(10):
        await ask(replica, "half", {"n": 2 * n}, internal=True)
    for n in range(5):
        with pytest.raises(ExecutionError):
            await ask(replica, "half", {"n": 2 * n + 1}, internal=True)
    for _ in range(3):
        with pytest.raises(InvalidInput):
            await ask(replica, "half", {"n": "x"}, internal=True)
    await ask(replica, "half", {"n": 2})  # a client's, which the gateway counts
    by_code = {labels[-1]: n for labels, n in counted(replica, "servekit_requests_total").items()}
    assert by_code == {"200": 10, "500": 5, "422": 3}
    assert replica.finished == 16


async def test_a_cancelled_call_is_counted_as_such(start, ask, until):
    gate = asyncio.Event()

    @sk.service
    class S:
        @sk.endpoint
        async def wait(self) -> None:
            await gate.wait()

    replica = await start(S)
    task = asyncio.create_task(ask(replica, "wait", internal=True))
    await until(lambda: replica.load().ongoing == 1)
    assert set(counted(replica, "servekit_in_flight").values()) == {1}
    task.cancel()
    await until(task.done)
    by_code = {labels[-1]: n for labels, n in counted(replica, "servekit_requests_total").items()}
    assert by_code == {"499": 1}
    assert set(counted(replica, "servekit_in_flight").values()) == {0}
    assert replica.finished == 1


async def test_the_load_is_what_is_on_board_and_the_pace(start, ask):
    replica = await start(Counted)
    assert replica.load().ongoing == 0
    assert replica.load().unit_s == 0.0
    await asyncio.gather(*(ask(replica, "half", {"n": 2 * n}) for n in range(10)))
    await asyncio.gather(*(ask(replica, "same", n) for n in range(10)))
    assert replica.load().ongoing == 0
    assert replica.load().unit_s > 0


async def test_capacity_is_unknown_until_a_batch_with_a_target_has_run(start, ask):
    @sk.service
    class S:
        @sk.batched(max_size=4, target_ms=100)
        async def same(self, xs: list[int]) -> list[int]:
            await asyncio.sleep(0.001)
            return xs

    plain, targeted = await start(Counted), await start(S)
    assert plain.capacity_per_s() is None
    for n in range(20):
        await ask(targeted, "same", n)
    capacity = targeted.capacity_per_s()
    assert capacity is not None
    assert capacity > 0
