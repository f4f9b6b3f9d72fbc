"""The autoscaler, on a clock that is a number."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from servekit.engine.scaler import PANIC_SHARE, Scaler
from servekit.spec.policy import Autoscale
from tests.examples import examples


class Service:
    """A scaler whose wish is granted at the next tick; `load` is calls on board in all."""

    def __init__(self, policy: Autoscale, *, target: float = 1.0, replicas: int | None = None):
        self.scaler = Scaler(policy, target=target)
        self.replicas = policy.start if replicas is None else replicas
        self.now = 1000.0

    def run(self, seconds: float, load, *, tick_s: float = 1.0, **figures) -> list[int]:
        """Tick for so long with a constant load, or `load(now)`; return the replicas wanted."""
        wanted = []
        for _ in range(round(seconds / tick_s)):
            self.now += tick_s
            ongoing = load(self.now) if callable(load) else load
            self.replicas = self.scaler.observe(
                self.now, ongoing=ongoing, replicas=self.replicas, **figures
            )
            wanted.append(self.replicas)
        return wanted


def changes(wanted: list[int]) -> int:
    return sum(a != b for a, b in pairwise(wanted))


def test_steady_load_gets_what_it_needs_and_keeps_it():
    service = Service(Autoscale(max=10), target=4)
    assert service.run(300, 12)[-1] == 3
    assert changes(service.run(600, 12)) == 0


def test_whole_loads_are_not_rounded_up():
    service = Service(Autoscale(max=10), target=0.1)
    assert service.run(300, 0.3)[-1] == 3


def test_the_rate_counts_when_it_asks_for_more():
    service = Service(Autoscale(max=10))
    assert service.run(200, 1, rate_per_s=90, capacity_per_s=30)[-1] == 3
    assert service.run(300, 1, rate_per_s=90, capacity_per_s=None)[-1] == 1
    assert service.run(200, 5, rate_per_s=90, capacity_per_s=30)[-1] == 5


@pytest.mark.parametrize("window_s", [60, 20, 120])
def test_growth_below_panic_takes_the_stable_window(window_s):
    service = Service(Autoscale(max=10, window_s=window_s), replicas=4)
    service.run(2 * window_s, 4)
    wanted = service.run(2 * window_s, 7)
    assert wanted[5] >= 5
    assert wanted.index(7) == pytest.approx(window_s * 2 / 3, abs=2)
    assert wanted == sorted(wanted)


@pytest.mark.parametrize("window_s", [60, 20, 120])
def test_a_burst_panics_within_the_panic_window(window_s):
    service = Service(Autoscale(max=100, window_s=window_s))
    service.run(2 * window_s, 1)
    wanted = service.run(window_s * PANIC_SHARE + 1, 50)
    assert service.scaler.statistics().panicking
    assert wanted[-1] == 50
    # The stable window alone would be far from it.
    assert service.scaler.statistics().stable < 11


def test_panic_only_grows_then_gives_way():
    service = Service(Autoscale(max=100, down_delay_s=0))
    service.run(120, 1)
    peak = service.run(4, 50)[-1]
    wanted = service.run(50, 1)
    assert wanted == sorted(wanted)
    assert wanted[0] >= peak
    assert service.run(120, 1)[-1] == 1
    assert not service.scaler.statistics().panicking


def test_starting_replicas_calm_a_panic():
    scaler = Scaler(Autoscale(max=100), target=1)
    scaler.observe(0, ongoing=10, replicas=1)
    assert scaler.statistics().panicking
    calm = Scaler(Autoscale(max=100), target=1)
    calm.observe(0, ongoing=10, replicas=6)
    assert not calm.statistics().panicking


@pytest.mark.parametrize("period_s", [4, 10, 20, 60])
@pytest.mark.parametrize("peak", [1.5, 3.5, 7.8])
def test_a_square_wave_settles(period_s, peak):
    service = Service(Autoscale(max=20))

    def load(now: float) -> float:
        return peak if now % period_s < period_s / 2 else 0

    service.run(400, load)
    assert changes(service.run(1200, load)) == 0


def test_the_worst_wave_moves_once_per_delay():
    """A short peak every five minutes panics each time; it must not do more than up and down."""
    service = Service(Autoscale(max=20))
    service.run(600, lambda now: 16 if now % 300 < 10 else 1)
    wanted = service.run(3000, lambda now: 16 if now % 300 < 10 else 1)
    steps = [b - a for a, b in pairwise(wanted) if a != b]
    turns = sum((a > 0) != (b > 0) for a, b in pairwise(steps))
    assert max(wanted) == 16
    assert turns <= 2 * 10


def test_zero_has_a_delay_of_its_own():
    """One replica goes after `idle_s`; two become one after `down_delay_s`, however short it is."""
    quick = Service(Autoscale(min=0, max=4, down_delay_s=600, idle_s=5))
    quick.run(30, 1)
    assert quick.run(12, 0) == [1] * 5 + [0] * 7
    slow = Service(Autoscale(min=0, max=4, down_delay_s=5, idle_s=200))
    slow.run(200, 2)
    assert slow.run(199, 0)[-1] == 1
    assert slow.run(2, 0)[-1] == 0
    both = Service(Autoscale(min=0, max=4, down_delay_s=300, idle_s=5))
    both.run(200, 2)
    assert set(both.run(200, 0)) == {2}


def test_short_calls_between_two_ticks_keep_it_awake():
    """None is ever on board when the scaler looks, but some were answered since it did."""
    service = Service(Autoscale(min=0, max=4, idle_s=5))
    assert set(service.run(300, 0, rate_per_s=0.5)) == {1}
    assert service.run(7, 0)[-1] == 0


def test_dead_quiet_stays_at_the_least():
    service = Service(Autoscale(min=2, max=5))
    assert set(service.run(600, 0)) == {2}


def test_falls_only_after_the_delay_and_by_half_at_most():
    service = Service(Autoscale(max=64, down_delay_s=90), replicas=64)
    service.run(120, 64)
    wanted = service.run(400, 0)
    first = next(i for i, count in enumerate(wanted) if count < 64)
    assert first >= 89  # the last full load was one tick before the first
    assert all(after >= before // 2 for before, after in pairwise(wanted))
    assert wanted[-1] == 1


def test_rises_only_after_the_delay_and_to_the_mildest_wish():
    service = Service(Autoscale(max=64, up_delay_s=20))
    service.run(120, 1)
    wanted = service.run(19, 40)
    assert set(wanted) == {1}
    assert service.run(30, 40)[-1] == 40
    blip = Service(Autoscale(max=64, up_delay_s=20))
    blip.run(120, 1)
    assert set(blip.run(10, 40) + blip.run(9, 1)) == {1}
    # What is left of it then is its share of the stable window: (10 x 40 + 50 x 1) / 60.
    assert max(blip.run(100, 1)) == 8


def test_bounds_hold_against_any_load():
    service = Service(Autoscale(min=2, max=5))
    assert max(service.run(60, 1e9)) == 5
    assert min(service.run(900, 0)) == 2


def test_one_tick_multiplies_by_a_thousand_at_most():
    scaler = Scaler(Autoscale(max=10**6), target=1)
    assert scaler.observe(0, ongoing=1e6, replicas=1) == 1000
    assert scaler.observe(1, ongoing=1e6, replicas=1000) == 10**6


def test_from_zero_to_one_and_back():
    policy = Autoscale(min=0, max=4, initial=0, down_delay_s=30, up_delay_s=15)
    service = Service(policy)
    assert set(service.run(300, 0)) == {0}
    woken_at = service.now
    service.replicas = service.scaler.wake(service.now)
    assert service.replicas == 1
    assert set(service.run(10, 1)) == {1}
    wanted = service.run(60, 0)
    assert wanted.index(0) == pytest.approx(30, abs=1)
    assert service.now > woken_at
    assert set(service.run(300, 0)) == {0}


def test_waking_holds_although_the_call_is_not_counted_yet():
    service = Service(Autoscale(min=0, max=4, initial=0, down_delay_s=30))
    service.scaler.wake(service.now)
    assert service.scaler.observe(service.now, ongoing=0, replicas=0) == 1
    assert service.scaler.observe(service.now + 29, ongoing=0, replicas=0) == 1
    assert service.scaler.observe(service.now + 31, ongoing=0, replicas=1) == 0


def test_load_at_zero_wakes_without_wake_even_with_a_delay():
    service = Service(Autoscale(min=0, max=4, initial=0, up_delay_s=60))
    assert service.run(1, 0.01) == [1]


def test_wake_never_shrinks():
    service = Service(Autoscale(min=0, max=9))
    service.run(300, 6)
    assert service.scaler.wake(service.now) == 6


def test_many_go_to_one_before_zero():
    service = Service(Autoscale(min=0, max=64))
    service.run(120, 40)
    wanted = service.run(600, 0)
    assert wanted[-1] == 0
    assert wanted[wanted.index(0) - 1] == 1


def test_a_crash_is_not_a_wish_to_shrink():
    service = Service(Autoscale(max=10))
    service.run(200, 5)
    service.run(20, 2)
    assert service.replicas == 5
    assert service.scaler.observe(service.now + 1, ongoing=2, replicas=4) == 5


def test_a_new_scaler_keeps_what_it_finds():
    service = Service(Autoscale(max=20), replicas=10)
    wanted = service.run(59, 0)
    assert set(wanted) == {10}
    assert service.run(120, 0)[-1] == 1


def test_time_that_nobody_watched_is_no_reason_to_shrink():
    service = Service(Autoscale(max=20), replicas=10)
    service.run(200, 10)
    service.now += 500
    assert set(service.run(59, 0)) == {10}


def test_slow_ticks_work_too():
    service = Service(Autoscale(max=20))
    assert service.run(300, 7, tick_s=15)[-1] == 7
    assert service.run(600, 0, tick_s=15)[-1] == 1


@pytest.mark.parametrize("odd", [math.nan, math.inf, -5.0])
def test_odd_figures_count_as_none(odd):
    service = Service(Autoscale(max=5))
    assert set(service.run(30, odd)) == {1}
    assert set(service.run(30, 0, rate_per_s=odd, capacity_per_s=1)) == {1}
    assert set(service.run(30, 0, rate_per_s=5, capacity_per_s=odd)) <= {1}
    assert set(service.run(30, 0, rate_per_s=5, capacity_per_s=0)) == {1}


def test_statistics_say_what_was_seen():
    service = Service(Autoscale(max=9), target=2)
    service.run(120, 4)
    statistics = service.scaler.statistics()
    assert statistics.desired == 2
    assert statistics.stable == statistics.panic == 2.0
    assert not statistics.panicking


class ScalerMachine(RuleBasedStateMachine):
    """Any load, tick, crash and pause: the promises of the module's docstring hold."""

    @initialize(
        least=st.integers(0, 3),
        span=st.integers(0, 30),
        up=st.sampled_from([0.0, 5.0, 30.0]),
        down=st.sampled_from([0.0, 10.0, 60.0]),
        per_replica=st.floats(0.1, 100),
    )
    def start(self, least, span, up, down, per_replica):
        self.policy = Autoscale(
            min=least, max=max(1, least + span), up_delay_s=up, down_delay_s=down
        )
        self.target = per_replica
        self.scaler = Scaler(self.policy, target=per_replica)
        self.now = 0.0
        self.replicas = self.desired = self.policy.start
        self.loads: list[tuple[float, float]] = []
        self.woken = -math.inf

    @rule(
        tick_s=st.sampled_from([0.1, 0.5, 1.0, 7.0, 100.0]),
        load=st.one_of(st.just(0.0), st.floats(1e-6, 100)),
        ticks=st.integers(1, 40),
    )
    def tick(self, tick_s, load, ticks):
        for _ in range(ticks):
            self.now += tick_s
            before, panicking = self.desired, self.scaler.statistics().panicking
            self.desired = self.scaler.observe(
                self.now, ongoing=load * self.target, replicas=self.replicas
            )
            self.loads.append((self.now, load))
            assert self.desired <= max(1, self.replicas) * 1000
            assert self.desired >= min(self.replicas // 2, self.policy.max)
            if load:
                assert self.desired >= 1
            if self.desired == 0:
                delay = self.policy.down_delay_s
                assert all(x == 0 for t, x in self.loads if t >= self.now - delay)
                assert self.now - self.woken > delay
                assert self.replicas <= 1
            if (
                panicking
                and self.scaler.statistics().panicking
                and not self.policy.up_delay_s
                and self.desired  # idle for long enough is idle, also then
            ):
                assert self.desired >= min(before, self.policy.max)
            self.replicas = self.desired

    @rule(lost=st.integers(1, 5))
    def crash(self, lost):
        self.replicas = max(0, self.replicas - lost)

    @rule()
    def wake(self):
        self.woken = self.now
        self.desired = self.replicas = max(self.replicas, self.scaler.wake(self.now))
        assert self.desired >= 1

    @rule()
    def settle(self):
        """Under a constant load it comes to rest, at what that load needs."""
        load = 2.5
        for _ in range(200):
            self.now += 1.0
            self.loads.append((self.now, load))
            self.replicas = self.desired = self.scaler.observe(
                self.now, ongoing=load * self.target, replicas=self.replicas
            )
        assert self.desired == min(max(3, self.policy.min), self.policy.max)

    @invariant()
    def within_bounds(self):
        if hasattr(self, "policy"):
            assert self.policy.min <= self.desired <= self.policy.max


ScalerMachine.TestCase.settings = settings(
    max_examples=examples(30), stateful_step_count=12, deadline=None
)
TestScalerMachine = ScalerMachine.TestCase


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(0, 20)), min_size=1, max_size=60),
    st.floats(0, 10),
)
def test_the_window_of_extremes_is_the_plain_definition(steps, span):
    from servekit.engine.scaler import _Highest

    window, now, seen = _Highest(span), 0.0, []
    for gap, value in steps:
        now += gap
        seen.append((now, value))
        assert window.add(now, value) == max(
            v for i, (t, v) in enumerate(seen) if t > now - span or i == len(seen) - 1
        )
