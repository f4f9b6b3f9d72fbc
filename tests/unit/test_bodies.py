"""The account of all bodies: it never goes over its limit, and ends where it began."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.core.host import Host
from servekit.gateway.bodies import Bodies, default_limit

LIMIT = 100

STEPS = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.one_of(
            st.tuples(st.just("hold"), st.integers(0, LIMIT + 10)),
            st.sampled_from([("open_buffer",), ("close_buffer",), ("close",)]),
        ),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_requests_do_each_gives_back_once(steps):
    bodies = Bodies(LIMIT)
    shares = [bodies.share() for _ in range(5)]
    sizes, works, buffers = [0] * 5, [True] * 5, [False] * 5
    for index, (verb, *arguments) in steps:
        result = getattr(shares[index], verb)(*arguments)
        if verb == "hold":
            [size] = arguments
            others = sum(sizes) - sizes[index]
            fits = not others or others + size <= LIMIT or size <= sizes[index]
            assert result == (works[index] and fits)
            if result:
                sizes[index] = size
        elif verb == "open_buffer":
            buffers[index] = works[index]
        elif verb == "close_buffer":
            buffers[index] = False
        else:
            works[index] = False
        if not works[index] and not buffers[index]:
            sizes[index] = 0
        assert bodies.held == sum(sizes)
        # Only one that came first may be over the limit, and then none comes behind it.
        assert sum(sizes) - max(sizes) <= LIMIT
    for share in shares:
        share.close()
        share.close_buffer()
    assert bodies.held == 0


def test_a_body_that_is_alone_may_be_of_any_size():
    bodies = Bodies(LIMIT)
    large, small = bodies.share(), bodies.share()
    assert large.hold(500)
    assert large.hold(600)
    assert not small.hold(1)
    large.close()
    assert small.hold(1)
    assert not bodies.share().hold(LIMIT)


@pytest.mark.parametrize(
    ("memory", "limit"), [(400_000_000, 100_000_000), (1 << 40, 2 << 30), (0, 512 << 20)]
)
def test_the_default_is_a_part_of_the_memory_that_may_be_used(memory, limit, monkeypatch):
    assert 0 < default_limit() <= 2 << 30
    monkeypatch.setattr(Host, "memory", lambda _: memory)
    assert default_limit() == limit
