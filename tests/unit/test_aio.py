"""Coarse deadlines against a model, on a loop whose clock the test owns; task scopes."""

import asyncio
import heapq
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.core import aio
from servekit.core.aio import Deadlines, Tasks

TICK_S = 0.005


class Timer:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """The part of a loop that `Deadlines` uses; time passes only in `advance`."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.wakes = 0
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now + delay, callback)
        heapq.heappush(self._timers, (timer.when, next(self._order), timer))
        return timer

    @property
    def armed(self) -> int:
        return sum(not timer.cancelled for _, _, timer in self._timers)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                self.now = max(self.now, when)
                self.wakes += 1
                timer.callback()
        self.now = end


@pytest.fixture
def make(monkeypatch):
    def start(now: float = 1000.0) -> tuple[Loop, Deadlines]:
        loop = Loop(now)
        monkeypatch.setattr(aio, "now", lambda: loop.now)
        return loop, Deadlines(loop, TICK_S)  # type: ignore[arg-type]

    return start


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.floats(-0.02, 0.1)),
        st.tuples(st.just("discard"), st.integers(0, 1000)),
        st.tuples(st.just("advance"), st.floats(0, 0.03)),
    ),
    max_size=60,
)


@given(actions=actions, start=st.floats(0, 1e7))
def test_deadlines_fire_within_a_tick_never_early_and_only_once(actions, start):
    with pytest.MonkeyPatch.context() as patch:
        loop = Loop(start)
        patch.setattr(aio, "now", lambda: loop.now)
        deadlines = Deadlines(loop, TICK_S)  # type: ignore[arg-type]
        expected: dict[tuple[int, int], float] = {}
        keys: list[tuple[int, int]] = []
        fired: list[float] = []

        def add(when: float) -> None:
            def fire() -> None:
                assert loop.now >= when
                fired.append(when)
                del expected[key]  # a second time, or after a discard, it would not be there

            key = deadlines.add(when, fire)
            expected[key] = when
            keys.append(key)

        for verb, amount in actions:
            if verb == "add":
                add(loop.now + amount)
            elif verb == "discard" and keys:
                key = keys[amount % len(keys)]
                expected.pop(key, None)
                deadlines.discard(key)
            elif verb == "advance":
                loop.advance(amount)
                late = [when for when in expected.values() if when + 1.01 * TICK_S < loop.now]
                assert not late
            assert len(deadlines) == len(expected)
        for key in keys:
            deadlines.discard(key)
        assert len(deadlines) == 0
        loop.advance(1.0)
        assert loop.armed == 0


def test_an_idle_loop_is_woken_at_most_once(make):
    loop, deadlines = make()
    for offset in range(1, 101):
        deadlines.discard(deadlines.add(loop.now + offset, pytest.fail))
    loop.advance(1000.0)
    assert loop.wakes <= 1
    assert loop.armed == 0


def test_only_the_earliest_deadline_holds_a_timer(make):
    loop, deadlines = make()
    fired: list[str] = []
    deadlines.add(loop.now + 3.0, lambda: fired.append("late"))
    deadlines.add(loop.now + 1.0, lambda: fired.append("early"))
    deadlines.add(loop.now + 2.0, lambda: fired.append("middle"))
    assert loop.armed == 1
    loop.advance(1.1)
    assert fired == ["early"]
    assert loop.armed == 1
    loop.advance(2.0)
    assert fired == ["early", "middle", "late"]
    assert loop.armed == 0


def test_deadlines_that_come_and_go_leave_nothing_behind(make):
    loop, deadlines = make()
    for _ in range(1000):
        deadlines.discard(deadlines.add(loop.now + 60.0, pytest.fail))
    assert len(deadlines._ticks) <= 1
    assert len(deadlines._buckets) <= 1


def test_close_forgets_all(make):
    loop, deadlines = make()
    deadlines.add(loop.now + 1.0, pytest.fail)
    deadlines.close()
    assert len(deadlines) == 0
    assert loop.armed == 0
    loop.advance(2.0)


async def test_deadlines_on_a_real_loop():
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    start = aio.now()
    times: list[tuple[float, float]] = []
    done = loop.create_future()
    for offset in (0.0, 0.003, 0.011, 0.02, 0.02):
        when = start + offset
        deadlines.add(when, lambda when=when: times.append((when, aio.now())))
    deadlines.add(start + 0.03, lambda: done.set_result(None))
    await done
    assert len(times) == 5
    assert all(fired >= when for when, fired in times)


# -- tasks


async def test_a_scope_cancels_what_still_runs():
    tasks = Tasks()
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    task = tasks.spawn(work(), name="work")
    assert task.get_name() == "work"
    await asyncio.sleep(0)
    await tasks.close()
    assert ended == ["work"]
    assert task.cancelled()


async def test_a_failure_in_the_background_reaches_the_loops_handler():
    seen: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: seen.append(context))
    tasks = Tasks()

    async def work() -> None:
        raise ValueError("broken")

    tasks.spawn(work(), name="fragile")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    loop.set_exception_handler(before)
    (context,) = seen
    assert "fragile" in str(context["message"])
    assert isinstance(context["exception"], ValueError)
    await tasks.close()


async def test_a_task_may_close_its_own_scope():
    tasks = Tasks()
    other = tasks.spawn(asyncio.sleep(60))

    async def work() -> str:
        await asyncio.sleep(0)
        await tasks.close()
        return "ended"

    assert await tasks.spawn(work()) == "ended"
    assert other.cancelled()


async def test_what_a_task_spawns_while_it_is_closed_is_closed_too():
    tasks = Tasks()
    late: list[asyncio.Task[None]] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            late.append(tasks.spawn(asyncio.sleep(60)))

    tasks.spawn(work())
    await asyncio.sleep(0)
    await tasks.close()
    assert late[0].done()
