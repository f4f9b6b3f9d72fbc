"""Calls as arguments of calls: who makes them, what arrives, and what goes wrong."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self

import numpy as np
import pytest

import servekit as sk
from servekit.core.call import Call, Handler, Payload, Reply
from servekit.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    ExecutionError,
    InvalidInput,
    Overloaded,
    ServekitError,
)
from servekit.runtime.handle import Options, ServiceHandle
from servekit.runtime.replica import Replica
from servekit.spec.definition import definition
from servekit.spec.describe import describe
from servekit.wire import memory
from servekit.wire.connection import Connection
from servekit.wire.frames import Hello
from tests.calls import make_call

Vector = sk.Array["float32", "n"]


@sk.service
class Maker:
    began = 0
    cancelled = 0

    @sk.endpoint(idempotent=True)
    async def vector(self, size: int) -> Vector:
        return np.arange(size, dtype=np.float32)

    @sk.endpoint(idempotent=True)
    async def add(self, x: int, y: int = 1) -> int:
        return x + y

    @sk.endpoint
    async def once(self) -> int:
        Maker.began += 1
        return Maker.began

    @sk.endpoint(idempotent=True)
    async def text(self) -> str:
        return "no number"

    @sk.endpoint
    async def fail(self) -> int:
        raise BadRequest("not today")

    @sk.endpoint
    async def never(self) -> int:
        Maker.began += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            Maker.cancelled += 1
        return 0


@sk.service
class User:
    @sk.endpoint(idempotent=True)
    async def total(self, vector: Vector, scale: float = 1.0) -> float:
        return float(vector.sum()) * scale

    @sk.endpoint(idempotent=True)
    async def apart(self, first: Vector, name: str, second: Vector) -> tuple[int, str, int]:
        return first.size, name, second.size

    @sk.endpoint(idempotent=True)
    async def body(self, vector: Vector, /) -> int:
        return vector.size

    @sk.batched(max_size=8)
    async def squares(self, numbers: list[int]) -> list[int]:
        return [n * n for n in numbers]

    @sk.endpoint
    async def count(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number


@sk.service(limits=sk.Limits(max_ongoing=1, max_queued=0))
class Full:
    @sk.endpoint
    async def hold(self, number: int = 0) -> None:
        Maker.began += 1
        await asyncio.get_running_loop().create_future()


class Apart:
    """Two replicas, and a caller beside them; each side's calls are written down."""

    def __init__(self) -> None:
        self.by_caller: list[str] = []
        self.by_replica: list[Call] = []
        self._handlers: dict[str, Handler] = {}
        self._closing: list[Any] = []

    async def __aenter__(self) -> Self:
        Maker.began = Maker.cancelled = 0
        for service in (Maker, User, Full):
            found = definition(service)
            spec = describe(service).service(found.name)
            replica = Replica(
                found, spec, replica_id=f"{found.name}-1", outward=self._from_a_replica
            )
            await replica.start({})
            server = Connection(Hello(found.name), client=False, handler=replica)
            client = Connection(Hello(), client=True)
            await memory.join(client, server)
            self._handlers[found.name] = client.call
            self._closing += [client.close, server.close, replica.stop]
        self.maker, self.user, self.full = self.handles(self.route)
        return self

    async def __aexit__(self, *_: object) -> None:
        for close in self._closing:
            await close()

    @staticmethod
    def handles(handler: Handler) -> tuple[Any, Any, Any]:
        """Return handles of the services over a handler."""
        loop = asyncio.get_running_loop()
        maker, user, full = (
            ServiceHandle(definition(s), s.__name__, handler, loop, Options(), pipelines=True)
            for s in (Maker, User, Full)
        )
        return maker, user, full

    async def route(self, call: Call) -> Reply:
        self.by_caller.append(call.endpoint)
        return await self._handlers[call.service](call)

    async def _from_a_replica(self, call: Call) -> Reply:
        self.by_replica.append(call)
        return await self._handlers[call.service](call)


async def test_the_callee_makes_the_call():
    async with Apart() as app:
        total = await app.user.total.remote(sk.promise(app.maker.vector.remote(1000)), scale=2.0)
        assert total == 999 * 1000
        assert app.by_caller == ["total"]
        assert [call.endpoint for call in app.by_replica] == ["vector"]


async def test_in_the_declared_form():
    async with Apart() as app:
        assert await app.user.total(app.maker.vector.remote(3)) == 3.0
        assert app.by_caller == ["total"]


async def test_several_and_others_between_them():
    async with Apart() as app:
        answer = await app.user.apart.remote(
            app.maker.vector.remote(70_000), second=app.maker.vector.remote(5), name="é"
        )
        assert answer == (70_000, "é", 5)
        assert app.by_caller == ["apart"]


async def test_a_body():
    async with Apart() as app:
        assert await app.user.body.remote(app.maker.vector.remote(7)) == 7
        assert app.by_caller == ["body"]


async def test_a_batched_endpoint_and_a_stream():
    async with Apart() as app:
        squares = [app.user.squares.remote(app.maker.add.remote(n)) for n in range(5)]
        assert await asyncio.gather(*squares) == [1, 4, 9, 16, 25]
        counted = app.user.count.remote(app.maker.add.remote(2))
        assert [number async for number in counted] == [0, 1, 2]
        assert set(app.by_caller) == {"squares", "count"}


async def test_a_promise_within_a_promise():
    async with Apart() as app:
        deep = app.maker.add.remote(app.maker.add.remote(app.maker.add.remote(1), 10), y=100)
        assert await app.user.squares.remote(deep) == 112**2
        assert app.by_caller == ["squares"]
        assert [call.endpoint for call in app.by_replica] == ["add"] * 3


async def test_what_runs_already_is_waited_for():
    async with Apart() as app:
        begun = app.maker.add.remote(1)
        await asyncio.sleep(0.05)
        assert await app.user.apart.remote(
            app.maker.vector.remote(4), "x", second=app.maker.vector.remote(5)
        ) == (4, "x", 5)
        assert await app.user.squares.remote(begun) == 4
        assert app.by_caller == ["add", "apart", "squares"]


async def test_some_travel_and_some_are_waited_for():
    async with Apart() as app:
        begun = app.maker.vector.remote(3)
        await asyncio.sleep(0.05)
        late = app.maker.vector.remote(4)
        assert await app.user.apart.remote(begun, "x", late) == (3, "x", 4)
        assert app.by_caller == ["vector", "apart"]


def test_in_a_test_and_on_any_thread():
    @sk.service
    class Both:
        maker = sk.depends(Maker)
        user = sk.depends(User)

        @sk.endpoint
        async def on_the_loop(self) -> float:
            return await self.user.total.remote(sk.promise(self.maker.vector.remote(3)))

        @sk.endpoint
        def in_a_thread(self) -> float:
            return self.user.total.remote(sk.promise(self.maker.vector.remote(3))).result()

    with sk.local(Both) as both:
        assert both.on_the_loop.remote().result() == 3.0
        assert both.in_a_thread.remote().result() == 3.0


# -- what goes wrong


async def test_its_error_is_the_others():
    async with Apart() as app:
        with pytest.raises(BadRequest, match="not today"):
            await app.user.squares.remote(app.maker.fail.remote())


async def test_a_result_of_the_wrong_type_names_the_parameter():
    async with Apart() as app:
        with pytest.raises(InvalidInput, match=r"User.total: vector: .* got 'no number'"):
            await app.user.total.remote(app.maker.text.remote())
        with pytest.raises(InvalidInput, match=r"User.body: "):
            await app.user.body.remote(app.maker.text.remote())


async def test_arguments_that_do_not_fit_fail_at_the_call():
    async with Apart() as app:
        with pytest.raises(TypeError, match=r"no parameter 'vektor'. Did you mean 'vector'"):
            app.user.total.remote(vektor=app.maker.vector.remote(3))
        with pytest.raises(TypeError, match="two values"):
            app.user.total.remote(app.maker.vector.remote(3), vector=[1.0])
        with pytest.raises(TypeError, match="1 positional"):
            app.user.body.remote(app.maker.vector.remote(3), 2)
        with pytest.raises(TypeError, match="scale"):
            app.user.total.remote(app.maker.vector.remote(3), scale="much")
        with pytest.raises(InvalidInput, match="vector"):
            await app.user.total.remote(scale=app.maker.add.remote(1))


async def test_twice_is_refused():
    async with Apart() as app:
        vector = app.maker.vector.remote(3)
        first, second = app.user.total.remote(vector), app.user.total.remote(vector)
        assert await first == 3.0
        with pytest.raises(ServekitError, match=r"Maker.vector: .* passed on"):
            await second
        with pytest.raises(ServekitError, match="passed on"):
            await vector


async def test_cancelling_the_outer_call_cancels_the_inner(until):
    async with Apart() as app:
        call = app.user.squares.remote(app.maker.never.remote())
        await until(lambda: Maker.began == 1)
        assert call.cancel()
        await until(lambda: Maker.cancelled == 1)


async def test_of_several_one_that_fails_ends_the_others(until):
    async with Apart() as app:
        with pytest.raises(BadRequest, match="not today"):
            await app.maker.add.remote(app.maker.never.remote(), app.maker.fail.remote())
        await until(lambda: Maker.cancelled == Maker.began)


async def test_the_deadline_holds_for_both(until):
    async with Apart() as app:
        hurried = app.user.squares.options(timeout_s=0.2)
        with pytest.raises((DeadlineExceeded, Cancelled)):
            await hurried.remote(app.maker.never.options(timeout_s=60).remote())
        await until(lambda: Maker.cancelled == 1)


async def test_the_router_is_told_what_may_not_run_twice():
    """The outer call may be sent again only if the inner may."""
    async with Apart() as app:
        sent: list[Call] = []

        async def note(call: Call) -> Reply:
            sent.append(call)
            return await app.route(call)

        maker, user, _ = app.handles(note)
        assert await user.total.remote(maker.vector.remote(3)) == 3.0
        assert await user.total.remote(np.ones(1, np.float32), scale=maker.once.remote()) == 1.0
        assert [call.idempotent for call in sent] == [True, False]


async def test_a_refusal_behind_what_has_run_is_none(until):
    """A full queue says that nothing has begun, so the call is sent elsewhere; here something has."""
    async with Apart() as app:
        busy = app.full.hold.remote()
        await until(lambda: Maker.began == 1)
        for inner, started in (("add", False), ("once", True)):
            arguments = (1,) if inner == "add" else ()
            with pytest.raises(Overloaded) as caught:
                await app.full.hold.remote(getattr(app.maker, inner).remote(*arguments))
            assert caught.value.started is started
        busy.cancel()


@pytest.mark.parametrize("promises", [b"\xff", b"\xc1", b"\x90", b"\x91\x96", b"x" * 100])
async def test_what_is_no_promise(promises):
    async with Apart() as app:
        call = make_call("User", "total", internal=True, promises=promises)
        with pytest.raises((BadRequest, InvalidInput)):
            await app.route(call)


async def test_segments_that_are_not_there():
    async with Apart() as app:
        seen: list[Call] = []

        async def cut(call: Call) -> Reply:
            call.payload = Payload(call.payload.content_type, call.payload.segments[:1])
            seen.append(call)
            return await app.route(call)

        maker, user, _ = app.handles(cut)
        with pytest.raises(BadRequest, match="segments"):
            await user.total.remote(maker.vector.remote(3))


async def test_from_outside_nothing_is_believed():
    """A gateway's call never brings calls; one that does is refused before any is made."""
    async with Apart() as app:
        sent: list[Call] = []

        async def from_outside(call: Call) -> Reply:
            call.internal = False
            sent.append(call)
            return await app.route(call)

        maker, user, _ = app.handles(from_outside)
        with pytest.raises(BadRequest, match="takes no calls"):
            await user.total.remote(maker.once.remote())
        assert not Maker.began
        assert sent


def test_a_failure_that_is_no_call_error():
    @sk.service
    class Raises:
        @sk.endpoint
        async def it(self) -> int:
            raise RuntimeError("secret")

    @sk.service
    class Outer:
        raises = sk.depends(Raises)
        maker = sk.depends(Maker)

        @sk.endpoint
        async def ask(self) -> int:
            return await self.maker.add.remote(sk.promise(self.raises.it.remote()))

    with sk.local(Outer) as outer, pytest.raises(ExecutionError):
        outer.ask.remote().result()
