"""Deadlines of calls and streams against a model, on a loop whose clock the test owns."""

import asyncio
import heapq
import itertools
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.core.call import JSON, Call, Load, Payload, Reply
from servekit.errors import DeadlineExceeded, PayloadTooLarge, ReplicaLost
from servekit.wire import caller as caller_module
from servekit.wire.caller import Caller
from servekit.wire.frames import Kind
from tests.calls import make_call

LATE_S = 1.01 * caller_module._TICK_S


class Timer:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """The running loop, but for its timers: their time passes only in `advance`."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.wakes = 0
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._real = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def call_later(
        self, delay: float, callback: Callable[[], None], *, context: object = None
    ) -> Timer:
        timer = Timer(self.now + delay, callback)
        heapq.heappush(self._timers, (timer.when, next(self._order), timer))
        return timer

    @property
    def armed(self) -> int:
        return sum(not timer.cancelled for _, _, timer in self._timers)

    async def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                self.now = max(self.now, when)
                self.wakes += 1
                timer.callback()
        self.now = end
        await turns()


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


class World:
    """A caller, its clock, and a peer that only does what the test says."""

    def __init__(self, now: float = 1000.0) -> None:
        self.loop = Loop(now)
        self.caller = Caller(self.loop, self._sent, lambda: None)  # type: ignore[arg-type]
        self.cancels: dict[int, float] = {}
        """When a call's CANCEL was sent."""

    def _sent(self, buffers) -> None:
        _, id_, kind = struct.unpack_from("<IIB", buffers[0])
        if kind == Kind.CANCEL:
            assert id_ not in self.cancels
            self.cancels[id_] = self.loop.now

    async def call(self, after_s: float | None, **fields: Any) -> tuple[int, asyncio.Task[Reply]]:
        """Start a call; returns its id and its task."""
        deadline = None if after_s is None else self.loop.now + after_s
        call: Call = make_call("S", "e", deadline=deadline, **fields)
        task = asyncio.create_task(self.caller.call(call))
        await turns()
        return self.caller._last_id, task

    async def answer(self, id_: int, *, stream: bool = False) -> None:
        header = msgspec.msgpack.encode((JSON, Load(), 0.0, stream))
        self.caller.on_reply(id_, header, [] if stream else [b"{}"])
        await turns()


@pytest.fixture
def make(monkeypatch):
    def start(now: float = 1000.0) -> World:
        world = World(now)
        monkeypatch.setattr(caller_module, "now", lambda: world.loop.now)
        return world

    return start


@pytest.mark.parametrize("order", [*itertools.permutations((1.0, 2.0, 3.0))])
async def test_each_deadline_fires_in_its_time_whatever_their_order(make, order):
    world = make()
    tasks = {after_s: (await world.call(after_s))[1] for after_s in order}
    assert world.loop.armed == 1
    await world.loop.advance(0.999)
    assert not any(task.done() for task in tasks.values())
    for passed in (1.0, 2.0, 3.0):
        await world.loop.advance(0.002 if passed == 1.0 else 1.0)
        assert {after_s for after_s, task in tasks.items() if task.done()} == {
            after_s for after_s in order if after_s <= passed
        }
        assert world.loop.armed == (passed < 3.0)
    for task in tasks.values():
        with pytest.raises(DeadlineExceeded) as caught:
            await task
        assert caught.value.started
    assert world.caller.ongoing == 0
    assert len(world.cancels) == 3


async def test_an_answered_call_leaves_nothing_that_fires(make):
    world = make()
    id_, task = await world.call(1.0)
    await world.answer(id_)
    assert (await task).payload is not None
    await world.loop.advance(2.0)
    assert world.cancels == {}
    assert world.loop.armed == 0


async def test_a_call_that_was_left_does_not_fire_again(make):
    world = make()
    id_, task = await world.call(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await world.loop.advance(2.0)
    assert list(world.cancels) == [id_]
    assert world.loop.armed == 0


async def test_a_late_answer_of_an_expired_call_is_dropped(make):
    world = make()
    id_, task = await world.call(1.0)
    await world.loop.advance(1.0)
    for stream in (False, True):
        await world.answer(id_, stream=stream)
    with pytest.raises(DeadlineExceeded):
        await task
    assert world.caller.ongoing == 0


async def test_an_answer_in_the_turn_of_the_deadline_counts(make):
    world = make()
    id_, task = await world.call(1.0)
    world.caller.on_reply(id_, msgspec.msgpack.encode((JSON, Load(), 0.0, False)), [b"{}"])
    await world.loop.advance(1.0)
    assert (await task).payload is not None
    assert world.cancels == {}


async def test_a_stream_ends_at_the_deadline_of_its_call(make):
    world = make()
    id_, task = await world.call(1.0)
    await world.answer(id_, stream=True)
    stream = (await task).stream
    world.caller.on_chunk(id_, JSON.encode(), [b"1"])
    await world.loop.advance(0.999)
    assert world.cancels == {}
    await world.loop.advance(0.002)
    assert list(world.cancels) == [id_]
    assert isinstance(await anext(stream), Payload)
    with pytest.raises(DeadlineExceeded):
        await anext(stream)
    assert world.caller.ongoing == 0
    assert world.loop.armed == 0


@pytest.mark.parametrize("how", ["end", "close", "drop"])
async def test_a_stream_that_is_over_leaves_nothing_that_fires(make, how):
    world = make()
    id_, task = await world.call(1.0)
    await world.answer(id_, stream=True)
    reply = await task
    del task
    if how == "end":
        world.caller.on_end(id_, b"")
    elif how == "close":
        await reply.aclose()
    del reply
    await turns()
    assert world.caller.ongoing == 0
    before = dict(world.cancels)
    assert list(before) == ([] if how == "end" else [id_])
    await world.loop.advance(2.0)
    assert world.cancels == before
    assert world.loop.armed == 0


async def test_without_deadlines_there_is_no_timer(make):
    world = make()
    id_, task = await world.call(None)
    assert world.loop.armed == 0
    await world.answer(id_, stream=True)
    assert world.loop.armed == 0
    await (await task).aclose()


async def test_a_call_without_a_deadline_outlives_the_others(make):
    world = make()
    free, task = await world.call(None)
    _, short = await world.call(1.0)
    await world.loop.advance(100.0)
    assert short.done()
    assert not task.done()
    assert world.loop.armed == 0
    await world.answer(free)
    await task
    with pytest.raises(DeadlineExceeded):
        await short


async def test_when_the_connection_is_lost_there_is_no_timer(make):
    world = make()
    _, task = await world.call(1.0)
    id_, streaming = await world.call(2.0)
    await world.answer(id_, stream=True)
    reply = await streaming
    world.caller.lose()
    assert world.loop.armed == 0
    with pytest.raises(ReplicaLost):
        await task
    with pytest.raises(ReplicaLost):
        await anext(reply.stream)
    await world.loop.advance(5.0)
    assert world.cancels == {}


async def test_calls_still_expire_when_the_peer_takes_no_new_ones(make):
    world = make()
    _, task = await world.call(1.0)
    world.caller.usable = False
    with pytest.raises(ReplicaLost):
        await (await world.call(1.0))[1]
    await world.loop.advance(1.0)
    with pytest.raises(DeadlineExceeded):
        await task


@pytest.mark.parametrize("after_s", [0.0, -1.0])
async def test_a_deadline_that_has_passed_sends_nothing(make, after_s):
    world = make()
    _, task = await world.call(after_s)
    with pytest.raises(DeadlineExceeded) as caught:
        await task
    assert not caught.value.started
    assert (world.caller._last_id, world.loop.armed) == (0, 0)


async def test_a_call_that_can_not_be_sent_does_not_expire(make):
    world = make()
    _, task = await world.call(1.0, headers=b"h" * 70_000)
    with pytest.raises(PayloadTooLarge):
        await task
    assert world.caller.ongoing == 0
    await world.loop.advance(2.0)
    assert (world.cancels, world.loop.armed) == ({}, 0)


async def test_many_answered_calls_wake_the_loop_once(make):
    world = make()
    for _ in range(100):
        id_, task = await world.call(1.0)
        await world.answer(id_)
        await task
    await world.loop.advance(1000.0)
    assert world.loop.wakes == 1
    assert world.loop.armed == 0


actions = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.none() | st.floats(0.0001, 0.1)),
        st.tuples(st.just("stream"), st.none() | st.floats(0.0001, 0.1)),
        st.tuples(st.just("answer"), st.integers(0, 1000)),
        st.tuples(st.just("leave"), st.integers(0, 1000)),
        st.tuples(st.just("advance"), st.floats(0, 0.03)),
    ),
    max_size=40,
)


@given(actions=actions, start=st.floats(0, 1e7))
@settings(max_examples=150)
def test_deadlines_fire_within_a_tick_never_early_and_only_once(actions, start):
    async def main() -> None:
        world = World(start)
        patch.setattr(caller_module, "now", lambda: world.loop.now)
        caller, loop = world.caller, world.loop
        open_: dict[int, float | None] = {}
        deadlines: dict[int, float | None] = {}
        tasks: dict[int, asyncio.Task[Reply]] = {}
        replies: dict[int, Reply] = {}
        left: set[int] = set()

        def check() -> None:
            for id_ in world.cancels.keys() & open_.keys():  # it has expired, and not early
                deadline = open_.pop(id_)
                assert deadline is not None
                assert world.cancels[id_] >= deadline
            assert all(d is None or d + LATE_S >= loop.now for d in open_.values())
            assert caller.ongoing == len(open_)
            assert loop.armed <= 1

        for verb, amount in actions:
            ids = list(open_)
            if verb == "advance":
                await loop.advance(amount)
            elif verb in ("call", "stream"):
                id_, task = await world.call(amount)
                if task.done():  # at 1e7 s a clock does not tell 100 us apart from 0
                    assert isinstance(task.exception(), DeadlineExceeded)
                    continue
                deadlines[id_] = open_[id_] = None if amount is None else loop.now + amount
                tasks[id_] = task
                if verb == "stream":
                    await world.answer(id_, stream=True)
                    replies[id_] = await task
            elif ids:
                id_ = ids[amount % len(ids)]
                del open_[id_]
                if verb == "leave":
                    left.add(id_)
                    if id_ in replies:
                        await replies[id_].aclose()
                    else:
                        tasks[id_].cancel()
                elif id_ in replies:
                    caller.on_end(id_, b"")
                else:
                    await world.answer(id_)
                await turns()
            check()
        await loop.advance(1.0)
        check()
        assert all(deadline is None for deadline in open_.values())
        assert loop.armed == 0
        for id_, task in tasks.items():
            expired = id_ in world.cancels and id_ not in left
            outcome = task.exception() if task.done() and not task.cancelled() else None
            if id_ not in replies:
                assert isinstance(outcome, DeadlineExceeded) == expired
            elif expired:
                with pytest.raises(DeadlineExceeded):
                    await anext(replies[id_].stream)
        caller.lose()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(main())
