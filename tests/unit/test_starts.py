"""Who loads when: a pure queue."""

from hypothesis import given
from hypothesis import strategies as st

from servekit.engine.starts import Start, Starts


def starts(parallel, *queued):
    found = Starts(parallel)
    for start in queued:
        found.ask(start)
    return found


def unknown():
    raise AssertionError("nobody asked for memory")


def take(queue, available=unknown):
    """Let all go on that may."""
    taken = []
    while (start := queue.next(available)) is not None:
        taken.append(start)
    return taken


def test_at_most_so_many_at_once_and_dependencies_first():
    root = [Start(n, "Root", rank=1, needs=frozenset({"Child"})) for n in range(2)]
    child = [Start(n, "Child", rank=0) for n in range(2, 5)]
    queue = starts(2, *root, *child)
    assert take(queue) == child[:2]
    assert take(queue) == []
    queue.end(child[0])
    assert take(queue) == child[2:]
    queue.end(child[1])
    queue.end(child[2])
    assert take(queue) == root
    queue.end(root[0])
    queue.end(root[0])
    assert take(queue) == []


def test_what_replaces_a_lost_one_goes_before_what_is_more():
    more = [Start(0, "Child", rank=0), Start(1, "Root", rank=1)]
    again = [Start(2, "Root", rank=1, restart=True), Start(3, "Child", rank=0, restart=True)]
    assert take(starts(9, *more, *again)) == [*reversed(again), *more]


def test_what_a_loading_one_may_wait_for_goes_at_once():
    """Else replicas that call a dependency while they load would hold its turn until they time out."""
    root = [Start(n, "Root", rank=2, needs=frozenset({"Child", "Deep"})) for n in range(2)]
    queue = starts(2, *root)
    assert take(queue) == root
    other, deep = Start(3, "Other", rank=0), Start(4, "Deep", rank=1, memory=2**40)
    queue.ask(other)
    queue.ask(deep)
    assert take(queue) == [deep]
    queue.end(deep)
    queue.end(root[0])
    assert take(queue) == [other]


def test_one_that_says_its_memory_waits_while_others_load_and_too_little_is_left():
    big, bigger, small = Start(0, "A", memory=6), Start(1, "A", memory=8), Start(2, "B")
    queue = starts(3, big, bigger, small)
    assert take(queue, lambda: 10) == [big]
    assert queue.short == bigger
    assert take(queue, lambda: 14) == [bigger, small], "6 of 14 are promised, 8 are left"
    assert queue.short is None


def test_with_nobody_else_loading_it_goes_in_any_case():
    queue = starts(2, Start(0, "A", memory=100))
    assert take(queue, lambda: 0) == [Start(0, "A", memory=100)]


def test_where_free_memory_is_not_known_nobody_waits():
    queue = starts(2, Start(0, "A", memory=5), Start(1, "A", memory=5))
    assert len(take(queue, lambda: None)) == 2


def test_one_that_gave_up_is_out_of_the_way():
    one, other = Start(0, "A", memory=5), Start(1, "A", memory=50)
    queue = starts(2, one, other)
    assert take(queue, lambda: 10) == [one]
    last = Start(2, "B")
    queue.ask(last)
    assert take(queue, lambda: 10) == []
    queue.end(other)
    assert take(queue, lambda: 10) == [last]


CHAIN = ("A", "B", "C", "D")
"""Each calls those behind it, so D is the deepest."""


def of_chain(number, at, memory):
    return Start(number, CHAIN[at], len(CHAIN) - at, memory, frozenset(CHAIN[at + 1 :]))


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10)), max_size=30),
    st.lists(st.integers(0, 100)),
    st.integers(0, 20),
)
def test_all_get_their_turn_and_no_more_than_so_many_unless_waited_for(
    parallel, wanted, ends, free
):
    queue = Starts(parallel)
    loading: list[Start] = []
    done: list[Start] = []
    for number, (at, memory) in enumerate(wanted):
        queue.ask(of_chain(number, at, memory))
        if number % 3 == 0:
            loading += take(queue, lambda: free)
    picks = iter(ends)
    while True:
        while (start := queue.next(lambda: free)) is not None:
            needed = any(start.service in other.needs for other in loading)
            assert needed or len(loading) < parallel
            assert needed or not start.memory or not loading or (
                free - sum(other.memory for other in loading) >= start.memory
            )  # fmt: skip
            loading.append(start)
        if not loading:
            break
        ended = loading.pop(next(picks, 0) % len(loading))
        queue.end(ended)
        done.append(ended)
    assert sorted(start.number for start in done) == list(range(len(wanted)))
