"""Slots as a state machine: never too many, first come first served, nothing lost."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from servekit.errors import Overloaded
from servekit.runtime.slots import Slots
from tests.examples import examples


async def use(slots: Slots, granted: list[int], id_: int) -> None:
    if not slots.take():
        await slots.wait()
    granted.append(id_)


class Machine(RuleBasedStateMachine):
    """Callers come, go and leave in any order, within one turn of the loop or over several."""

    @initialize(limit=st.integers(1, 4), max_queued=st.integers(0, 5))
    def start(self, limit, max_queued):
        self.loop = asyncio.new_event_loop()
        self.slots = Slots(limit, max_queued, "S.f")
        self.granted: list[int] = []
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.order: list[int] = []  # who wants a slot and has not left
        self.held: list[int] = []
        self.next = 0

    def turns(self, count: int = 4) -> None:
        async def spin() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        self.loop.run_until_complete(spin())
        for id_ in self.granted[:]:
            if id_ in self.order:
                assert self.order[0] == id_, "somebody overtook"  # in the order of first steps
                self.order.remove(id_)
                self.held.append(id_)

    @rule(turns=st.sampled_from([0, 1, 4]))
    def arrive(self, turns):
        full = self.slots.running >= self.slots.limit
        full &= self.slots.queued >= self.slots.max_queued
        try:
            self.slots.check(0.2)
        except Overloaded as error:
            assert full
            assert error.retry_after_s == 0.2
            assert not error.started
            return
        assert not full
        self.next += 1
        self.order.append(self.next)
        task = self.loop.create_task(use(self.slots, self.granted, self.next))
        self.tasks[self.next] = task
        if turns:
            self.turns(turns)

    @precondition(lambda self: self.held)
    @rule(settle=st.booleans(), which=st.integers(0, 100))
    def leave(self, settle, which):
        self.held.pop(which % len(self.held))
        self.slots.release()
        if settle:
            self.turns()

    @precondition(lambda self: self.order)
    @rule(settle=st.booleans(), which=st.integers(0, 100))
    def give_up(self, settle, which):
        id_ = self.order[which % len(self.order)]
        self.tasks[id_].cancel()
        self.order.remove(id_)
        if settle:
            self.turns()

    @precondition(lambda self: self.order and self.held)
    @rule(which=st.integers(0, 100))
    def arrive_and_give_up_and_leave_at_once(self, which):
        self.arrive(turns=0)
        self.give_up(settle=False, which=which)
        self.leave(settle=False, which=which)

    @rule()
    def settle(self):
        self.turns()
        # Now that all have had their turn, no slot is free while somebody waits.
        assert len(self.held) == self.slots.running
        assert len(self.order) == self.slots.queued
        assert not self.order or len(self.held) == self.slots.limit

    @invariant()
    def never_too_many(self):
        if hasattr(self, "slots"):
            assert 0 <= self.slots.running <= self.slots.limit
            assert self.slots.queued >= 0

    def teardown(self):
        if not hasattr(self, "slots"):
            return
        try:
            self.settle()
            while self.held:
                self.held.pop()
                self.slots.release()
                self.settle()
            assert self.slots.running == self.slots.queued == 0
            assert all(task.done() for task in self.tasks.values())
        finally:
            for task in self.tasks.values():
                task.cancel()
            self.turns()
            self.loop.close()


Machine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25)
TestSlots = Machine.TestCase


async def test_a_call_behind_one_that_gives_up_in_the_same_turn_is_not_forgotten():
    slots = Slots(1, 10, "S.f")
    assert slots.take()
    leaver = asyncio.create_task(slots.wait())
    await asyncio.sleep(0)
    leaver.cancel()
    slots.release()
    await use(slots, [], 1)
    assert slots.running == 1
    await asyncio.gather(leaver, return_exceptions=True)


def test_without_a_queue_the_second_is_refused():
    slots = Slots(1, 0, "S.f")
    slots.check(0.0)
    assert slots.take()
    with pytest.raises(Overloaded, match=r"S\.f: 1 calls run and 0 wait") as caught:
        slots.check(0.0)
    assert caught.value.reason == "queue_full"
    assert caught.value.retry_after_s == 0.05
