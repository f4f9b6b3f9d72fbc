"""Where blocks lie in an arena: they never overlap, all come back, and unused memory is given up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.wire.blocks import Blocks

COUNT = 64

takes = st.tuples(st.just("take"), st.integers(1, 20))
releases = st.tuples(st.just("release"), st.integers(0, 1000))
gives = st.tuples(st.just("give"), st.integers(0, 1000))
fails = st.tuples(st.just("fail"), st.integers(1, 20))
cools = st.tuples(st.just("cool"), st.just(0))


class Model:
    """Granules one by one, as plain sets."""

    def __init__(self) -> None:
        self.blocks = Blocks(COUNT)
        self.lent: dict[int, set[int]] = {}
        self.backed: set[int] = set()
        self.used_lately: set[int] = set()

    def used(self) -> set[int]:
        return {0}.union(*self.lent.values())

    def take(self, count: int) -> None:
        taken = self.blocks.take(count)
        free = [g for g in range(COUNT) if g not in self.used()]
        fitting = [g for g in free if {*range(g, g + count)} <= {*free}]
        if taken is None:
            assert not fitting
            return
        start, backed = taken
        granules = {*range(start, start + count)}
        assert start == fitting[0]
        assert backed == (granules <= self.backed)
        self.lent[start] = granules
        self.backed |= granules
        self.used_lately |= granules

    def release(self, which: int) -> None:
        """The peer clears the flags of some blocks, all at once."""
        gone = [start for i, start in enumerate(self.lent) if which >> (i % 10) & 1]
        flags = bytes(start in self.lent and start not in gone for start in range(COUNT))
        self.blocks.reclaim(flags)
        for start in gone:
            del self.lent[start]

    def give(self, which: int) -> None:
        if self.lent:
            start = [*self.lent][which % len(self.lent)]
            self.blocks.give(start)
            del self.lent[start]

    def fail(self, count: int) -> None:
        """The system has no memory for a block."""
        if (taken := self.blocks.take(count)) is not None:
            self.blocks.give(taken[0], empty=True)
            self.backed -= {*range(taken[0], taken[0] + count)}

    def cool(self, _: int) -> None:
        cold: set[int] = set()
        for start, stop in self.blocks.cool():
            assert start < stop
            cold |= {*range(start, stop)}
        assert cold == self.backed - self.used_lately
        self.backed -= cold
        self.used_lately = self.used() - {0}
        assert self.blocks.backed == bool(self.backed)


@pytest.mark.slow
@given(steps=st.lists(takes | releases | gives | fails | cools, max_size=60))
@settings(max_examples=300)
def test_any_sequence_is_as_if_granules_were_counted_one_by_one(steps):
    model = Model()
    for name, argument in steps:
        getattr(model, name)(argument)
        assert len(model.blocks) == len(model.lent)
    model.blocks.reclaim(bytes(COUNT))
    assert model.blocks.take(COUNT - 1) is not None  # it all came back, in one piece
    assert model.blocks.take(1) is None


def test_granule_0_is_no_block():
    blocks = Blocks(8)
    assert blocks.take(8) is None
    assert blocks.take(7) == (1, False)


def test_the_same_memory_serves_one_call_after_another():
    blocks = Blocks(100)
    first = blocks.take(10)
    assert first == (1, False)
    for _ in range(50):
        blocks.reclaim(bytes(100))
        assert blocks.take(10) == (1, True)


def test_memory_that_is_lent_stays_while_it_is_not_used_again():
    blocks = Blocks(100)
    assert blocks.take(10) == (1, False)
    assert blocks.take(10) == (11, False)
    blocks.give(1)
    assert blocks.cool() == []  # used since the last time
    assert blocks.cool() == [(1, 11)]
    assert blocks.cool() == []
    blocks.give(11)
    assert blocks.cool() == []  # was lent until now
    assert blocks.cool() == [(11, 21)]
    assert not blocks.backed


@pytest.mark.parametrize("start", [0, 2, 50])
def test_what_was_not_lent_can_not_be_given_back(start):
    blocks = Blocks(100)
    blocks.take(3)
    with pytest.raises(KeyError):
        blocks.give(start)
