"""Running a `@batched` endpoint: calls go into the pure batcher, its decisions are carried out.

Each call is decoded on arrival and waits in the batcher; the batcher says which ones run
together; every caller gets its own row, or its own error.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import index
from typing import Any

import msgspec

from servekit.core.call import EMPTY, JSON, Call, Payload, Reply, now
from servekit.core.context import CURRENT, RequestContext
from servekit.errors import (
    CallError,
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    UnsupportedMedia,
)
from servekit.observe.families import Families
from servekit.runtime.batcher import Batcher, BatcherStatistics, Decision, Dispatch, Refuse
from servekit.runtime.collate import cut, glue, join, split
from servekit.runtime.endpoints import masked
from servekit.runtime.form import drop
from servekit.runtime.meter import Meter
from servekit.runtime.queue import Entry
from servekit.runtime.threads import Threads
from servekit.spec.definition import EndpointDefinition
from servekit.spec.item import Item, ItemError
from servekit.spec.schema import Arguments


class _Waiting(Entry):
    """One item on board, with its arguments and the future of its result."""

    __slots__ = ("args", "context", "dispatched", "future", "late")

    def __init__(
        self,
        id_: int,
        rows: int,
        key: object,
        args: tuple[Any, ...],
        context: RequestContext,
        future: "asyncio.Future[Any]",
    ) -> None:
        call = context.call
        super().__init__(id_, rows, call.deadline, call.priority, key)
        self.args = args
        self.context = context
        self.future = future
        self.dispatched = 0.0
        self.late = False

    def with_context(self) -> tuple[Any, ...]:
        """Return the arguments as `Item`s that know the call they came from."""
        return tuple([Item(arg, self.context) for arg in self.args])


def _in_time(batch: Sequence[_Waiting]) -> list[_Waiting]:
    """Look at the clock right before the work begins: who waits no more must not be run for."""
    time = now()
    for entry in batch:
        entry.late = entry.deadline is not None and entry.deadline <= time
    return [entry for entry in batch if not entry.late]


class Batched:
    """Calls of one batched endpoint.

    Args:
        instance: The service object.
        definition: The endpoint; has a `batch` policy.
        threads: Where a sync function runs.
        meter: Gets the figures.
        families: Gets the batch sizes.
        service: Name of the service in the graph.
    """

    def __init__(
        self,
        instance: object,
        definition: EndpointDefinition,
        threads: Threads,
        meter: Meter,
        families: Families,
        *,
        service: str,
    ) -> None:
        assert definition.batch is not None
        self._policy = policy = definition.batch
        self._fn: Callable[..., Any] = partial(definition.fn, instance)
        self._definition = definition
        self._sized = policy.axis is not None or definition.size_of or definition.bucket_by
        self._where = definition.where
        self._input, self._output = definition.schemas
        self._threads = threads
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._batcher = Batcher(policy)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._armed: float | None = None
        self._last_id = 0
        labels = {"service": service, "endpoint": definition.name}
        self._batch_size = families.batch_size.labels(**labels)
        self._batch_fill = families.batch_fill_ratio.labels(**labels)

    async def __call__(self, call: Call, context: RequestContext) -> Reply:
        """Answer one call of one item.

        Raises:
            CallError: The input is wrong, there is no room, time is up, or user code raised.
        """
        given = call.arguments
        try:
            args, kwargs = given or self._input.decode(call.payload, internal=call.internal)
        except CallError:
            drop(call)
            raise
        if given is None:
            call.payload = EMPTY
        else:
            call.arguments = None
        value, waited = await self._value((*args, *kwargs.values()), context)
        if given is not None:
            return Reply(value=value, queue_s=waited)
        payload = self._output.encode(value, accept=call.accept, internal=call.internal)
        return Reply(payload, queue_s=waited)

    def _value(
        self, args: tuple[Any, ...], context: RequestContext
    ) -> Awaitable[tuple[Any, float]]:
        """Return the result for one item and the seconds it waited; a long array goes in parts."""
        if self._policy.axis is not None:
            parts = cut(args[0], self._policy)
            if len(parts) > 1:
                return self._value_of_parts(parts, context)
        return self._result(self._enter(args, context))

    async def _value_of_parts(
        self, parts: Sequence[Any], context: RequestContext
    ) -> tuple[Any, float]:
        entered = [self._enter((part,), context) for part in parts]
        values, waited = zip(*await asyncio.gather(*map(self._result, entered)), strict=True)
        return glue(values, self._policy), waited[0]

    async def many(self, call: Call, context: RequestContext) -> Reply:
        """Answer one call of many items: one `{"result"}` or `{"error"}` each, in their order.

        Raises:
            CallError: The input is wrong. What fails for one item stands in its place.
        """
        if "json" not in call.accept and "*" not in call.accept and call.accept:
            raise UnsupportedMedia(f"{self._where}/batch answers {JSON}, not {call.accept}")
        inputs = self._input.decode_batch(call.payload, internal=call.internal)
        results = await asyncio.gather(*(self._one_of_many(item, context) for item in inputs))
        return Reply(Payload(JSON, (b"[" + b",".join(results) + b"]",)))

    async def _one_of_many(self, item: Arguments | InvalidInput, context: RequestContext) -> bytes:
        try:
            if isinstance(item, InvalidInput):
                raise item
            args, kwargs = item
            value, _ = await self._value((*args, *kwargs.values()), context)
            document = self._output.encode(value, accept=JSON).segments[0]
        except CallError as error:
            return b'{"error":' + msgspec.json.encode(error.details()) + b"}"
        return b'{"result":' + document + b"}"

    def _enter(self, args: tuple[Any, ...], context: RequestContext) -> _Waiting:
        self._last_id += 1
        definition, axis = self._definition, self._policy.axis
        rows, key = 1, None
        if self._sized:
            try:
                if axis is not None:
                    rows = self._rows(args[0].shape, axis)
                if definition.size_of is not None:
                    rows = index(definition.size_of(args[0]))
                    if rows < 1:
                        raise ValueError(f"size_of returned {rows}, not 1 or more")
                if definition.bucket_by is not None:
                    key = definition.bucket_by(args[0])
                if axis is not None:
                    shape = args[0].shape
                    key = (key, args[0].dtype.str, shape[:axis], shape[axis + 1 :])
                hash(key)
            except Exception as error:
                where = f"{self._where} (size_of, bucket_by)"
                raise masked(error, where, context.request_id) from error
        future: asyncio.Future[Any] = self._loop.create_future()
        waiting = _Waiting(self._last_id, rows, key, args, context, future)
        if decisions := self._batcher.arrive(now(), waiting):
            self._carry_out(decisions)
        elif self._batcher.next_timer != self._armed:
            self._arm()
        return waiting

    def _rows(self, shape: tuple[int, ...], axis: int) -> int:
        if len(shape) <= axis or not shape[axis]:
            message = f"shape {shape} has no rows along axis {axis}"
            raise InvalidInput(
                f"{self._where}: {message}",
                fields=[{"path": "", "message": message, "type": "array_shape"}],
                started=False,
            )
        return shape[axis]

    async def _result(self, waiting: _Waiting) -> tuple[Any, float]:
        self._meter.ongoing += 1
        try:
            return await waiting.future, waiting.dispatched - waiting.arrived
        except asyncio.CancelledError:
            self._batcher.cancel(now(), waiting.id)
            waiting.context.cancelled = True
            self._arm()
            raise
        finally:
            self._meter.ongoing -= 1

    # -- decisions ---------------------------------------------------------------------------

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Dispatch):
                task = self._loop.create_task(self._run(decision))
                self._running[decision.batch] = task
            else:
                self._refuse(decision)
        self._arm()

    def _arm(self) -> None:
        when = self._batcher.next_timer
        if when == self._armed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed = when
        self._timer = None
        if when is not None:
            self._timer = self._loop.call_later(max(0.0, when - now()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._armed = None
        self._carry_out(self._batcher.timer(now()))

    def _refuse(self, refusal: Refuse) -> None:
        entry, reason, retry_after_s = refusal
        assert isinstance(entry, _Waiting)
        error: CallError
        if reason == "deadline_passed":
            error = DeadlineExceeded("the deadline passed in the queue", started=False)
        elif reason == "too_large":
            size = self._policy.max_size
            error = InvalidInput(
                f"{self._where}: the item has {entry.rows} rows, a batch at most {size}",
                fields=[{"path": "", "message": f"at most {size} rows", "type": reason}],
                started=False,
            )
        else:
            error = Overloaded(
                f"{self._where}: refused, {reason.replace('_', ' ')}",
                reason=reason,
                retry_after_s=max(0.05, retry_after_s),
                started=False,
            )
        if not entry.future.done():
            entry.future.set_exception(error)

    # -- execution ---------------------------------------------------------------------------

    async def _run(self, dispatch: Dispatch) -> None:
        CURRENT.set(None)  # it serves many, not the one that completed it
        started = now()
        batch = [e for e in dispatch.entries if isinstance(e, _Waiting) and not e.future.done()]
        meter = self._meter
        meter.running += len(batch)
        rows = 0
        for entry in batch:
            rows += entry.rows
            entry.dispatched = started
            meter.queue_seconds.observe(started - entry.arrived)
        if batch:
            self._batch_size.observe(rows)
            self._batch_fill.observe(rows / self._policy.max_size)
        ok = False
        try:
            if batch:
                # A batch that shrank on the way to its start teaches nothing about its size.
                ok = await self._execute(batch) and len(batch) == len(dispatch.entries)
        finally:
            ended = now()
            meter.running -= len(batch)
            meter.finished += len(batch)
            if batch:
                meter.ran(ended - started, len(batch))
            del self._running[dispatch.batch]
            self._carry_out(self._batcher.complete(ended, dispatch.batch, ok=ok))

    async def _execute(self, batch: Sequence[_Waiting]) -> bool:
        """Run a batch and answer its callers; when it raises and may be isolated, run its halves.

        Returns whether all of it ran, and none raised.
        """
        ok = True
        results: Iterator[Any]
        try:
            results = iter(await self._invoke(batch))
        except asyncio.CancelledError:
            for entry in batch:
                entry.future.cancel()
            raise
        except Exception as error:  # noqa: BLE001  (user code; goes to its callers)
            if self._policy.isolate and len(batch) > 1:
                half = len(batch) // 2
                first = await self._execute(batch[:half])
                return await self._execute(batch[half:]) and first
            requests = ", ".join(entry.context.request_id for entry in batch)
            results = repeat(ItemError(masked(error, self._where, requests)))
            ok = False
        for entry in batch:
            if entry.late:
                self._refuse(Refuse(entry, "deadline_passed", 0.0))
                ok = False
                continue
            result = next(results)
            if entry.future.done():
                continue
            if isinstance(result, ItemError):
                failed = masked(result.error, self._where, entry.context.request_id)
                entry.future.set_exception(failed)
            else:
                entry.future.set_result(result)
        return ok

    async def _invoke(self, batch: Sequence[_Waiting]) -> Sequence[Any]:
        """Call the user's function; returns a result for each entry that is not late."""
        policy, ready = self._policy, list[_Waiting]()

        def arguments() -> tuple[Any, ...]:
            ready.extend(_in_time(batch))
            if not ready:
                return ()
            if self._definition.wants_items:
                return join([entry.with_context() for entry in ready], policy)
            return join([entry.args for entry in ready], policy)

        def work() -> Any:
            columns = arguments()
            return self._fn(*columns) if ready else None

        if self._definition.is_async:
            columns = arguments()
            result = await self._fn(*columns) if ready else None
        else:
            result = await self._threads.submit(work)
        if not ready:
            return []
        return split(result, [entry.rows for entry in ready], policy, where=self._where)

    # -- figures -----------------------------------------------------------------------------

    def statistics(self) -> BatcherStatistics:
        """Return the batcher's figures."""
        return self._batcher.statistics()
