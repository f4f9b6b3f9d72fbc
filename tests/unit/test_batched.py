"""`@batched` endpoints: everybody gets their own result or error, whoever else is in the batch."""

import asyncio
import json
import threading

import msgspec
import numpy as np
import pytest

import servekit as sk
from servekit.core.call import BINARY, JSON, MSGPACK, Payload, now
from servekit.core.context import CURRENT, RequestContext
from servekit.errors import (
    DeadlineExceeded,
    ExecutionError,
    InvalidInput,
    InvalidOutput,
    NotFound,
    Overloaded,
    UnsupportedMedia,
)
from servekit.spec.body import pack, unpack
from tests.calls import make_call


class Gate:
    """Holds the first batch, so that what comes meanwhile runs together."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.batches: list[list[object]] = []


def gated(**policy):
    gate = Gate()

    @sk.service
    class S:
        @sk.batched(**({"max_size": 8} | policy))
        async def double(self, xs: list[int]) -> list[int]:
            gate.batches.append(xs[:])
            await gate.open.wait()
            return [2 * x for x in xs]

    return S, gate


def idle(replica) -> bool:
    figures = replica._batched[0].statistics()
    meter = replica._meters[0]
    return (
        figures.queued == figures.running_batches == meter.ongoing == meter.running == 0
        and not replica._batched[0]._running
    )


async def test_what_waits_while_a_batch_runs_runs_together(start, ask, until):
    service, gate = gated()
    replica = await start(service)
    tasks = [asyncio.create_task(ask(replica, "double", n)) for n in range(12)]
    await until(lambda: replica.load().ongoing == 12 and gate.batches)
    assert gate.batches == [[0]]
    gate.open.set()
    assert await asyncio.gather(*tasks) == [2 * n for n in range(12)]
    assert gate.batches == [[0], [1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11]]
    assert idle(replica)
    assert replica.finished == 12


async def test_batches_in_threads(start, ask):
    batches: list[list[int]] = []

    @sk.service
    class S:
        @sk.batched(max_size=4)
        def double(self, xs: list[int]) -> list[int]:
            assert threading.current_thread() is not threading.main_thread()
            batches.append(xs[:])
            return [2 * x for x in xs]

    replica = await start(S)
    results = await asyncio.gather(*(ask(replica, "double", n) for n in range(100)))
    assert results == [2 * n for n in range(100)]
    assert sorted(x for batch in batches for x in batch) == list(range(100))
    assert max(map(len, batches)) <= 4
    assert idle(replica)


async def test_several_batches_may_run_at_once(start, ask, until):
    service, gate = gated(concurrent_batches=3)
    replica = await start(service)
    tasks = [asyncio.create_task(ask(replica, "double", n)) for n in range(10)]
    await until(lambda: replica.load().ongoing == 10 and len(gate.batches) >= 3)
    assert len(gate.batches) == 3
    gate.open.set()
    assert await asyncio.gather(*tasks) == [2 * n for n in range(10)]
    assert idle(replica)


async def test_several_arguments(start, ask):
    @sk.service
    class S:
        @sk.batched(max_size=8)
        def add(self, xs: list[int], ys: list[int]) -> list[int]:
            return [x + y for x, y in zip(xs, ys, strict=True)]

    replica = await start(S)
    calls = (ask(replica, "add", {"xs": n, "ys": 100 * n}) for n in range(20))
    assert await asyncio.gather(*calls) == [101 * n for n in range(20)]


# -- errors


@sk.service
class Picky:
    """Refuses odd numbers in one way or another."""

    @sk.batched(max_size=8)
    def one_by_one(self, xs: list[int]) -> list[int | sk.ItemError]:
        return [sk.ItemError(ValueError("hunter2")) if x % 2 else x for x in xs]

    @sk.batched(max_size=8)
    def named(self, xs: list[int]) -> list[int | sk.ItemError]:
        return [sk.ItemError(NotFound(f"no {x}", reason="odd")) if x % 2 else x for x in xs]

    @sk.batched(max_size=8)
    def together(self, xs: list[int]) -> list[int]:
        if any(x % 2 for x in xs):
            raise ValueError("hunter2")
        return xs

    @sk.batched(max_size=8, isolate=True)
    def isolated(self, xs: list[int]) -> list[int]:
        if any(x % 2 for x in xs):
            raise ValueError("hunter2")
        return xs

    @sk.batched(max_size=8, isolate=True)
    async def short(self, xs: list[int]) -> list[int]:
        return [x for x in xs if not x % 2]

    @sk.batched(max_size=8)
    def count(self, xs: list[int]) -> list[int]:
        return [*xs, 1]

    @sk.batched(max_size=8)
    def none(self, xs: list[int]) -> list[int]:
        return None  # type: ignore[return-value]

    @sk.batched(max_size=8)
    async def types(self, xs: list[int]) -> list[int]:
        return ["text" if x % 2 else x for x in xs]  # type: ignore[misc]

    @sk.batched(max_size=8)
    def leave(self, xs: list[int]) -> list[int]:
        raise SystemExit(1)


async def outcomes(ask, replica, endpoint, bodies):
    calls = (ask(replica, endpoint, b, request_id=f"id-{b}") for b in bodies)
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize(
    ("endpoint", "error"),
    [
        ("one_by_one", ExecutionError),
        ("named", NotFound),
        ("isolated", ExecutionError),
        ("short", InvalidOutput),
        ("types", InvalidOutput),
    ],
)
async def test_one_bad_item_fails_alone(endpoint, error, start, ask, caplog):
    replica = await start(Picky)
    got = await outcomes(ask, replica, endpoint, [0, 2, 4, 6, 7, 8, 10, 12])
    assert [x for x in got if isinstance(x, int)] == [0, 2, 4, 6, 8, 10, 12]
    assert type(got[4]) is error
    assert "hunter2" not in str(got[4])
    await ask(replica, endpoint, 2)


async def test_an_item_error_that_is_a_call_error_stays_one(start, ask):
    replica = await start(Picky)
    with pytest.raises(NotFound, match="no 3") as caught:
        await ask(replica, "named", 3)
    assert caught.value.reason == "odd"


@pytest.mark.parametrize(
    ("endpoint", "error"),
    [
        ("together", ExecutionError),
        ("count", InvalidOutput),
        ("none", InvalidOutput),
        ("leave", ExecutionError),
    ],
)
async def test_a_batch_that_fails_as_a_whole_fails_for_all_of_it(
    endpoint, error, start, ask, until, caplog
):
    replica = await start(Picky)
    got = await outcomes(ask, replica, endpoint, [1, 3, 5])
    assert [type(x) for x in got] == [error] * 3
    assert "hunter2" not in str(got)
    if error is ExecutionError:
        assert "Traceback" in caplog.text
        assert all(f"id-{n}" in caplog.text for n in (1, 3, 5))
    await until(lambda: replica.load().ongoing == 0)
    # The endpoint lives on.
    assert (await outcomes(ask, replica, endpoint, [1]))[0].__class__ is error


@pytest.mark.parametrize(
    ("callback", "bad"),
    [("size_of", bad) for bad in (ValueError("hunter2"), None, -1, 0, "3", 2.5, [], float("nan"))]
    + [("bucket_by", bad) for bad in (ValueError("hunter2"), [], {})],
    ids=repr,
)
async def test_a_callback_that_fails_for_one_item_fails_it_alone(
    callback, bad, start, ask, until, caplog
):
    gate = asyncio.Event()

    def judge(x: int) -> object:
        if x != 13:
            return 1
        if isinstance(bad, Exception):
            raise bad
        return bad

    @sk.service
    class S:
        @sk.batched(max_size=8, **{callback: judge})
        async def same(self, xs: list[int]) -> list[int]:
            await gate.wait()
            return xs

    replica = await start(S)
    bodies = [1, 2, 13, 3, 13, 4]
    tasks = [asyncio.create_task(ask(replica, "same", b, deadline=now() + 60)) for b in bodies]
    await until(lambda: sum(task.done() for task in tasks) == 2)
    gate.set()
    got = await asyncio.gather(*tasks, return_exceptions=True)
    assert [x for x in got if isinstance(x, int)] == [1, 2, 3, 4]
    assert type(got[2]) is type(got[4]) is ExecutionError
    assert "hunter2" not in str(got)
    assert await ask(replica, "same", 5) == 5
    assert idle(replica)


async def test_an_item_too_large_for_any_batch(start, ask):
    @sk.service
    class S:
        @sk.batched(max_size=8, size_of=len)
        def same(self, xs: list[str]) -> list[str]:
            return xs

    replica = await start(S)
    with pytest.raises(InvalidInput, match="9 rows, a batch at most 8") as caught:
        await ask(replica, "same", "x" * 9)
    assert caught.value.fields[0]["type"] == "too_large"
    assert await ask(replica, "same", "x" * 8) == "x" * 8


# -- queues and deadlines


async def test_a_full_queue(start, ask, until):
    service, gate = gated(max_queued=3, max_size=2)
    replica = await start(service)
    tasks = [asyncio.create_task(ask(replica, "double", n)) for n in range(4)]
    await until(lambda: replica.load().ongoing == 4)
    with pytest.raises(Overloaded) as caught:
        await ask(replica, "double", 5)
    error = caught.value
    assert (error.status, error.reason, error.started) == (429, "queue_full", False)
    assert error.retry_after_s is not None
    assert error.retry_after_s > 0
    gate.open.set()
    assert await asyncio.gather(*tasks) == [0, 2, 4, 6]
    assert idle(replica)


async def test_who_is_late_is_never_run(start, ask):
    service, gate = gated()
    replica = await start(service)
    with pytest.raises(DeadlineExceeded) as caught:
        await ask(replica, "double", 1, deadline=now() - 1)
    assert not caught.value.started
    assert gate.batches == []
    assert idle(replica)


async def test_callers_that_leave_the_queue_leave_no_trace(start, ask, until):
    service, gate = gated()
    replica = await start(service)
    tasks = [asyncio.create_task(ask(replica, "double", n)) for n in range(50)]
    await until(lambda: replica.load().ongoing == 50)
    for task in tasks[1:]:
        task.cancel()
    await until(lambda: replica.load().ongoing == 1)
    assert replica._batched[0].statistics().queued == 0
    replica.metrics()
    assert replica._meters[0]._queued.value == 0
    gate.open.set()
    assert await tasks[0] == 0
    assert gate.batches == [[0]]
    assert idle(replica)


async def test_impatient_callers_do_not_harm_patient_ones(start, ask, until):
    service, gate = gated(max_size=32)
    replica = await start(service)
    hasty = [asyncio.create_task(ask(replica, "double", n)) for n in range(200)]
    await until(lambda: replica.load().ongoing == 200)
    for task in hasty:
        task.cancel()
    patient = [asyncio.create_task(ask(replica, "double", n)) for n in range(1000, 1050)]
    await until(lambda: replica.load().ongoing == 50)
    gate.open.set()
    assert await asyncio.gather(*patient) == [2 * n for n in range(1000, 1050)]
    await asyncio.gather(*hasty, return_exceptions=True)
    assert all(n >= 1000 for batch in gate.batches[1:] for n in batch)
    await until(lambda: idle(replica))


async def test_a_caller_that_leaves_a_running_batch_does_not_stop_it(start, ask, until):
    service, gate = gated(max_size=4)
    replica = await start(service)
    first = asyncio.create_task(ask(replica, "double", 0))
    await until(lambda: gate.batches)
    tasks = [asyncio.create_task(ask(replica, "double", n)) for n in (1, 2, 3)]
    await until(lambda: replica.load().ongoing == 4)
    first.cancel()
    gate.open.set()
    assert await asyncio.gather(*tasks) == [2, 4, 6]
    assert first.cancelled()
    await until(lambda: idle(replica))


async def test_max_wait_fills_a_batch(start, ask):
    sizes: list[int] = []

    @sk.service
    class S:
        @sk.batched(max_size=4, max_wait_ms=60_000)
        async def same(self, xs: list[int]) -> list[int]:
            sizes.append(len(xs))
            await asyncio.sleep(0.001)
            return xs

    replica = await start(S)
    for _ in range(3):
        await asyncio.gather(*(ask(replica, "same", n, deadline=now() + 60) for n in range(4)))
    assert sum(sizes) == 12
    assert idle(replica)


async def test_a_batch_that_shrinks_before_its_start_runs_the_rest_and_teaches_nothing(
    start, ask, until, monkeypatch
):
    service, gate = gated(target_ms=1000)
    gate.open.set()
    replica = await start(service)
    batched = replica._batched[0]
    assert await ask(replica, "double", 1) == 2
    known = batched.statistics()
    assert known.alpha_s > 0
    gate.open.clear()
    block = asyncio.create_task(ask(replica, "double", 0))
    await until(lambda: len(gate.batches) == 2)
    tasks = [asyncio.create_task(ask(replica, "double", n)) for n in range(2, 8)]
    await until(lambda: replica.load().ongoing == 7)

    def only_odd(batch):
        gate.open.clear()
        for entry in batch:
            entry.late = entry.args[0] % 2 == 0
        return [entry for entry in batch if not entry.late]

    monkeypatch.setattr("servekit.runtime.batched._in_time", only_odd)
    gate.open.set()
    await block
    await until(lambda: len(gate.batches) == 3)
    taught = batched.statistics()
    gate.open.set()
    assert await asyncio.gather(*tasks[1::2]) == [6, 10, 14]
    await until(lambda: batched.statistics().running_batches == 0)
    assert gate.batches[2:] == [[3, 5, 7]]
    after = batched.statistics()
    assert (after.alpha_s, after.beta_s) == (taught.alpha_s, taught.beta_s)
    for task in tasks[::2]:
        with pytest.raises(DeadlineExceeded):
            await task
    await until(lambda: idle(replica))


# -- buckets and padding


async def test_only_equal_buckets_share_a_batch(start, ask, until):
    service, gate = gated(bucket_by=lambda x: x % 3)
    replica = await start(service)
    tasks = [asyncio.create_task(ask(replica, "double", n)) for n in range(30)]
    await until(lambda: replica.load().ongoing == 30)
    gate.open.set()
    assert await asyncio.gather(*tasks) == [2 * n for n in range(30)]
    assert all(len({x % 3 for x in batch}) == 1 for batch in gate.batches)
    assert max(map(len, gate.batches)) > 1


async def test_batches_are_padded_and_the_padding_goes_nowhere(start, ask, until):
    service, gate = gated(pad_to=(1, 4, 8))
    replica = await start(service)
    tasks = [asyncio.create_task(ask(replica, "double", n)) for n in range(1 + 3 + 8 + 2)]
    await until(lambda: replica.load().ongoing == 14)
    gate.open.set()
    assert await asyncio.gather(*tasks) == [2 * n for n in range(14)]
    assert {len(batch) for batch in gate.batches} <= {1, 4, 8}
    assert replica._batched[0].statistics().rows == 14


# -- items and their contexts


async def test_each_item_brings_its_own_context(start, ask, until):
    gate = asyncio.Event()

    @sk.service
    class S:
        @sk.batched(max_size=8)
        async def who(self, items: list[sk.Item[int]]) -> list[list[object]]:
            await gate.wait()
            return [
                [i.value, i.ctx.request_id, i.ctx.headers["x-who"], i.ctx.deadline, i.ctx.attempt]
                for i in items
            ]

    replica = await start(S)
    deadlines = [now() + 60 + n for n in range(17)]

    def one(n: int):
        headers = msgspec.msgpack.encode([[b"X-Who", b"w%d" % n]])
        settings = {"headers": headers, "deadline": deadlines[n], "attempt": n % 3}
        return asyncio.create_task(ask(replica, "who", n, request_id=f"id-{n}", **settings))

    tasks = [one(n) for n in range(17)]
    await until(lambda: replica.load().ongoing == 17)
    gate.set()
    got = await asyncio.gather(*tasks)
    assert got == [[n, f"id-{n}", f"w{n}", deadlines[n], n % 3] for n in range(17)]


async def test_an_item_knows_that_its_caller_has_left(start, ask, until):
    seen: list[sk.Item[int]] = []
    gate = asyncio.Event()

    @sk.service
    class S:
        @sk.batched(max_size=8)
        async def same(self, items: list[sk.Item[int]]) -> list[int]:
            seen.extend(items)
            await gate.wait()
            return [item.value for item in items]

    replica = await start(S)
    block = asyncio.create_task(ask(replica, "same", 0))
    await until(lambda: seen)
    block.cancel()
    await until(lambda: seen[0].ctx.cancelled)
    gate.set()
    await until(lambda: idle(replica))


@pytest.mark.parametrize("name", ["sync", "coro", "called"])
async def test_a_batch_has_no_current_request(name, start, ask, caplog):
    @sk.service
    class S:
        @sk.batched(max_size=8)
        def sync(self, xs: list[int]) -> list[str]:
            return [sk.context().request_id for _ in xs]

        @sk.batched(max_size=8)
        async def coro(self, xs: list[int]) -> list[str]:
            return [sk.context().request_id for _ in xs]

        @sk.batched(max_size=8)
        async def called(self, xs: list[int]) -> list[str]:
            return [await asyncio.to_thread(lambda: sk.context().request_id) for _ in xs]

    replica = await start(S)
    CURRENT.set(RequestContext(make_call("S", "f")))  # as in a service that calls this one
    for _ in range(2):
        with pytest.raises(ExecutionError):
            await ask(replica, name, 1)
    assert "no current request" in caplog.text


# -- arrays


@sk.service
class Arrays:
    shapes: list[tuple[int, ...]]

    def __init__(self) -> None:
        self.shapes = []
        self.gate = asyncio.Event()

    @sk.batched(max_size=32, axis=0)
    async def double(self, x: sk.Array["float32", "N 2"]) -> sk.Array["float32", "N 2"]:
        self.shapes.append(x.shape)
        await self.gate.wait()
        return x * 2

    @sk.batched(max_size=32, axis=1)
    async def across(self, x: np.ndarray) -> np.ndarray:
        self.shapes.append(x.shape)
        await self.gate.wait()
        return x * 2


async def send(replica, endpoint, array):
    payload = Payload(MSGPACK, (pack(array),))
    reply = await replica(make_call("S", endpoint, payload, request_id="r", accept=MSGPACK))
    return unpack(reply.payload.segments[0])


async def test_arrays_are_joined_and_each_caller_gets_its_own_rows(start, until):
    replica = await start(Arrays)
    service = replica._instance
    arrays = [np.full((1 + n % 5, 2), n, np.float32) for n in range(40)]
    tasks = [asyncio.create_task(send(replica, "double", a)) for a in arrays]
    await until(lambda: replica.load().ongoing == 40)
    service.gate.set()
    for array, result in zip(arrays, await asyncio.gather(*tasks), strict=True):
        np.testing.assert_array_equal(result, array * 2)
        assert result.dtype == np.float32
    assert all(rows <= 32 for rows, _ in service.shapes)
    assert len(service.shapes) < 40


async def test_arrays_of_other_shapes_and_types_are_kept_apart(start, until):
    replica = await start(Arrays)
    service = replica._instance
    arrays = [
        np.full((1 + n % 3, 2 + n % 2, 1 + n % 4), n, np.float32 if n % 3 else np.float64)
        for n in range(30)
    ]
    tasks = [asyncio.create_task(send(replica, "across", a)) for a in arrays]
    await until(lambda: replica.load().ongoing == 30)
    service.gate.set()
    for array, result in zip(arrays, await asyncio.gather(*tasks), strict=True):
        np.testing.assert_array_equal(result, array * 2)
        assert result.dtype == array.dtype


@pytest.mark.parametrize(
    ("endpoint", "array"),
    [
        ("double", np.zeros((0, 2), np.float32)),
        ("across", np.zeros((2, 0))),
        ("across", np.zeros(())),
        ("across", np.zeros(3)),
    ],
)
async def test_an_array_that_fits_no_batch_is_the_callers_error(endpoint, array, start, until):
    replica = await start(Arrays)
    service = replica._instance
    good = np.ones((2, 2), np.float32)
    tasks = [asyncio.create_task(send(replica, endpoint, good)) for _ in range(3)]
    await until(lambda: replica.load().ongoing == 3)
    for _ in range(2):
        with pytest.raises(InvalidInput):
            await send(replica, endpoint, array)
    service.gate.set()
    for result in await asyncio.gather(*tasks):
        np.testing.assert_array_equal(result, good * 2)
    await until(lambda: idle(replica))


# -- a client's own batch


async def test_a_clients_batch_is_answered_item_by_item(start, ask):
    replica = await start(Picky)
    got = await ask(replica, "named/batch", [0, 1, 2, 3])
    assert [item.get("result") for item in got] == [0, None, 2, None]
    assert got[1]["error"] == {"code": "not_found", "reason": "odd", "message": "no 1"}
    assert "error" not in got[0]
    assert await ask(replica, "named/batch", []) == []


async def test_clients_batches_never_make_a_batch_over_the_limit(start, ask, until):
    service, gate = gated(max_size=32)
    replica = await start(service)
    bodies = [list(range(100 * c, 100 * c + 32)) for c in range(5)]
    tasks = [asyncio.create_task(ask(replica, "double/batch", body)) for body in bodies]
    await until(lambda: replica.load().ongoing == 160)
    gate.open.set()
    for body, got in zip(bodies, await asyncio.gather(*tasks), strict=True):
        assert got == [{"result": 2 * n} for n in body]
    assert max(map(len, gate.batches)) <= 32
    assert sum(map(len, gate.batches)) == 160
    assert idle(replica)


async def test_a_clients_batch_that_is_cancelled_leaves_nothing(start, ask, until):
    service, gate = gated(max_size=4)
    replica = await start(service)
    task = asyncio.create_task(ask(replica, "double/batch", list(range(40))))
    await until(lambda: replica.load().ongoing == 40)
    task.cancel()
    await until(lambda: replica.load().ongoing == 0)
    gate.open.set()
    await until(lambda: idle(replica))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_clients_batch_may_overflow_the_queue(start, ask):
    service, gate = gated(max_size=4, max_queued=6)
    gate.open.set()
    replica = await start(service)
    got = await ask(replica, "double/batch", list(range(10)))
    refused = [item for item in got if "error" in item]
    assert len(got) - len(refused) == 7
    assert all(item["error"]["reason"] == "queue_full" for item in refused)
    assert idle(replica)


@pytest.mark.parametrize("rows", [33, 64, 100])
async def test_a_longer_array_than_a_batch_goes_in_parts(rows, start):
    replica = await start(Arrays)
    replica._instance.gate.set()
    array = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    np.testing.assert_array_equal(await send(replica, "double", array), array * 2)
    shapes = replica._instance.shapes
    assert sum(shape[0] for shape in shapes) == rows
    assert max(shape[0] for shape in shapes) <= 32
    assert idle(replica)


@pytest.mark.parametrize("body", [{"xs": 1}, "text", 7])
async def test_a_clients_batch_that_is_wrong(body, start, ask):
    replica = await start(Picky)
    with pytest.raises(InvalidInput):
        await ask(replica, "named/batch", body)


async def test_a_wrong_item_of_a_clients_batch_fails_alone(start, ask):
    replica = await start(Picky)
    good, bad = await ask(replica, "named/batch", [2, "two"])
    assert "result" in good
    assert bad["error"]["code"] == "invalid_input"


async def test_a_clients_batch_is_answered_in_json_only(start):
    replica = await start(Picky)
    payload = Payload(JSON, (json.dumps([2]).encode(),))
    call = make_call("S", "named/batch", payload, request_id="r", accept=BINARY)
    with pytest.raises(UnsupportedMedia):
        await replica(call)
