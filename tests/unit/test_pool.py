"""A pool of replicas that are no processes: what it starts, keeps and lets go, and in which order."""

import asyncio

import pytest

from servekit.engine import pool as module
from servekit.engine.control import Started, Stats
from servekit.engine.member import State
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

    def __init__(self, replicas: int | Autoscale = 1) -> None:
        self.spec = ServiceSpec(name="S", target="app:S", replicas=replicas)
        self.replicas: list[Replica] = []
        self.refusal: Exception | None = None
        self.published: list[str] = []
        self.pool = Pool(self.spec, self._spawn, self._publish, drain_s=9.0, start_timeout_s=9.0)  # type: ignore[arg-type]

    def _publish(self) -> None:
        if hasattr(self, "pool"):
            self.published.append(self.pool.targets().state)

    async def _spawn(self, spec: ServiceSpec) -> Replica:
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
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


async def test_no_room_is_tried_again(until):
    stage = await Stage(1).started()
    stage.refusal = ResourceError("no GPU")
    stage.pool.resize(2)
    await until(lambda: stage.pool.restarts.get("resources", 0) >= 3)
    stage.refusal = None
    await until(lambda: len(stage.replicas) == 2)
    stage.load()
    await until(lambda: stage.states() == ["ready", "ready"])
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
    policy = pool.resized((3, 5))
    assert isinstance(policy, Autoscale)
    assert (policy.min, policy.max, policy.initial) == (3, 5, None)
    pool.resize(policy)
    assert pool.desired == 3
    await until(lambda: len(stage.replicas) == 3)
    stage.load()
    pool.resize(pool.resized((0, 1)))
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
        Stage(replicas).pool.resized(wanted)
