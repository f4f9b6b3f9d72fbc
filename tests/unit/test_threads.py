"""The thread pool: bounded, in the caller's context, and it answers whatever happens."""

import asyncio
import contextvars
import threading
import weakref

import pytest

from servekit.errors import ServekitError
from servekit.runtime.threads import Threads

LABEL: contextvars.ContextVar[str] = contextvars.ContextVar("label", default="")


@pytest.fixture
def make():
    made: list[Threads] = []

    def start(limit: int = 4) -> Threads:
        made.append(Threads(asyncio.get_running_loop(), limit, name="T"))
        return made[-1]

    yield start
    for threads in made:
        threads.close()
        for thread in threads._threads:
            thread.join(10)
            assert not thread.is_alive()


async def test_values_and_errors_come_back(make):
    threads = make()
    assert await threads.submit(lambda: threading.current_thread().name.startswith("T-"))

    def fail() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        await threads.submit(fail)
    assert await threads.submit(lambda: None) is None


async def test_hundreds_of_jobs_in_a_few_threads(make):
    threads = make(3)
    names: set[str] = set()

    def job(i: int) -> int:
        names.add(threading.current_thread().name)
        return i * i

    results = await asyncio.gather(*(threads.submit(lambda i=i: job(i)) for i in range(500)))
    assert results == [i * i for i in range(500)]
    assert names <= {"T-0", "T-1", "T-2"}
    assert threads._busy == 0


async def test_as_many_run_at_once_as_the_limit_says(make):
    threads = make(3)
    barrier = threading.Barrier(3)
    await asyncio.gather(*(threads.submit(lambda: barrier.wait(10)) for _ in range(3)))
    assert len(threads._threads) == 3


async def test_threads_start_when_they_are_needed(make):
    threads = make(10)
    assert threads._threads == []
    for _ in range(20):
        await threads.submit(lambda: None)
    assert len(threads._threads) == 1


async def test_work_runs_in_a_copy_of_the_callers_context(make):
    threads = make()
    LABEL.set("mine")

    def job() -> str:
        seen = LABEL.get()
        LABEL.set("changed")
        return seen

    assert await threads.submit(job) == "mine"
    assert LABEL.get() == "mine"


async def test_a_thread_that_waits_holds_nothing_of_its_last_work(make, until):
    class Array:
        pass

    threads = make()
    argument = Array()
    gone = weakref.ref(argument), weakref.ref(await threads.submit(lambda it=argument: [it][0]))
    del argument
    await until(lambda: all(ref() is None for ref in gone))


async def test_work_that_is_cancelled_before_it_began_is_skipped(make):
    threads = make(1)
    gate = threading.Event()
    ran: list[str] = []
    first = threads.submit(gate.wait)
    second = threads.submit(lambda: ran.append("second"))
    third = threads.submit(lambda: ran.append("third"))
    second.cancel()
    gate.set()
    await first
    await third
    assert ran == ["third"]
    assert threads._busy == 0


async def test_cancelling_running_work_lets_it_end(make, until):
    threads = make(1)
    gate, began, ended = threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        began.set()
        gate.wait(10)
        ended.set()

    future = threads.submit(job)
    await until(began.is_set)
    future.cancel()
    assert not ended.is_set()
    gate.set()
    await until(ended.is_set)
    await threads.submit(lambda: None)
    assert threads._busy == 0


async def test_stop_iteration_does_not_break_the_future(make):
    def job() -> None:
        raise StopIteration("end")

    with pytest.raises(ServekitError, match="StopIteration"):
        await make().submit(job)


def test_a_thread_survives_the_end_of_its_loop():
    loop = asyncio.new_event_loop()
    gate, began = threading.Event(), threading.Event()

    def job() -> None:
        began.set()
        gate.wait(10)

    async def main() -> Threads:
        threads = Threads(loop, 1, name="T")
        threads.submit(job)
        return threads

    threads = loop.run_until_complete(main())
    assert began.wait(10)
    loop.close()
    gate.set()
    threads._threads[0].join(10)
    assert not threads._threads[0].is_alive()
