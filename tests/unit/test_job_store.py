"""What any store of jobs must do, and what SQLite's must besides: survive, share, refuse.

The same rules drive the store in SQLite and the one in dicts, which must agree on everything.
"""

import asyncio
import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

from servekit.core.job import JobError, JobProgress
from servekit.errors import CallError, ConfigError, Conflict, NotFound, Overloaded, Unavailable
from servekit.jobs import job as life
from servekit.jobs.job import LEASE_S, Job, new_job
from servekit.jobs.sqlite import MEMORY, SqliteStore
from servekit.jobs.store import Store, TaskCount
from servekit.spec.policy import TaskPolicy
from tests.memory_store import MemoryStore

T0 = 1_800_000_000.0
ERROR = JobError("execution_error", "it raised", "why")


def job(task: str = "t", *, key: str = "", now: float = T0, **policy) -> Job:
    policy = {"backoff_s": 0.0, "retries": 1, "max_queued": 5, "ttl_s": 100.0} | policy
    return new_job("S", task, TaskPolicy(**policy), now=now, key=key, digest=key)


@pytest.fixture(params=["sqlite", "sqlite in memory", "dicts"])
def open_store(request, tmp_path):
    async def make() -> Store:
        if request.param == "dicts":
            return MemoryStore()
        store = SqliteStore(MEMORY if "memory" in request.param else tmp_path / "jobs.sqlite")
        await store.open()
        return store

    return make


@pytest.fixture
def with_store(open_store):
    """Run a coroutine function on a store that is closed behind it."""

    def decorate(test):
        async def run():
            store = await open_store()
            try:
                await test(store)
            finally:
                await store.close()

        asyncio.run(run())

    return decorate


async def claim(store: Store, now: float = T0, task: str = "t"):
    await store.reap("S", task, now=now, jitter=0.0)
    return await store.claim("S", task, worker="w", now=now)


# -- any store


def test_jobs_are_claimed_once_in_their_order(with_store):
    @with_store
    async def _(store):
        made = [job() for _ in range(3)]
        for number, one in enumerate(made):
            assert await store.submit(one, b"%d" % number) == one
        assert [await store.position(one) for one in made] == [0, 1, 2]
        taken = [await claim(store) for _ in range(3)]
        assert [(t.id, t.attempt, arguments) for t, arguments in taken] == [
            (one.id, 1, b"%d" % number) for number, one in enumerate(made)
        ]
        assert await claim(store) is None
        assert await claim(store, task="other") is None


def test_a_result_comes_back_as_it_was(with_store):
    @with_store
    async def _(store):
        one = await store.submit(job(), b"")
        with pytest.raises(NotFound):
            await store.result(one.id)
        await claim(store)
        big = os.urandom(3_000_000)
        assert (await store.succeed(one.id, 1, big, now=T0)).status == "succeeded"
        assert await store.result(one.id) == big
        assert await store.succeed(one.id, 1, b"again", now=T0) is None
        assert await store.result(one.id) == big


def test_a_lost_lease_is_handed_on_and_its_old_holder_refused(with_store):
    @with_store
    async def _(store):
        one = await store.submit(job(retries=3), b"x")
        await claim(store)
        assert await claim(store, T0 + LEASE_S - 1) is None
        assert (await store.renew(one.id, 1, now=T0 + LEASE_S - 1)).status == "running"
        assert await claim(store, T0 + LEASE_S + 1) is None
        late = T0 + 3 * LEASE_S
        again, arguments = await claim(store, late)
        assert (again.id, again.attempt, again.failures, arguments) == (one.id, 2, 1, b"x")
        assert await store.renew(one.id, 1, now=late) is None
        assert await store.progress(one.id, 1, [JobProgress(0.9)], now=late) is None
        assert await store.fail(one.id, 1, ERROR, now=late, jitter=0) is None
        assert await store.give_back(one.id, 1, now=late) is None
        assert await store.succeed(one.id, 1, b"stale", now=late) is None
        with pytest.raises(NotFound):
            await store.result(one.id)
        await store.succeed(one.id, 2, b"fresh", now=late)
        assert await store.result(one.id) == b"fresh"


def test_events_tell_everything_in_order(with_store):
    @with_store
    async def _(store):
        one = await store.submit(job(), b"")
        await claim(store)
        steps = [JobProgress(n / 4, f"{n}", {"n": n}) for n in range(4)]
        await store.progress(one.id, 1, steps, now=T0 + 1)
        await store.renew(one.id, 1, now=T0 + 1)
        await store.fail(one.id, 1, ERROR, now=T0 + 2, jitter=0)
        await claim(store, T0 + 2)
        await store.succeed(one.id, 2, b"", now=T0 + 3)
        events = await store.events_after(one.id, 0)
        assert [e.number for e in events] == list(range(1, 10))
        assert [(e.status, e.attempt) for e in events] == [
            ("queued", 0),
            *[("running", 1)] * 5,
            ("queued", 1),
            ("running", 2),
            ("succeeded", 2),
        ]
        assert [e.progress for e in events[2:6]] == steps
        assert events[6].error == ERROR
        assert await store.events_after(one.id, 7) == events[7:]
        assert await store.events_after(one.id, 2, limit=3) == events[2:5]
        assert await store.events_after("nobody", 0) == []


def test_events_have_a_bound(with_store, monkeypatch):
    monkeypatch.setattr("servekit.jobs.sqlite.MAX_EVENTS", 20)
    monkeypatch.setattr("tests.memory_store.MAX_EVENTS", 20)

    @with_store
    async def _(store):
        one = await store.submit(job(), b"")
        await claim(store)
        for n in range(10):
            await store.progress(one.id, 1, [JobProgress(message=str(n))] * 10, now=T0)
        events = await store.events_after(one.id, 0)
        assert [e.number for e in events] == list(range(83, 103))


def test_one_key_is_one_job(with_store):
    @with_store
    async def _(store):
        one = await store.submit(job(key="a"), b"first")
        assert (await store.submit(job(key="a"), b"second")).id == one.id
        assert (await store.submit(job("u", key="a"), b"")).id != one.id
        assert (await store.submit(job(key="b"), b"")).id != one.id
        await claim(store)
        done = await store.succeed(one.id, 1, b"", now=T0)
        assert await store.submit(job(key="a"), b"") == done
        await store.purge(now=T0 + 1000)
        await store.purge(now=T0 + 1000)
        assert (await store.submit(job(key="a", now=T0 + 1000), b"")).id != one.id


def test_the_queue_has_an_end(with_store):
    @with_store
    async def _(store):
        made = [await store.submit(job(key=str(n)), b"") for n in range(5)]
        with pytest.raises(Overloaded) as caught:
            await store.submit(job(), b"")
        assert (caught.value.reason, caught.value.started) == ("queue_full", False)
        assert await store.submit(job(key="3"), b"") == made[3], "it is kept already"
        await store.submit(job("other"), b"")
        await store.cancel(made[0].id, now=T0)
        await store.submit(job(), b"")
        with pytest.raises(Overloaded):
            await store.retry(made[0].id, now=T0)
        assert (await store.get(made[0].id)).status == "cancelled"


def test_cancel_and_retry(with_store):
    @with_store
    async def _(store):
        one = await store.submit(job(), b"")
        assert (await store.cancel(one.id, now=T0)).status == "cancelled"
        assert await claim(store) is None
        assert (await store.retry(one.id, now=T0)).status == "queued"
        await claim(store)
        assert (await store.cancel(one.id, now=T0)).cancelling
        assert (await store.renew(one.id, 1, now=T0)).cancelling
        assert (await store.fail(one.id, 1, ERROR, now=T0, jitter=0)).status == "cancelled"
        await store.retry(one.id, now=T0)
        await claim(store)
        await store.succeed(one.id, 2, b"", now=T0)
        for act in (store.cancel, store.retry):
            with pytest.raises(Conflict):
                await act(one.id, now=T0)
            with pytest.raises(NotFound):
                await act("nobody", now=T0)
        with pytest.raises(NotFound):
            await store.get("nobody")


def test_the_newest_come_first(with_store):
    @with_store
    async def _(store):
        made = [await store.submit(job(), b"") for _ in range(4)]
        await store.cancel(made[1].id, now=T0)
        ids = [one.id for one in made]
        assert [j.id for j in await store.newest("S", "t")] == ids[::-1]
        assert [j.id for j in await store.newest("S", "t", limit=2)] == ids[:1:-1]
        assert [j.id for j in await store.newest("S", "t", status="cancelled")] == [ids[1]]
        assert await store.newest("S", "other") == []


def test_time_ends_and_deletes(with_store):
    @with_store
    async def _(store):
        queued, running, done = [await store.submit(job(), b"") for _ in range(3)]
        await store.cancel(queued.id, now=T0)
        await claim(store)
        await claim(store)
        await store.succeed(done.id, 1, b"", now=T0)
        await store.retry(queued.id, now=T0)
        assert await store.purge(now=T0 + 99) == []
        ended = await store.purge(now=T0 + 100)
        assert [(j.id, j.status) for j in ended] == [(queued.id, "expired")]
        assert (await store.get(running.id)).status == "running"
        with pytest.raises(NotFound):
            await store.get(done.id)
        with pytest.raises(NotFound):
            await store.result(done.id)
        assert await store.events_after(done.id, 0) == []
        assert await store.purge(now=T0 + 200) == []
        with pytest.raises(NotFound):
            await store.get(queued.id)


def test_an_expired_job_is_not_claimed(with_store):
    @with_store
    async def _(store):
        await store.submit(job(), b"")
        assert await claim(store, T0 + 100) is None


def test_counts_are_of_what_has_not_ended(with_store):
    @with_store
    async def _(store):
        assert await store.counts(now=T0) == []
        one, two, _ = [await store.submit(job(backoff_s=10), b"") for _ in range(3)]
        await store.submit(job("u"), b"")
        await claim(store)
        await claim(store)
        await store.fail(one.id, 1, ERROR, now=T0, jitter=0)
        assert await store.counts(now=T0) == [
            TaskCount("S", "t", queued=2, running=1, ready=1),
            TaskCount("S", "u", queued=1, running=0, ready=1),
        ]
        [t, _] = await store.counts(now=T0 + LEASE_S)
        assert t.ready == 3, "one that waits again, and one whose worker is silent"
        await store.succeed(two.id, 1, b"", now=T0)
        assert (await store.counts(now=T0))[0].running == 0


# -- both agree


class Agree(RuleBasedStateMachine):
    """Any operations, in any order, have the same outcome in SQLite as in dicts."""

    ids = Bundle("ids")

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stores: list[Store] = [SqliteStore(MEMORY), MemoryStore()]
        self.loop.run_until_complete(self.stores[0].open())
        self.now = T0

    def teardown(self):
        self.loop.run_until_complete(self.stores[0].close())
        self.loop.close()

    def same(self, act):
        outcomes = []
        for store in self.stores:
            try:
                outcomes.append(self.loop.run_until_complete(act(store)))
            except CallError as error:
                outcomes.append((type(error), error.reason))
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    @initialize(target=ids)
    def nobody(self):
        return "nobody"

    @rule(seconds=st.sampled_from([0.0, 1.0, LEASE_S, 101.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(target=ids, key=st.sampled_from(["", "", "a", "b"]), task=st.sampled_from("tu"))
    def submit(self, key, task):
        made = job(task, key=key, now=self.now)
        kept = self.same(lambda s: s.submit(made, made.id.encode()))
        return kept.id if isinstance(kept, Job) else multiple()

    @rule(task=st.sampled_from("tu"))
    def claim(self, task):
        self.same(lambda s: s.claim("S", task, worker="w", now=self.now))

    @rule(task=st.sampled_from("tu"))
    def reap(self, task):
        self.same(lambda s: s.reap("S", task, now=self.now, jitter=0.5))

    @rule(
        id_=ids,
        attempt=st.integers(1, 3),
        act=st.sampled_from(["renew", "progress", "succeed", "fail", "back"]),
    )
    def worker(self, id_, attempt, act):
        now, steps = self.now, [JobProgress(0.1), JobProgress(0.2)]
        self.same(
            {
                "renew": lambda s: s.renew(id_, attempt, now=now),
                "progress": lambda s: s.progress(id_, attempt, steps, now=now),
                "succeed": lambda s: s.succeed(id_, attempt, b"%d" % attempt, now=now),
                "fail": lambda s: s.fail(id_, attempt, ERROR, now=now, jitter=0.5),
                "back": lambda s: s.give_back(id_, attempt, now=now),
            }[act]
        )

    @rule(id_=ids, act=st.sampled_from(["cancel", "retry", "get", "result", "events"]))
    def caller(self, id_, act):
        self.same(
            {
                "cancel": lambda s: s.cancel(id_, now=self.now),
                "retry": lambda s: s.retry(id_, now=self.now),
                "get": lambda s: s.get(id_),
                "result": lambda s: s.result(id_),
                "events": lambda s: s.events_after(id_, 2),
            }[act]
        )

    @rule(status=st.sampled_from([None, "queued", "failed", "expired"]))
    def look(self, status):
        self.same(lambda s: s.newest("S", "t", status=status, limit=3))
        self.same(lambda s: s.counts(now=self.now))

    @rule()
    def purge(self):
        self.same(lambda s: s.purge(now=self.now))


TestAgree = Agree.TestCase
TestAgree.settings = settings(max_examples=60, stateful_step_count=40)


# -- SQLite's


CLAIMS = """
import asyncio, json, sys, time
from servekit.jobs.sqlite import SqliteStore

async def main():
    store = SqliteStore(sys.argv[1])
    await store.open()
    print("open", flush=True)
    sys.stdin.readline()
    mine = []
    while (claimed := await store.claim("S", "t", worker=sys.argv[2], now=time.time())):
        job, arguments = claimed
        mine.append(arguments.decode())
        assert await store.succeed(job.id, job.attempt, arguments, now=time.time())
    await store.close()
    print(json.dumps(mine), flush=True)

asyncio.run(main())
"""


async def test_two_processes_share_a_file(tmp_path):
    """No job is claimed by both, and none by nobody."""
    path, count = tmp_path / "jobs.sqlite", 150
    store = SqliteStore(path)
    await store.open()
    for number in range(count):
        await store.submit(job(max_queued=count, now=time.time()), b"%d" % number)
    script = textwrap.dedent(CLAIMS)
    workers = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            script,
            str(path),
            name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for name in ("one", "other")
    ]
    for worker in workers:
        assert await worker.stdout.readline() == b"open\n"
    outputs = await asyncio.gather(*(worker.communicate(b"go\n") for worker in workers))
    one, other = (json.loads(out) for out, _ in outputs)
    assert sorted(map(int, one + other)) == list(range(count))
    for made in await store.newest("S", "t", limit=count):
        assert (made.status, made.attempt) == ("succeeded", 1)
    await store.close()


SUBMITS = """
import asyncio, sys, time
from servekit.jobs.job import new_job
from servekit.jobs.sqlite import SqliteStore
from servekit.spec.policy import TaskPolicy

async def main():
    store = SqliteStore(sys.argv[1])
    await store.open()
    while True:
        job = new_job("S", "t", TaskPolicy(), now=time.time())
        await store.submit(job, b"x")
        print(job.id, flush=True)

asyncio.run(main())
"""


async def test_what_was_answered_survives_kill_9(tmp_path):
    path = tmp_path / "jobs.sqlite"
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(SUBMITS), str(path), stdout=subprocess.PIPE
    )
    told = [(await worker.stdout.readline()).strip().decode() for _ in range(50)]
    worker.send_signal(signal.SIGKILL)
    rest = (await worker.stdout.read()).decode()
    told += rest[: rest.rfind("\n") + 1].split()
    await worker.wait()
    store = SqliteStore(path)
    await store.open()
    kept = [made.id for made in await store.newest("S", "t", limit=10_000)][::-1]
    assert kept[: len(told)] == told
    assert len(kept) - len(told) in (0, 1)
    await store.close()


async def test_the_file_is_its_owners_alone(tmp_path):
    path = tmp_path / "jobs.sqlite"
    store = SqliteStore(path)
    await store.open()
    await store.submit(job(), b"")
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    await store.close()
    assert [file.name for file in tmp_path.iterdir()] == ["jobs.sqlite"]


@pytest.mark.parametrize("how", ["newer", "no database", "a folder", "no folder"])
async def test_what_can_not_be_used_is_refused(tmp_path, how):
    path = tmp_path / "jobs.sqlite"
    if how == "newer":
        db = sqlite3.connect(path)
        db.execute("PRAGMA user_version = 7")
        db.close()
    elif how == "no database":
        path.write_bytes(b"these are no jobs" * 1000)
    elif how == "a folder":
        path.mkdir()
    else:
        path = tmp_path / "not" / "there"
    with pytest.raises(ConfigError, match=str(path)):
        await SqliteStore(path).open()


async def test_a_file_that_is_locked_is_unavailable(tmp_path, monkeypatch):
    monkeypatch.setattr("servekit.jobs.sqlite._BUSY_S", 0.05)
    path = tmp_path / "jobs.sqlite"
    store = SqliteStore(path)
    await store.open()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="locked") as caught:
        await store.submit(job(), b"")
    assert caught.value.reason == "job_store"
    assert await store.newest("S", "t") == [], "readers go on"
    other.execute("ROLLBACK")
    await store.submit(job(), b"")
    other.close()
    await store.close()


async def test_a_full_disk_leaves_nothing_half_done(tmp_path):
    store = SqliteStore(tmp_path / "jobs.sqlite")
    await store.open()
    one = await store.submit(job(), b"")
    await claim(store)
    await store._do(lambda: store._db.execute("PRAGMA max_page_count = 30"))
    with pytest.raises(Unavailable, match="full"):
        await store.succeed(one.id, 1, bytes(1_000_000), now=T0)
    assert (await store.get(one.id)).status == "running"
    assert life.holds(await store.get(one.id), 1)
    assert (await store.succeed(one.id, 1, b"small", now=T0)).status == "succeeded"
    await store.close()
