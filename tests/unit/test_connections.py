"""The count of connections, by address."""

import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.gateway import connections as module
from servekit.gateway.connections import Connections, make_room

ADDRESSES = ["", "10.0.0.1", "10.0.0.2", "2001:db8::1"]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(ADDRESSES)), max_size=60))
def test_no_limit_is_passed_and_nothing_is_left_behind(steps):
    connections = Connections(5, per_address=2)
    here: list[str] = []
    for enters, address in steps:
        if enters:
            fits = len(here) < 5 and (not address or here.count(address) < 2)
            assert (connections.enter(address) is None) == fits
            here += [address] * fits
        elif address in here:
            here.remove(address)
            connections.leave(address)
        assert connections.count == len(here)
    for address in here:
        connections.leave(address)
    assert (connections.count, connections._by_address) == (0, {})


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
    ],
)
def test_what_counts_as_one_address(one, other, same):
    connections = Connections(5, per_address=1)
    assert connections.enter(one) is None
    refusal = connections.enter(other)
    assert (refusal is not None) == same
    if refusal is not None:
        assert (refusal.status, refusal.reason) == (503, "too_many_connections")
        assert refusal.retry_after_s


def test_without_a_limit_for_each_address_none_is_kept():
    connections = Connections(5)
    for _ in range(5):
        assert connections.enter("10.0.0.1") is None
    assert not connections._by_address
    assert connections.enter("10.0.0.2") is not None


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "new", "possible"),
    [
        (1024, 1_000_000, 10_512, 10_000),
        (20_000, 1_000_000, None, 10_000),
        (1024, 4096, 4096, 3584),
        (256, 256, None, 1),
        (1024, INFINITE, 10_512, 10_000),
        (INFINITE, INFINITE, None, 10_000),
    ],
)
def test_room_for_descriptors(monkeypatch, soft, hard, new, possible):
    made = []
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(module.resource, "setrlimit", lambda _, limits: made.append(limits))
    assert make_room(10_000) == possible
    assert made == ([] if new is None else [(new, hard)])
