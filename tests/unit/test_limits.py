"""Limits per party: the cell rate algorithm against a bucket that is filled by hand."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.resilience.limits import OngoingLimiter, Rate, RateLimiter

# Powers of two, so that no sum is rounded and model and limiter can be compared exactly.
RATES = st.sampled_from([0.125, 0.5, 1.0, 2.0, 8.0])
GAPS = st.lists(st.integers(0, 40), max_size=60)  # in eighths of a second


class Bucket:
    """What is meant: so many tokens, filled at a rate, one taken by each event."""

    def __init__(self, rate: Rate, at: float) -> None:
        self.rate, self.tokens, self.at = rate, Fraction(rate.burst), Fraction(at)

    def _fill(self, at: float) -> None:
        passed = Fraction(at) - self.at
        self.at = Fraction(at)
        full = Fraction(self.rate.burst)
        self.tokens = min(full, self.tokens + passed * Fraction(self.rate.per_s))

    def admit(self, at: float) -> Fraction:
        self._fill(at)
        if self.tokens >= 1:
            self.tokens -= 1
            return Fraction(0)
        return (1 - self.tokens) / Fraction(self.rate.per_s)


@given(RATES, st.integers(1, 20), GAPS, st.floats(0, 2**20).map(int))
def test_it_is_a_token_bucket(per_s, burst, gaps, start):
    rate = Rate(per_s, burst)
    limiter, bucket, at = RateLimiter(), Bucket(rate, start), float(start)
    for gap in gaps:
        at += gap / 8
        assert limiter.admit("a", rate, at) == bucket.admit(at)


@given(RATES, st.integers(1, 5), GAPS)
def test_the_wait_it_tells_is_exact(per_s, burst, gaps):
    """One that comes after it is admitted, one that comes before is not."""
    rate, at = Rate(per_s, burst), 0.0
    limiter = RateLimiter()
    for gap in gaps:
        at += gap / 8
        wait_s = limiter.admit("a", rate, at)
        if wait_s:
            assert limiter.admit("a", rate, at + wait_s - 2**-20) == 2**-20
            at += wait_s
            assert limiter.admit("a", rate, at) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 8)), max_size=80))
def test_parties_do_not_see_each_other(events):
    rate, at = Rate(1.0, 2), 0.0
    together, alone = RateLimiter(), {party: RateLimiter() for party in "abc"}
    for party, gap in events:
        at += gap / 8
        assert together.admit(party, rate, at) == alone[party].admit(party, rate, at)


@given(RATES, st.integers(1, 20), GAPS)
def test_in_no_window_are_more_admitted_than_its_burst_and_rate(per_s, burst, gaps):
    rate, at, admitted = Rate(per_s, burst), 0.0, []
    limiter = RateLimiter()
    for gap in gaps:
        at += gap / 8
        if limiter.admit("a", rate, at) == 0:
            admitted.append(at)
    for first, begin in enumerate(admitted):
        for last in range(first, len(admitted)):
            assert last - first + 1 <= burst + (admitted[last] - begin) * per_s


def test_what_is_refused_does_not_count():
    limiter, rate = RateLimiter(), Rate(1.0, 1)
    assert limiter.admit("a", rate, 0.0) == 0
    assert [limiter.admit("a", rate, 0.5) for _ in range(100)] == [0.5] * 100
    assert limiter.admit("a", rate, 1.0) == 0


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_admit_together_what_one_would(workers):
    limiters = [RateLimiter(share=1 / workers) for _ in range(workers)]
    rate, admitted = Rate(8.0, 16), 0
    for eighth in range(80):
        for limiter in limiters:
            admitted += sum(limiter.admit("a", rate, eighth / 8) == 0 for _ in range(20))
    assert 16 + 79 - workers < admitted <= 16 + 79


def test_a_share_of_less_than_one_event_still_admits():
    limiter = RateLimiter(share=0.25)
    assert limiter.admit("a", Rate(1.0, 1), 0.0) == 0
    assert limiter.admit("a", Rate(1.0, 1), 0.0) == 4.0


def test_memory_is_bounded_and_the_longest_unseen_is_forgotten():
    limiter, rate = RateLimiter(max_parties=3), Rate(1.0, 1)
    for party in "abc":
        assert limiter.admit(party, rate, 0.0) == 0
    assert limiter.admit("a", rate, 0.0) > 0  # seen again, if only to be refused
    assert limiter.admit("d", rate, 0.0) == 0
    assert len(limiter) == 3
    assert limiter.admit("a", rate, 0.0) > 0
    assert limiter.admit("b", rate, 0.0) == 0
    for number in range(1000):
        limiter.admit(str(number), rate, 0.0)
    assert len(limiter) == 3


def test_so_many_at_once():
    ongoing = OngoingLimiter()
    assert [ongoing.enter("a", 2) for _ in range(3)] == [True, True, False]
    assert ongoing.enter("b", 1)
    ongoing.leave("a")
    assert ongoing.enter("a", 2)
    for party in "aab":
        ongoing.leave(party)
    assert len(ongoing) == 0


@pytest.mark.parametrize(
    ("limit", "share", "admitted"), [(50, 1 / 3, 16), (2, 0.25, 1), (8, 0.5, 4)]
)
def test_a_share_of_so_many_at_once(limit, share, admitted):
    ongoing = OngoingLimiter(share=share)
    assert sum(ongoing.enter("a", limit) for _ in range(100)) == admitted
