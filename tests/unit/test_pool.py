"""A pool of replicas that are no processes: what it starts, keeps and lets go, and in which order."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from servekit.engine import pool as module
from servekit.engine.control import Started, Stats
from servekit.engine.member import State
from servekit.engine.numbers import resized
from servekit.engine.pool import Pool
from servekit.engine.table import Target
from servekit.errors import ConfigError, ResourceError, SetupError, SpecError
from servekit.spec.app import ServiceSpec
from servekit.spec.policy import Autoscale


class Process:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class Replica:
    """Has the face of a `Member`; loads until it is told how that ends."""

    def __init__(self, spec: ServiceSpec, number: int) -> None:
        self.spec = spec
        self.id = f"{spec.name}-{number}"
        self.process = Process(number)
        self.state = State.STARTING
        self.ready_at = 0.0
        self.stats = Stats()
        self.rate_per_s = 0.0
        self.trouble = ""
        self.failing_since = None
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.drained = asyncio.Event()

    @property
    def target(self) -> Target:
        return Target(self.id, "unix:/x", self.spec.version)

    async def start(self, _: float) -> Started:
        await asyncio.wait([self.loaded, self.process.ended], return_when=asyncio.FIRST_COMPLETED)
        if not self.loaded.done():
            raise SetupError("ended while it started")
        self.loaded.result()
        if self.state is State.STARTING:
            self.state, self.ready_at = State.STANDBY, float(self.process.pid)
        return Started(address="unix:/x")

    def adopt(self, spec: ServiceSpec) -> None:
        self.spec = spec

    async def configure(self, spec: ServiceSpec, _: float) -> None:
        self.adopt(spec)

    async def check(self) -> None: ...

    async def count(self) -> None: ...

    async def drain(self, _: float) -> None:
        self.state = State.DRAINING
        await self.drained.wait()
        self.die("exit code 0")

    async def end(self, _: float) -> None:
        self.die("exit code 0")

    def die(self, cause: str = "killed by SIGKILL") -> None:
        if not self.process.ended.done():
            self.process.ended.set_result(cause)


class Stage:
    """A pool, and all replicas that it ever started."""

    def __init__(self, replicas: int | Autoscale = 1, **spec: Any) -> None:
        self.spec = ServiceSpec(name="S", target="app:S", replicas=replicas, **spec)
        self.replicas: list[Replica] = []
        self.refusal: Exception | None = None
        self.room = 1000
        self.restarts: list[bool] = []
        self.published: list[str] = []
        self.turns = asyncio.Semaphore(1000)
        self.pool = Pool(
            self.spec,
            self._spawn,  # type: ignore[arg-type]
            self._publish,
            self._turn,
            drain_s=9.0,
            start_timeout_s=9.0,
        )

    def _publish(self) -> None:
        if hasattr(self, "pool"):
            self.published.append(self.pool.targets().state)

    @contextlib.asynccontextmanager
    async def _turn(self, _: ServiceSpec, *, restart: bool = False) -> AsyncIterator[None]:
        self.restarts.append(restart)
        async with self.turns:
            yield

    async def _spawn(self, spec: ServiceSpec) -> Replica:
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        if sum(not replica.process.ended.done() for replica in self.replicas) >= self.room:
            raise ResourceError("no GPU is left")
        self.replicas.append(Replica(spec, len(self.replicas) + 1))
        return self.replicas[-1]

    async def started(self) -> "Stage":
        start = asyncio.ensure_future(self.pool.start())
        await settle()
        self.load()
        await start
        return self

    def load(self) -> None:
        """Let all that load be ready."""
        for replica in self.replicas:
            if not replica.loaded.done():
                replica.loaded.set_result(None)

    def states(self) -> list[str]:
        return [str(replica.state) for replica in self.replicas]

    async def close(self) -> None:
        for replica in self.replicas:
            replica.drained.set()
        await self.pool.close(1.0)
        assert not self.pool.members


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(module, "_BACKOFF_S", (0.0, 0.02))
    monkeypatch.setattr(module, "_ROOM_S", 0.02)


async def test_what_lacks_is_started_side_by_side(until):
    """Two more replicas load at the same time, not one after the other."""
    stage = await Stage(1).started()
    stage.pool.resize(3)
    await until(lambda: len(stage.replicas) == 3)
    assert stage.states() == ["ready", "starting", "starting"]
    await settle()
    assert len(stage.replicas) == 3
    stage.load()
    await until(lambda: stage.states() == ["ready"] * 3)
    await stage.close()


async def test_what_lacks_waits_for_its_turn(until):
    stage = await Stage(1).started()
    stage.turns = asyncio.Semaphore(1)
    stage.pool.resize(4)
    for number in range(2, 4):
        await until(lambda number=number: len(stage.replicas) == number)
        await settle()
        assert len(stage.replicas) == number
        stage.load()
    await until(lambda: len(stage.replicas) == 4)
    stage.load()
    await until(lambda: stage.states() == ["ready"] * 4)
    await stage.close()


async def test_what_is_not_lacking_any_more_when_its_turn_comes_is_not_started(until):
    stage = await Stage(1).started()
    stage.turns = asyncio.Semaphore(1)
    stage.pool.resize(4)
    await until(lambda: len(stage.replicas) == 2)
    stage.pool.resize(2)
    await settle()
    stage.load()
    await until(lambda: stage.states() == ["ready"] * 2)
    await settle()
    assert len(stage.replicas) == 2
    stage.pool.resize(3)
    await until(lambda: len(stage.replicas) == 3)
    await stage.close()


async def test_a_turn_that_is_refused_is_tried_again(until, monkeypatch):
    stage = await Stage(1).started()

    @contextlib.asynccontextmanager
    async def refuse(_: ServiceSpec, **_options: object) -> AsyncIterator[None]:
        raise ResourceError("no memory")
        yield

    monkeypatch.setattr(stage.pool, "_turn", refuse)
    stage.pool.resize(2)
    await until(lambda: stage.pool._room_at)
    monkeypatch.setattr(stage.pool, "_turn", stage._turn)
    await until(lambda: len(stage.replicas) == 2)
    await stage.close()


async def test_more_than_there_is_room_for_waits_without_ado(until, caplog):
    """It is said once, no failure is counted, and one that dies meanwhile comes back at once."""
    stage = await Stage(Autoscale(min=2, max=5)).started()
    stage.room = 2
    stage.pool._want(4)
    await until(lambda: "no room" in caplog.text)
    stage.pool._wake.set()
    await until(lambda: len(stage.restarts) >= 2 + 2 * 3)
    assert caplog.text.count("no room") == 1
    assert stage.pool.restarts == {}
    assert stage.pool.targets().state == "up"
    stage.replicas[0].die()
    await until(lambda: len(stage.replicas) == 3)
    stage.load()
    await until(lambda: stage.states() == ["ended", "ready", "ready"])
    assert stage.pool.restarts == {"killed": 1}
    stage.room = 4
    await until(lambda: len(stage.replicas) == 5)
    stage.load()
    await until(lambda: stage.states().count("ready") == 4)
    await stage.close()


async def test_a_restart_says_so_and_a_scale_up_does_not(until):
    stage = await Stage(2).started()
    assert stage.restarts == [False, False]
    stage.pool.resize(3)
    await until(lambda: len(stage.replicas) == 3)
    stage.load()
    await until(lambda: stage.states() == ["ready"] * 3)
    stage.pool.resize(2)
    await settle()
    stage.replicas[1].die()
    await until(lambda: len(stage.replicas) == 4)
    stage.pool.resize(3)
    await until(lambda: len(stage.replicas) == 5)
    assert stage.restarts[2:] == [False, True, False]
    await stage.close()


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_without_room_beside_the_old_the_new_replace_them_one_after_the_other(
    number, until, caplog
):
    stage = await Stage(number).started()
    stage.room = number
    new = ServiceSpec(name="S", target="app:S", replicas=number, version="new")
    preparing = asyncio.ensure_future(stage.pool.prepare(new))
    await until(lambda: "leaves first" in caplog.text)
    await settle()
    assert stage.states().count("draining") == 1, "its calls end before it does"
    assert stage.pool.targets().state == ("starting" if number == 1 else "up")
    for round_ in range(number):
        next(r for r in stage.replicas if r.state is State.DRAINING).drained.set()
        await until(lambda: any(r.state is State.STARTING for r in stage.replicas))
        stage.load()
        if not round_:
            await preparing
            stage.pool.adopt(new)
        await until(lambda: not any(r.state is State.STARTING for r in stage.replicas))
        if round_ + 1 < number:
            await until(lambda: any(r.state is State.DRAINING for r in stage.replicas))
            assert stage.states().count("ready") == number - 1
    await settle()
    assert [r.spec.version for r in stage.replicas] == ["1"] * number + ["new"] * number
    assert stage.states() == ["ended"] * number + ["ready"] * number
    assert stage.pool.restarts == {}
    await stage.close()


async def test_an_old_revision_that_left_for_a_new_one_that_fails_comes_back(until):
    stage = await Stage(1).started()
    stage.room = 1
    stage.replicas[0].drained.set()
    new = ServiceSpec(name="S", target="app:S", version="new")
    preparing = asyncio.ensure_future(stage.pool.prepare(new))
    await until(lambda: len(stage.replicas) == 2)
    stage.replicas[1].loaded.set_exception(SetupError("bad weights"))
    with pytest.raises(SetupError, match="bad weights"):
        await preparing
    await stage.pool.abandon()
    await until(lambda: len(stage.replicas) == 3)
    stage.load()
    await until(lambda: stage.states() == ["ended", "ended", "ready"])
    assert stage.replicas[2].spec.version == "1"
    await stage.close()


async def test_a_revision_for_which_there_never_is_room_is_refused(until):
    stage = await Stage(2).started()
    for replica in stage.replicas:
        replica.drained.set()
    stage.room = 0
    with pytest.raises(ResourceError, match="no GPU"):
        await stage.pool.prepare(ServiceSpec(name="S", target="app:S", version="new"))
    await stage.pool.abandon()
    stage.room = 2
    await until(lambda: len(stage.replicas) == 4)
    stage.load()
    await until(lambda: stage.pool.targets().state == "up")
    await stage.close()


async def test_a_starting_replica_is_the_first_to_go_and_goes_at_once(until):
    """Nobody waits until it has loaded, and that it ended so is no failure."""
    stage = await Stage(1).started()
    stage.pool.resize(3)
    await until(lambda: len(stage.replicas) == 3)
    stage.pool.resize(1)
    await until(lambda: len(stage.pool.members) == 1)
    assert stage.states()[0] == "ready"
    assert stage.pool.restarts == {}
    assert stage.pool.targets().state == "up"
    await stage.close()


async def test_one_that_is_ready_at_the_very_end_does_not_come_back(until):
    """Its load and the word to leave cross: it never takes calls."""
    stage = await Stage(1).started()
    stage.pool.resize(2)
    await until(lambda: len(stage.replicas) == 2)
    late = stage.replicas[1]
    late.end = lambda _: late.drained.wait()  # type: ignore[method-assign]
    stage.pool.resize(1)
    await until(lambda: late.state is State.DRAINING)
    late.loaded.set_result(None)
    await settle()
    assert late.state is State.DRAINING
    assert [t.replica for t in stage.pool.targets().targets] == ["S-1"]
    late.drained.set()
    late.die()
    await stage.close()


async def test_one_whose_process_starts_meanwhile_gets_the_latest_arguments(until):
    stage = await Stage(1, args={"x": 1}, tunable=("x",)).started()
    stage.pool.resize(2)
    await asyncio.sleep(0)  # its process is on its way
    light = msgspec.structs.replace(stage.spec, args={"x": 2})
    await stage.pool.configure(light)
    await until(lambda: len(stage.replicas) == 2)
    await settle()
    assert [replica.spec for replica in stage.replicas] == [light, light]
    stage.load()
    await until(lambda: stage.states() == ["ready"] * 2)
    await stage.close()


async def test_a_death_during_a_roll_does_not_end_the_next_revision(until):
    """The replica that was prepared is neither old nor surplus, whatever wakes the pool."""
    stage = await Stage(2).started()
    other = ServiceSpec(name="S", target="app:S", replicas=2, code="new")
    prepare = asyncio.ensure_future(stage.pool.prepare(other))
    await until(lambda: len(stage.replicas) == 3)
    stage.replicas[0].die()
    await until(lambda: len(stage.replicas) == 4)
    stage.load()
    await prepare
    await until(lambda: stage.states()[3] == "ready")
    await settle()
    assert stage.states()[1:] == ["ready", "standby", "ready"]
    assert stage.replicas[2].spec is other
    stage.pool.adopt(other)
    await until(lambda: len(stage.replicas) == 5)
    stage.load()
    for replica in (stage.replicas[1], stage.replicas[3]):
        replica.drained.set()
    await until(lambda: stage.states()[2:] == ["ready", "ended", "ready"])
    assert {m.spec.code for m in stage.pool.members} == {"new"}
    await stage.close()


async def test_an_abandoned_revision_leaves_the_pool_as_it_was(until):
    stage = await Stage(1).started()
    other = ServiceSpec(name="S", target="app:S", code="new")
    prepare = asyncio.ensure_future(stage.pool.prepare(other))
    await until(lambda: len(stage.replicas) == 2)
    stage.load()
    await prepare
    stage.replicas[1].drained.set()
    await stage.pool.abandon()
    await until(lambda: len(stage.pool.members) == 1)
    assert stage.pool.restarts == {}
    assert stage.states() == ["ready", "ended"]
    await stage.close()


async def test_starts_that_fail_side_by_side_are_one_failure(until):
    """Four that can't start do not make the service `down` at the first try; three tries do."""
    stage = await Stage(1).started()
    stage.replicas[0].die()
    await until(lambda: len(stage.replicas) == 2)
    stage.pool.resize(4)
    await until(lambda: len(stage.replicas) == 5)
    for replica in stage.replicas[1:]:
        replica.loaded.set_exception(SetupError("no weights"))
    await until(lambda: sum(stage.pool.restarts.values()) == 5)
    assert stage.pool.targets().state == "starting"
    await until(lambda: len(stage.replicas) == 9)
    for replica in stage.replicas[5:]:
        replica.loaded.set_exception(SetupError("no weights"))
    await until(lambda: stage.pool.targets().state == "down")
    await until(lambda: len(stage.replicas) == 13)
    stage.load()
    await until(lambda: stage.pool.targets().state == "up")
    await stage.close()


async def test_without_room_for_any_replica_the_service_is_down_until_there_is(until, caplog):
    stage = await Stage(1).started()
    stage.refusal = ResourceError("no GPU")
    stage.replicas[0].die()
    await until(lambda: stage.pool.restarts.get("resources", 0) >= 3)
    assert stage.pool.targets().state == "down"
    assert caplog.text.count("no room") == 1
    stage.refusal = None
    await until(lambda: len(stage.replicas) == 2)
    stage.load()
    await until(lambda: stage.states() == ["ended", "ready"])
    await stage.close()


async def test_a_service_that_failed_and_sleeps_is_woken_by_a_call(until):
    """Were it still `down`, its calls would be refused, and none could ever wake it."""
    stage = await Stage(Autoscale(min=0, max=1, idle_s=0.0)).started()
    stage.replicas[0].die()
    for number in range(2, 4):
        await until(lambda n=number: len(stage.replicas) == n)
        stage.replicas[-1].loaded.set_exception(SetupError("no weights"))
    await until(lambda: stage.pool.targets().state == "down")
    for tick in range(3):
        stage.pool.scale(1000.0 + tick)
    assert stage.pool.desired == 0
    assert stage.published[-1] == "asleep"
    await settle()
    woken = len(stage.replicas)
    stage.pool.wake(1010.0)
    assert stage.published[-1] == "starting"  # so the call waits
    await until(lambda: len(stage.replicas) > woken)
    stage.load()
    await until(lambda: stage.pool.targets().state == "up")
    await stage.close()


async def test_an_unwell_replica_goes_before_those_that_are_well(until):
    stage = await Stage(3).started()
    stage.replicas[2].state = State.UNREADY
    stage.pool.resize(2)
    await until(lambda: stage.replicas[2].state is State.DRAINING)
    assert stage.states()[:2] == ["ready", "ready"]
    await stage.close()


async def test_other_bounds_move_the_number_at_once(until):
    stage = await Stage(Autoscale(min=1, max=4, initial=2)).started()
    pool = stage.pool
    policy = resized(pool.policy, (3, 5), name="S")
    assert isinstance(policy, Autoscale)
    assert (policy.min, policy.max, policy.initial) == (3, 5, None)
    pool.resize(policy)
    assert pool.desired == 3
    await until(lambda: len(stage.replicas) == 3)
    stage.load()
    pool.resize(resized(pool.policy, (0, 1), name="S"))
    assert pool.desired == 1
    await stage.close()


@pytest.mark.parametrize(
    ("replicas", "wanted", "error", "text"),
    [
        (2, 0, ConfigError, "S=0: must be 1 or more; a service that may sleep has replicas="),
        (2, (1, 3), ConfigError, "S has a fixed number of replicas, 2; write S=3, or"),
        (
            Autoscale(min=1, max=4),
            6,
            ConfigError,
            "S follows its load from 1 to 4 replicas; move its bounds, S=1..6, or pin it, S=6..6",
        ),
        (Autoscale(min=1, max=4), (3, 2), SpecError, r"Autoscale\(min=3, max=2\): need"),
        (Autoscale(min=1, max=4), (0, 0), SpecError, "max >= 1"),
    ],
)
async def test_numbers_that_a_service_does_not_take(replicas, wanted, error, text):
    with pytest.raises(error, match=text):
        resized(replicas, wanted, name="S")


async def test_one_that_is_well_does_not_end_the_back_off_of_others_that_fail(until, monkeypatch):
    """Else one more that can't start would be tried again each second, for ever."""
    monkeypatch.setattr(module, "_PROVEN_S", -1.0)
    stage = await Stage(1).started()
    stage.pool.resize(2)
    for number in range(2, 5):
        await until(lambda number=number: len(stage.replicas) == number)
        stage.replicas[-1].loaded.set_exception(SetupError("no weights"))
        await until(lambda number=number: stage.pool._failures == number - 1)
        await stage.pool.check()
        assert stage.pool._failures == number - 1
    await until(lambda: len(stage.replicas) == 5)
    stage.load()
    await until(lambda: stage.states().count("ready") == 2)
    stage.replicas[-1].ready_at = module.now()
    await stage.pool.check()
    assert stage.pool._failures == 0
    await stage.close()


@pytest.mark.parametrize(("lived_s", "answered", "proven"), [(0, 99, 0), (0, 100, 1), (11, 0, 1)])
async def test_one_that_worked_before_it_died_ends_the_back_off(lived_s, answered, proven, until):
    stage = await Stage(1).started()
    failures = 3
    stage.pool._failures = failures
    [replica] = stage.replicas
    replica.ready_at, replica.stats = module.now() - lived_s, Stats(finished=answered)
    replica.die()
    await until(lambda: stage.pool.restarts == {"killed": 1})
    assert stage.pool._failures == (1 if proven else failures + 1)
    await stage.close()
