"""The router, with fake replicas on unix sockets: choose, hold, retry, and follow the table."""

import asyncio
from collections import Counter

import pytest

from servekit.core.call import JSON, Call, Load, Payload, Reply, now
from servekit.engine import router as router_module
from servekit.engine.router import Router, completion_time
from servekit.engine.table import ServiceTargets, Table, Target
from servekit.errors import (
    CallError,
    DeadlineExceeded,
    ExecutionError,
    NotFound,
    Overloaded,
    ReplicaLost,
    Unavailable,
)
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from servekit.wire.sockets import Address, Listener
from tests.calls import make_call


def a_call(service: str = "S", body: bytes = b"{}", **settings) -> Call:
    return make_call(service, "e", Payload(JSON, (body,)), request_id="r", **settings)


class Replica:
    """Answers its own name, at once or when it is told to."""

    def __init__(self, name: str, folder) -> None:
        self.name = name
        self.load = Load(0, 0.01)
        self.calls: list[Call] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: CallError | None = None
        self.listener = Listener(
            Address(f"unix:{folder / name}.sock"),
            lambda: Connection(
                Hello(service="S", replica=name, version="1"),
                client=False,
                handler=self,
                own_load=lambda: self.load,
            ),
        )
        self.target = Target(name, self.listener.address.text)

    async def __call__(self, call: Call) -> Reply:
        self.calls.append(call)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Reply(Payload(JSON, (self.name.encode(),)))

    def crash(self) -> None:
        """Lose all connections, and take none for now."""
        if self.listener._server is not None:
            self.listener._server.close()
        for connection in self.listener.connections:
            connection.abort()

    def leave(self) -> None:
        """Tell all that it takes no new calls."""
        for connection in self.listener.connections:
            connection.goaway()


class Cluster:
    """A router and its replicas."""

    def __init__(self, folder, until) -> None:
        self.folder = folder
        self.until = until
        self.starved: list[str] = []
        self.router = Router(Hello(replica="gateway"), on_starved=self.starved.append)
        self.replicas: dict[str, Replica] = {}
        self.serial = 0

    async def start(self, *names: str) -> list[Replica]:
        for name in names:
            self.replicas[name] = Replica(name, self.folder)
            await self.replicas[name].listener.open()
        return [self.replicas[name] for name in names]

    def table(
        self, *names: str, state: str = "up", service: str = "S", proves: bool = True, **settings
    ) -> None:
        self.serial += 1
        targets = tuple(self.replicas[name].target for name in names)
        services = {service: ServiceTargets(targets, state, **settings)}  # type: ignore[arg-type]
        self.router.update(Table(self.serial, services, proves))

    async def up(self, *names: str) -> list[Replica]:
        replicas = await self.start(*(n for n in names if n not in self.replicas))
        self.table(*names)
        await self.until(lambda: set(names) <= self.router.connections().keys())
        return replicas

    async def ask(self, **settings) -> str:
        reply = await self.router(a_call(**settings))
        return bytes(reply.payload.segments[0]).decode()

    async def close(self) -> None:
        await self.router.close()
        for replica in self.replicas.values():
            replica.gate.set()
            await replica.listener.close()


@pytest.fixture
def make(tmp_path, until):
    tmp_path.chmod(0o700)
    return lambda: Cluster(tmp_path, until)


# -- choosing


@pytest.fixture
def clock(monkeypatch):
    """The time by which figures grow old; it stands still."""
    clock = [now()]
    monkeypatch.setattr(router_module, "now", lambda: clock[0])
    return clock


@pytest.mark.usefixtures("clock")
async def test_the_less_loaded_of_two_is_chosen(make):
    cluster = make()
    one, two = await cluster.up("one", "two")
    one.load, two.load = Load(10, 0.01), Load(1, 0.01)
    await asyncio.gather(*(cluster.ask() for _ in range(20)))  # now both have told
    before = len(two.calls)
    assert [await cluster.ask() for _ in range(20)] == ["two"] * 20
    assert len(two.calls) == before + 20
    one.load, two.load = Load(1, 0.001), Load(1, 0.1)
    await cluster.ask()
    await asyncio.gather(*(cluster.ask() for _ in range(20)))
    assert Counter([await cluster.ask() for _ in range(20)])["one"] == 20
    await cluster.close()


@pytest.mark.parametrize("count", [2, 3])
async def test_calls_are_spread_over_equals(make, count):
    cluster = make()
    replicas = await cluster.up(*"abc"[:count])
    for _ in range(120 * count):
        await cluster.ask()
    assert min(len(replica.calls) for replica in replicas) > 60
    await cluster.close()


@pytest.mark.usefixtures("clock")
async def test_the_worst_of_three_is_never_chosen(make):
    cluster = make()
    replicas = await cluster.up("a", "b", "c")
    for replica, ongoing in zip(replicas, (50, 40, 60), strict=True):
        replica.load = Load(ongoing, 0.01)
    await asyncio.gather(*(cluster.ask() for _ in range(60)))  # now all have told
    assert {await cluster.ask() for _ in range(100)} == {"a", "b"}
    await cluster.close()


async def test_figures_that_nothing_renews_are_not_believed_for_long(make, clock):
    """A slow first call, or a queue of others that is long done, keeps calls away for a second."""
    cluster = make()
    _, slow = await cluster.up("quick", "slow")
    slow.load = Load(0, 2.0)
    await asyncio.gather(*(cluster.ask() for _ in range(60)))
    assert {await cluster.ask() for _ in range(100)} == {"quick"}
    clock[0] = now() + 1.0
    assert {await cluster.ask() for _ in range(100)} == {"quick"}  # it may still be at it
    slow.load = Load(0, 0.01)
    clock[0] = now() + 60.0
    assert {await cluster.ask() for _ in range(100)} == {"quick", "slow"}
    await cluster.close()


async def test_a_slow_replica_is_asked_now_and_then(make, clock):
    """Once it has said again that it is slow, it is left alone for as long again."""
    cluster = make()
    _, slow = await cluster.up("quick", "slow")
    slow.load = Load(0, 2.0)
    await asyncio.gather(*(cluster.ask() for _ in range(60)))
    before = len(slow.calls)
    clock[0] = now() + 60.0
    slow.gate.clear()
    asking = [asyncio.create_task(cluster.ask()) for _ in range(20)]
    await cluster.until(lambda: len(slow.calls) > before)
    await cluster.until(lambda: sum(task.done() for task in asking) == 19)
    slow.gate.set()
    await asyncio.gather(*asking)
    assert len(slow.calls) == before + 1
    await cluster.close()


async def test_a_replica_that_joins_gets_its_share(make):
    cluster = make()
    await cluster.up("a")
    assert await cluster.ask() == "a"
    for names in (["a", "b"], ["a", "b", "c"]):
        await cluster.up(*names)
        assert {await cluster.ask() for _ in range(100)} == set(names)
    await cluster.close()


async def test_what_is_on_its_way_counts_too(make):
    cluster = make()
    replicas = await cluster.up("a", "b", "c", "d")
    for replica in replicas:
        replica.gate.clear()
    tasks = [asyncio.create_task(cluster.ask()) for _ in range(80)]
    await cluster.until(lambda: sum(len(r.calls) for r in replicas) == 80)
    assert max(len(r.calls) for r in replicas) <= 30
    assert min(len(r.calls) for r in replicas) >= 10
    for replica in replicas:
        replica.gate.set()
    await asyncio.gather(*tasks)
    await cluster.close()


def test_completion_time():
    class Seen:
        def __init__(self, load, ongoing):
            self.load, self.ongoing = load, ongoing

    assert completion_time(Seen(Load(3, 0.5), 1)) == 2.0
    assert completion_time(Seen(Load(1, 0.5), 3)) == 2.0
    assert completion_time(Seen(Load(0, 0.0), 0)) < completion_time(Seen(Load(0, 0.0), 1))


async def test_an_affinity_key_stays_with_its_replica(make):
    cluster = make()
    await cluster.up("a", "b", "c", "d")
    homes = {}
    for key in map(str, range(40)):
        homes[key] = {await cluster.ask(affinity_key=key) for _ in range(3)}
    assert all(len(home) == 1 for home in homes.values())
    assert len({name for home in homes.values() for name in home}) == 4
    # When one leaves, only its own keys move.
    cluster.table("a", "b", "c")
    for key, home in homes.items():
        if home != {"d"}:
            assert {await cluster.ask(affinity_key=key)} == home
    await cluster.close()


async def test_an_unknown_service(make):
    cluster = make()
    await cluster.up("one")
    with pytest.raises(NotFound, match="no service 'T' runs here") as caught:
        await cluster.ask(service="T")
    assert not caught.value.started
    await cluster.close()


# -- holding


async def test_calls_wait_until_a_replica_is_ready_and_go_in_order(make):
    cluster = make()
    cluster.table(state="starting")
    tasks = [asyncio.create_task(cluster.ask(body=b"%d" % n)) for n in range(20)]
    await cluster.until(lambda: cluster.router.statistics() == {"S": 20})
    assert cluster.router.unready() == {"S": "starting"}
    assert cluster.starved == ["S"] * 20
    (one,) = await cluster.up("one")
    assert await asyncio.gather(*tasks) == ["one"] * 20
    assert [int(bytes(c.payload.segments[0])) for c in one.calls] == list(range(20))
    assert cluster.router.statistics() == {}
    assert cluster.router.unready() == {}
    await cluster.close()


async def test_a_service_that_sleeps_is_ready_and_wakes(make):
    cluster = make()
    cluster.table(state="asleep")
    assert cluster.router.unready() == {}
    task = asyncio.create_task(cluster.ask())
    await cluster.until(lambda: cluster.starved)
    await cluster.up("one")
    assert await task == "one"
    await cluster.close()


async def test_one_that_may_sleep_is_ready_while_its_replica_leaves(make):
    """The table has it a little longer than it is there; calls meanwhile wake another."""
    cluster = make()
    (one,) = await cluster.up("one")
    cluster.table("one", state="asleep")
    assert await cluster.ask() == "one"
    one.crash()
    await cluster.until(lambda: not cluster.router.connections())
    assert cluster.router.unready() == {}
    task = asyncio.create_task(cluster.ask())
    await cluster.until(lambda: cluster.starved == ["S"])
    cluster.table(state="asleep")
    assert cluster.starved == ["S", "S"]
    await cluster.up("two")
    assert await task == "two"
    await cluster.close()


async def test_an_unready_replica_finishes_its_calls_and_takes_no_others(make):
    cluster = make()
    one, _ = await cluster.up("one", "two")
    one.gate.clear()
    running = [asyncio.create_task(cluster.ask()) for _ in range(20)]
    await cluster.until(lambda: one.calls)
    cluster.table("one", "two", unready=("one",))
    before = len(one.calls)
    assert [await cluster.ask() for _ in range(20)] == ["two"] * 20
    one.gate.set()
    assert Counter(await asyncio.gather(*running))["one"] == before
    cluster.table("one", "two", unready=("one", "two"))
    assert cluster.router.unready() == {"S": "connecting"}
    task = asyncio.create_task(cluster.ask())
    await cluster.until(lambda: cluster.router.statistics())
    cluster.table("one", "two")
    assert await task in ("one", "two")
    assert {await cluster.ask() for _ in range(60)} == {"one", "two"}
    await cluster.close()


async def test_a_table_that_proves_nothing_takes_away_only_what_is_gone(make):
    cluster = make()
    one, _ = await cluster.up("one", "two")
    cluster.table(state="starting", proves=False)
    assert {await cluster.ask() for _ in range(60)} == {"one", "two"}
    assert cluster.router.unready() == {}
    connection = cluster.router.connections()["one"]
    one.leave()
    await cluster.until(lambda: not connection.usable)
    assert [await cluster.ask() for _ in range(20)] == ["two"] * 20
    cluster.table("two", proves=False)
    one.crash()
    await cluster.until(lambda: cluster.router.connections().keys() == {"two"})
    await one.listener.open()
    assert [await cluster.ask() for _ in range(20)] == ["two"] * 20
    assert cluster.router.connections().keys() == {"two"}
    cluster.table("two")
    cluster.table()
    assert cluster.router.connections() == {}
    await cluster.close()


def test_before_the_first_table_nothing_is_ready():
    async def main():
        router = Router(Hello())
        assert router.unready() == {"app": "starting"}
        await router.close()

    asyncio.run(main())


async def test_a_wait_ends_at_the_deadline(make):
    cluster = make()
    cluster.table(state="starting")
    with pytest.raises(DeadlineExceeded) as caught:
        await cluster.ask(deadline=now() + 0.01)
    assert not caught.value.started
    assert cluster.router.statistics() == {}
    await cluster.close()


async def test_a_caller_that_leaves_is_not_held(make):
    cluster = make()
    cluster.table(state="starting")
    tasks = [asyncio.create_task(cluster.ask(deadline=now() + 60)) for _ in range(50)]
    await cluster.until(lambda: cluster.router.statistics() == {"S": 50})
    for task in tasks[1:]:
        task.cancel()
    await cluster.until(lambda: cluster.router.statistics() == {"S": 1})
    await cluster.up("one")
    assert await tasks[0] == "one"
    assert len(cluster.replicas["one"].calls) == 1
    await asyncio.gather(*tasks, return_exceptions=True)
    await cluster.close()


async def test_only_so_many_are_held(make, monkeypatch):
    monkeypatch.setattr(router_module, "MAX_HELD", 5)
    cluster = make()
    cluster.table(state="starting")
    tasks = [asyncio.create_task(cluster.ask()) for _ in range(5)]
    await cluster.until(lambda: cluster.router.statistics() == {"S": 5})
    with pytest.raises(Overloaded) as caught:
        await cluster.ask()
    assert caught.value.retry_after_s
    assert caught.value.reason == "no_replica"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await cluster.close()


async def test_a_service_that_is_down_refuses_at_once_and_lets_go_who_waits(make):
    cluster = make()
    cluster.table(state="starting")
    task = asyncio.create_task(cluster.ask())
    await cluster.until(lambda: cluster.router.statistics())
    cluster.table(state="down", retry_after_s=7.0)
    for attempt in (task, cluster.ask()):
        with pytest.raises(Unavailable) as caught:
            await attempt
        assert (caught.value.reason, caught.value.retry_after_s) == ("no_replica", 7.0)
        assert not caught.value.started
    assert cluster.router.unready() == {"S": "down"}
    await cluster.close()


async def test_who_waits_for_a_service_that_is_removed_is_let_go(make):
    cluster = make()
    cluster.table(state="starting")
    task = asyncio.create_task(cluster.ask())
    await cluster.until(lambda: cluster.router.statistics())
    cluster.table(service="other", state="starting")
    with pytest.raises(Unavailable):
        await task
    with pytest.raises(NotFound):
        await cluster.ask()
    await cluster.close()


# -- losing replicas


async def test_an_idempotent_call_goes_to_another_replica(make):
    cluster = make()
    one, two = await cluster.up("one", "two")
    one.gate.clear()
    two.gate.clear()
    task = asyncio.create_task(cluster.ask(idempotent=True))
    await cluster.until(lambda: one.calls or two.calls)
    loser, winner = (one, two) if one.calls else (two, one)
    winner.gate.set()
    loser.crash()
    assert await task == winner.name
    assert winner.calls[0].attempt == 1
    await cluster.close()


async def test_another_call_is_lost_with_its_replica(make):
    cluster = make()
    one, two = await cluster.up("one", "two")
    one.gate.clear()
    two.gate.clear()
    task = asyncio.create_task(cluster.ask())
    await cluster.until(lambda: one.calls or two.calls)
    (one if one.calls else two).crash()
    with pytest.raises(ReplicaLost) as caught:
        await task
    assert caught.value.started
    assert len(one.calls) + len(two.calls) == 1
    await cluster.close()


@pytest.mark.parametrize("retries", [0, 1, 2, 3])
async def test_no_more_than_the_retries(make, retries):
    cluster = make()
    replicas = await cluster.up("a", "b", "c", "d", "e")
    for replica in replicas:
        replica.gate.clear()

    async def assassin() -> None:
        dead: set[str] = set()
        while True:
            for replica in replicas:
                if replica.calls and replica.name not in dead:
                    dead.add(replica.name)
                    replica.crash()
            await asyncio.sleep(0)

    killer = asyncio.create_task(assassin())
    with pytest.raises(ReplicaLost):
        await cluster.ask(idempotent=True, retries=retries)
    killer.cancel()
    assert sum(len(r.calls) for r in replicas) == retries + 1
    await asyncio.gather(killer, return_exceptions=True)
    await cluster.close()


async def test_when_the_only_replica_dies_an_idempotent_call_waits_for_the_next(make):
    cluster = make()
    (one,) = await cluster.up("one")
    one.gate.clear()
    tasks = [asyncio.create_task(cluster.ask(idempotent=True)) for _ in range(10)]
    await cluster.until(lambda: len(one.calls) == 10)
    one.crash()
    await cluster.until(lambda: cluster.router.statistics() == {"S": 10})
    await cluster.up("two")
    assert await asyncio.gather(*tasks) == ["two"] * 10
    await cluster.close()


async def test_a_call_in_the_very_turn_of_the_loss_is_not_lost(make):
    cluster = make()
    (one,) = await cluster.up("one")
    connection = cluster.router.connections()["one"]
    tasks = []
    connection.on_lost = lambda _: tasks.append(asyncio.create_task(cluster.ask()))
    one.crash()
    await cluster.until(lambda: tasks and cluster.router.statistics() == {"S": 1})
    await cluster.up("two")
    assert await tasks[0] == "two"
    await cluster.close()


async def test_a_replica_that_comes_back_is_connected_again(make):
    cluster = make()
    (one,) = await cluster.up("one")
    one.crash()
    await cluster.until(lambda: not cluster.router.connections())
    assert cluster.router.unready() == {"S": "connecting"}
    await one.listener.open()
    await cluster.until(cluster.router.connections)
    assert await cluster.ask() == "one"
    await cluster.close()


async def test_a_draining_replica_gets_no_new_calls_and_loses_none(make):
    cluster = make()
    one, two = await cluster.up("one", "two")
    one.gate.clear()
    two.gate.clear()
    old = [asyncio.create_task(cluster.ask()) for _ in range(20)]
    await cluster.until(lambda: len(one.calls) + len(two.calls) == 20)
    at_one = len(one.calls)
    one.leave()
    # These cross the GOAWAY: refused unstarted, they go to the other, however often that is.
    new = [asyncio.create_task(cluster.ask(retries=0)) for _ in range(20)]
    one.gate.set()
    two.gate.set()
    names = Counter(await asyncio.gather(*old))
    assert names == {"one": at_one, "two": 20 - at_one}
    assert await asyncio.gather(*new) == ["two"] * 20
    assert len(one.calls) == at_one
    await cluster.close()


@pytest.mark.parametrize("others", [["b"], ["b", "c"]])
@pytest.mark.parametrize("go", [Replica.leave, Replica.crash])
async def test_a_replica_that_has_left_is_never_chosen_again(make, go, others):
    cluster = make()
    gone, *_ = await cluster.up("a", *others)
    homes = {key: await cluster.ask(affinity_key=key) for key in map(str, range(20))}
    assert {await cluster.ask() for _ in range(100)} == {"a", *others}
    before = len(gone.calls)
    connection = cluster.router.connections()["a"]
    go(gone)
    await cluster.until(lambda: not connection.usable)
    # All of these in the turn in which the router could first know.
    asked = [cluster.ask(retries=0) for _ in range(60)]
    asked += [cluster.ask(affinity_key=key, retries=0) for key in homes]
    names = await asyncio.gather(*asked)
    assert set(names) == set(others)
    for home, name in zip(homes.values(), names[60:], strict=True):
        assert home in (name, "a")
    assert {await cluster.ask() for _ in range(60)} == set(others)
    assert len(gone.calls) == before
    await cluster.close()


async def test_when_the_last_replica_leaves_calls_wait_for_the_next(make):
    cluster = make()
    (one,) = await cluster.up("one")
    connection = cluster.router.connections()["one"]
    one.leave()
    await cluster.until(lambda: not connection.usable)
    assert cluster.router.unready() == {"S": "connecting"}
    tasks = [asyncio.create_task(cluster.ask(affinity_key=key)) for key in ("", "k")]
    await cluster.until(lambda: cluster.router.statistics() == {"S": 2})
    await cluster.up("one", "two")
    assert await asyncio.gather(*tasks) == ["two", "two"]
    assert one.calls == []
    await cluster.close()


@pytest.mark.parametrize(
    "error",
    [
        ExecutionError("raised"),
        Overloaded("full", reason="queue_full", retry_after_s=1.0, started=False),
        Unavailable("a dependency has none", reason="no_replica"),
        DeadlineExceeded("late"),
    ],
)
async def test_what_the_replica_answers_is_not_tried_again(make, error):
    cluster = make()
    one, two = await cluster.up("one", "two")
    one.error = two.error = error
    with pytest.raises(type(error)):
        await cluster.ask(idempotent=True)
    assert len(one.calls) + len(two.calls) == 1
    await cluster.close()


# -- the table


async def test_an_older_table_is_ignored(make):
    cluster = make()
    await cluster.up("one")
    newest = cluster.serial
    for serial in (newest, newest - 1, -5):
        cluster.router.update(Table(serial, {}))
    assert await cluster.ask() == "one"
    cluster.router.update(Table(newest + 10, {}))
    with pytest.raises(NotFound):
        await cluster.ask()
    await cluster.close()


async def test_a_replica_that_leaves_the_table_answers_what_it_has(make):
    cluster = make()
    (one,) = await cluster.up("one")
    one.gate.clear()
    old = asyncio.create_task(cluster.ask())
    await cluster.until(lambda: one.calls)
    await cluster.up("two")  # and without "one"
    assert [await cluster.ask() for _ in range(5)] == ["two"] * 5
    one.gate.set()
    assert await old == "one"
    await cluster.until(lambda: not one.listener.connections)
    assert set(cluster.router.connections()) == {"two"}
    await cluster.close()


async def test_a_replica_stays_connected_over_tables_that_keep_it(make):
    cluster = make()
    await cluster.up("one", "two")
    before = cluster.router.connections()
    cluster.table("two", "one")
    await cluster.ask()
    assert cluster.router.connections() == before
    await cluster.close()


async def test_close_ends_everything(make):
    cluster = make()
    one, two = await cluster.up("one", "two")
    one.gate.clear()
    running = asyncio.create_task(cluster.ask(affinity_key="k"))
    await cluster.until(lambda: one.calls or two.calls or running.done())
    cluster.table("two")  # "one" is finishing
    cluster.serial += 1
    cluster.router.update(
        Table(cluster.serial, {"S": ServiceTargets((two.target,), "up"), "T": ServiceTargets()})
    )
    held = asyncio.create_task(cluster.ask(service="T"))
    await cluster.until(cluster.router.statistics)
    await cluster.router.close()
    with pytest.raises(Unavailable):
        await held
    await asyncio.gather(running, return_exceptions=True)
    await cluster.until(lambda: not one.listener.connections and not two.listener.connections)
    assert cluster.router.connections() == {}
    await cluster.close()
