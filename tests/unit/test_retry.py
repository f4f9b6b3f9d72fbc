"""Retries: safe ones alone, in time, and never more than the budget has room for."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from servekit.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    ExecutionError,
    InvalidInput,
    Overloaded,
    ReplicaLost,
    Unavailable,
)
from servekit.resilience.retry import BROKEN, FOREIGN, Attempts, RetryBudget, may_repeat

RETRYABLE = [Overloaded, Unavailable, ReplicaLost]
FINAL = [BadRequest, InvalidInput, ExecutionError, DeadlineExceeded, Cancelled]


def attempts(budget=None, *, retries=2, idempotent=False, deadline=None, jitter=lambda: 0.5):
    return Attempts(
        budget or RetryBudget(),
        retries=retries,
        idempotent=idempotent,
        deadline=deadline,
        jitter=jitter,
    )


@pytest.mark.parametrize("kind", RETRYABLE)
def test_what_did_not_run_may_be_repeated(kind):
    for idempotent in (False, True):
        assert may_repeat(kind("m", started=False), idempotent=idempotent)


@pytest.mark.parametrize("kind", FINAL)
def test_what_would_fail_again_may_not(kind):
    for started in (False, True):
        assert not may_repeat(kind("m", started=started), idempotent=True)


@pytest.mark.parametrize("kind", RETRYABLE)
def test_what_a_server_reports_as_started_is_final(kind):
    """It has retried itself, or would be asked to do all the work before the failure again."""
    assert not may_repeat(kind("m", started=True), idempotent=True)


@pytest.mark.parametrize("reason", [BROKEN, FOREIGN])
def test_what_nobody_reports_may_be_repeated_if_it_is_idempotent(reason):
    error = ReplicaLost("m", reason=reason)
    assert may_repeat(error, idempotent=True)
    assert not may_repeat(error, idempotent=False)


def test_pauses_grow_with_full_jitter():
    for share in (0.0, 0.5, 0.999):
        with attempts(retries=12, jitter=lambda share=share: share) as tries:
            pauses = [tries.pause(Overloaded("m", started=False), 0.0) for _ in range(12)]
        assert pauses == [pytest.approx(share * min(0.01 * 2**n, 1.0)) for n in range(12)]


@pytest.mark.parametrize(
    ("after", "deadline", "pause"),
    [
        (None, None, 0.005),
        (0.0, None, 0.005),
        (-7.0, None, 0.005),
        (2.0, None, 2.005),
        (2.0, 13.0, 2.005),
        (2.0, 12.0, None),
        (1e9, None, None),
        (float("inf"), None, None),
        (float("nan"), 11.0, 0.005),
        (None, 10.0, None),
        (None, 9.0, None),
    ],
)
def test_what_the_server_asks_for_is_waited_if_it_fits(after, deadline, pause):
    with attempts(deadline=deadline) as tries:
        error = Overloaded("m", started=False, retry_after_s=after)
        got = tries.pause(error, 10.0)
    assert got == (None if pause is None else pytest.approx(pause))


@given(
    retries=st.integers(0, 5),
    errors=st.lists(
        st.builds(
            lambda kind, started, after: kind("m", started=started, retry_after_s=after),
            st.sampled_from(RETRYABLE + FINAL),
            st.booleans(),
            st.none() | st.floats(allow_nan=False),
        ),
        max_size=10,
    ),
    deadline=st.none() | st.floats(0, 100),
    times=st.lists(st.floats(0, 100), min_size=10, max_size=10),
)
def test_no_attempt_begins_late_or_beyond_the_number(retries, errors, deadline, times):
    made = 0
    budget = RetryBudget()
    with attempts(budget, retries=retries, deadline=deadline) as tries:
        for error, now in zip(errors, sorted(times), strict=False):
            pause = tries.pause(error, now)
            if pause is None:
                continue
            made += 1
            assert pause >= 0
            assert not error.started
            assert error.retryable
            assert deadline is None or now + pause < deadline
            assert pause >= (error.retry_after_s or 0.0)
    assert made <= retries
    assert (budget.active, budget.retrying) == (0, 0)


class Calls(RuleBasedStateMachine):
    """Calls that begin, fail and end in any order, against the budget's promise."""

    def __init__(self):
        super().__init__()
        self.budget = RetryBudget(share=0.2, floor=3)
        self.calls = []
        self.retrying = set()

    @rule(count=st.integers(1, 30))
    def begin(self, count):
        for _ in range(count):
            self.calls.append(attempts(self.budget, retries=3).__enter__())

    @rule(data=st.data())
    def fail(self, data):
        if not self.calls:
            return
        index = data.draw(st.integers(0, len(self.calls) - 1))
        call = self.calls[index]
        had_room = len(self.retrying) < max(3, 0.2 * len(self.calls))
        pause = call.pause(Unavailable("m", started=False), 0.0)
        if pause is not None and call not in self.retrying:
            assert had_room
            self.retrying.add(call)

    @rule(data=st.data())
    def end(self, data):
        if self.calls:
            call = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
            call.__exit__(None, None, None)
            self.retrying.discard(call)

    @invariant()
    def it_counts(self):
        assert self.budget.active == len(self.calls)
        assert self.budget.retrying == len(self.retrying)


TestCalls = Calls.TestCase


def test_a_server_in_trouble_gets_a_fifth_more_not_three_times_as_much():
    budget = RetryBudget()
    calls = [attempts(budget).__enter__() for _ in range(100)]
    again = [call.pause(Unavailable("m", started=False), 0.0) for call in calls]
    assert sum(pause is not None for pause in again) == 20


def test_a_lone_call_has_the_floor():
    with attempts() as tries:
        assert tries.pause(Unavailable("m", started=False), 0.0) is not None
        assert tries.pause(Unavailable("m", started=False), 0.0) is not None
        assert tries.pause(Unavailable("m", started=False), 0.0) is None


def test_threads_share_a_budget():
    budget = RetryBudget()

    def work():
        for _ in range(500):
            with attempts(budget) as tries:
                tries.pause(Unavailable("m", started=False), 0.0)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (budget.active, budget.retrying) == (0, 0)
