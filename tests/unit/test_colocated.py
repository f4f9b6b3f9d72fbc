"""A dependency in its parent's process: what callers see is what they see of one behind a wire."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Annotated, Any

import numpy as np
import pytest
from numpy.typing import NDArray

import servekit as sk
from servekit.core.call import Reply, now
from servekit.errors import (
    BadRequest,
    CallError,
    DeadlineExceeded,
    ExecutionError,
    NotFound,
    Overloaded,
    SpecError,
)
from servekit.runtime.colocated import Colocated
from servekit.runtime.group import Group
from servekit.spec.app import AppSpec
from servekit.spec.describe import describe
from servekit.spec.policy import Resources
from tests.calls import make_call

MARK: ContextVar[str] = ContextVar("mark", default="nobody's")


class Probe:
    """What the child did; shared, as all runs in this process."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.seen: list[Any] = []
        self.made = 0
        self.closed = 0
        self.running = 0


PROBE = Probe()


@pytest.fixture(autouse=True)
def probe():
    global PROBE
    PROBE = Probe()
    yield PROBE
    PROBE.gate.set()


class Gone(NotFound):
    """An author's own error."""


@sk.service(limits=sk.Limits(max_ongoing=2, max_queued=1))
class Child:
    @sk.endpoint
    def add(self, a: int, b: int = 1) -> int:
        return a + b

    @sk.endpoint
    def body(self, value: int, /) -> int:
        return value

    @sk.endpoint
    async def none(self) -> None:
        return None

    @sk.endpoint
    def hold(self, n: int) -> int:
        PROBE.running += 1
        PROBE.gate.wait(10)
        return n

    @sk.endpoint
    async def stubborn(self) -> None:
        PROBE.running += 1
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        while not PROBE.gate.is_set():
            await asyncio.sleep(0.001)
        PROBE.running -= 1

    @sk.endpoint
    def gone(self) -> int:
        error = Gone("no such thing", reason="lost", retry_after_s=1.5, fields=[{"path": "x"}])
        error.headers = {"x-secret": "1"}
        raise error

    @sk.endpoint
    async def breaks(self) -> int:
        raise KeyError("secret")

    @sk.endpoint
    async def marks(self) -> str:
        before = MARK.get()
        MARK.set("the child's")
        return before

    @sk.batched(max_size=8)
    def pair(self, left: list[str], right: list[str]) -> list[str]:
        return [f"{a}-{b}" for a, b in zip(left, right, strict=True)]

    @sk.batched(max_size=8)
    def who(self, names: list[sk.Item[str]]) -> list[str | sk.ItemError]:
        return [
            sk.ItemError(ValueError(item.value)) if item.value == "bad"
            else f"{item.value} {item.ctx.request_id}"
            for item in names
        ]  # fmt: skip

    @sk.batched(max_size=4, axis=0)
    def scale(
        self, rows: Annotated[NDArray[np.float32], sk.Array["float32", "n 2"]]
    ) -> Annotated[NDArray[np.float32], sk.Array["float32", "n 2"]]:
        PROBE.seen.append(rows.shape)
        return rows * 2

    @sk.endpoint
    async def count(self, n: int) -> AsyncIterator[int | None]:
        try:
            for i in range(n):
                PROBE.made += 1
                PROBE.seen.append(sk.context().request_id)
                yield i or None
        finally:
            PROBE.closed += 1

    @sk.endpoint
    def count_sync(self, n: int) -> Iterator[int]:
        try:
            for i in range(n):
                PROBE.made += 1
                yield i
        finally:
            PROBE.closed += 1

    @sk.endpoint
    async def breaks_late(self) -> AsyncIterator[int]:
        yield 1
        raise KeyError("secret")

    @sk.endpoint
    async def never(self) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.get_running_loop().create_future()
        finally:
            PROBE.closed += 1

    @sk.endpoint
    async def total(self, numbers: AsyncIterator[int], start: int = 0) -> int:
        async for number in numbers:
            start += number
            PROBE.seen.append(MARK.get())
        return start

    @sk.endpoint
    def total_sync(self, numbers: Iterator[int]) -> int:
        return sum(numbers)

    @sk.endpoint
    async def first(self, numbers: AsyncIterator[int]) -> int:
        return await anext(numbers)

    @sk.endpoint
    async def twice(self, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        async for number in numbers:
            yield 2 * number

    @sk.endpoint
    async def deaf(self, numbers: AsyncIterator[int]) -> None:
        PROBE.running += 1
        await asyncio.get_running_loop().create_future()

    @sk.endpoint
    async def nothing(self) -> AsyncIterator[int]:
        for i in range(0):
            yield i


@sk.service
class Parent:
    child = sk.depends(Child)

    @sk.endpoint
    async def start(self) -> None: ...


@sk.service(name="Parent")
class Together(Parent):
    child = sk.depends(Child, colocate=True)


@contextlib.asynccontextmanager
async def running(parent: type) -> AsyncIterator[tuple[Any, Any]]:
    """Run a parent with all it needs on this loop; yields its object and its group."""
    from servekit.engine.inprocess import _Graph

    graph = _Graph(asyncio.get_running_loop(), {})
    await graph.start(parent, {})
    try:
        yield graph._closing[-1].own._instance, graph
    finally:
        await graph.stop()


both = pytest.mark.parametrize("parent", [Parent, Together], ids=["apart", "colocated"])


# -- the same on both sides of a wire


@both
async def test_arguments_in_every_form(parent):
    async with running(parent) as (service, _):
        child = service.child
        assert await child.add.remote(2) == 3
        assert await child.add.remote(2, 3) == 5
        assert await child.add.remote(b=3, a=2) == 5
        assert await child.body.remote(4) == 4
        assert await child.none.remote() is None
        assert await child.none() is None
        assert await child.pair.remote(right="r", left="l") == "l-r"
        for wrong in (
            lambda: child.add.remote(),
            lambda: child.add.remote(1, 2, 3),
            lambda: child.add.remote(1, a=1),
            lambda: child.add.remote(1, c=1),
            lambda: child.body.remote(),
            lambda: child.body.remote(value=1),
            lambda: child.pair.remote("l"),
        ):
            with pytest.raises(TypeError, match=r"Child\.(add|body|pair)"):
                wrong()


@both
async def test_batches_of_lists_items_and_arrays(parent, probe):
    async with running(parent) as (service, _):
        child = service.child
        pairs = await asyncio.gather(*(child.pair.remote(str(n), "x") for n in range(20)))
        assert pairs == [f"{n}-x" for n in range(20)]
        calls = [child.who.remote(str(n)) for n in range(5)]
        assert await asyncio.gather(*calls) == [f"{n} {c.request_id}" for n, c in enumerate(calls)]
        with pytest.raises(ExecutionError, match="ValueError"):
            await child.who.remote("bad")
        arrays = [np.full((n, 2), n, np.float32) for n in range(1, 8)]
        doubled = await asyncio.gather(*(child.scale.remote(array) for array in arrays))
        for array, result in zip(arrays, doubled, strict=True):
            np.testing.assert_array_equal(result, array * 2)
        assert all(rows <= 4 for rows, _ in probe.seen), "long arrays go in parts"


@both
async def test_errors(parent, caplog):
    async with running(parent) as (service, _):
        with pytest.raises(NotFound, match="no such thing") as caught:
            await service.child.gone.remote()
        error = caught.value
        assert type(error) is NotFound, "what it is says the code, not the child's class"
        assert (error.reason, error.retry_after_s, error.fields, error.started, error.headers) == (
            "lost", 1.5, ({"path": "x"},), True, {},
        )  # fmt: skip
        with pytest.raises(ExecutionError) as hidden:
            await service.child.breaks.remote()
        assert "secret" not in str(hidden.value)
        assert hidden.value.__cause__ is None
        assert "secret" in caplog.text


@both
async def test_overload_is_refused(parent, probe, until):
    async with running(parent) as (service, _):
        calls = [service.child.hold.remote(n) for n in range(3)]
        await until(lambda: probe.running == 2)
        with pytest.raises(Overloaded) as caught:
            await service.child.hold.remote(9)
        assert (caught.value.reason, caught.value.started) == ("queue_full", False)
        probe.gate.set()
        assert await asyncio.gather(*calls) == [0, 1, 2]


@both
@pytest.mark.parametrize("timeout_s", [0.05, 1e-9])
async def test_a_deadline_ends_the_wait_also_for_work_that_does_not_stop(
    parent, timeout_s, probe, until
):
    async with running(parent) as (service, _):
        with pytest.raises(DeadlineExceeded):
            await service.child.stubborn.options(timeout_s=timeout_s).remote()
        probe.gate.set()
        await until(lambda: not probe.running)


@both
async def test_a_cancelled_wait_ends_at_once(parent, probe, until):
    async with running(parent) as (service, _):
        call = asyncio.ensure_future(service.child.stubborn())
        await until(lambda: probe.running)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert probe.running, "the caller does not wait for the callee's cleaning up"
        probe.gate.set()
        await until(lambda: not probe.running)


@both
async def test_threads_hold_their_slots_until_they_end(parent, probe, until):
    async with running(parent) as (service, _):
        calls = [asyncio.ensure_future(_awaited(service.child.hold.remote(n))) for n in range(2)]
        await until(lambda: probe.running == 2)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        waits = service.child.add.options(timeout_s=0.05).remote(1)
        with pytest.raises(DeadlineExceeded):
            await waits
        probe.gate.set()
        assert await service.child.add.remote(1) == 2


async def _awaited(call):
    return await call


@both
async def test_the_context_is_the_callees_own(parent, probe):
    async with running(parent) as (service, _):
        stream = service.child.count.remote(3)
        assert [i async for i in stream] == [None, 1, 2]
        assert probe.seen == [stream.request_id] * 3
        with pytest.raises(sk.errors.ServekitError):
            sk.context()


@both
async def test_streams_end_and_break(parent):
    async with running(parent) as (service, _):
        child = service.child
        assert [i async for i in child.nothing.remote()] == []
        assert [i async for i in child.count_sync.remote(300)] == list(range(300))
        got = []
        with pytest.raises(ExecutionError, match="KeyError"):
            async for i in child.breaks_late.remote():
                got.append(i)
        assert got == [1]


@both
@pytest.mark.parametrize("name", ["count", "count_sync"])
async def test_a_stream_is_a_bounded_number_of_chunks_ahead(parent, name, probe, until):
    async with running(parent) as (service, _):
        stream = getattr(service.child, name).remote(100_000)
        assert await anext(stream) in (None, 0)
        await until(lambda: probe.made >= 128)
        for _ in range(100):
            await asyncio.sleep(0)
        assert probe.made < 200
        await stream.aclose()
        await until(lambda: probe.closed == 1)


@both
async def test_a_stream_that_is_dropped_is_closed(parent, probe, until):
    async with running(parent) as (service, _):
        async for _ in service.child.count.remote(100_000):
            break
        gc.collect()
        await until(lambda: probe.closed == 1)
        assert probe.made < 1000


@both
async def test_a_deadline_ends_a_stream(parent, probe, until):
    async with running(parent) as (service, _):
        got = []
        with pytest.raises(DeadlineExceeded):
            async for i in service.child.never.options(timeout_s=0.2).remote():
                got.append(i)
        assert got == [1]
        await until(lambda: probe.closed == 1)


class Input:
    """Numbers without end, or as many as are wanted, that take note of what is read of them."""

    def __init__(self, n=10**9, error=None):
        self.n = n
        self.error = error
        self.read = 0
        self.closed = 0

    async def __aiter__(self):
        try:
            for number in range(self.n):
                self.read += 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.closed += 1


@both
async def test_input_streams(parent, until):
    async with running(parent) as (service, _):
        child = service.child
        assert await child.total.remote(Input(300), start=1) == sum(range(300)) + 1
        assert await child.total.remote(start=1, numbers=iter([1, 2])) == 4
        assert await child.total_sync.remote(Input(300)) == sum(range(300))
        assert [i async for i in child.twice.remote(Input(300))] == [2 * n for n in range(300)]
        endless = Input()
        assert await child.first.remote(endless) == 0
        await until(lambda: endless.closed)
        assert endless.read < 200
        for wrong in (
            lambda: child.total.remote(),
            lambda: child.total.remote(5),
            lambda: child.total.remote(Input(1), begin=1),
        ):
            with pytest.raises(TypeError, match=r"Child\.total|numbers"):
                wrong()


@both
async def test_input_that_breaks_off(parent, caplog):
    async with running(parent) as (service, _):
        with pytest.raises(BadRequest) as caught:
            await service.child.total.remote(Input(3, ValueError("secret")))
        assert caught.value.reason == "input_failed"
        with pytest.raises(NotFound, match="gone"):
            await service.child.total.remote(Input(3, Gone("gone")))
        assert "secret" in caplog.text


@both
async def test_input_is_read_as_it_is_asked_for_and_ends_with_the_call(parent, probe, until):
    async with running(parent) as (service, _):
        unread = Input()
        with pytest.raises(DeadlineExceeded):
            await service.child.deaf.options(timeout_s=0.1).remote(unread)
        assert not unread.read
        stream = service.child.twice.remote(endless := Input())
        assert await anext(stream) == 0
        await until(lambda: endless.read >= 128)
        for _ in range(100):
            await asyncio.sleep(0)
        assert endless.read < 600
        await stream.aclose()
        await until(lambda: endless.closed)


@both
async def test_calls_are_counted_under_the_childs_name(parent):
    async with running(parent) as (service, graph):
        assert await service.child.add.remote(1) == 2
        with pytest.raises(NotFound):
            await service.child.gone.remote()
        counted = {
            (sample.labels[:2], sample.labels[-1]): sample.value
            for group in graph._closing
            for family in group.metrics()
            if family.name == "servekit_requests_total"
            for sample in family.samples
        }
        assert counted == {
            (("Child", "add"), "200"): 1.0,
            (("Child", "gone"), "404"): 1.0,
        }


# -- what only works in one process


async def test_context_variables_do_not_cross_over():
    async with running(Together) as (service, _):
        MARK.set("the parent's")
        assert await service.child.marks.remote() == "nobody's"
        assert await service.child.marks() == "nobody's"
        assert MARK.get() == "the parent's"

        async def numbers():
            yield len(MARK.get())

        assert await service.child.total.remote(numbers()) == len("the parent's")
        assert PROBE.seen == ["nobody's"]


async def test_objects_are_handed_over_as_they_are():
    kept: list[Any] = []

    @sk.service
    class Keeper:
        @sk.endpoint
        async def keep(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
            kept.append(rows)
            return rows

        @sk.endpoint
        async def each(self, rows: NDArray[np.float32]) -> AsyncIterator[NDArray[np.float32]]:
            yield rows

    @sk.service
    class Owner:
        keeper = sk.depends(Keeper, colocate=True)

    async with running(Owner) as (service, _):
        rows = np.zeros((300, 500), np.float32)
        assert await service.keeper.keep.remote(rows) is rows
        assert kept[0] is rows
        assert [chunk is rows async for chunk in service.keeper.each.remote(rows)] == [True]


async def test_one_instance_for_all_in_a_process_and_hooks_in_order():
    events: list[str] = []

    @sk.service(gpu=0.25)
    class Deep:
        def __init__(self) -> None:
            events.append("deep init")

        @sk.warmup
        async def warm(self) -> None:
            events.append("deep warm")

        @sk.live
        def well(self) -> bool:
            return "unwell" not in events

        @sk.teardown
        def end(self) -> None:
            events.append("deep end")

        @sk.endpoint
        async def me(self) -> int:
            return id(self)

    @sk.service(gpu=0.25)
    class Middle:
        deep = sk.depends(Deep, colocate=True)

        @sk.setup
        async def look(self) -> None:
            events.append("middle setup")
            await self.deep.me()

        @sk.endpoint
        async def me(self) -> int:
            return await self.deep.me()

    @sk.service(gpu=0.5)
    class Top:
        middle = sk.depends(Middle, colocate=True)
        deep = sk.depends(Deep, colocate=True, timeout_s=5)

        def __init__(self) -> None:
            events.append("top init")

        @sk.teardown
        async def end(self) -> None:
            await self.deep.me()
            events.append("top end")

    spec = describe(Top).service("Top")
    assert [inner.name for inner in spec.beside] == ["Deep", "Middle"]
    assert spec.needs == Resources(gpu=1.0, cpu=spec.needs.cpu)
    async with running(Top) as (service, graph):
        assert await service.middle.me() == await service.deep.me.remote()
        (group,) = graph._closing
        assert isinstance(group, Group)
        assert await group.check("ready") == await group.check("live") == ""
        events.append("unwell")
        assert await group.check("live") == "Deep: @sk.live hook well returned False"
        events.remove("unwell")
    assert events == [
        "deep init", "deep warm", "middle setup", "top init", "top end", "deep end",
    ]  # fmt: skip


async def test_a_child_that_can_not_start_is_named():
    @sk.service
    class Broken:
        def __init__(self) -> None:
            raise OSError("no weights")

    @sk.service
    class Owner:
        broken = sk.depends(Broken, colocate=True)

    with pytest.raises(sk.errors.SetupError, match=r"Broken: set-up raised OSError: no weights"):
        async with running(Owner):
            pass


def test_a_fake_takes_the_place_of_a_colocated_dependency():
    class Fake:
        def add(self, a: int, b: int = 1) -> int:
            return 100

    @sk.service
    class Adder:
        child = sk.depends(Child, colocate=True)

        @sk.endpoint
        async def add(self, a: int) -> int:
            return await self.child.add.remote(a)

    with sk.local(Adder, overrides={Adder.child: Fake()}) as service:
        assert service.add.remote(1).result() == 100
    with sk.local(Adder) as service:
        assert service.add.remote(1).result() == 2


async def test_what_is_closed_ends_its_work(until):
    began: list[int] = []

    async def replica(call):
        began.append(1)
        await asyncio.get_running_loop().create_future()

    joint = Colocated(replica)
    call = asyncio.ensure_future(joint(make_call("Child", "add")))
    await until(lambda: began)
    await joint.close()
    with pytest.raises(CallError, match="cancelled"):
        await call


async def test_a_handlers_own_bug_does_not_reach_the_caller(caplog):
    async def replica(call):
        raise AssertionError("secret")

    with pytest.raises(ExecutionError, match="internal error: AssertionError"):
        await Colocated(replica)(make_call("Child", "add"))
    assert "secret" in caplog.text


async def test_a_stream_that_comes_too_late_is_closed(until):
    closed: list[int] = []
    go = asyncio.Event()

    class Late:
        def __aiter__(self):
            return self

        async def __anext__(self):
            return 1

        async def aclose(self):
            closed.append(1)

    async def replica(call):
        while not go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go.wait()
        return Reply(stream=Late())

    joint = Colocated(replica)
    with pytest.raises(DeadlineExceeded):
        await joint(make_call("Child", "count", deadline=now() + 0.01))
    go.set()
    await until(lambda: closed)
    await joint.close()


# -- the app as data


@sk.service(gpu=0.5, env={"A": "1"})
class Encoder: ...


@sk.service(prefix="/tokens")
class Tokens: ...


def test_what_is_only_colocated_has_no_processes():
    @sk.service(gpu=0.5, memory="1KiB")
    class Root:
        encoder = sk.depends(Encoder, colocate=True)
        tokens = sk.depends(Tokens, colocate=True)

    app = describe(Root)
    assert [s.name for s in app.services] == ["Tokens", "Root"]
    assert list(app.everything()) == ["Tokens", "Encoder", "Root"]
    root = app.service("Root")
    assert [inner.name for inner in root.beside] == ["Encoder", "Tokens"]
    assert [edge.colocate for edge in root.dependencies] == [True, True]
    assert (root.needs.gpu, root.needs.memory, root.environment) == (1.0, 1024, {"A": "1"})
    assert AppSpec.from_json(app.to_json()) == app


def test_one_that_others_call_has_processes_too():
    @sk.service
    class Other:
        encoder = sk.depends(Encoder)

    @sk.service
    class Root:
        encoder = sk.depends(Encoder, colocate=True)
        other = sk.depends(Other, colocate=True)

    app = describe(Root)
    assert [s.name for s in app.services] == ["Encoder", "Root"]
    assert [inner.name for inner in app.service("Root").beside] == ["Encoder", "Other"]


def test_a_process_has_the_revision_of_all_that_runs_in_it():
    def root(size: int) -> Any:
        @sk.service
        class Inner:
            def __init__(self, size: int = 1) -> None: ...

        @sk.service
        class Root:
            inner = sk.depends(sk.ref(Inner, name="Inner", args={"size": size}), colocate=True)

        return describe(Root).service("Root")

    assert root(1).revision == root(1).revision != root(2).revision


def child_with(**settings):
    @sk.service(**settings)
    class Inner: ...

    @sk.service
    class Middle:
        inner = sk.depends(Inner, colocate=True)

    return Inner, Middle


@pytest.mark.parametrize(
    ("inner", "outer", "message"),
    [
        ({"gpu": 0.5}, {"gpu": 1}, r"Root: Root and Middle and Inner share a process, whose gpu=1 \+ 0.5 is"),
        ({"gpu": 0.75}, {"gpu": 0.5}, r"gpu=0.5 \+ 0.75 is neither a share .* nor a whole number"),
        ({"env": {"A": "1"}}, {"env": {"A": "2"}}, r"Root has env\['A'\]='2' and Inner '1'"),
        ({"replicas": 2}, {}, r"Middle\.inner: 'Inner' has replicas=2, but it only runs in .*'Middle'"),
        ({"replicas": sk.Autoscale(max=2)}, {}, r"Middle\.inner: 'Inner' has replicas=Autoscale"),
    ],
)  # fmt: skip
def test_what_can_not_share_a_process_is_refused(inner, outer, message):
    _, between = child_with(**inner)

    @sk.service(**outer)
    class Root:
        middle = sk.depends(between, colocate=True)

    with pytest.raises(SpecError, match=message):
        describe(Root)


def test_what_fits_is_not_refused():
    below, between = child_with(replicas=2, gpu=0.1, env={"A": "1"})

    @sk.service(gpu=0.9, env={"A": "1", "B": "2"})
    class Root:
        middle = sk.depends(between, colocate=True)
        inner = sk.depends(below)

    root = describe(Root).service("Root")
    assert root.needs.gpu == 1.0
    assert root.environment == {"A": "1", "B": "2"}
