"""What an app may take of a machine, which is a fake one here."""

import asyncio
import contextlib

import pytest

import servekit as sk
from servekit.engine.budget import Budget
from servekit.errors import ResourceError
from servekit.settings import Settings
from servekit.spec.describe import describe

GIB = 2**30


class Machine:
    """A machine with as much as a test says."""

    def __init__(self, cores=4, memory=8 * GIB, available=8 * GIB):
        self._cores = cores
        self._memory = memory
        self.free = available

    def cores(self):
        return self._cores

    def memory(self):
        return self._memory

    def available(self):
        return self.free


@sk.service(replicas=2, memory="2GiB", gpu=0.3)
class Child: ...


@sk.service(memory="1GiB", replicas=sk.Autoscale(min=1, max=9, initial=2), gpu=0.7)
class Beside: ...


@sk.service(memory="512MiB", cpu=3)
class Root:
    child = sk.depends(Child)
    beside = sk.depends(Beside)


@sk.service(memory="2GiB")
class Big: ...


@sk.service(memory="512MiB")
class Small:
    big = sk.depends(Big)


APP = describe(Root)
PLAIN = describe(Small)


def numbers(app):
    return [
        (s, s.replicas if isinstance(s.replicas, int) else s.replicas.start) for s in app.services
    ]


def budget(machine=None, **settings):
    return Budget(Settings(gpus=2, **settings), machine or Machine())


async def test_memory_that_is_not_there_is_refused_with_who_asks():
    with pytest.raises(ResourceError) as caught:
        await budget(Machine(memory=6 * GIB)).admit(APP, numbers(APP))
    assert str(caught.value) == (
        "the app asks for 6.5 GiB of memory, and this machine has 6 GiB: "
        "Child 2 of 2 GiB, Beside 2 of 1 GiB, Root 1 of 512 MiB; lower memory= or replicas="
    )
    await budget(Machine(memory=int(6.5 * GIB))).admit(APP, numbers(APP))
    await budget(Machine(memory=0)).admit(APP, numbers(APP))


async def test_what_fits_together_is_placed_together(caplog):
    """In the order of their start, both thirds would go to one device, and no two thirds fit."""
    found = budget(Machine(memory=16 * GIB))
    await found.admit(APP, numbers(APP))
    child, beside, root = APP.services
    assert found.place("Root-1", root) == ()
    placed = [found.place(f"Child-{n}", child) for n in range(2)]
    placed += [found.place(f"Beside-{n}", beside) for n in range(2)]
    assert sorted(ids for (ids,) in placed) == ["0", "0", "1", "1"]
    with pytest.raises(ResourceError, match="Child-9 asks gpu=0.3"):
        found.place("Child-9", child)
    found.release("Child-0")
    assert found.place("Child-9", child) == placed[0]
    assert "cores" not in caplog.text


async def test_gpus_that_are_not_there_are_refused():
    with pytest.raises(ResourceError, match="this machine has 1 GPU"):
        await Budget(Settings(gpus=1), Machine()).admit(APP, numbers(APP))


async def test_an_app_without_gpus_does_not_wait_for_the_driver(monkeypatch):
    def asked(**_):
        raise AssertionError

    monkeypatch.setattr("servekit.engine.budget.detect", asked)

    @sk.service
    class Plain: ...

    app = describe(Plain)
    await Budget(Settings(), Machine()).admit(app, numbers(app))


async def test_another_revision_is_checked_but_holds_nothing():
    found = budget()
    await found.admit(APP, numbers(APP))
    child, _, _ = APP.services
    first = [found.place(f"Child-{n}", child) for n in range(2)]
    await found.admit(APP, numbers(APP))
    for number in range(2):
        found.release(f"Child-{number}")
    assert [found.place(f"Child-{n}", child) for n in range(2, 4)] == first


async def test_other_numbers_are_checked_for_an_empty_machine():
    found = budget(Machine(memory=10 * GIB))
    await found.admit(APP, numbers(APP))
    child, beside, root = APP.services
    found.check([(child, 3), (beside, 1), (root, 1)])
    with pytest.raises(ResourceError, match="asks for 10.5 GiB of memory"):
        found.check([(child, 4), (beside, 2), (root, 1)])
    with pytest.raises(ResourceError, match="Beside #3 asks gpu=0.7"):
        found.check([(child, 0), (beside, 3), (root, 1)])


async def test_what_runs_already_leaves_less_memory_for_one_more():
    """An autoscaler asks for replicas that nobody counted when the app was admitted."""
    found = budget(Machine(memory=7 * GIB))
    big, small = PLAIN.services
    for number in range(3):
        found.place(f"Big-{number}", big)
    found.place("Small-1", small)
    with pytest.raises(ResourceError, match=r"Big-9 asks for 2 GiB .* of the 7 GiB .* 6.5 GiB"):
        found.place("Big-9", big)
    found.place("Small-2", small)
    found.release("Big-0")
    found.release("Big-0")
    found.place("Big-9", big)


async def test_where_the_memory_is_not_known_none_is_refused():
    found = budget(Machine(memory=0))
    big, _ = PLAIN.services
    assert [found.place(f"Big-{n}", big) for n in range(99)] == [()] * 99


async def test_cores_are_a_warning(caplog):
    await budget(Machine(cores=2)).admit(APP, numbers(APP))
    assert "more cores than there are" in caplog.text


class Loads:
    """Replicas that load until they are told that they have."""

    def __init__(self, found):
        self.found = found
        self.loading: dict[str, asyncio.Event] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, name, spec):
        self.tasks.append(asyncio.create_task(self._load(name, spec)))

    async def _load(self, name, spec):
        async with self.found.turn(spec):
            done = self.loading[name] = asyncio.Event()
            await done.wait()
            del self.loading[name]


@pytest.mark.parametrize(("settings", "cores", "most"), [({}, 1, 2), ({"start_parallel": 1}, 8, 1)])
async def test_replicas_load_in_turns(settings, cores, most, until):
    found = budget(Machine(cores=cores), **settings)
    await found.admit(APP, numbers(APP))
    child, _, root = APP.services
    loads = Loads(found)
    loads.start("root", root)
    await until(lambda: loads.loading)
    assert list(loads.loading) == ["root"]
    loads.loading["root"].set()
    await until(lambda: not loads.loading)
    for number in range(5):
        loads.start(f"child {number}", child)
    seen = []
    for _ in range(5):
        await until(lambda: loads.loading)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(loads.loading) <= most
        name, done = next(iter(loads.loading.items()))
        seen.append(name)
        done.set()
        await until(lambda name=name: name not in loads.loading)
    assert seen == [f"child {n}" for n in range(5)]
    await asyncio.gather(*loads.tasks)


async def test_memory_is_waited_for(until, monkeypatch, caplog):
    monkeypatch.setattr("servekit.engine.budget._LOOK_S", 0.01)
    caplog.set_level("INFO")
    machine = Machine(available=3 * GIB)
    found = budget(machine)
    await found.admit(APP, numbers(APP))
    child, _, _ = APP.services
    loads = Loads(found)
    loads.start("one", child)
    await until(lambda: loads.loading)
    loads.start("two", child)
    await until(lambda: "waits for memory" in caplog.text)
    assert list(loads.loading) == ["one"]
    machine.free = 4 * GIB
    await until(lambda: len(loads.loading) == 2)
    loads.start("three", child)
    for event in list(loads.loading.values()):
        event.set()
    await until(lambda: "three" in loads.loading)
    loads.loading["three"].set()
    await asyncio.gather(*loads.tasks)


async def test_memory_is_not_waited_for_for_ever(until, monkeypatch):
    monkeypatch.setattr("servekit.engine.budget._LOOK_S", 0.01)
    found = budget(Machine(available=GIB), start_timeout_s=0.02)
    await found.admit(APP, numbers(APP))
    child, _, _ = APP.services
    loads = Loads(found)
    loads.start("one", child)
    await until(lambda: loads.loading)
    with pytest.raises(ResourceError, match="Child asks for 2 GiB of memory, and .* only 1 GiB"):
        async with found.turn(child):
            pass
    loads.loading["one"].set()
    await asyncio.gather(*loads.tasks)


async def test_a_start_that_is_given_up_lets_the_next_go(until):
    found = budget(start_parallel=1)
    child, _, _ = APP.services
    loads = Loads(found)
    for name in ("one", "two", "three"):
        loads.start(name, child)
    await until(lambda: loads.loading)
    loads.tasks[1].cancel()
    loads.tasks[0].cancel()
    await until(lambda: "three" in loads.loading)
    loads.loading["three"].set()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*loads.tasks)
    await asyncio.gather(*loads.tasks, return_exceptions=True)
