"""The targets of adaptive batching, as simulations: seeded, so each run is the same run."""

import dataclasses

import pytest

from servekit.bench.simulate import Device, Load, Loop, Result, observe, simulate
from servekit.spec.policy import BatchPolicy

pytestmark = pytest.mark.slow

POLICY = BatchPolicy(max_size=64, target_ms=100)
DEVICE = Device(alpha_s=0.010, beta_s=0.001, noise=0.08)
EXACT = dataclasses.replace(DEVICE, noise=0.0)
PROFILE = {rows: 0.010 + 0.001 * rows for rows in (1, 2, 4, 8, 16, 32, 64)}
CAPACITY = 800.0  # rows per second within 100 ms: 40 rows in 50 ms


def load(rate: float, seconds: float = 10.0) -> Load:
    return Load(rate_per_s=rate, duration_s=seconds, deadline_s=0.1)


def late_share(result: Result) -> float:
    return result.late / result.served


def test_events_run_in_order_of_time_then_of_scheduling():
    loop, seen = Loop(), []
    loop.at(2.0, lambda: seen.append(("c", loop.now)))
    loop.at(1.0, lambda: seen.append(("a", loop.now)))
    loop.at(1.0, lambda: (seen.append(("b", loop.now)), loop.at(0.5, lambda: seen.append("past"))))
    loop.run()
    assert seen == [("a", 1.0), ("b", 1.0), "past", ("c", 2.0)]
    assert loop.now == 2.0


def test_same_seed_same_trace():
    first, again, other = (
        simulate(POLICY, DEVICE, load(900, 3), seed=seed, profile=PROFILE) for seed in (7, 7, 8)
    )
    assert first == again
    assert first.trace != other.trace


def test_every_call_is_answered_once():
    result = simulate(POLICY, DEVICE, load(1500, 5), profile=PROFILE)
    assert result.offered == result.served + sum(result.refused.values())
    assert result.served == result.on_time + result.late
    assert result.max_batch <= 64
    assert result.p50_s <= result.p90_s <= result.p99_s


@pytest.mark.parametrize("rate", [40, 720, 1200, 2400])
@pytest.mark.parametrize("seed", [0, 1])
def test_an_exact_model_is_never_late(rate: float, seed: int):
    assert simulate(POLICY, EXACT, load(rate, 6), seed=seed, profile=PROFILE).late == 0


def test_a_light_load_does_not_wait():
    result = simulate(POLICY, DEVICE, load(40, 60), profile=PROFILE)
    assert result.mean_s < 0.014
    assert result.on_time == result.offered


def test_just_below_capacity_nearly_all_are_on_time():
    result = simulate(POLICY, DEVICE, load(720, 30), profile=PROFILE)
    assert result.on_time > 0.99 * result.offered
    assert result.p99_s < 0.095


@pytest.mark.parametrize("overload", [1.5, 3.0])
@pytest.mark.parametrize("target_ms", [100, None])
@pytest.mark.parametrize("profile", [PROFILE, None])
def test_goodput_stays_at_capacity_under_overload(overload, target_ms, profile):
    policy = BatchPolicy(max_size=64, target_ms=target_ms)
    result = simulate(policy, DEVICE, load(overload * CAPACITY), profile=profile)
    assert result.goodput_per_s >= 0.95 * CAPACITY
    assert late_share(result) < 0.004


def test_two_devices_worth_of_slots_have_twice_the_capacity():
    policy = BatchPolicy(max_size=64, target_ms=100, concurrent_batches=2)
    relaxed = simulate(policy, DEVICE, load(1.8 * CAPACITY, 5), profile=PROFILE)
    assert relaxed.on_time > 0.985 * relaxed.offered
    result = simulate(policy, DEVICE, load(3.0 * CAPACITY, 5), profile=PROFILE)
    assert result.goodput_per_s >= 0.95 * 2 * CAPACITY
    assert late_share(result) < 0.004


def test_padded_sizes_are_accounted_for():
    sizes = (1, 8, 16, 32, 64)
    device = dataclasses.replace(EXACT, pad_to=sizes)
    policy = BatchPolicy(max_size=64, target_ms=100, pad_to=sizes)
    result = simulate(policy, device, load(1200), profile=PROFILE)
    assert result.late == 0
    assert result.goodput_per_s > 0.9 * 32 / 0.042


def test_a_device_that_slows_down_by_half_is_found_out_within_50_batches():
    device = dataclasses.replace(DEVICE, slow_at_s=5.0, slow_factor=2.0)
    for rate in (300, 720):
        tally = observe(POLICY, device, load(rate, 20), profile=PROFILE)
        slow = [at for at, _ in tally.batches if at >= 5.0]
        after = [
            answer.latency_s
            for answer in tally.answers
            if answer.reason is None and answer.arrived >= slow[50]
        ]
        assert len(after) > 1000
        assert sum(latency > 0.1 for latency in after) < 0.01 * len(after)


@pytest.mark.parametrize("factor", [10.0, 0.1])
@pytest.mark.parametrize("rate", [200, 1200])
def test_a_profile_that_is_ten_times_off_is_corrected_within_2_s(factor: float, rate: float):
    wrong = {rows: seconds * factor for rows, seconds in PROFILE.items()}
    tally = observe(POLICY, DEVICE, load(rate, 12), profile=wrong)
    after = [answer for answer in tally.answers if answer.arrived >= 2.0]
    good = sum(answer.reason is None and answer.latency_s <= 0.1 for answer in after)
    late = sum(answer.reason is None and answer.latency_s > 0.1 for answer in after)
    assert good >= 0.95 * min(rate, CAPACITY) * 10.0
    assert late < 0.004 * len(after)


def test_holding_makes_batches_larger_and_never_costs_more_than_its_bound():
    device = Device(alpha_s=0.020, beta_s=0.0001)
    offered = Load(rate_per_s=100, duration_s=20)
    plain = simulate(BatchPolicy(max_size=64), device, offered)
    holding = simulate(BatchPolicy(max_size=64, max_wait_ms=20), device, offered)
    assert holding.mean_batch > 1.05 * plain.mean_batch
    assert holding.p99_s < plain.p99_s + 0.020


def test_calls_without_a_deadline_are_all_served_although_the_target_is_lost():
    # 840/s needs batches of 53 or more, which take longer than half of the target.
    result = simulate(POLICY, DEVICE, Load(rate_per_s=840, duration_s=10), profile=PROFILE)
    assert result.refused == {}
    assert result.mean_batch > 45
    assert result.p99_s < 0.5


def test_the_rows_of_five_clients_are_merged_up_to_the_bound():
    offered = Load(rate_per_s=200, duration_s=5, rows=32)
    result = simulate(BatchPolicy(max_size=32), DEVICE, offered, profile=PROFILE)
    assert result.max_batch == 32
