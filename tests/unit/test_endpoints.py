"""Calls that run one by one: slots, contexts, masks, and streams that end when they should."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest

import servekit as sk
from servekit.core.call import JSON, Payload, now
from servekit.core.context import RequestContext
from servekit.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    ExecutionError,
    InvalidInput,
    InvalidOutput,
    NotFound,
    Overloaded,
)
from servekit.runtime.endpoints import NotRun
from servekit.runtime.threads import Threads
from tests.calls import make_call

ONE = sk.Limits(max_ongoing=1, max_queued=1)


def parts(reply):
    async def read():
        return [msgspec.json.decode(bytes(chunk.segments[0])) async for chunk in reply.stream]

    return read()


def quiet(replica) -> bool:
    """Whether nothing is on board, and all slots are free."""
    slots = (replica._async_slots, replica._sync_slots)
    return replica.load().ongoing == 0 and all(s.running == s.queued == 0 for s in slots)


# -- slots


async def test_a_slot_is_held_until_a_sync_function_really_ends(start, ask, until):
    gate = threading.Event()
    runs: list[int] = []

    @sk.service(limits=ONE)
    class S:
        @sk.endpoint
        def work(self, n: int) -> int:
            runs.append(n)
            gate.wait(10)
            return n

    replica = await start(S)
    first = asyncio.create_task(ask(replica, "work", {"n": 1}))
    await until(lambda: runs == [1])
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert replica.load().ongoing == 1
    second = asyncio.create_task(ask(replica, "work", {"n": 2}))
    await until(lambda: replica.load().ongoing == 2)
    assert runs == [1]
    with pytest.raises(Overloaded):
        await ask(replica, "work", {"n": 3})
    gate.set()
    assert await second == 2
    assert runs == [1, 2]
    await until(lambda: quiet(replica))


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(start, ask, until):
    gate = asyncio.Event()

    @sk.service(limits=sk.Limits(max_ongoing=2, max_queued=3))
    class S:
        @sk.endpoint
        async def work(self) -> int:
            await gate.wait()
            return 1

    replica = await start(S)
    tasks = [asyncio.create_task(ask(replica, "work")) for _ in range(5)]
    await until(lambda: replica.load().ongoing == 5)
    with pytest.raises(Overloaded) as caught:
        await ask(replica, "work")
    error = caught.value
    assert (error.status, error.reason, error.started) == (429, "queue_full", False)
    assert error.retry_after_s is not None
    assert error.retry_after_s > 0
    gate.set()
    assert await asyncio.gather(*tasks) == [1] * 5
    assert quiet(replica)


async def test_a_full_queue_refuses_before_it_decodes(start, ask, until):
    gate = asyncio.Event()

    @sk.service(limits=sk.Limits(max_ongoing=1, max_queued=0))
    class S:
        @sk.endpoint
        async def work(self, n: int) -> int:
            await gate.wait()
            return n

    replica = await start(S)
    task = asyncio.create_task(ask(replica, "work", {"n": 1}))
    await until(lambda: replica.load().ongoing == 1)
    with pytest.raises(Overloaded):
        await ask(replica, "work", {"n": "not a number"})
    gate.set()
    await task


@pytest.mark.parametrize("limit", [1, 3])
async def test_an_endpoint_may_have_a_limit_of_its_own(limit, start, ask, until):
    gate = asyncio.Event()
    running = most = 0

    @sk.service
    class S:
        @sk.endpoint(max_concurrency=limit)
        async def work(self) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await gate.wait()
            running -= 1
            return 1

    replica = await start(S)
    tasks = [asyncio.create_task(ask(replica, "work")) for _ in range(10)]
    await until(lambda: replica.load().ongoing == 10)
    gate.set()
    await asyncio.gather(*tasks)
    assert most == limit
    assert quiet(replica)


async def test_calls_run_in_the_order_in_which_they_came(start, ask):
    order: list[int] = []

    @sk.service(limits=sk.Limits(max_ongoing=1))
    class S:
        @sk.endpoint
        async def work(self, n: int) -> None:
            order.append(n)
            await asyncio.sleep(0)

    replica = await start(S)
    await asyncio.gather(*(ask(replica, "work", {"n": n}) for n in range(20)))
    assert order == list(range(20))


async def test_a_caller_that_leaves_the_queue_never_runs(start, ask, until):
    gate = asyncio.Event()
    runs: list[int] = []

    @sk.service(limits=sk.Limits(max_ongoing=1))
    class S:
        @sk.endpoint
        async def work(self, n: int) -> int:
            runs.append(n)
            await gate.wait()
            return n

    replica = await start(S)
    tasks = [asyncio.create_task(ask(replica, "work", {"n": n})) for n in range(50)]
    await until(lambda: replica.load().ongoing == 50)
    for task in tasks[1:-1]:
        task.cancel()
    await until(lambda: replica.load().ongoing == 2)
    gate.set()
    assert await tasks[0] == 0
    assert await tasks[-1] == 49
    assert runs == [0, 49]
    assert quiet(replica)


async def test_who_waits_past_its_deadline_does_not_run(start, ask, until):
    gate = asyncio.Event()
    runs: list[int] = []

    @sk.service(limits=ONE)
    class S:
        @sk.endpoint
        async def work(self, n: int) -> int:
            runs.append(n)
            await gate.wait()
            return n

    replica = await start(S)
    first = asyncio.create_task(ask(replica, "work", {"n": 1}))
    await until(lambda: runs)
    deadline = now() + 0.05
    late = asyncio.create_task(ask(replica, "work", {"n": 2}, deadline=deadline))
    await until(lambda: replica.load().ongoing == 2)
    await until(lambda: now() > deadline)
    gate.set()
    await first
    with pytest.raises(DeadlineExceeded) as caught:
        await late
    assert not caught.value.started
    assert runs == [1]
    assert quiet(replica)


@sk.service
class Late:
    """Every kind of endpoint; each notes that it ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    @sk.endpoint
    def sync(self, name: str) -> str:
        self.ran.append(name)
        return name

    @sk.endpoint
    async def coro(self, name: str) -> str:
        self.ran.append(name)
        return name

    @sk.endpoint
    def gen(self, name: str) -> Iterator[str]:
        self.ran.append(name)
        yield name

    @sk.endpoint
    async def agen(self, name: str) -> AsyncIterator[str]:
        self.ran.append(name)
        yield name

    @sk.batched(max_size=4)
    def batch(self, names: list[str]) -> list[str]:
        self.ran.extend(names)
        return names

    @sk.batched(max_size=4)
    async def abatch(self, names: list[str]) -> list[str]:
        self.ran.extend(names)
        return names


def given(kind: str) -> object:
    return kind if kind.endswith("batch") else {"name": kind}


@pytest.mark.parametrize("kind", ["sync", "coro", "gen", "agen", "batch", "abatch"])
async def test_a_call_that_comes_too_late_does_not_run(start, ask, kind):
    replica = await start(Late)
    with pytest.raises(DeadlineExceeded) as caught:
        await ask(replica, kind, given(kind), deadline=now() - 0.001)
    assert not caught.value.started
    assert replica._instance.ran == []
    assert quiet(replica)


@pytest.mark.parametrize("kind", ["sync", "gen", "batch"])
async def test_a_call_for_which_a_thread_comes_too_late_does_not_run(start, ask, kind, monkeypatch):
    def busy(threads: Threads, work: Callable[[], Any]) -> asyncio.Future[Any]:
        def in_line() -> Any:
            time.sleep(max(0.0, deadline - now()))
            return work()

        return submit(threads, in_line)

    submit = Threads.submit
    replica = await start(Late)
    monkeypatch.setattr(Threads, "submit", busy)
    deadline = now() + 0.05
    with pytest.raises(DeadlineExceeded) as caught:
        await ask(replica, kind, given(kind), deadline=deadline)
    assert not caught.value.started
    assert replica._instance.ran == []
    await asyncio.sleep(0)
    assert quiet(replica)


# -- contexts


async def test_every_call_has_a_context_of_its_own(start, ask):
    @sk.service
    class S:
        @sk.endpoint
        def sync(self) -> str:
            return f"{sk.context().request_id} {sk.context().headers['x-who']}"

        @sk.endpoint
        async def coro(self) -> str:
            await asyncio.sleep(0)
            return f"{sk.context().request_id} {sk.context().headers['x-who']}"

        @sk.endpoint
        def gen(self) -> Iterator[str]:
            for _ in range(3):
                yield f"{sk.context().request_id} {sk.context().headers['x-who']}"

        @sk.endpoint
        async def agen(self) -> AsyncIterator[str]:
            for _ in range(3):
                await asyncio.sleep(0)
                yield f"{sk.context().request_id} {sk.context().headers['x-who']}"

    replica = await start(S)

    async def one(endpoint: str, i: int) -> None:
        headers = msgspec.msgpack.encode([[b"X-Who", b"%d" % i]])
        got = await ask(replica, endpoint, request_id=f"id-{i}", headers=headers)
        expected = f"id-{i} {i}"
        if isinstance(got, str):
            assert got == expected
        else:
            assert await parts(got) == [expected] * 3
            await got.aclose()

    await asyncio.gather(*(one(e, i) for i, e in enumerate(["sync", "coro", "gen", "agen"] * 10)))


async def test_a_sync_function_can_see_that_its_caller_has_left(start, ask, until):
    began, ended = threading.Event(), threading.Event()

    @sk.service
    class S:
        @sk.endpoint
        def loop(self) -> None:
            context = sk.context()
            began.set()
            while not context.cancelled:
                pass
            ended.set()

    replica = await start(S)
    task = asyncio.create_task(ask(replica, "loop"))
    await until(began.is_set)
    task.cancel()
    await until(ended.is_set)
    await until(lambda: quiet(replica))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_async_function_is_cancelled_with_its_caller(start, ask, until):
    events: list[str] = []

    @sk.service
    class S:
        @sk.endpoint
        async def wait(self) -> None:
            events.append("began")
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await asyncio.sleep(0)
                events.append("cleaned up")

    replica = await start(S)
    task = asyncio.create_task(ask(replica, "wait"))
    await until(lambda: events)
    task.cancel()
    await until(lambda: task.done())
    assert events == ["began", "cleaned up"]
    assert quiet(replica)


# -- errors


@sk.service
class Fails:
    @sk.endpoint
    def sync(self, n: int) -> int:
        raise ValueError("hunter2")

    @sk.endpoint
    async def coro(self, n: int) -> int:
        raise ValueError("hunter2")

    @sk.endpoint
    def leave(self, n: int) -> int:
        raise SystemExit(n)

    @sk.endpoint
    def stop(self, n: int) -> int:
        raise StopIteration("hunter2")

    @sk.endpoint
    def own(self, n: int) -> int:
        raise NotFound(f"there is no {n}", reason="no_number")

    @sk.endpoint
    async def lies(self, n: int) -> int:
        return "text"  # type: ignore[return-value]

    @sk.endpoint
    def gen(self, n: int) -> Iterator[int]:
        yield from range(n)
        raise ValueError("hunter2")

    @sk.endpoint
    async def agen(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i
        raise ValueError("hunter2")

    @sk.endpoint
    def no_gen(self, n: int) -> AsyncIterator[int]:
        raise ValueError("hunter2")

    @sk.endpoint
    def lying_gen(self, n: int) -> Iterator[int]:
        yield from range(n)
        yield "text"  # type: ignore[misc]


@pytest.mark.parametrize("endpoint", ["sync", "coro", "leave", "stop", "gen", "agen", "no_gen"])
async def test_what_user_code_raises_is_masked(endpoint, start, ask, until, caplog):
    replica = await start(Fails)
    with pytest.raises(ExecutionError) as caught:
        await ask(replica, endpoint, {"n": 0}, request_id="id-7")
    assert "hunter2" not in str(caught.value)
    assert f"Fails.{endpoint}" in str(caught.value)
    assert caught.value.started
    assert "id-7" in caplog.text
    assert "Traceback" in caplog.text
    await until(lambda: quiet(replica))


async def test_a_call_error_of_user_code_passes_as_it_is(start, ask, caplog):
    replica = await start(Fails)
    with pytest.raises(NotFound, match="there is no 3") as caught:
        await ask(replica, "own", {"n": 3})
    assert caught.value.reason == "no_number"
    assert "Traceback" not in caplog.text


async def test_an_output_of_another_type(start, ask):
    replica = await start(Fails)
    with pytest.raises(InvalidOutput, match=r"Fails\.lies"):
        await ask(replica, "lies", {"n": 3})
    assert quiet(replica)


@pytest.mark.parametrize(
    ("body", "error"), [({"n": "x"}, InvalidInput), ({}, InvalidInput), (None, InvalidInput)]
)
async def test_wrong_input_takes_no_slot(body, error, start, ask):
    replica = await start(Fails)
    with pytest.raises(error):
        await ask(replica, "sync", body)
    assert quiet(replica)


async def test_a_body_that_is_no_json(start):
    replica = await start(Fails)
    with pytest.raises(BadRequest):
        await replica(make_call("S", "sync", Payload(JSON, (b"{",)), request_id="r"))
    assert quiet(replica)


# -- streams


@pytest.mark.parametrize("endpoint", ["gen", "agen"])
async def test_an_error_behind_the_first_chunk_comes_in_its_place(
    endpoint, start, ask, until, caplog
):
    replica = await start(Fails)
    reply = await ask(replica, endpoint, {"n": 3})
    got = []
    with pytest.raises(ExecutionError) as caught:
        async for chunk in reply.stream:
            got.append(msgspec.json.decode(bytes(chunk.segments[0])))
    assert got == [0, 1, 2]
    assert "hunter2" not in str(caught.value)
    await reply.aclose()
    await until(lambda: quiet(replica))


async def test_a_chunk_of_another_type(start, ask, until):
    replica = await start(Fails)
    with pytest.raises(InvalidOutput):
        await ask(replica, "lying_gen", {"n": 0})
    reply = await ask(replica, "lying_gen", {"n": 1})
    with pytest.raises(InvalidOutput):
        await parts(reply)
    await reply.aclose()
    await until(lambda: quiet(replica))


class Tap:
    """Counts what a generator made, and notes that it was closed."""

    def __init__(self) -> None:
        self.made = 0
        self.closed = 0


def tapped(tap: Tap):
    @sk.service(limits=sk.Limits(max_ongoing=2, max_queued=0))
    class S:
        @sk.endpoint
        def gen(self, n: int) -> Iterator[int]:
            try:
                for i in range(n):
                    tap.made += 1
                    yield i
            finally:
                tap.closed += 1

        @sk.endpoint
        async def agen(self, n: int) -> AsyncIterator[int]:
            try:
                for i in range(n):
                    tap.made += 1
                    yield i
            finally:
                await asyncio.sleep(0)
                tap.closed += 1

        @sk.endpoint
        def listed(self, n: int) -> Iterator[int]:
            return iter(range(n))

    return S


@pytest.mark.parametrize("endpoint", ["gen", "agen", "listed"])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
async def test_a_stream_to_its_end(endpoint, count, start, ask, until):
    replica = await start(tapped(Tap()))
    for _ in range(3):
        reply = await ask(replica, endpoint, {"n": count})
        assert await parts(reply) == list(range(count))
        await reply.aclose()
        await until(lambda: quiet(replica))


async def test_a_sync_generator_is_held_back_by_a_slow_reader(start, ask, until):
    tap = Tap()
    replica = await start(tapped(tap))
    reply = await ask(replica, "gen", {"n": 10_000})
    ahead = 0
    for taken in range(1, 100):
        await until(lambda taken=taken: tap.made > taken)
        # The thread may run on while this looks; what counts is that it is bounded.
        ahead = max(ahead, tap.made - taken)
        await anext(reply.stream)
    assert ahead <= 20
    await reply.aclose()
    await until(lambda: tap.closed and quiet(replica))
    assert tap.made < 200


@pytest.mark.parametrize("endpoint", ["gen", "agen"])
@pytest.mark.parametrize("taken", [0, 1, 5, 40])
async def test_closing_a_stream_ends_its_generator_and_frees_the_slot(
    endpoint, taken, start, ask, until
):
    tap = Tap()
    replica = await start(tapped(tap))
    reply = await ask(replica, endpoint, {"n": 10_000})
    for _ in range(taken):
        await anext(reply.stream)
    assert replica.load().ongoing == 1
    await reply.aclose()
    await reply.aclose()
    await until(lambda: tap.closed == 1 and quiet(replica))
    assert tap.made < 100


async def test_a_stream_holds_its_slot(start, ask, until):
    replica = await start(tapped(Tap()))
    replies = [await ask(replica, "agen", {"n": 10}) for _ in range(2)]
    with pytest.raises(Overloaded):
        await ask(replica, "agen", {"n": 10})
    await replies[0].aclose()
    assert await parts(await ask(replica, "agen", {"n": 3})) == [0, 1, 2]
    await replies[1].aclose()
    for reply in replies:
        await reply.aclose()


async def test_cancelling_a_stream_before_its_first_chunk(start, ask, until):
    events: list[str] = []

    @sk.service
    class S:
        @sk.endpoint
        async def agen(self) -> AsyncIterator[int]:
            events.append("began")
            try:
                await asyncio.get_running_loop().create_future()
                yield 1
            finally:
                events.append("closed")

    replica = await start(S)
    task = asyncio.create_task(ask(replica, "agen"))
    await until(lambda: events)
    task.cancel()
    await until(lambda: task.done())
    assert events == ["began", "closed"]
    assert quiet(replica)


async def test_a_sync_generator_that_is_slow_to_its_first_chunk_may_be_cancelled(start, ask, until):
    gate, began, closed = threading.Event(), threading.Event(), threading.Event()

    @sk.service
    class S:
        @sk.endpoint
        def gen(self) -> Iterator[int]:
            try:
                began.set()
                gate.wait(10)
                yield 1
                yield 2
            finally:
                closed.set()

    replica = await start(S)
    task = asyncio.create_task(ask(replica, "gen"))
    await until(began.is_set)
    task.cancel()
    await until(lambda: task.done())
    assert replica.load().ongoing == 1  # the thread still works
    gate.set()
    await until(lambda: closed.is_set() and quiet(replica))


async def test_a_thread_does_not_begin_work_that_nobody_wants(start, ask, until):
    @sk.service
    class S:
        @sk.endpoint
        def work(self) -> None: ...

    replica = await start(S)
    runner, _ = replica._runners["work"]
    context = RequestContext()
    context.cancelled = True
    assert runner._admission.enter(context.call)
    with pytest.raises(NotRun, match="the caller left") as caught:
        await runner._in_thread(context, pytest.fail)
    assert isinstance(caught.value.why, Cancelled)
    assert not caught.value.why.started
    assert quiet(replica)
