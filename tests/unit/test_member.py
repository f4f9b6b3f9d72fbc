"""A replica as the supervisor sees it: its figures, and how long they count."""

import pytest

from servekit.engine import member as module
from servekit.engine.control import Health, StartReplica, Stats
from servekit.engine.member import Member, State
from servekit.engine.table import Table
from servekit.errors import ReplicaLost
from servekit.spec.app import ServiceSpec


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.time = 1000.0
        monkeypatch.setattr(module, "now", lambda: self.time)


class Process:
    """Answers `stats` with what it is given, or not at all."""

    def __init__(self) -> None:
        self.stats: Stats | None = None

    async def ask(self, verb: str, body: object = None, **_: object) -> object:
        assert verb == "stats"
        if self.stats is None:
            raise ReplicaLost("silent")
        return self.stats


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def member(clock, monkeypatch):
    """A member that became ready now; its probes go where its figures come from."""
    spec = ServiceSpec(name="S", target="app:S")
    order = StartReplica(spec, "S-1", (), "unix:/x", "/x", Table())
    member = Member(order, Process())  # type: ignore[arg-type]
    member.state, member.ready_at = State.READY, clock.time

    class Probe:
        class lost:
            done = staticmethod(lambda: False)

    async def ask(*_: object, **__: object) -> Health:
        if member.process.stats is None:
            raise ReplicaLost("silent")
        return Health()

    member._probe = Probe()  # type: ignore[assignment]
    monkeypatch.setattr(module, "ask", ask)
    return member


async def test_the_rate_is_per_second_however_long_a_tick_takes(member, clock):
    member.process.stats = Stats(finished=10)
    clock.time += 1
    await member.check()
    assert member.rate_per_s == pytest.approx(10)
    member.process.stats = Stats(finished=40)
    clock.time += 5
    await member.check()
    assert member.rate_per_s == pytest.approx(6)


@pytest.mark.parametrize("look", ["check", "count"])
async def test_figures_of_a_silent_replica_expire(member, clock, look):
    """After two periods they say nothing about the load; the total stays, so no rate jumps."""
    member.process.stats = Stats(ongoing=7, finished=100, waiting={"T": 2}, capacity_per_s=9.0)
    clock.time += 1
    await getattr(member, look)()
    member.process.stats = None
    clock.time += 1
    await getattr(member, look)()
    assert (member.stats.ongoing, member.stats.waiting) == (7, {"T": 2})
    clock.time += 1
    await getattr(member, look)()
    assert (member.stats.ongoing, member.stats.waiting, member.rate_per_s) == (0, {}, 0.0)
    assert member.stats.capacity_per_s is None
    member.process.stats = Stats(ongoing=1, finished=104)
    clock.time += 2
    await getattr(member, look)()
    assert (member.stats.ongoing, member.rate_per_s) == (1, pytest.approx(1))


async def test_it_fails_from_its_first_silence_to_its_next_answer(member, clock):
    clock.time += 1
    await member.check()
    assert (member.failing_since, member.trouble) == (1001.0, "does not answer: silent")
    clock.time += 3
    await member.check()
    assert member.failing_since == 1001.0
    member.process.stats = Stats()
    await member.check()
    assert (member.failing_since, member.trouble) == (None, "")
