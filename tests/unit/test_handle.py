"""Handles: from a method's call in one service to an answer of another, and all that travels along."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

import servekit as sk
from servekit.core.call import now
from servekit.core.context import CURRENT, RequestContext
from servekit.errors import (
    Cancelled,
    DeadlineExceeded,
    ExecutionError,
    InvalidInput,
    InvalidOutput,
    NotFound,
    ServekitError,
)
from servekit.runtime.handle import Options, ServiceHandle
from servekit.spec.definition import definition
from tests.calls import make_call


class Probe:
    """What the child saw; shared, as `local` runs all in this process."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.contexts: list[RequestContext] = []
        self.running = 0
        self.began = 0
        self.streams_closed = 0
        self.made = 0


PROBE = Probe()


@pytest.fixture(autouse=True)
def probe():
    global PROBE
    PROBE = Probe()
    yield PROBE
    PROBE.gate.set()


@sk.service
class Child:
    @sk.endpoint
    def double(self, n: int) -> int:
        return 2 * n

    @sk.endpoint
    async def adouble(self, n: int) -> int:
        PROBE.contexts.append(sk.context())
        return 2 * n

    @sk.batched(max_size=8)
    def square(self, ns: list[int]) -> list[int]:
        return [n * n for n in ns]

    @sk.endpoint
    async def wait(self) -> None:
        probe = PROBE
        probe.running += 1
        probe.began += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            probe.running -= 1

    @sk.batched(max_size=4)
    async def wait_together(self, ns: list[int]) -> list[int]:
        PROBE.began += 1
        while not PROBE.gate.is_set():
            await asyncio.sleep(0.001)
        return ns

    @sk.endpoint
    def fail(self, n: int) -> int:
        raise NotFound(f"no {n}", reason="gone", retry_after_s=2.0)

    @sk.endpoint
    async def count(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                PROBE.made += 1
                yield i
        finally:
            PROBE.streams_closed += 1

    @sk.endpoint
    def count_sync(self, n: int) -> Iterator[int]:
        try:
            for i in range(n):
                PROBE.made += 1
                yield i
        finally:
            PROBE.streams_closed += 1


@sk.service
class Parent:
    child = sk.depends(Child)
    hasty = sk.depends(Child, timeout_s=0.05)

    @sk.endpoint
    async def double(self, n: int) -> int:
        return await self.child.adouble(n)

    @sk.endpoint
    async def remote(self, n: int) -> int:
        return await self.child.double.remote(n)

    @sk.endpoint
    def sync(self, n: int) -> int:
        return self.child.double(n) + self.child.double.remote(n).result()

    @sk.endpoint
    async def gather(self, n: int) -> list[int]:
        return list(await asyncio.gather(*(self.child.square.remote(i) for i in range(n))))

    @sk.endpoint
    async def blocks(self, n: int) -> int:
        return self.child.double.remote(n).result()

    @sk.endpoint
    async def blocks_plainly(self, n: int) -> int:
        return self.child.double(n)

    @sk.endpoint
    async def twice(self, n: int) -> int:
        call = self.child.double.remote(n)
        return await call + await call

    @sk.endpoint
    async def wait(self) -> None:
        await self.child.wait()

    @sk.endpoint
    async def wait_remote(self) -> None:
        await asyncio.gather(*(self.child.wait.remote() for _ in range(3)))

    @sk.endpoint
    def wait_sync(self) -> None:
        self.child.wait.remote().result()

    @sk.endpoint
    async def wait_together(self, n: int) -> int:
        return await self.child.wait_together.remote(n)

    @sk.endpoint
    async def fail(self, n: int) -> int:
        return await self.child.fail.remote(n)

    @sk.endpoint
    async def relay(self, n: int) -> AsyncIterator[int]:
        async for i in self.child.count.remote(n):
            yield 10 * i

    @sk.endpoint
    def relay_sync(self, n: int) -> Iterator[int]:
        for i in self.child.count_sync(n):
            yield 10 * i

    @sk.endpoint
    async def first_of(self, n: int) -> int:
        async for i in self.child.count.remote(n):
            return i
        return -1

    @sk.endpoint
    async def forget(self, n: int) -> None:
        self.child.double.remote(n)
        self.child.fail.remote(n)

    @sk.endpoint
    async def too_slow(self) -> None:
        await self.hasty.wait()

    @sk.endpoint
    async def wrong(self, n: str) -> int:
        return await self.child.double.remote(n)  # type: ignore[arg-type]


@sk.service(name="Parent")
class Together(Parent):
    child = sk.depends(Child, colocate=True)
    hasty = sk.depends(Child, timeout_s=0.05, colocate=True)


@pytest.fixture(scope="module", params=[Parent, Together], ids=["apart", "colocated"])
def app(request):
    """A child behind a wire, and one in its parent's process: callers must see no difference."""
    with sk.local(request.param) as service:
        yield service


def child(app):
    """The child's replica, through the handle."""
    return app.double._handler.__self__


# -- forms of a call


def test_every_form_of_a_call_gives_the_same(app):
    assert app.sync(4) == 16
    assert app.double.remote(4).result() == 8
    assert app.remote.remote(4).result(10) == 8
    assert asyncio.run(app.double(4)) == 8
    assert app.gather.remote(10).result() == [n * n for n in range(10)]
    assert app.sync(n=4) == 16


async def test_on_another_loop(app):
    assert await app.double(3) == 6
    assert await app.remote.remote(3) == 6
    assert await asyncio.gather(*(app.double.remote(n) for n in range(50))) == [
        2 * n for n in range(50)
    ]


def test_from_many_threads(app):
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(app.double.remote(n).result()))
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(results) == [2 * n for n in range(20)]


async def test_waiting_on_a_loops_thread_is_refused(app):
    with pytest.raises(ServekitError, match=r"Parent\.sync: waiting here would block"):
        app.sync(1)
    call = app.double.remote(1)
    with pytest.raises(ServekitError, match="would block the event loop"):
        call.result()
    assert await call == 2
    with pytest.raises(ServekitError, match="would block the event loop"):
        app.relay.remote(1).iter_sync()


@pytest.mark.parametrize("name", ["blocks", "blocks_plainly", "twice"])
def test_what_would_block_or_run_twice_raises_within_a_service_too(app, name, caplog):
    with pytest.raises(ExecutionError):
        getattr(app, name).remote(1).result()
    why = "is awaited twice" if name == "twice" else "would block the event loop"
    assert why in caplog.text


def test_a_result_may_be_waited_for_in_vain_and_then_again(app, probe):
    call = app.wait_together.remote(7)
    with pytest.raises(TimeoutError):
        call.result(0)
    probe.gate.set()
    assert call.result() == 7


def test_a_call_that_nobody_awaits_runs_and_complains_of_nothing(app, until_sync):
    app.forget.remote(1).result()
    gc.collect()
    assert app.double.remote(1).result() == 2


# -- errors


def test_errors_pass_through_two_services(app):
    with pytest.raises(NotFound, match="no 3") as caught:
        app.fail.remote(3).result()
    assert (caught.value.reason, caught.value.retry_after_s) == ("gone", 2.0)


def test_arguments_that_do_not_fit_fail_at_the_call(app, caplog):
    for call in (
        lambda: app.double.remote(),
        lambda: app.double.remote(1, 2),
        lambda: app.double.remote(m=1),
    ):
        with pytest.raises(TypeError, match=r"Parent\.double"):
            call()
    with pytest.raises((TypeError, InvalidInput)):
        app.double.remote("x").result()
    # The parent's own mistake; without a wire between them, what it does to the child's answer.
    with pytest.raises((ExecutionError, InvalidOutput)):
        app.wrong.remote("x").result()


def test_an_endpoint_that_is_none(app):
    with pytest.raises(
        AttributeError, match=r"Parent has no endpoint 'duble'. Did you mean 'double'"
    ):
        app.duble  # noqa: B018
    assert repr(app) == "<handle of Parent>"
    assert "Parent.double" in repr(app.double)


# -- what travels


def test_the_request_id_travels(app, probe):
    calls = [app.double.remote(n) for n in range(2)]
    for call in calls:
        call.result()
    ids = {call.request_id for call in calls}
    assert len(ids) == 2
    assert {context.request_id for context in probe.contexts} == ids


def test_the_deadline_travels_and_shrinks(app, probe):
    app.double.remote(1).result()
    app.double.options(timeout_s=30).remote(1).result()
    before = now()
    app.double.options(timeout_s=20).remote(1).result()
    free, thirty, twenty = (context.deadline for context in probe.contexts)
    assert free is None
    assert before < twenty < thirty
    assert twenty <= now() + 20


def test_a_deadline_ends_the_whole_chain(app, probe, until_sync):
    with pytest.raises(DeadlineExceeded):
        app.wait.options(timeout_s=0.05).remote().result()
    until_sync(lambda: probe.running == 0)


def test_a_dependency_may_have_less_time(app, probe, until_sync):
    with pytest.raises(DeadlineExceeded):
        app.too_slow.options(timeout_s=60).remote().result()
    until_sync(lambda: probe.running == 0)


def recorder(cls, calls):
    async def handler(call):
        calls.append(call)
        raise Cancelled("not today")

    return ServiceHandle(
        definition(cls), "child", handler, asyncio.get_running_loop(), Options(retries=1)
    )


async def test_a_call_takes_over_what_its_context_knows():
    calls = []
    handle = recorder(Child, calls)
    headers = msgspec.msgpack.encode([[b"X-Tenant", b"a"]])
    served = make_call(
        "parent",
        "f",
        request_id="id",
        deadline=now() + 5,
        headers=headers,
        traceparent="00-t",
        attempt=1,
        caller="team-a",
    )
    context = RequestContext(served)
    token = CURRENT.set(context)
    for method in (
        handle.double,
        handle.double.options(timeout_s=1),
        handle.double.options(timeout_s=9),
    ):
        with pytest.raises(Cancelled):
            await method.remote(1)
    CURRENT.reset(token)
    assert {c.request_id for c in calls} == {"id"}
    assert {c.traceparent for c in calls} == {"00-t"}
    assert {c.caller for c in calls} == {"team-a"}
    assert {bytes(c.headers) for c in calls} == {headers}
    assert {c.service for c in calls} == {"child"}
    assert all(c.internal for c in calls)
    own, shorter, longer = (c.deadline for c in calls)
    assert own == longer == context.deadline
    assert shorter < own
    assert calls[0].attempt == 0


async def test_options_make_another_handle():
    calls = []
    handle = recorder(Child, calls)
    special = handle.square.options(priority=3, affinity_key="k", retries=5)
    for method in (special, handle.square, special.options(retries=0)):
        with pytest.raises(Cancelled):
            await method.remote(1)
    assert [(c.priority, c.affinity_key, c.retries) for c in calls] == [
        (3, "k", 5), (0, "", 1), (0, "", 0),
    ]  # fmt: skip
    assert [c.idempotent for c in calls] == [True, True, True]


async def test_a_cancelled_context_makes_no_calls():
    calls = []
    handle = recorder(Child, calls)
    context = RequestContext(make_call("parent", "f", request_id="id"))
    context.cancelled = True
    token = CURRENT.set(context)
    with pytest.raises(Cancelled):
        handle.double.remote(1)
    CURRENT.reset(token)
    assert calls == []


# -- cancelling


@pytest.mark.parametrize(("name", "children"), [("wait", 1), ("wait_remote", 3)])
def test_cancel_reaches_the_child(app, probe, until_sync, name, children):
    calls = [getattr(app, name).remote() for _ in range(20)]
    until_sync(lambda: probe.running == 20 * children)
    for call in calls:
        assert call.cancel()
    until_sync(lambda: probe.running == 0)
    assert not calls[0].cancel() or calls[0]._outside.cancelled()


def test_hundreds_of_cancels_at_any_moment_leave_nothing_in_flight(app, probe, until_sync):
    calls = []
    for n in range(500):
        calls.append(app.wait.remote())
        if n % 3:
            calls[n - n % 3].cancel()
    for call in calls:
        call.cancel()
    until_sync(lambda: probe.running == 0)
    connection = app.wait._handler.__self__
    until_sync(lambda: connection.ongoing == 0)
    for _ in range(20):  # what is still on its way has arrived by now
        assert app.double.remote(2).result() == 4
    until_sync(lambda: probe.running == 0)


def test_cancels_in_a_childs_batch_leave_their_neighbours_right(app, probe, until_sync):
    calls = [app.wait_together.remote(n) for n in range(40)]
    until_sync(lambda: probe.began)
    for call in calls[::2]:
        call.cancel()
    probe.gate.set()
    assert [call.result() for call in calls[1::2]] == list(range(1, 40, 2))


async def test_a_coroutine_that_is_cancelled_before_it_began_calls_nobody(app, probe):
    task = asyncio.create_task(app.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await app.double(2) == 4
    assert probe.began == 0


async def test_cancelling_a_task_that_awaits_cancels_the_call(app, probe, until):
    task = asyncio.create_task(app.wait())
    await until(lambda: probe.running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: probe.running == 0)


# -- streams


def test_streams_in_every_form(app):
    assert list(app.relay_sync(5)) == [0, 10, 20, 30, 40]
    assert list(app.relay_sync.remote(3).iter_sync()) == [0, 10, 20]
    assert list(app.relay.remote(5).iter_sync()) == [0, 10, 20, 30, 40]
    assert list(app.relay.remote(0).iter_sync()) == []


async def test_a_stream_on_another_loop(app):
    assert [i async for i in app.relay(300)] == [10 * i for i in range(300)]
    assert [i async for i in app.relay_sync.remote(300)] == [10 * i for i in range(300)]


def test_leaving_a_stream_early_ends_both_generators(app, probe, until_sync):
    for i in app.relay.remote(100_000).iter_sync():
        if i == 50:
            break
    until_sync(lambda: probe.streams_closed == 1)
    assert probe.made < 100_000


def test_leaving_a_sync_stream_early_ends_both_generators(app, probe, until_sync):
    for i in app.relay_sync(100_000):
        if i == 50:
            break
    until_sync(lambda: probe.streams_closed == 1)
    assert probe.made < 100_000


def test_a_stream_that_a_service_leaves_early_is_closed(app, probe, until_sync):
    assert app.first_of.remote(100_000).result() == 0
    gc.collect()
    until_sync(lambda: probe.streams_closed == 1)
    assert probe.made < 100_000


async def test_closing_a_stream(app, probe, until):
    stream = app.relay.remote(100_000)
    assert await anext(stream) == 0
    await stream.aclose()
    await until(lambda: probe.streams_closed == 1)
    assert [i async for i in stream] == []
    assert not stream.cancel()


def test_a_stream_that_was_never_read(app, probe):
    stream = app.relay.remote(10)
    assert stream.cancel()
    assert list(app.relay.remote(1).iter_sync()) == [0]
    assert probe.made == 1
