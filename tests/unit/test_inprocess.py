"""`sk.local`: a graph in this process, with fakes in place of what is too heavy."""

import threading
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

import servekit as sk
from servekit.errors import InvalidInput, InvalidOutput, NotFound, SetupError, SpecError

EVENTS: list[str] = []


@pytest.fixture(autouse=True)
def events():
    EVENTS.clear()
    return EVENTS


@sk.service
class Base:
    def __init__(self, fail: str = "") -> None:
        EVENTS.append("base init")
        self.fail = fail

    @sk.teardown
    def stop(self) -> None:
        EVENTS.append("base teardown")

    @sk.batched(max_size=4)
    def embed(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text))] for text in texts]

    @sk.endpoint
    async def words(self, text: str) -> AsyncIterator[str]:
        for word in text.split():
            yield word

    @sk.endpoint
    def arrays(self, n: int) -> list[np.ndarray]:
        return [np.full(3, i, np.float32) for i in range(n)]


@sk.service
class Left:
    base = sk.depends(Base)

    @sk.endpoint
    async def length(self, text: str) -> float:
        return (await self.base.embed.remote(text))[0]


@sk.service
class Right:
    base = sk.depends(Base)

    @sk.endpoint
    def length(self, text: str) -> float:
        return self.base.embed(text)[0]


@sk.service
class Root:
    left = sk.depends(Left)
    right = sk.depends(Right)
    base = sk.depends(Base)

    def __init__(self, factor: float = 1.0) -> None:
        EVENTS.append("root init")
        self.factor = factor

    @sk.setup
    async def check(self) -> None:
        self.ready_with = await self.left.length("abc")

    @sk.teardown
    def stop(self) -> None:
        EVENTS.append("root teardown")

    @sk.endpoint
    async def both(self, text: str) -> float:
        left = await self.left.length(text)
        return (left + await self.right.length.remote(text)) * self.factor

    @sk.endpoint
    def prepared(self) -> float:
        return self.ready_with

    @sk.endpoint
    async def words(self, text: str) -> AsyncIterator[str]:
        async for word in self.base.words(text):
            yield word.upper()

    @sk.endpoint
    async def total(self, n: int) -> float:
        return float(sum(a.sum() for a in await self.base.arrays.remote(n)))


def test_a_diamond_runs_with_one_replica_of_each(events):
    with sk.local(Root) as app:
        assert app.both.remote("hello").result() == 10.0
        assert list(app.words.remote("a b").iter_sync()) == ["A", "B"]
        assert events == ["base init", "root init"]
    assert events[2:] == ["root teardown", "base teardown"]


def test_dependencies_may_be_called_while_setting_up():
    with sk.local(Root) as app:
        assert app.prepared() == 3.0


def test_constructor_arguments():
    with sk.local(Root, args={"factor": 10.0}) as app:
        assert app.both.remote("hello").result() == 100.0
    with pytest.raises(SpecError, match="factr"), sk.local(Root, args={"factr": 10.0}):
        pass


@pytest.mark.parametrize("count", [3, 254, 255, 1000])
def test_many_arrays_travel_in_one_answer(count):
    with sk.local(Root) as app:
        assert app.total.remote(count).result() == 3.0 * sum(range(count))


def test_two_apps_at_once_do_not_touch():
    with sk.local(Root) as one, sk.local(Root, args={"factor": 2.0}) as two:
        assert one.both.remote("ab").result() == 4.0
        assert two.both.remote("ab").result() == 8.0


def test_nothing_is_left_running():
    before = threading.active_count()
    with sk.local(Root) as app:
        app.both.remote("x").result()
    for thread in threading.enumerate():
        if thread.name.startswith(("Root-", "Right-", "Base-")):
            thread.join(10)
    assert threading.active_count() <= before


# -- fakes


class SyncFake:
    def embed(self, text: str) -> list[float]:
        return [100.0]

    def words(self, text: str) -> Iterator[str]:
        return iter(["fake"])


class AsyncFake:
    async def embed(self, text: str) -> list[float]:
        return [200.0]

    async def words(self, text: str) -> AsyncIterator[str]:
        yield "fake"
        yield "faker"


@pytest.mark.parametrize(
    ("fake", "length", "words"),
    [(SyncFake(), 100.0, ["FAKE"]), (AsyncFake(), 200.0, ["FAKE", "FAKER"])],
)
def test_fakes_stand_in_for_dependencies(fake, length, words, events):
    fakes = {Left.base: fake, Right.base: fake, Root.base: fake}
    with sk.local(Root, overrides=fakes) as app:
        assert app.both.remote("x").result() == 2 * length
        assert list(app.words.remote("x").iter_sync()) == words
    assert "base init" not in events


def test_a_fake_replaces_one_edge_only():
    with sk.local(Root, overrides={Left.base: SyncFake()}) as app:
        assert app.both.remote("x").result() == 101.0


def test_a_whole_service_may_be_faked():
    class Fake:
        def length(self, text: str) -> float:
            return 7.0

    with sk.local(Root, overrides={Root.left: Fake(), Root.right: Fake()}) as app:
        assert app.both.remote("x").result() == 14.0


def test_a_fake_without_the_method_or_with_a_wrong_answer():
    class Wrong:
        def embed(self, text: str) -> str:
            return "no vector"

    with (
        sk.local(Left, overrides={Left.base: object()}) as app,
        pytest.raises(NotFound, match="no method 'embed'"),
    ):
        app.length.remote("x").result()
    with sk.local(Left, overrides={Left.base: Wrong()}) as app, pytest.raises(InvalidOutput):
        app.length.remote("x").result()


# -- failures


def test_wrong_input_is_refused_as_anywhere():
    with sk.local(Root) as app, pytest.raises((InvalidInput, TypeError)):
        app.both.remote(3).result()


@pytest.mark.parametrize("where", ["child", "root"])
def test_set_up_that_raises_ends_everything(where, events, until_sync):
    @sk.service
    class Bad:
        base = sk.depends(Base)

        def __init__(self) -> None:
            raise OSError("no weights")

        @sk.endpoint
        def f(self) -> int:
            return 1

    @sk.service
    class Above:
        bad = sk.depends(Bad)

        @sk.endpoint
        def f(self) -> int:
            return 1

    before = threading.active_count()
    with (
        pytest.raises(SetupError, match="no weights") as caught,
        sk.local(Above if where == "child" else Bad),
    ):
        pytest.fail("it should not have started")
    assert isinstance(caught.value.__cause__, OSError)
    assert events == ["base init", "base teardown"]
    assert threading.active_count() <= before


def test_what_is_no_service():
    class Plain: ...

    with pytest.raises(SpecError, match="no service"), sk.local(Plain):
        pass


def test_an_exception_in_the_block_passes_through(events):
    with pytest.raises(ZeroDivisionError), sk.local(Root):
        _ = 1 / 0
    assert events[-2:] == ["root teardown", "base teardown"]
